"""Partitions of cgroup v2: which owners of CPUs get one, and what is known of them.

Theory of operation. A partition is an addition: the cpusets hold without it, and whatever goes wrong with it
costs the partition only. A container gets one that runs, owns CPUs and has them in effect, and whose CPUs no
other container may use: BE containers may use those of an LSR pod, several containers those of their pod. The
kernel would take the CPUs away from the others without any notice.

A record (``x/`` and the container's id) holds all that will be written. The ledger has it before that is
written. What a record names and the newest state no longer wants is ended before any cpuset is written, so no
container grows onto CPUs that the kernel withholds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field, structs

from proxy.engine.enforcement import applies_to
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool

if TYPE_CHECKING:
    from proxy.engine.state import NodeState

KEY = "x/"


class PartitionRecord(Struct, frozen=True):
    """A partition that exists, or is about to be made.

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
        """Return it as plain data."""
        lent = {path: str(cpus) for path, cpus in self.lent.items()}
        return {"path": self.path, "cpus": str(self.cpus), "kind": self.kind, "lent": lent}

    @classmethod
    def load(cls, value: Mapping[str, object]) -> PartitionRecord:
        """Return it from plain data.

        Raises:
            ValueError: It is not a partition.
        """
        path, cpus, kind, lent = (value.get(name) for name in ("path", "cpus", "kind", "lent"))
        if not (path and isinstance(path, str) and isinstance(kind, str) and isinstance(lent, dict)):
            raise ValueError("it is not a partition")
        return cls(path, CpuSet.parse(str(cpus)), kind, {p: CpuSet.parse(str(c)) for p, c in lent.items()})


class PartitionFacts(Struct, frozen=True):
    """What is known of partitions, by container id. May be read from any thread.

    Attributes:
        records: The partitions that exist, or are about to be made.
        why: Why a container has none, in words.
    """

    records: Mapping[str, PartitionRecord] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> dict[str, dict[str, object]]:
        """Return the records as plain data, by the ledger's key."""
        return {KEY + container_id: record.dump() for container_id, record in self.records.items()}

    def making(self, container_id: str, record: PartitionRecord) -> PartitionFacts:
        """Return it with a partition that is about to be made."""
        return structs.replace(self, records={**self.records, container_id: record})

    def without(self, ids: Iterable[str]) -> PartitionFacts:
        """Return it without the records of some containers."""
        gone = set(ids)
        return structs.replace(self, records={i: r for i, r in self.records.items() if i not in gone})

    def explained(self, container_id: str, why: str) -> PartitionFacts:
        """Return it with the reason why a container has no partition."""
        return structs.replace(self, why={**self.why, container_id: why})

    def outdated(self, state: NodeState, kind: str) -> list[tuple[str, PartitionRecord]]:
        """Return the partitions that are to be ended; all where there are to be none (``kind`` is empty)."""
        return [
            (container_id, record)
            for container_id, record in self.records.items()
            if record.kind != kind or partition_cpus(state, container_id) != record.cpus
        ]


def partition_cpus(state: NodeState, container_id: str) -> CpuSet | None:
    """Return the CPUs of a container that may be a partition; None where it may not be one."""
    container = state.containers.get(container_id)
    if container is None or container.phase is not Phase.RUNNING or container.placement.pool is not Pool.OWN:
        return None
    if not applies_to(state, container.pod):
        return None
    return None if shared_with(state, container) else state.wanted(container)


def shared_with(state: NodeState, container: Container) -> str:
    """Say which other container may run on an owner's CPUs; empty where none may."""
    cpus = state.wanted(container)
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
