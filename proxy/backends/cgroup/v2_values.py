"""Values of cgroup v2 files, in the terms of v1: a quota without a period, and nanoseconds.

v2 has one file for the two of v1 (``cpu.max`` has the quota and the period), and microseconds instead of v1's
nanoseconds (Linux Documentation/admin-guide/cgroup-v2.rst, "CPU Interface Files").

All functions take the text of a kernel file and raise CgroupError for text that the kernel never writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from proxy.model.errors import CgroupError

UNLIMITED = -1

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


def parse_quota(text: str) -> int:
    """Read the quota from ``cpu.max``: microseconds, -1 for no quota. The period must be in the text too."""
    parts = text.split()
    if len(parts) != 2:
        raise CgroupError(f"cannot read cpu.max: {text!r} is not a quota and a period")
    return UNLIMITED if parts[0] == "max" else _integer(parts[0], "cpu.max")


def quota_text(quota: int) -> str:
    """Write a quota for ``cpu.max``; without a period, the file keeps its period."""
    return "max" if quota == UNLIMITED else str(quota)


def parse_cpu_usage(text: str) -> int:
    """Read the used CPU time from ``cpu.stat``, in nanoseconds."""
    used = _integers_of_lines(text, "cpu.stat", ("usage_usec",))["usage_usec"]
    if used < 0:
        raise CgroupError(f"cannot read cpu.stat: {used} is not a time")
    return 1000 * used


def _integers_of_lines(text: str, file: str, names: Iterable[str]) -> dict[str, int]:
    texts: Mapping[str, str] = dict(pair for line in text.splitlines() if len(pair := line.split()) == 2)
    figures = {}
    for name in names:
        if name not in texts:
            raise CgroupError(f"cannot read {file}: it has no {name}")
        figures[name] = _integer(texts[name], file)
    return figures


def _integer(text: str, file: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise CgroupError(f"cannot read {file}: {text!r} is not a whole number")
    return int(text)
