"""Partitions: the jobs of the kernel worker's thread, each of which uses the newest state.

See ``proxy.engine.partition`` for which containers get a partition, and
``proxy.executor.partitions.sync`` for when.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from proxy.engine.partition import (
    MEMBER,
    PartitionFacts,
    PartitionRecord,
    PartitionState,
    makeable_cpus,
    partition_cpus,
)
from proxy.executor.context import NodeContext
from proxy.executor.partitions.ports import Partitions
from proxy.executor.partitions.watcher import PartitionWatcher
from proxy.model.errors import CgroupError


class PartitionJobs:
    """Makes, compares and ends partitions.

    Attributes:
        ended: Ids of the containers of partitions that have ended since the event loop last took them over.
    """

    def __init__(
        self, context: NodeContext, kernel: Partitions, wanted: str, watcher: PartitionWatcher
    ) -> None:
        self._context = context
        self._kernel = kernel
        self._watcher = watcher
        self._wanted = wanted
        self.ended: set[str] = set()
        self._invalid: set[str] = set()
        """Containers whose partition the kernel has ended, but whose group could not be made a member."""
        self._not_made: set[str] = set()
        """Containers with a record whose partition is not known to have been made."""

    @property
    def known(self) -> PartitionFacts:
        """The known facts about partitions."""
        return self._context.state.facts.partitions

    @property
    def kind(self) -> str:
        """``root`` or ``isolated``; empty if there must be no partitions now."""
        return "" if self._kernel.unsupported_reason or self._context.store.mode.in_release else self._wanted

    def clear(self) -> None:
        """End the partitions that the newest state no longer has, before any cpuset is written."""
        for container_id, record in self.known.outdated(self._context.state, self.kind):
            if container_id not in self.ended:
                try:
                    self._end(container_id, record)
                except CgroupError as error:
                    self._context.telemetry.problem("cannot end a partition", cpus=record.cpus, err=error)

    def _end(self, container_id: str, record: PartitionRecord) -> None:
        self._watcher.drop(container_id)
        self._kernel.end(record.path, record.cpus, record.exclusive_added)
        self.ended.add(container_id)

    def compare(self) -> dict[str, PartitionState]:
        """End the partitions that are not what they should be; returns the states of those newly found."""
        lost: dict[str, PartitionState] = {}
        self._watcher.silence()
        self._invalid &= self.known.records.keys()
        self._not_made &= self.known.records.keys()
        for container_id, record in self.known.records.items():
            if container_id in self.ended:
                continue
            try:
                state = self._kernel.read(record.path)
                if state.valid and state.kind == record.kind:
                    self._watcher.add(container_id, self._kernel.event_file(record.path))
                    self._invalid.discard(container_id)
                    self._not_made.discard(container_id)
                    continue
            except CgroupError as error:
                if error.errno == errno.ENOENT:
                    self._watcher.drop(container_id)
                    self._end_above(container_id, record)
                else:
                    self._context.telemetry.problem("cannot read a partition", path=record.path, err=error)
                continue
            is_unmade = state.kind == MEMBER and container_id in self._not_made
            if container_id not in self._invalid and not is_unmade:
                lost[container_id] = state
            self._end_invalid(container_id, record)
        return lost

    def loaded(self, ids: Iterable[str]) -> None:
        """Take over the ledger's records: the last daemon may have ended before it made the partitions."""
        self._not_made.update(ids)

    def is_unmade(self, container_id: str) -> bool:
        """Return whether a container has a record, but its partition is not known to have been made."""
        return container_id in self._not_made

    def is_invalid(self, container_id: str) -> bool:
        """Return whether the kernel has ended a container's partition, but its group is not a member yet."""
        return container_id in self._invalid

    def _end_invalid(self, container_id: str, record: PartitionRecord) -> None:
        try:
            self._end(container_id, record)
        except CgroupError as error:
            self._invalid.add(container_id)
            self._context.telemetry.problem("cannot end a partition", path=record.path, err=error)
        else:
            self._invalid.discard(container_id)

    def _end_above(self, container_id: str, record: PartitionRecord) -> None:
        """Reclaim the CPUs of a partition whose group is gone; the groups above still list them."""
        self.ended.add(container_id)
        try:
            self._kernel.end(record.path, record.cpus, record.exclusive_added)
        except CgroupError as error:
            self._context.telemetry.problem("cannot end a partition", path=record.path, err=error)

    def plan(self, container_id: str) -> PartitionRecord | None:
        """Find out which partition to make; None if it is too early, or too late."""
        context, kind = self._context, self.kind
        container = context.state.containers.get(container_id)
        cpus = makeable_cpus(context.state, container_id)
        path = None if container is None else context.cpuset_writer.path_of(container)
        if path is None or cpus is None or not kind:
            return None
        try:
            if context.cpuset_writer.cgroups.read(path).effective_cpus != cpus:
                return None
            if self._kernel.read(path).kind != MEMBER:  # ours, from before the ledger was lost
                self._kernel.end(path, cpus, dict.fromkeys(_above(path), cpus))
            record = PartitionRecord(path, cpus, kind, self._kernel.exclusive_added(path, cpus))
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                context.telemetry.problem("cannot make a partition", path=path, err=error)
            return None
        self._not_made.add(container_id)
        return record

    def carry_out(self, container_id: str, record: PartitionRecord) -> PartitionState | None:
        """Make the planned and recorded partition; None if none was made and nothing must be reported."""
        if container_id in self.ended:
            return None
        if not self.kind or partition_cpus(self._context.state, container_id) != record.cpus:
            self.ended.add(container_id)
            return None
        try:
            partition = self._kernel.make(record.path, record.cpus, record.kind, record.exclusive_added)
        except CgroupError as error:
            if error.errno == errno.ENOENT:
                self._end_above(container_id, record)
                return None
            # The record stays: the next check ends a partly made partition.
            return PartitionState(MEMBER, valid=False, reason=str(error))
        if partition.valid:
            self._not_made.discard(container_id)
            self._watcher.add(container_id, self._kernel.event_file(record.path))
        else:
            self.ended.add(container_id)
        return partition


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
