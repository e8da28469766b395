"""The two lists of a cpuset group: their files, their types, and their contents."""

from __future__ import annotations

import functools
from collections.abc import Callable

from msgspec import Struct

from proxy.model.idset import CpuSet, IdSet, Mask


class CpusetList(Struct, frozen=True):
    """One of the two lists.

    Attributes:
        file: Holds it as configured.
        effective: Holds what tasks really get.
        words: What it is called in errors.
        type: Its values.
    """

    file: str
    effective: str
    words: str
    type: type[IdSet]


def kinds(version: int) -> tuple[CpusetList, CpusetList]:
    """Return CPUs and memory nodes as they are in cgroup v1 or v2."""
    names_of = ("cpuset.cpus.effective", "cpuset.mems.effective")
    if version == 1:
        names_of = ("cpuset.effective_cpus", "cpuset.effective_mems")
    return (
        CpusetList("cpuset.cpus", names_of[0], "CPUs", CpuSet),
        CpusetList("cpuset.mems", names_of[1], "memory nodes", Mask),
    )


@functools.lru_cache(maxsize=64)
def list_or_none(parse: Callable[[str], IdSet], line: bytes | None) -> IdSet | None:
    """Read a list; most groups hold the same few. None where it is none."""
    try:
        return None if line is None else parse(line.decode("ascii", "replace"))
    except ValueError:
        return None


@functools.lru_cache(maxsize=64)
def line_of(value: IdSet) -> bytes:
    """Say a list as the kernel does, with its line end."""
    return f"{value}\n".encode()
