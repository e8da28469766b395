"""Starts that hang, step by step: the cgroup is made, the cpuset is written again, the program is executed.

The order is that of runc (``docs/applying.md``, *Starts that hang*). Cases without a promise on that page are
left out: between runc's second write and the program's execution, a living daemon has always answered the
kernel's report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.api.cri import api_pb2 as pb
from proxy.model.grpc_status import GrpcStatus
from tests.simulation.kernel import bits_of
from tests.simulation.runtime import CREATED, RefusedError

if TYPE_CHECKING:
    from tests.simulation.kubelet import KubeletCall
    from tests.simulation.node import SimulatedNode
    from tests.simulation.runtime import SimulatedContainer

POLL_S = 0.05


class HangingStarts:
    """The starts that hang now."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.under_way: dict[KubeletCall, SimulatedContainer | None] = {}

    def begin(self, kubelet_call: KubeletCall) -> None:
        """Begin a start that hangs before its cgroup is made."""
        container_id = pb.StartContainerRequest.FromString(kubelet_call.body or b"").container_id
        self.under_way[kubelet_call] = self.node.runtime.containers.get(container_id)
        self.node.schedule.after(self._moment(), self._make, kubelet_call)

    def is_starting(self, container: SimulatedContainer) -> bool:
        """Return whether a start of a container hangs."""
        return any(self._container(kubelet_call) is container for kubelet_call in self.under_way)

    def _moment(self) -> float:
        return 0.05 if self.node.faults.calm else self.node.faults.dice.random() * 4.0

    def _container(self, kubelet_call: KubeletCall) -> SimulatedContainer | None:
        """Return the container of a start; None if it is gone: another one may have its id by now."""
        container = self.under_way[kubelet_call]
        if container is None or self.node.runtime.containers.get(container.id) is not container:
            return None
        return container

    def _end(self, kubelet_call: KubeletCall, status: int) -> None:
        self.under_way.pop(kubelet_call, None)
        self.node.kubelet.answer(kubelet_call, status, b"")

    def _make(self, kubelet_call: KubeletCall) -> None:
        node, container = self.node, self._container(kubelet_call)
        if container is None or not node.runtime.up or kubelet_call.gone or not kubelet_call.daemon.alive:
            self._end(
                kubelet_call, GrpcStatus.UNKNOWN
            )  # nothing has been done yet, and its connection has ended
            return
        try:
            node.runtime.make_group(container)
        except RefusedError as error:
            self._end(kubelet_call, error.code)
            return
        node.schedule.after(self._moment(), self._write_again, kubelet_call)

    def _write_again(self, kubelet_call: KubeletCall) -> None:
        node, container = self.node, self._container(kubelet_call)
        group = node.kernel.groups.get(container.path) if container is not None else None
        if container is None or group is None or container.state != CREATED:
            self._end(kubelet_call, GrpcStatus.UNKNOWN)
            return
        try:
            if container.cpus:
                node.promises.runtime_writes(container, bits_of(container.cpus))
                node.kernel.write(group, container.cpus)
        except OSError:
            node.kernel.remove(container.path)
            self._end(kubelet_call, GrpcStatus.UNKNOWN)
            return
        node.schedule.after(self._moment(), self._execute, kubelet_call, node.schedule.now)

    def _execute(self, kubelet_call: KubeletCall, since: float) -> None:
        node, container = self.node, self._container(kubelet_call)
        if container is None or container.path not in node.kernel.groups or container.state != CREATED:
            self._end(kubelet_call, GrpcStatus.UNKNOWN)
            return
        daemon = node.daemon
        if daemon is None or not daemon.has_followed(node.kernel.groups[container.path], since):
            node.schedule.after(POLL_S, self._execute, kubelet_call, since)
            return
        node.runtime.execute(container)
        self._end(kubelet_call, GrpcStatus.OK)
