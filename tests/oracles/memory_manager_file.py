"""What kubelet's memory_manager_state says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.allocation.memory.state import MemoryState, NumaMemory, ResourceTable
from proxy.backends.kubelet.checkpoints import Checkpoint, _readable, lower_case_keys
from proxy.model.grants import Block, Blocks
from proxy.model.idset import Mask


def held_memory(checkpoint: Checkpoint) -> MemoryState:
    """Read the nodes and assignments of a ``memory_manager_state``.

    Raises:
        CheckpointError: Something in it is not a node or a block.
    """
    with _readable("memory_manager_state"):
        nodes = {int(i): _node(raw) for i, raw in (checkpoint.fields.get("machinestate") or {}).items()}
        entries = checkpoint.fields.get("entries") or {}
        held = {uid: {name: _blocks(raw) for name, raw in pod.items()} for uid, pod in entries.items()}
        return MemoryState(dict(sorted(nodes.items())), held)


def _node(raw: Mapping[str, Any]) -> NumaMemory:
    node = lower_case_keys(raw)
    tables = {name: _table(lower_case_keys(table)) for name, table in (node.get("memorymap") or {}).items()}
    return NumaMemory(tables, Mask(node.get("cells") or ()), int(node.get("numberofassignments", 0)))


def _table(raw: Mapping[str, Any]) -> ResourceTable:
    names = ("total", "systemreserved", "allocatable", "reserved", "free")
    return ResourceTable(*(int(raw.get(name, 0)) for name in names))


def _blocks(raw: list[Mapping[str, Any]] | None) -> Blocks:
    blocks = [lower_case_keys(block) for block in raw or ()]
    return tuple(Block(Mask(b["numaaffinity"]), str(b["type"]), int(b["size"])) for b in blocks)
