"""Sizes of huge pages as cgroup files spell them: ``2MB`` are 2 MiB."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from proxy.allocation.memory.state import page_resource

SIZES_LIMIT = 64
"""So many sizes of pages are read; no architecture has more than a dozen."""
SIZE_LENGTH_LIMIT = 16
"""Characters of the size of a page; all that are sizes are shorter."""
_PAGE_SIZE = re.compile(r"([1-9][0-9]{0,8})([KMGT])i?B", re.ASCII)
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}


def huge_pages(limits: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return resources and bytes for limits on huge pages; texts that are no size are left out.

    Args:
        limits: Page size and bytes; kubelet sends 0 bytes for each size that is not asked for.
    """
    found: dict[str, int] = {}
    for size, limit in limits:
        if limit and (name := _resource(size[:SIZE_LENGTH_LIMIT])):
            found[name] = limit
    return tuple(sorted(found.items()))


@functools.lru_cache(maxsize=64)
def _resource(page_size: str) -> str:
    match = _PAGE_SIZE.fullmatch(page_size)
    return page_resource(int(match[1]) * _KIB[match[2]]) if match else ""
