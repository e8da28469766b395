"""The scenario of the demonstration: pods start, CPUs change owners, things go wrong, CPUs are returned.

On a machine with few CPUs (the containerd environment may be a small one) it has one owner at a time. Every
step ends by comparing the cgroup files with the rules; a difference raises.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import DemoPod
from proxy.demo.snapshot import DemoError
from proxy.demo.step_runner import DemoStep, StepRunner, sentence_list
from proxy.model.errors import RuntimeCallError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.phrases import cpus as named
from proxy.model.workload import KubeQos

_MANY_CORES = 4
"""From this number of cores on, all owners are on the node at the same time."""


class FailureSteps:
    """The steps in which something fails."""

    def __init__(self, runner: StepRunner, cpus: ScenarioCpus) -> None:
        self._runner = runner
        self._environment = runner.environment
        self._cpus = cpus

    def refused_creates(self) -> DemoStep:
        """Two creates are refused."""
        absent = self._cpus.absent

        def act() -> list[str]:
            return [
                self._refusal(
                    DemoPod("greedy", "LSE", KubeQos.GUARANTEED, str(absent)), GrpcStatus.INVALID_ARGUMENT
                ),
                self._refusal(
                    DemoPod("rival", "LSE", KubeQos.GUARANTEED, str(self._cpus.lse)),
                    GrpcStatus.FAILED_PRECONDITION,
                ),
            ]

        return DemoStep(
            "Two LSE pods that cannot be placed",
            f"One requests {named(absent)}, which this machine does not have, the other for trading's "
            f"{named(self._cpus.lse)}. LSE would rather not run than run elsewhere: the create is refused "
            "with the reason, the runtime never sees it, and no container moves.",
            act,
            at_once=True,
        )

    def _refusal(self, spec: DemoPod, code: GrpcStatus) -> str:
        pod = self._environment.client.run_pod(spec)
        try:
            self._environment.client.create(pod)
        except RuntimeCallError as error:
            if error.code != code:
                raise
            return f"{code.name}: {error}"
        finally:
            self._environment.client.end_pod(pod)
        raise DemoError(f"{spec.name} was created, it should have been refused")

    def failed_create(self) -> DemoStep:
        """A create fails at the runtime, and all containers get their CPUs back."""
        cpus = self._cpus.failed

        def act() -> list[str]:
            spec = DemoPod("risky", "LSE", KubeQos.GUARANTEED, str(cpus))
            pod = self._environment.client.run_pod(spec)
            if self._environment.fail_create is not None:
                self._environment.fail_create(
                    "failed to create containerd container: no space left on device"
                )
            try:
                self._environment.client.create(
                    pod, image="" if self._environment.fail_create else "localhost/absent:1"
                )
            except RuntimeCallError as error:
                message = f"The runtime's own error reached the client unchanged: {error}"
            else:
                raise DemoError("the create of risky went well, it should have failed")
            finally:
                self._environment.client.end_pod(pod)
            return [*sentence_list(self._runner.check_others_left(spec, cpus)), message]

        return DemoStep(
            f"risky (LSE) would take {named(cpus)}, but the runtime fails",
            "The others had left already when the runtime's error came. It goes up as it is, and they are "
            "put back: after a failed create the node is as before.",
            act,
            shows_node_at_create=True,
        )

    def kubelet_update(self) -> DemoStep:
        """An UpdateContainerResources of kubelet passes through."""
        all_cpus = str(self._environment.machine.online)

        def act() -> list[str]:
            web = self._runner.pod("web")
            self._environment.client.update(
                web.container_id, pb.LinuxContainerResources(cpuset_cpus=all_cpus, cpu_shares=4096)
            )
            info = json.loads(self._environment.client.status(web.container_id).info["info"])
            cpu = info["runtimeSpec"]["linux"]["resources"]["cpu"]
            if cpu.get("shares") != 4096:
                raise DemoError(f"the runtime has cpu_shares {cpu.get('shares')}, kubelet sent 4096")
            if CpuSet.parse(cpu.get("cpus", "")) != self._runner.expected.shared_pool:
                raise DemoError(f"the runtime has saved CPUs {cpu.get('cpus')!r}")
            return [f"The runtime saved cpu_shares 4096 as sent, and CPUs {cpu['cpus']}, not {all_cpus}."]

        return DemoStep(
            "kubelet updates web, with a cpuset of its own",
            f"UpdateContainerResources comes with CPUs {all_cpus}, as kubelet's own manager would send it, "
            "and leaves with ours; all other fields pass as they came.",
            act,
            at_once=True,
        )

    def proxy_restart(self) -> DemoStep:
        """The proxy is killed and starts again."""

        def act() -> list[str]:
            proxy = self._environment.proxy
            pid = proxy.pid
            proxy.kill()
            self._runner.wait_until_expected(0.0)
            seconds = proxy.start()
            self._wait_ready()
            rival = DemoPod("rival", "LSE", KubeQos.GUARANTEED, str(self._cpus.lse))
            return [
                f"Process {pid} was killed, nothing moved; {proxy.pid} answered {seconds:.1f} s later.",
                f"It still knows the owners: {self._refusal(rival, GrpcStatus.FAILED_PRECONDITION)}",
            ]

        return DemoStep(
            "The proxy is killed (kill -9) and starts again",
            "Containers run on without it. The new process finds the placements in its ledger and compares "
            "them with the runtime and the kernel: nothing moves, nothing is given twice.",
            act,
            at_once=True,
        )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 10
        while not self._environment.status().get("ready"):
            if time.monotonic() > deadline:
                raise DemoError("the new proxy is not reconciled with the runtime after 10 s")
            time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class ScenarioCpus:
    """The CPUs that the scenario uses.

    Attributes:
        lse: CPUs that the LSE pod's annotation names.
        lsr: The same for the LSR pod.
        failed: The same for the pod whose create fails.
        count: Whole CPUs that the Guaranteed container requests.
        fits_all: Whether all of them fit at the same time.
        absent: CPUs that this machine does not have.
    """

    lse: CpuSet
    lsr: CpuSet
    failed: CpuSet
    count: int
    fits_all: bool
    absent: CpuSet

    @classmethod
    def of(cls, machine: Machine) -> ScenarioCpus:
        """Choose them for a machine.

        Raises:
            DemoError: The machine has only one CPU.
        """
        if len(machine.online) < 2:
            raise DemoError("the demonstration needs at least two CPUs")
        last = max(machine.possible)
        absent = CpuSet((last + 1, last + 2))
        cores = list(machine.cores.values())
        if len(cores) < _MANY_CORES:
            highest = CpuSet((max(machine.online),))
            return cls(highest, highest, highest, 1, False, absent)
        return cls(cores[1], cores[2], cores[-1], 2 * len(cores[0]), True, absent)


class Scenario:
    """The steps of the scenario, for one run."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._environment = runner.environment
        self._cpus = ScenarioCpus.of(runner.environment.machine)

    def steps(self) -> list[DemoStep]:
        """Return the steps in their order."""
        cpus = self._cpus
        failures = FailureSteps(self._runner, cpus)
        middle = [failures.refused_creates(), failures.kubelet_update(), failures.proxy_restart()]
        if cpus.fits_all:
            owners = [self._lse(), self._lsr(), self._guaranteed()]
            return [
                self._sharing(), *owners, self._unlabelled_pods(), *middle, failures.failed_create(),
                self._freed("trading"), self._freed("search", "database"), self._empty(),
            ]  # fmt: skip
        return [
            self._sharing(), self._lse(), self._unlabelled_pods(), *middle, self._freed("trading"),
            failures.failed_create(), self._lsr(), self._freed("search"), self._guaranteed(),
            self._freed("database"), self._empty(),
        ]  # fmt: skip

    # Pods come.

    def _sharing(self) -> DemoStep:
        def act() -> list[str]:
            self._runner.launch(DemoPod("web", "LS", cpus=2))
            self._runner.launch(DemoPod("batch", "BE", KubeQos.BEST_EFFORT))
            return []

        return DemoStep(
            "Two pods that share: web (LS) and batch (BE)",
            "LS runs on the shared pool, BE on the BE pool. No CPU has an owner yet, so both pools are the "
            "whole machine. The cpuset was written into CreateContainer on its way to the runtime.",
            act,
        )

    def _lse(self) -> DemoStep:
        cpus = self._cpus.lse
        return self._owner(
            DemoPod("trading", "LSE", KubeQos.GUARANTEED, str(cpus), cpus=len(cpus)),
            cpus,
            f"trading (LSE) takes {named(cpus)}",
            "The scheduler named these CPUs in the pod's annotation, and LSE does not share them. The "
            "others leave them first: the create is held until the kernel confirms it.",
        )

    def _lsr(self) -> DemoStep:
        cpus = self._cpus.lsr
        return self._owner(
            DemoPod("search", "LSR", KubeQos.GUARANTEED, str(cpus), cpus=len(cpus)),
            cpus,
            f"search (LSR) takes {named(cpus)}, BE may stay",
            "LSR owns its CPUs as LSE does, but lends what it does not use to BE: the shared pool loses "
            "them, the BE pool keeps them.",
        )

    def _owner(self, spec: DemoPod, cpus: CpuSet, title: str, why: str) -> DemoStep:
        def act() -> list[str]:
            self._runner.launch(spec, cpus)
            return sentence_list(self._runner.check_others_left(spec, cpus))

        return DemoStep(title, why, act, at_once=True)

    def _guaranteed(self) -> DemoStep:
        count = self._cpus.count

        def act() -> list[str]:
            spec = DemoPod("database", kube_qos=KubeQos.GUARANTEED, cpus=count)
            owned = CpuSet()
            for cpus in self._runner.expected.owned.values():
                owned |= cpus
            self._runner.launch(spec, owned)  # its CPUs are read, and then checked
            got = self._environment.snapshot().get("database").cpus
            self._check_chosen_cpus(got, owned)
            self._runner.expected.owned["database"] = got
            return [
                f"The proxy picked {got}: {self._runner.reason('database')}.",
                *sentence_list(self._runner.check_others_left(spec, got)),
            ]

        whole = f"{count} whole CPU" + ("s" if count > 1 else "")
        return DemoStep(
            f"database (Guaranteed) requests {whole}",
            "cpuManagerPolicy is static, so the proxy picks CPUs for it: close together, whole cores first, "
            "on one NUMA node, and the memory of that node.",
            act,
            at_once=True,
        )

    def _check_chosen_cpus(self, got: CpuSet, taken: CpuSet) -> None:
        machine = self._environment.machine
        split = [core for core in machine.cores.values() if core & got and not core <= got]
        if len(got) != self._cpus.count or not got.isdisjoint(taken):
            raise DemoError(
                f"database got CPUs {got}; it requested {self._cpus.count}, and {taken} were taken"
            )
        if len(machine.nodes_of(got)) != 1 or (self._cpus.fits_all and split):
            raise DemoError(f"database got CPUs {got}, which are not whole cores of one NUMA node")

    def _unlabelled_pods(self) -> DemoStep:
        def act() -> list[str]:
            self._runner.launch(DemoPod("api", kube_qos=KubeQos.BURSTABLE, shares=256))
            self._runner.launch(DemoPod("logs", kube_qos=KubeQos.BEST_EFFORT))
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
                self._runner.end(name)
            return []

        verb = "stop" if len(names) > 1 else "stops"
        return DemoStep(
            f"{' and '.join(names)} {verb}, the CPUs come back",
            "Once the runtime has removed the container, its CPUs are free and the pools grow again.",
            act,
        )

    def _empty(self) -> DemoStep:
        def act() -> list[str]:
            for name in [pod.spec.name for pod in self._environment.pods]:
                self._runner.end(name)
            page = self._environment.status()
            if page["exclusive"]:
                raise DemoError(f"CPUs are still owned: {page['exclusive']}")
            return []

        return DemoStep("All pods leave", "The node is empty again, and no CPU has an owner.", act)
