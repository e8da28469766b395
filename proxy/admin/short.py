"""The part of the status page with containers that have less than promised: CPUs or memory are offline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proxy.report.parts import one_line


def short(entries: Sequence[Mapping[str, object]]) -> Iterable[str]:
    """Write the part; nothing where every container has what it was promised.

    Args:
        entries: What the status says under ``short``.
    """
    if entries:
        yield ""
        yield f"NOT AS PROMISED ({len(entries)})"
        for entry in entries:
            yield f"  {one_line(entry.get('container')) or '?'}: {one_line(entry.get('what')) or '?'}"
