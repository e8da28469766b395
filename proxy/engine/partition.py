"""Decide which owners of CPUs get a partition of cgroup v2, and record the partitions.

Theory of operation. A partition is an addition: the cpusets are in effect without it, and if making it fails,
nothing else is lost. A container gets a partition if it runs, owns CPUs, has them in effect, and no other
container may use them, because the kernel would take the CPUs away from the other containers without any
notice. (BE containers may use the CPUs of an LSR pod, and several containers may use those of their common
pod.)

A record (``x/`` and the container's id) holds all that will be written to the kernel. The ledger has the
record before that is written. A recorded partition that the newest state no longer requires is ended before
any cpuset is written, so no container is given CPUs that the kernel withholds.

    PartitionsRead      ledger -> recorded
    PartitionsDue       owners without a record -> MakePartitions, or the reason why there is none
    PartitionPlanned    -> recorded            before anything is written
    PartitionMade       recorded, without a reason
    PartitionRefused    the kernel's reason    PartitionsEnded comes too: it was made a member again
    PartitionsCompared  what the kernel has ended -> ReportLostPartitions, and the reason
    PartitionsEnded     recorded -> gone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field, structs

from proxy.engine.enforcement import applies_to
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool

if TYPE_CHECKING:
    from proxy.engine.state import NodeState

PARTITION_RECORD = "x/"
MEMBER = "member"


class PartitionState(Struct, frozen=True):
    """The partition state of a group, in the kernel's words.

    Attributes:
        kind: ``member``, ``root`` or ``isolated``.
        valid: Whether the partition is in effect.
        reason: Why it is not valid; empty if the kernel gives no reason.
    """

    kind: str
    valid: bool
    reason: str = ""


class PartitionRecord(Struct, frozen=True):
    """A partition that exists, or is about to be made.

    Attributes:
        path: The container's cgroup.
        cpus: The CPUs of the partition.
        kind: ``root`` or ``isolated``.
        exclusive_added: CPUs that were added to ``cpuset.cpus.exclusive`` of the cgroups above, by path.
    """

    path: str
    cpus: CpuSet
    kind: str
    exclusive_added: Mapping[str, CpuSet]

    def dump(self) -> dict[str, object]:
        """Return it as plain data."""
        exclusive_added = {path: str(cpus) for path, cpus in self.exclusive_added.items()}
        return {"path": self.path, "cpus": str(self.cpus), "kind": self.kind, "lent": exclusive_added}

    @classmethod
    def load(cls, value: Mapping[str, object]) -> PartitionRecord:
        """Return it from plain data.

        Raises:
            ValueError: It is not a partition.
        """
        path, cpus, kind, exclusive_added = (value.get(name) for name in ("path", "cpus", "kind", "lent"))
        if not (
            path and isinstance(path, str) and isinstance(kind, str) and isinstance(exclusive_added, dict)
        ):
            raise ValueError("it is not a partition")
        return cls(
            path, CpuSet.parse(str(cpus)), kind, {p: CpuSet.parse(str(c)) for p, c in exclusive_added.items()}
        )


class PartitionFacts(Struct, frozen=True):
    """The known facts about partitions, by container id. May be read from any thread.

    Attributes:
        records: The partitions that exist, or are about to be made.
        obstacles: Why a container has no partition, as text.
    """

    records: Mapping[str, PartitionRecord] = field(default_factory=dict)
    obstacles: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def load(
        entries: Mapping[str, Mapping[str, object]],
    ) -> tuple[dict[str, PartitionRecord], dict[str, str]]:
        """Return the records of a ledger, and the keys of invalid entries with the reasons."""
        records, invalid = dict[str, PartitionRecord](), dict[str, str]()
        for key, value in entries.items():
            if key.startswith(PARTITION_RECORD):
                try:
                    records[key.removeprefix(PARTITION_RECORD)] = PartitionRecord.load(value)
                except ValueError as error:
                    invalid[key] = str(error)
        return records, invalid

    def dump(self) -> dict[str, dict[str, object]]:
        """Return the records as plain data, by the ledger's key."""
        return {
            PARTITION_RECORD + container_id: record.dump() for container_id, record in self.records.items()
        }

    def outdated(self, state: NodeState, kind: str) -> list[tuple[str, PartitionRecord]]:
        """Return the partitions to end; all of them if ``kind`` is empty, because there should be none."""
        return [
            (container_id, record)
            for container_id, record in self.records.items()
            if record.kind != kind or partition_cpus(state, container_id) != record.cpus
        ]


# -- events and effects -------------------------------------------------------------------------------------


class PartitionsRead(Struct, frozen=True):
    """The ledger of an earlier run has records of partitions, by container id."""

    records: Mapping[str, PartitionRecord]


class PartitionsDue(Struct, frozen=True):
    """Partitions may be made; answered by ``MakePartitions``.

    Attributes:
        later: Ids of containers for which no partition may be tried now.
    """

    later: frozenset[str] = frozenset()


class PartitionPlanned(Struct, frozen=True):
    """A partition will be made next."""

    container_id: str
    record: PartitionRecord


class PartitionMade(Struct, frozen=True):
    """The partition of a container is in effect."""

    container_id: str


class PartitionRefused(Struct, frozen=True):
    """The kernel made no valid partition; the reason is in the kernel's words."""

    container_id: str
    reason: str


class PartitionsEnded(Struct, frozen=True):
    """Partitions of some containers no longer exist, or were not made."""

    ids: tuple[str, ...]


class PartitionsCompared(Struct, frozen=True):
    """All partitions have been compared; answered by ``ReportLostPartitions``.

    Attributes:
        lost: The state in the kernel of partitions that are not as planned, by container id.
    """

    lost: Mapping[str, PartitionState]


class MakePartitions(Struct, frozen=True):
    """Make the partitions of some containers; each only if it is still possible when its turn comes."""

    ids: tuple[str, ...]


class ReportLostPartitions(Struct, frozen=True):
    """Report that the kernel has ended partitions.

    Attributes:
        lost: The containers, and what the kernel did.
    """

    lost: tuple[tuple[Container, str], ...]


PartitionEvent = (
    PartitionsDue | PartitionPlanned | PartitionMade | PartitionRefused | PartitionsEnded | PartitionsCompared
)
PartitionEffect = MakePartitions | ReportLostPartitions
PartitionStep = tuple[PartitionFacts, tuple[PartitionEffect, ...]]


def step(state: NodeState, event: PartitionEvent) -> PartitionStep:
    """Return the known facts about partitions after an event, and the effects to perform."""
    facts = state.facts.partitions
    match event:
        case PartitionPlanned(container_id, record):
            return structs.replace(facts, records={**facts.records, container_id: record}), ()
        case PartitionMade(container_id):
            return structs.replace(
                facts, obstacles={i: text for i, text in facts.obstacles.items() if i != container_id}
            ), ()
        case PartitionRefused(container_id, reason):
            return structs.replace(facts, obstacles={**facts.obstacles, container_id: reason}), ()
        case PartitionsEnded(ids):
            remaining = {i: record for i, record in facts.records.items() if i not in ids}
            return structs.replace(facts, records=remaining), ()
        case PartitionsCompared(lost):
            return _compared(facts, state, lost)
        case PartitionsDue(later):
            return _due(facts, state, later)


def _compared(facts: PartitionFacts, state: NodeState, lost: Mapping[str, PartitionState]) -> PartitionStep:
    containers = state.containers
    texts = {i: _lost_text(partition) for i, partition in lost.items() if i in containers}
    obstacles = {i: text for i, text in facts.obstacles.items() if i in containers} | texts
    report = ReportLostPartitions(tuple((containers[i], text) for i, text in texts.items()))
    return structs.replace(facts, obstacles=obstacles), (report,)


def _lost_text(partition: PartitionState) -> str:
    message = (
        f"{partition.kind}{'' if partition.valid else ' invalid'}".removeprefix("member invalid") or MEMBER
    )
    return f"the kernel turned it into {message}{f' ({partition.reason})' if partition.reason else ''}"


def _due(facts: PartitionFacts, state: NodeState, later: frozenset[str]) -> PartitionStep:
    make, obstacles = list[str](), {**facts.obstacles}
    for container in state.containers.values():
        if container.placement.pool is not Pool.OWN or container.phase is not Phase.RUNNING:
            continue
        if container.id in facts.records or container.id in later:
            continue
        if partition_cpus(state, container.id) is None:
            obstacles[container.id] = shared_with(state, container)
        else:
            make.append(container.id)
    return structs.replace(facts, obstacles=obstacles), (MakePartitions(tuple(make)),)


# -- questions ----------------------------------------------------------------------------------------------


def makeable_cpus(state: NodeState, container_id: str) -> CpuSet | None:
    """Return the CPUs of a partition that may be made now; None if it is too early or too late."""
    cpus = partition_cpus(state, container_id)
    if not cpus or state.inflight.of(container_id):
        return None
    # A partition that has not been ended yet may have them.
    return None if any(r.cpus & cpus for r in state.facts.partitions.records.values()) else cpus


def partition_cpus(state: NodeState, container_id: str) -> CpuSet | None:
    """Return the CPUs of a container that may become a partition; None if they may not."""
    container = state.containers.get(container_id)
    if container is None or container.phase is not Phase.RUNNING or container.placement.pool is not Pool.OWN:
        return None
    if not applies_to(state, container.pod):
        return None
    return None if shared_with(state, container) else state.desired_cpus(container)


def shared_with(state: NodeState, container: Container) -> str:
    """Return which other container may run on an owner's CPUs; empty if none may."""
    cpus = state.desired_cpus(container)
    if container.placement.hook_extra_cpus & cpus:
        return "a hook has given it CPUs that are not its own"
    if cpus & state.pools.shared:
        return "it has none of its own CPUs now"
    if cpus & state.pools.be:
        return "BE containers may run on its CPUs"
    for other in state.containers.values():
        if other.id == container.id or other.phase is Phase.EXITED:
            continue
        if not applies_to(state, other.pod):
            return f"{other.ref} is only observed, and may run on its CPUs"
        if not other.placement.hook_extra_cpus.isdisjoint(cpus):
            return f"a hook lets {other.ref} run on its CPUs"
        if other.placement.pool is Pool.OWN and other.placement.exclusive & cpus:
            return f"{other.ref} has these CPUs too"
    return ""
