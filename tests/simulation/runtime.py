"""The simulated container runtime: what it has, what it does with calls, and the events that it sends.

To the daemon it behaves like containerd and runc: a create saves a cpuset, a start makes the cgroup with the
saved cpuset, an update saves and writes, a container's cgroup is gone when it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import RuntimeEvent
from proxy.model.grpc_status import GrpcStatus
from tests.simulation.kernel import bits_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.clock import ScheduledCallback
    from tests.simulation.node import SimulatedNode
    from tests.simulation.runtime_client import SimulatedEvents

CREATED, RUNNING, EXITED = "CREATED", "RUNNING", "EXITED"
ID_REUSE_S = 2.0
"""Until an id is used again: longer than anything that was sent for the earlier one is under way."""


@dataclass(slots=True)
class Sandbox:
    """A sandbox at the runtime."""

    id: str
    uid: str
    name: str
    parent: str
    labels: dict[str, str]
    annotations: dict[str, str]
    ready: bool = True


@dataclass(slots=True)
class SimulatedContainer:
    """A container at the runtime.

    Attributes:
        cpus: The cpuset that is saved.
        requested_limits: The client's resources.
        begun: Its program is being executed (``RUNNING`` says what the runtime answers).
        undecided: The daemon forwarded the call that brought the saved cpuset unchanged.
        to_report: The event of its exit that is not sent yet.
    """

    id: str
    sandbox: Sandbox
    name: str
    attempt: int
    cpus: str
    mems: str
    quota: int
    requested_limits: tuple[int, int, int]
    state: str = CREATED
    begun: bool = False
    undecided: bool = False
    to_report: ScheduledCallback | None = None

    @property
    def path(self) -> str:
        return f"{self.sandbox.parent.strip('/')}/{self.id}"


class RefusedError(Exception):
    """The runtime answers with an error."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


class SimulatedRuntime:
    """What the runtime has and does; it lives on when the daemon does not.

    Attributes:
        up: Whether it answers.
        undecided: The daemon forwarded the call that is being executed unchanged.
        events: Where the events of the daemon that lives now are put; None if none listens.
    """

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.up = True
        self.answers_since = 0.0
        self.undecided = False
        self.sandboxes: dict[str, Sandbox] = {}
        self.containers: dict[str, SimulatedContainer] = {}
        self.events: SimulatedEvents | None = None
        self._serial = 0
        self._free: dict[str, list[tuple[str, float]]] = {"c": [], "s": []}

    def _new_id(self, kind: str) -> str:
        """Return the id of a new container (``c``) or sandbox (``s``): now and then one that was used before.

        It was removed long enough ago that no call for the earlier one can still be carried out.
        """
        now, free, faults = self.node.schedule.now, self._free[kind], self.node.faults
        if free and now - free[0][1] > ID_REUSE_S and faults.happens(faults.rates.id_reused):
            return free.pop(0)[0]
        self._serial += 1
        return f"{kind}{self._serial}"

    def _release_id(self, object_id: str) -> None:
        """Let the id of a removed sandbox or container be used again."""
        self._free[object_id[0]].append((object_id, self.node.schedule.now))

    # -- what calls do ------------------------------------------------------------------------------------

    def execute_call(self, method: str, body: bytes) -> bytes:
        """Execute a call, and return the message of the answer.

        Raises:
            RefusedError: It cannot be done.
        """
        self.node.schedule.trace(f"runtime {method}")
        return METHODS[method](self, body)

    def run_sandbox(self, body: bytes) -> bytes:
        config = pb.RunPodSandboxRequest.FromString(body).config
        uid = config.metadata.uid
        if any(s.uid == uid and s.ready for s in self.sandboxes.values()):
            raise RefusedError(GrpcStatus.ALREADY_EXISTS)
        sandbox = Sandbox(
            self._new_id("s"),
            uid,
            config.metadata.name,
            config.linux.cgroup_parent,
            dict(config.labels),
            dict(config.annotations),
        )
        self.sandboxes[sandbox.id] = sandbox
        self.node.promises.sandbox_made(sandbox.id)
        self.node.kernel.make(sandbox.parent.strip("/"))
        return pb.RunPodSandboxResponse(pod_sandbox_id=sandbox.id).SerializeToString()

    def stop_sandbox(self, body: bytes) -> bytes:
        sandbox = self.sandboxes.get(pb.StopPodSandboxRequest.FromString(body).pod_sandbox_id)
        if sandbox is not None:
            sandbox.ready = False
            for container in self.containers_in(sandbox.id):
                self.end(container)
            self.node.schedule.after(0.0, self.report, "exit", sandbox.id)
        return b""

    def remove_sandbox(self, body: bytes) -> bytes:
        sandbox_id = pb.RemovePodSandboxRequest.FromString(body).pod_sandbox_id
        sandbox = self.sandboxes.pop(sandbox_id, None)
        if sandbox is not None:
            for container in self.containers_in(sandbox_id):
                self._delete(container)
            self.node.kernel.remove(sandbox.parent.strip("/"))
            self.report("delete", sandbox_id)
            self._release_id(sandbox_id)
        return b""

    def containers_in(self, sandbox_id: str) -> list[SimulatedContainer]:
        """Return the containers of a sandbox."""
        return [c for c in self.containers.values() if c.sandbox.id == sandbox_id]

    def create(self, body: bytes) -> bytes:
        request = pb.CreateContainerRequest.FromString(body)
        sandbox = self.sandboxes.get(request.pod_sandbox_id)
        if sandbox is None:
            raise RefusedError(GrpcStatus.NOT_FOUND)
        if not sandbox.ready:
            raise RefusedError(GrpcStatus.UNKNOWN)
        meta, limits = request.config.metadata, request.config.linux.resources
        if any(c.name == meta.name and c.attempt == meta.attempt for c in self.containers_in(sandbox.id)):
            raise RefusedError(GrpcStatus.ALREADY_EXISTS)
        container = SimulatedContainer(
            self._new_id("c"), sandbox, meta.name, meta.attempt, limits.cpuset_cpus,
            limits.cpuset_mems, limits.cpu_quota, (limits.cpu_shares, limits.cpu_quota, limits.cpu_period),
        )  # fmt: skip
        self.containers[container.id] = container
        self.node.promises.created(container)
        return pb.CreateContainerResponse(container_id=container.id).SerializeToString()

    def _existing(self, container_id: str) -> SimulatedContainer:
        container = self.containers.get(container_id)
        if container is None:
            raise RefusedError(GrpcStatus.NOT_FOUND)
        return container

    def start(self, body: bytes) -> bytes:
        container = self._existing(pb.StartContainerRequest.FromString(body).container_id)
        if self.node.hanging.is_starting(container):
            raise RefusedError(GrpcStatus.UNKNOWN)  # containerd executes one start of a container at a time
        self.make_group(container)
        self.execute(container)
        return b""

    def make_group(self, container: SimulatedContainer) -> None:
        """Make the cgroup of a starting container, with the saved resources.

        Raises:
            RefusedError: It cannot start.
        """
        kernel = self.node.kernel
        if container.state != CREATED or not container.sandbox.ready:
            raise RefusedError(GrpcStatus.UNKNOWN)
        fresh = container.path not in kernel.groups
        group = kernel.make(container.path)
        try:
            if container.cpus:
                self.node.promises.runtime_writes(container, bits_of(container.cpus))
                kernel.write(group, container.cpus, foreign=self.undecided)
            if container.mems:
                group.mems = bits_of(container.mems)
        except OSError:
            if fresh:
                kernel.remove(container.path)
            raise RefusedError(GrpcStatus.UNKNOWN) from None
        group.quota = group.quota if container.quota <= 0 else self._quota(container.quota)

    def _quota(self, quota: int) -> str:
        return str(quota) if self.node.kernel.version == 1 else f"{quota} 100000"

    def execute(self, container: SimulatedContainer) -> None:
        """Execute a container's program."""
        group = self.node.kernel.groups[container.path]
        group.container_id = container.id
        container.state, container.begun = RUNNING, True
        self.node.promises.began(container)
        self.report("start", container.id)

    def update(self, body: bytes) -> bytes:
        request = pb.UpdateContainerResourcesRequest.FromString(body)
        self.save(self._existing(request.container_id), request.linux.cpuset_cpus, request.linux.cpuset_mems,
                  request.linux.cpu_quota)  # fmt: skip
        return b""

    def save(self, container: SimulatedContainer, cpus: str, mems: str, quota: int) -> None:
        """Save the resources of an update, and write all saved resources.

        Raises:
            RefusedError: The container has ended, or the kernel refuses.
        """
        if container.state == EXITED:
            raise RefusedError(GrpcStatus.UNKNOWN)
        group = self.node.kernel.groups.get(container.path)
        before = container.cpus, container.mems, container.quota
        container.cpus, container.mems = cpus or container.cpus, mems or container.mems
        container.quota = quota or container.quota
        container.undecided = self.undecided if cpus else container.undecided
        if group is None:
            return
        try:
            if container.cpus:
                self.node.promises.runtime_writes(container, bits_of(container.cpus))
                self.node.kernel.write(group, container.cpus, foreign=self.undecided)
        except OSError:
            container.cpus, container.mems, container.quota = before
            raise RefusedError(GrpcStatus.UNKNOWN) from None
        if container.quota:
            group.quota = self._quota(container.quota) if container.quota > 0 else self._no_quota()

    def _no_quota(self) -> str:
        return "-1" if self.node.kernel.version == 1 else "max 100000"

    def stop(self, body: bytes) -> bytes:
        container = self._existing(pb.StopContainerRequest.FromString(body).container_id)
        self.end(container)
        return b""

    def remove(self, body: bytes) -> bytes:
        container = self.containers.get(pb.RemoveContainerRequest.FromString(body).container_id)
        if container is not None:
            self._delete(container)
        return b""

    def _delete(self, container: SimulatedContainer) -> None:
        self.end(container)
        self._report_exit(container)  # the exit is reported before the deletion
        del self.containers[container.id]
        self.report("delete", container.id)
        self._release_id(container.id)

    def end(self, container: SimulatedContainer) -> None:
        """Make a container exit."""
        if container.state == EXITED:
            return
        ran = container.state == RUNNING
        container.state, container.begun = EXITED, False
        self.node.promises.ended(container)
        self.node.kernel.remove(container.path)
        if ran:
            delay = self.node.delays.report()
            container.to_report = self.node.schedule.after(delay, self._report_exit, container)

    def _report_exit(self, container: SimulatedContainer) -> None:
        if container.to_report is not None:
            container.to_report.cancel()
            container.to_report = None
            self.report("exit", container.id)

    def report(self, kind: str, container_id: str) -> None:
        """Send an event, if the daemon listens."""
        if self.up and self.events is not None:
            self.events.send(RuntimeEvent(kind, container_id))  # type: ignore[arg-type]

    # -- going away ---------------------------------------------------------------------------------------

    def go_down(self) -> None:
        """The runtime's process ends; containers run on."""
        self.up = False
        if self.events is not None:
            self.events.cut()

    def come_up(self) -> None:
        """The runtime is back."""
        self.up = True
        self.answers_since = self.node.schedule.now


METHODS: dict[str, Callable[[SimulatedRuntime, bytes], bytes]] = {
    "RunPodSandbox": SimulatedRuntime.run_sandbox,
    "StopPodSandbox": SimulatedRuntime.stop_sandbox,
    "RemovePodSandbox": SimulatedRuntime.remove_sandbox,
    "CreateContainer": SimulatedRuntime.create,
    "StartContainer": SimulatedRuntime.start,
    "UpdateContainerResources": SimulatedRuntime.update,
    "StopContainer": SimulatedRuntime.stop,
    "RemoveContainer": SimulatedRuntime.remove,
}
