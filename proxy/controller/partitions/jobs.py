"""Partitions: what is done in the kernel worker's thread, where every job asks for the newest state.

See ``proxy.controller.partitions.owners`` for who and when.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.controller.context import NodeContext
from proxy.controller.partitions.ports import MEMBER, Partitions, PartitionState
from proxy.controller.partitions.watcher import Bell
from proxy.engine.state import NodeState
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """A partition that is there, or is about to be.

    Attributes:
        path: The container's group.
        cpus: The CPUs.
        kind: ``root`` or ``isolated``.
        lent: What it has added to the exclusive sets of the groups above.
    """

    path: str
    cpus: CpuSet
    kind: str
    lent: Mapping[str, CpuSet]

    def dump(self) -> dict[str, object]:
        """Give it as plain data."""
        lent = {path: str(cpus) for path, cpus in self.lent.items()}
        return {"path": self.path, "cpus": str(self.cpus), "kind": self.kind, "lent": lent}

    @classmethod
    def load(cls, value: Mapping[str, object]) -> PartitionRecord:
        """Take it from plain data.

        Raises:
            ValueError: It is none.
        """
        path, cpus, kind, lent = (value.get(name) for name in ("path", "cpus", "kind", "lent"))
        if not (path and isinstance(path, str) and isinstance(kind, str) and isinstance(lent, dict)):
            raise ValueError("it is no partition")
        return cls(path, CpuSet.parse(str(cpus)), kind, {p: CpuSet.parse(str(c)) for p, c in lent.items()})


class Jobs:
    """Makes, compares and ends.

    Attributes:
        asked: ``root`` or ``isolated``; empty to end what is there.
        records: What is there, by the container's id; changed in the event loop only.
        over: Ids of those that have been ended.
    """

    def __init__(self, context: NodeContext, kernel: Partitions, asked: str, bell: Bell) -> None:
        self._context = context
        self._kernel = kernel
        self._bell = bell
        self.asked = asked
        self.records: dict[str, PartitionRecord] = {}
        self.over: set[str] = set()

    def wanted(self, state: NodeState, container_id: str) -> CpuSet | None:
        """Give the CPUs of a container that may be a partition; None where it may not be one."""
        container = state.containers.get(container_id)
        if container is None or not self.asked or self._kernel.lack or self._context.store.mode.is_leaving:
            return None
        if container.phase is not Phase.RUNNING or container.placement.pool is not Pool.OWN:
            return None
        cpus = state.wanted(container)
        return None if shared_with(state, container, cpus) else cpus

    # -- for the kernel worker ----------------------------------------------------------------------------

    def clear(self) -> None:
        """End the partitions that the newest state does not want; before anybody else is written."""
        for container_id, record in list(self.records.items()):
            if container_id in self.over:
                continue
            cpus = self.wanted(self._context.state, container_id)
            if cpus == record.cpus and record.kind == self.asked:
                continue
            try:
                self._end(container_id, record)
            except CgroupError as error:
                self._context.telemetry.problem("cannot end a partition", cpus=record.cpus, err=error)

    def _end(self, container_id: str, record: PartitionRecord) -> None:
        self._bell.drop(container_id)
        self._kernel.end(record.path, record.cpus, record.lent)
        self.over.add(container_id)

    def compare(self) -> dict[str, PartitionState]:
        """Give those that are not what they should be, as the kernel has them; they are ended."""
        lost: dict[str, PartitionState] = {}
        self._bell.silence()
        for container_id, record in list(self.records.items()):
            if container_id in self.over:
                continue
            try:
                state = self._kernel.look(record.path)
                if not (state.valid and state.kind == record.kind):
                    lost[container_id] = state
                    self._end(container_id, record)
                else:
                    self._bell.add(container_id, self._kernel.file(record.path))
            except CgroupError as error:
                if error.errno == errno.ENOENT:
                    self._bell.drop(container_id)  # gone with its group; those above still lend its CPUs
                    self.over.add(container_id)
                    self._end_above(record)
                else:
                    self._context.telemetry.problem("cannot read a partition", path=record.path, err=error)
        return lost

    def _end_above(self, record: PartitionRecord) -> None:
        try:
            self._kernel.end(record.path, record.cpus, record.lent)
        except CgroupError as error:
            self._context.telemetry.problem("cannot end a partition", path=record.path, err=error)

    def plan(self, container_id: str) -> PartitionRecord | None:
        """Find out what is to be written; None where it is too early, or too late."""
        context = self._context
        container = context.state.containers.get(container_id)
        cpus = self.wanted(context.state, container_id)
        path = None if container is None else context.enforcer.path_of(container)
        if path is None or not cpus or context.flights.of(container_id):
            return None
        if any(record.cpus & cpus for record in self.records.values()):
            return None  # what has not been ended yet
        try:
            if context.enforcer.cgroups.read(path).effective_cpus != cpus:
                return None
            if self._kernel.look(path).kind != MEMBER:  # ours, from before the ledger was lost
                self._kernel.end(path, cpus, dict.fromkeys(_above(path), cpus))
            return PartitionRecord(path, cpus, self.asked, self._kernel.lent(path, cpus))
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                context.telemetry.problem("cannot make a partition", path=path, err=error)
            return None

    def carry_out(self, container_id: str, record: PartitionRecord) -> PartitionState | None:
        """Make what was planned and recorded; None where nothing came of it, and nobody need be told."""
        if container_id in self.over:
            return None
        if self.wanted(self._context.state, container_id) != record.cpus:
            self.over.add(container_id)
            return None
        try:
            made = self._kernel.make(record.path, record.cpus, record.kind, record.lent)
        except CgroupError as error:
            if error.errno == errno.ENOENT:
                self._end_above(record)
                self.over.add(container_id)
            else:
                # The record stays: the next comparison ends the partition.
                telemetry = self._context.telemetry
                telemetry.problem("cannot make a partition", path=record.path, err=error)
            return None
        if made.valid:
            self._bell.add(container_id, self._kernel.file(record.path))
        else:
            self.over.add(container_id)
        return made


def shared_with(state: NodeState, container: Container, cpus: CpuSet) -> str:
    """Tell who else may run on an owner's CPUs, in words; empty where nobody may."""
    if container.placement.hook_extra_cpus & cpus:
        return "a hook has given it CPUs that are not its own"
    if cpus & state.pools.shared:
        return "it has none of its own CPUs now"
    if cpus & state.pools.be:
        return "BE containers may run on its CPUs"
    for other in state.containers.values():
        if other.id == container.id or other.phase is Phase.EXITED:
            continue
        if not other.placement.hook_extra_cpus.isdisjoint(cpus):
            return f"a hook lets {other.ref} run on its CPUs"
        if other.placement.pool is Pool.OWN and other.placement.exclusive & cpus:
            return f"{other.ref} has these CPUs too"
    return ""


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
