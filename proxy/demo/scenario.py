"""The scenario of the demonstration: pods start, CPUs change owners, things go wrong, CPUs are returned.

On a machine with few CPUs (the containerd stage may be a small one) it has one owner at a time. Every step
ends by comparing the cgroup files with the rules; a difference raises.
"""

from __future__ import annotations

from proxy.demo.client import DemoPod
from proxy.demo.failure_steps import FailureSteps
from proxy.demo.scenario_cpus import ScenarioCpus
from proxy.demo.snapshot import DemoError
from proxy.demo.step_runner import DemoStep, Performance, reported
from proxy.model.idset import CpuSet
from proxy.model.phrases import cpus as named
from proxy.model.workload import KubeQos


class Scenario:
    """The story's steps, for one performance."""

    def __init__(self, show: Performance) -> None:
        self._show = show
        self._stage = show.stage
        self._parts = ScenarioCpus.of(show.stage.machine)

    def steps(self) -> list[DemoStep]:
        """Return the steps in their order."""
        parts = self._parts
        troubles = FailureSteps(self._show, parts)
        middle = [troubles.refused(), troubles.update(), troubles.killed()]
        if parts.big:
            owners = [self._lse(), self._lsr(), self._guaranteed()]
            return [
                self._sharing(), *owners, self._kube(), *middle, troubles.failed(), self._freed("trading"),
                self._freed("search", "database"), self._empty(),
            ]  # fmt: skip
        return [
            self._sharing(), self._lse(), self._kube(), *middle, self._freed("trading"), troubles.failed(),
            self._lsr(), self._freed("search"), self._guaranteed(), self._freed("database"), self._empty(),
        ]  # fmt: skip

    # Pods come.

    def _sharing(self) -> DemoStep:
        def act() -> list[str]:
            self._show.launch(DemoPod("web", "LS", cpus=2))
            self._show.launch(DemoPod("batch", "BE", KubeQos.BEST_EFFORT))
            return []

        return DemoStep(
            "Two pods that share: web (LS) and batch (BE)",
            "LS runs on the shared pool, BE on the BE pool. No CPU has an owner yet, so both pools are the "
            "whole machine. The cpuset was written into CreateContainer on its way to the runtime.",
            act,
        )

    def _lse(self) -> DemoStep:
        cpus = self._parts.lse
        return self._owner(
            DemoPod("trading", "LSE", KubeQos.GUARANTEED, str(cpus), cpus=len(cpus)),
            cpus,
            f"trading (LSE) takes {named(cpus)}",
            "The scheduler named these CPUs in the pod's annotation, and LSE does not share them. The "
            "others leave them first: the create is held until the kernel says that they are gone.",
        )

    def _lsr(self) -> DemoStep:
        cpus = self._parts.lsr
        return self._owner(
            DemoPod("search", "LSR", KubeQos.GUARANTEED, str(cpus), cpus=len(cpus)),
            cpus,
            f"search (LSR) takes {named(cpus)}, BE may stay",
            "LSR owns its CPUs as LSE does, but lends what it does not use to BE: the shared pool loses "
            "them, the BE pool keeps them.",
        )

    def _owner(self, spec: DemoPod, cpus: CpuSet, title: str, why: str) -> DemoStep:
        def act() -> list[str]:
            self._show.launch(spec, cpus)
            return reported(self._show.left_before(spec, cpus))

        return DemoStep(title, why, act, at_once=True)

    def _guaranteed(self) -> DemoStep:
        count = self._parts.count

        def act() -> list[str]:
            spec = DemoPod("database", kube_qos=KubeQos.GUARANTEED, cpus=count)
            taken = CpuSet()
            for cpus in self._show.expected.owned.values():
                taken |= cpus
            self._show.launch(spec, taken)  # what it gets is read, and then judged
            got = self._stage.snapshot().get("database").cpus
            self._judge(got, taken)
            self._show.expected.owned["database"] = got
            return [
                f"The proxy picked {got}: {self._show.reason('database')}.",
                *reported(self._show.left_before(spec, got)),
            ]

        whole = f"{count} whole CPU" + ("s" if count > 1 else "")
        return DemoStep(
            f"database (Guaranteed) asks for {whole}",
            "cpuManagerPolicy is static, so the proxy picks CPUs for it: close together, whole cores first, "
            "on one NUMA node, and the memory of that node.",
            act,
            at_once=True,
        )

    def _judge(self, got: CpuSet, taken: CpuSet) -> None:
        machine = self._stage.machine
        split = [core for core in machine.cores.values() if core & got and not core <= got]
        if len(got) != self._parts.count or not got.isdisjoint(taken):
            raise DemoError(
                f"database got CPUs {got}; it asked for {self._parts.count}, and {taken} were taken"
            )
        if len(machine.nodes_of(got)) != 1 or (self._parts.big and split):
            raise DemoError(f"database got CPUs {got}, which are not whole cores of one NUMA node")

    def _kube(self) -> DemoStep:
        def act() -> list[str]:
            self._show.launch(DemoPod("api", kube_qos=KubeQos.BURSTABLE, shares=256))
            self._show.launch(DemoPod("logs", kube_qos=KubeQos.BEST_EFFORT))
            return []

        return DemoStep(
            "Pods without a label: api (Burstable) and logs (BestEffort)",
            "Without Koordinator's label the Kubernetes class decides: Burstable shares, BestEffort is BE.",
            act,
        )

    # CPUs come back.

    def _freed(self, *names: str) -> DemoStep:
        def act() -> list[str]:
            for name in names:
                self._show.end(name)
            return []

        verb = "stop" if len(names) > 1 else "stops"
        return DemoStep(
            f"{' and '.join(names)} {verb}, the CPUs come back",
            "Once the runtime has removed the container, its CPUs are free and the pools grow again.",
            act,
        )

    def _empty(self) -> DemoStep:
        def act() -> list[str]:
            for name in [pod.spec.name for pod in self._stage.pods]:
                self._show.end(name)
            page = self._stage.status()
            if page["exclusive"]:
                raise DemoError(f"CPUs are still owned: {page['exclusive']}")
            return []

        return DemoStep("All pods leave", "The node is empty again, and no CPU has an owner.", act)
