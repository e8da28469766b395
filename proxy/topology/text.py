"""Formatting numbers and sets for the machine's picture: short, rounded, within the terminal's width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from proxy.model.idset import IdSet
from proxy.model.machine import Machine, NumaNode

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_THREE_DIGITS = 99.95
_SUFFIXES = {"K": 1, "M": 2, "G": 3}


def size_text(size: float) -> str:
    """Write a number of bytes with three digits at most: ``62.9 GiB``, ``32 MiB``."""
    unit = 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    number = f"{size:.0f}" if size >= _THREE_DIGITS else f"{size:.1f}".removesuffix(".0")
    return f"{number} {_UNITS[unit]}"


def cache_size_text(size: str) -> str:
    """Write a cache size, in sysfs form (``32768K``), in the largest fitting unit."""
    number, unit = size[:-1], _SUFFIXES.get(size[-1:], 0)
    return size_text(int(number) * _STEP**unit) if unit and number.isdigit() else size


def ids_text(ids: IdSet, room: int) -> str:
    """Write a set as a list; if that is longer than ``room``, as ``0…8``, or for equal steps ``0,2,…,8``."""
    text = str(ids)
    if len(text) <= room or len(ids) <= 3:
        return text
    numbers = list(ids)
    if len({high - low for low, high in itertools.pairwise(numbers)}) == 1:
        return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    return f"{numbers[0]}…{numbers[-1]}"


def memory_text(node: NumaNode) -> str:
    """Write a node's memory and its huge pages."""
    if node.mem_bytes is None:
        parts = ["memory unknown"]
    else:
        parts = [size_text(node.mem_bytes) if node.mem_bytes else "no memory"]
    for size, pages in sorted((node.hugepages or {}).items()):
        if pages.nr:
            parts.append(f"{pages.nr} x {size_text(size * _STEP)} pages")
    return ", ".join(parts)


def distance_lines(machine: Machine, width: int) -> list[str]:
    """Draw the distances between nodes that have CPUs or memory; nothing for fewer than two such nodes."""
    ids = [node.id for node in machine.nodes]
    at = [i for i, node in enumerate(machine.nodes) if node.cpus or node.mem_bytes != 0]
    if len(at) < 2 or not all(machine.nodes[i].distance for i in at):
        return []
    rows = {ids[i]: [machine.nodes[i].distance[k] for k in at] for i in at}
    remote = {
        d
        for row, index in zip(rows.values(), range(len(at)), strict=True)
        for k, d in enumerate(row)
        if k != index
    }
    local = {row[k] for k, row in enumerate(rows.values())}
    if len(remote) == 1 and len(local) == 1:
        return [f"distances: {local.pop()} within a node, {remote.pop()} between nodes"]
    column = max(len(str(value)) for value in [*rows, *(d for row in rows.values() for d in row)]) + 1
    if 12 + column * len(at) > width:
        return ["distances:", *(_by_distance(node, row, list(rows)) for node, row in rows.items())]
    head = "distances".ljust(11) + "".join(str(node).rjust(column) for node in rows)
    return [
        head,
        *(f"  node {node:<4}" + "".join(str(d).rjust(column) for d in row) for node, row in rows.items()),
    ]


def _by_distance(node: int, row: Sequence[int], ids: Sequence[int]) -> str:
    """Write one row as "distance to nodes", the nearest first, if the table is wider than the terminal."""
    near: dict[int, list[int]] = {}
    for other, distance in zip(ids, row, strict=True):
        near.setdefault(distance, []).append(other)
    return f"  node {node}: " + ", ".join(f"{d} to {IdSet(near[d])}" for d in sorted(near))
