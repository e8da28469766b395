"""What a state file of kubelet says: who holds which CPUs and which memory.

Theory (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, Allocate). The files are hints for us,
read at a moment that kubelet does not know of: between two writes a set may be in neither place. So what they
say is turned into values as it stands, and only what is no set, no block or no table is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from proxy.kubelet.checkpoints import Checkpoint, CheckpointError, lower
from proxy.model.idset import CpuSet, Mask
from proxy.model.memory import Block, Blocks
from proxy.place.memory.state import MemoryState, Node, Table


@dataclass(frozen=True, slots=True)
class HeldCpus:
    """What ``cpu_manager_state`` says.

    Attributes:
        default: The shared set.
        held: Pod uid to container name to CPUs; version 1 has container ids, and the empty uid here.
    """

    default: CpuSet
    held: Mapping[str, Mapping[str, CpuSet]]


def held_cpus(checkpoint: Checkpoint) -> HeldCpus:
    """Read the CPUs of a ``cpu_manager_state``.

    Raises:
        CheckpointError: A set in it is none.
    """
    with _readable("cpu_manager_state"):
        entries = checkpoint.fields.get("entries") or {}
        if entries and all(isinstance(value, str) for value in entries.values()):
            entries = {"": entries}
        default = CpuSet.parse(checkpoint.fields.get("defaultcpuset", ""))
        held = {uid: {n: CpuSet.parse(text) for n, text in pod.items()} for uid, pod in entries.items()}
        return HeldCpus(default, held)


def held_memory(checkpoint: Checkpoint) -> MemoryState:
    """Read the nodes and assignments of a ``memory_manager_state``.

    Raises:
        CheckpointError: Something in it is no node or no block.
    """
    with _readable("memory_manager_state"):
        nodes = {int(i): _node(raw) for i, raw in (checkpoint.fields.get("machinestate") or {}).items()}
        entries = checkpoint.fields.get("entries") or {}
        held = {uid: {name: _blocks(raw) for name, raw in pod.items()} for uid, pod in entries.items()}
        return MemoryState(dict(sorted(nodes.items())), held)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read kubelet's {what}: {error!r}") from None


def _node(raw: Mapping[str, Any]) -> Node:
    node = lower(raw)
    tables = {name: _table(lower(table)) for name, table in (node.get("memorymap") or {}).items()}
    return Node(tables, Mask(node.get("cells") or ()), int(node.get("numberofassignments", 0)))


def _table(raw: Mapping[str, Any]) -> Table:
    names = ("total", "systemreserved", "allocatable", "reserved", "free")
    return Table(*(int(raw.get(name, 0)) for name in names))


def _blocks(raw: list[Mapping[str, Any]] | None) -> Blocks:
    blocks = [lower(block) for block in raw or ()]
    return tuple(Block(Mask(b["numaaffinity"]), str(b["type"]), int(b["size"])) for b in blocks)
