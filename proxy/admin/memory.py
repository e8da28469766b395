"""The location of containers' memory as text: did it move?"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.observe.json_access import as_list, as_map, one_line

MIB = 1 << 20
HEAD = ("CONTAINER", "DECIDED", "IN EFFECT", "NODE", "ANON", "CACHE", "HUGE", "")
KINDS = ("anon", "file", "huge")


def memory_rows(answer: object) -> list[tuple[str, ...]]:
    """Return the rows of a table, one a container and node; the head first.

    Args:
        answer: What ``/memory`` answered; parts that are missing are left out.
    """
    rows: list[tuple[str, ...]] = [HEAD]
    for entry in as_list(as_map(answer).get("containers")):
        if isinstance(entry, Mapping):
            rows += _rows(entry)
    return rows


def _rows(entry: Mapping[str, object]) -> list[tuple[str, ...]]:
    first = (one_line(entry.get("ref")), one_line(entry.get("decided")) or "-", one_line(entry.get("nodes")))
    if problem := one_line(entry.get("problem")):
        return [(*first, "-", "-", "-", "-", problem)]
    kinds = [_sizes(entry.get(kind)) for kind in KINDS]
    numbers = sorted({node for sizes in kinds for node in sizes}, key=lambda node: (len(node), node))
    rows: list[tuple[str, ...]] = []
    for node in numbers or ["-"]:
        cells = [_size(sizes.get(node, 0)) for sizes in kinds]
        rows.append((*(first if not rows else ("", "", "")), node, *cells, "" if rows else verdict(entry)))
    return rows


def verdict(entry: Mapping[str, object]) -> str:
    """Say in words whether the memory is where it should be."""
    firm, cache = entry.get("outside"), entry.get("outsideFile")
    if not isinstance(firm, int) or not isinstance(cache, int):
        return ""
    if not firm and not cache:
        return "all there"
    words = [f"{_size(firm)} elsewhere"] if firm else []
    words += [f"{_size(cache)} of page cache elsewhere, where it was read first"] if cache else []
    if firm and entry.get("migrates") is False:
        words.append("the kernel does not move it (memory_migrate is 0)")
    return "; ".join(words)


def _sizes(value: object) -> dict[str, int]:
    return {str(node): size for node, size in as_map(value).items() if isinstance(size, int)}


def _size(size: int) -> str:
    return "0" if not size else f"{size / MIB:.1f} MiB" if size >= MIB / 10 else f"{size} B"
