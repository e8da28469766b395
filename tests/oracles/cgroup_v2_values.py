"""Values of cgroup v2 files, in the terms of v1 if Koordinator uses these.

Theory (Linux cgroup-v2.rst). v2 has weights, v1 has shares. As in kubelet, weights 1 to 10000 stand for
shares 2 to 262144, linearly and in whole numbers, so a value that is converted twice may have changed. All
functions raise CgroupError for text that the kernel never gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.backends.cgroup.v2_values import _integer, _integers_of_lines
from proxy.model.errors import CgroupError

SHARES = (2, 262_144)
WEIGHTS = (1, 10_000)
PAGE = 4096

_NODE = re.compile(r"N([0-9]{1,5})=([0-9]{1,19})")
_MEMORY = {
    "cache": "file",
    "rss": "anon",
    "inactive_file": "inactive_file",
    "active_file": "active_file",
    "inactive_anon": "inactive_anon",
    "active_anon": "active_anon",
    "unevictable": "unevictable",
}
"""v1's name of a figure to v2's."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """``cpu.stat`` of v2: microseconds and counts."""

    usage_usec: int
    user_usec: int
    system_usec: int
    nr_periods: int
    nr_throttled: int
    throttled_usec: int


@dataclass(frozen=True, slots=True)
class Throttling:
    """How often and how long a quota throttled; the time in nanoseconds, as in v1."""

    nr_periods: int
    nr_throttled: int
    throttled_nano_seconds: int


def shares_of(weight: int) -> int:
    """Return the shares that a weight stands for."""
    low, high = WEIGHTS
    if not low <= weight <= high:
        raise CgroupError(f"cannot turn weight {weight} into shares: it is not in {low}-{high}")
    return SHARES[0] + (weight - low) * (SHARES[1] - SHARES[0]) // (high - low)


def weight_of(shares: str | int) -> int:
    """Return the weight that shares stand for."""
    number = shares if isinstance(shares, int) else _integer(shares, "cpu.shares")
    low, high = SHARES
    if not low <= number <= high:
        raise CgroupError(f"cannot turn shares {number} into a weight: they are not in {low}-{high}")
    return WEIGHTS[0] + (number - low) * (WEIGHTS[1] - WEIGHTS[0]) // (high - low)


def cpu_times(text: str) -> CpuTimes:
    """Read all of ``cpu.stat``."""
    return CpuTimes(**_integers_of_lines(text, "cpu.stat", CpuTimes.__slots__))


def throttling(text: str) -> Throttling:
    """Read from ``cpu.stat`` how often and how long the quota throttled."""
    reported = _integers_of_lines(text, "cpu.stat", ("nr_periods", "nr_throttled", "throttled_usec"))
    return Throttling(reported["nr_periods"], reported["nr_throttled"], 1000 * reported["throttled_usec"])


def memory_figures(text: str) -> dict[str, int]:
    """Read ``memory.stat``: bytes by v1's names."""
    reported = _integers_of_lines(text, "memory.stat", _MEMORY.values())
    return {ours: reported[theirs] for ours, theirs in _MEMORY.items()}


def memory_pages(text: str, nodes: Iterable[int] | None = None) -> dict[int, int]:
    """Read ``memory.numa_stat``: pages of 4 KiB by NUMA node, anonymous and file memory together.

    Each figure is cut to whole pages before they are added.

    Args:
        text: The file; its first two lines are those of ``anon`` and ``file``.
        nodes: The machine's nodes, which the lines have to name in this order; 0, 1, 2 ... if None.
    """
    lines = text.splitlines()
    if [line.split(" ", 1)[0] for line in lines[:2]] != ["anon", "file"]:
        raise CgroupError("cannot read memory.numa_stat: it does not begin with lines for anon and file")
    pages: list[dict[int, int]] = []
    for line in lines[:2]:
        found = [_NODE.fullmatch(part) for part in line.split()[1:]]
        if not found or not all(found):
            raise CgroupError(f"cannot read memory.numa_stat: {line!r} is not a line of nodes")
        pairs = [(int(match[1]), int(match[2]) // PAGE) for match in found if match]
        if [node for node, _ in pairs] != list(range(len(pairs)) if nodes is None else nodes):
            raise CgroupError(f"cannot read memory.numa_stat: {line!r} does not name the machine's nodes")
        pages.append(dict(pairs))
    anon, file = pages
    if anon.keys() != file.keys():
        raise CgroupError("cannot read memory.numa_stat: anon and file name different nodes")
    return {node: anon[node] + file[node] for node in anon}
