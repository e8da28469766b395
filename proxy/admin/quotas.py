"""The part of the status page with the CFS quotas that are off, and what will be restored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proxy.report.parts import one_line, table


def quotas(entries: Sequence[Mapping[str, object]]) -> Iterable[str]:
    """Write the part; nothing where no quota was taken off.

    Args:
        entries: What the status says under ``quotas``.
    """
    rows = []
    for entry in entries:
        pod, container, was = (entry.get(key) for key in ("pod", "container", "was"))
        group = f"{pod or 'a pod that is gone'}/{container}" if container else str(pod or entry.get("group"))
        rows.append((one_line(group), f"{was} us" if isinstance(was, int) else "?"))
    if rows:
        yield ""
        yield "CFS quotas that are off, and what they were"
        yield from table(sorted(rows))
