"""The steps in which things go wrong."""

from __future__ import annotations

import json
import time

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import DemoPod
from proxy.demo.scenario_cpus import ScenarioCpus
from proxy.demo.snapshot import DemoError
from proxy.demo.step_runner import DemoStep, Performance, reported
from proxy.model.errors import RuntimeCallError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.phrases import cpus as named
from proxy.model.workload import KubeQos


class FailureSteps:
    """Steps of the story, for one performance."""

    def __init__(self, show: Performance, parts: ScenarioCpus) -> None:
        self._show = show
        self._stage = show.stage
        self._parts = parts

    def refused(self) -> DemoStep:
        """Two creates are refused."""
        absent = self._parts.absent

        def act() -> list[str]:
            return [
                self._refusal(
                    DemoPod("greedy", "LSE", KubeQos.GUARANTEED, str(absent)), GrpcStatus.INVALID_ARGUMENT
                ),
                self._refusal(
                    DemoPod("rival", "LSE", KubeQos.GUARANTEED, str(self._parts.lse)),
                    GrpcStatus.FAILED_PRECONDITION,
                ),
            ]

        return DemoStep(
            "Two LSE pods that cannot be placed",
            f"One asks for {named(absent)}, which this machine does not have, the other for trading's "
            f"{named(self._parts.lse)}. LSE would rather not run than run elsewhere: the create is refused "
            "with the reason, the runtime never sees it, and no container moves.",
            act,
            at_once=True,
        )

    def _refusal(self, spec: DemoPod, code: GrpcStatus) -> str:
        pod = self._stage.client.run_pod(spec)
        try:
            self._stage.client.create(pod)
        except RuntimeCallError as error:
            if error.code != code:
                raise
            return f"{code.name}: {error}"
        finally:
            self._stage.client.end_pod(pod)
        raise DemoError(f"{spec.name} was created, it should have been refused")

    def failed(self) -> DemoStep:
        """A create fails at the runtime, and all containers get their CPUs back."""
        cpus = self._parts.failed

        def act() -> list[str]:
            spec = DemoPod("risky", "LSE", KubeQos.GUARANTEED, str(cpus))
            pod = self._stage.client.run_pod(spec)
            if self._stage.fail_create is not None:
                self._stage.fail_create("failed to create containerd container: no space left on device")
            try:
                self._stage.client.create(pod, image="" if self._stage.fail_create else "localhost/absent:1")
            except RuntimeCallError as error:
                own = f"The runtime's own error reached the client unchanged: {error}"
            else:
                raise DemoError("the create of risky went well, it should have failed")
            finally:
                self._stage.client.end_pod(pod)
            return [*reported(self._show.left_before(spec, cpus)), own]

        return DemoStep(
            f"risky (LSE) would take {named(cpus)}, but the runtime fails",
            "The others had left already when the runtime's error came. It goes up as it is, and they are "
            "put back: after a failed create the node is as before.",
            act,
            middle=True,
        )

    def update(self) -> DemoStep:
        """An UpdateContainerResources of kubelet's passes."""
        everything = str(self._stage.machine.online)

        def act() -> list[str]:
            web = self._show.pod("web")
            self._stage.client.update(
                web.container_id, pb.LinuxContainerResources(cpuset_cpus=everything, cpu_shares=4096)
            )
            info = json.loads(self._stage.client.status(web.container_id).info["info"])
            cpu = info["runtimeSpec"]["linux"]["resources"]["cpu"]
            if cpu.get("shares") != 4096:
                raise DemoError(f"the runtime has cpu_shares {cpu.get('shares')}, kubelet sent 4096")
            if CpuSet.parse(cpu.get("cpus", "")) != self._show.expected.shared:
                raise DemoError(f"the runtime has saved CPUs {cpu.get('cpus')!r}")
            return [f"The runtime saved cpu_shares 4096 as sent, and CPUs {cpu['cpus']}, not {everything}."]

        return DemoStep(
            "kubelet updates web, with a cpuset of its own",
            f"UpdateContainerResources comes with CPUs {everything}, as kubelet's own manager would send it, "
            "and leaves with ours; all other fields pass as they came.",
            act,
            at_once=True,
        )

    def killed(self) -> DemoStep:
        """The proxy is killed and starts again."""

        def act() -> list[str]:
            proxy = self._stage.proxy
            pid = proxy.pid
            proxy.kill()
            self._show.settled(0.0)
            seconds = proxy.start()
            self._wait_ready()
            rival = DemoPod("rival", "LSE", KubeQos.GUARANTEED, str(self._parts.lse))
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
        while not self._stage.status().get("ready"):
            if time.monotonic() > deadline:
                raise DemoError("the new proxy is not in step with the runtime after 10 s")
            time.sleep(0.02)
