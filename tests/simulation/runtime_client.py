"""The runtime as the daemon reaches it: its own calls, and the stream of events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from proxy.executor.runtime_ports import Limits, RuntimeContainer, RuntimeDetail, RuntimeEvent, RuntimePod
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from tests.simulation.kernel import text_of
from tests.simulation.runtime import RefusedError
from tests.simulation.workers import SteppedThread

if TYPE_CHECKING:
    from proxy.model.idset import CpuSet, Mask
    from tests.simulation.daemon import SimulatedDaemon
    from tests.simulation.node import SimulatedNode
    from tests.simulation.runtime import SimulatedRuntime


class RuntimeClient:
    """The daemon's own calls at the runtime; implements ``proxy.executor.runtime_ports.Runtime``."""

    def __init__(self, node: SimulatedNode, process: SimulatedDaemon) -> None:
        self._node = node
        self._process = process

    def _call(self, action: str) -> SimulatedRuntime:
        """Take the time of a call, and fail as calls fail."""
        node = self._node
        if not self._process.alive:
            raise UnavailableError(f"cannot {action}: the daemon has ended")
        node.before_effect(self._process, f"runtime {action}")
        if not node.runtime.up:
            raise UnavailableError(f"cannot {action}: the runtime is away")
        if node.faults.runtime_is_silent():
            node.elapse(self._process, node.call_timeout)
            raise UnavailableError(f"cannot {action}: deadline exceeded")
        return node.runtime

    def version(self) -> str:
        self._call("ask for the version")
        return "simulated 1"

    def cgroup_driver(self) -> str:
        self._call("ask for the driver")
        return "cgroupfs"

    def list_pods(self) -> Sequence[RuntimePod]:
        found = self._call("list pods").sandboxes
        pods = [
            RuntimePod(s.id, s.uid, "ns", s.name, 0, s.ready, s.labels, s.annotations) for s in found.values()
        ]
        self._node.elapse_a_moment(self._process)
        return pods

    def list_containers(self, container_id: str = "") -> Sequence[RuntimeContainer]:
        found = self._call("list containers").containers
        containers = [
            RuntimeContainer(c.id, c.sandbox.id, c.name, c.attempt, c.state)
            for c in found.values()
            if container_id in ("", c.id)
        ]
        self._node.elapse_a_moment(self._process)
        return containers

    def detail(self, container_id: str) -> RuntimeDetail:
        one = self._call("ask for a status").containers.get(container_id)
        if one is None:
            raise RuntimeCallError("cannot ask for a status: not found", GrpcStatus.NOT_FOUND)
        shares, quota, period = one.requested_limits
        return RuntimeDetail(f"/{one.path}", shares, quota, period, 0, one.cpus, one.mems)

    def update_cpuset(self, container_id: str, cpus: CpuSet, mems: Mask | None, cpu_quota: int = 0) -> None:
        named = text_of(mems.bits) if mems is not None else ""
        self._update(container_id, text_of(cpus.bits), named, cpu_quota)

    def update_limits(
        self, container_id: str, cpus: CpuSet | None, mems: Mask | None, limits: Limits
    ) -> None:
        sets = [text_of(each.bits) if each is not None else "" for each in (cpus, mems)]
        self._update(container_id, *sets, limits.cpu_quota)

    def _update(self, container_id: str, cpus: str, mems: str, quota: int) -> None:
        node = self._node
        runtime = self._call(f"update {container_id}")

        def carry_out() -> None:
            if node.faults.update_fails():
                raise RefusedError(GrpcStatus.UNKNOWN)
            node.schedule.trace(f"runtime updates {container_id} {cpus}")
            one = runtime.containers.get(container_id)
            if one is None:
                raise RefusedError(GrpcStatus.NOT_FOUND)
            runtime.save(one, cpus, mems, quota)

        if node.faults.update_is_late():
            node.carry_out_late(carry_out)
            node.elapse(self._process, node.call_timeout)
            raise UnavailableError("cannot update the cpuset: deadline exceeded")
        try:
            carry_out()
        except RefusedError as error:
            raise RuntimeCallError("cannot update the cpuset: refused", error.code) from None

    def raw_lists(self) -> tuple[bytes, bytes]:
        self._call("list")
        return b"", b""

    def close(self) -> None:
        pass


class SimulatedEvents:
    """The runtime's events; implements ``proxy.executor.runtime_ports.RuntimeEventStream``."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self._queue: queue.SimpleQueue[RuntimeEvent | None] = queue.SimpleQueue()
        self._listener: SteppedThread | None = None
        self.report_unread: Callable[[str], None] = lambda message: None

    def listen(self) -> Iterator[RuntimeEvent]:
        if not self._node.runtime.up:
            raise UnavailableError("cannot subscribe: the runtime is away")
        if not self._node.options.events:
            raise RuntimeCallError("cannot subscribe: unknown service", GrpcStatus.UNIMPLEMENTED)
        thread = threading.current_thread()
        assert isinstance(thread, SteppedThread)
        self._queue = queue.SimpleQueue()
        self._listener = thread
        return self._stream(thread)

    def _stream(self, thread: SteppedThread) -> Iterator[RuntimeEvent]:
        try:
            while True:
                while not self._queue.empty():
                    event = self._queue.get_nowait()
                    if event is None:
                        raise UnavailableError("the runtime has gone")
                    yield event
                thread.pause()
        finally:
            self._listener = None

    def send(self, event: RuntimeEvent) -> None:
        """Send an event: it arrives after a while, and events stay in their order."""
        if self._listener is not None:
            self._node.deliver_in_order(self._arrive, event)

    def _arrive(self, event: RuntimeEvent) -> None:
        if self._listener is not None:
            self._node.schedule.count_event("notification", f"runtime {event.kind} {event.container_id}")
            self._queue.put(event)
            self._listener.resume()

    def cut(self) -> None:
        """The stream ends."""
        if self._listener is not None:
            self._queue.put(None)
            self._listener.resume()

    def close(self) -> None:
        self.cut()
