"""The part of the status page with owned CPUs that are partitions, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.report.parts import as_list, as_map, one_line, table


def partitions(data: Mapping[str, object]) -> Iterable[str]:
    """Write the part; nothing where none are asked for.

    Args:
        data: What the status says under ``partitions``.
    """
    entries = [as_map(entry) for entry in as_list(data.get("containers"))]
    asked, lack = one_line(data.get("asked")), one_line(data.get("lack"))
    if not asked and not any(entry.get("state") not in (None, "member") for entry in entries):
        return
    yield ""
    yield f"Partitions of owned CPUs ({asked or 'none'}){f': there are none, {lack}' if lack else ''}"
    rows = [[one_line(entry.get(key)) for key in ("ref", "cpus", "state", "reason")] for entry in entries]
    if rows and not lack:
        yield from table(rows)
    isolated = one_line(data.get("isolated"))
    if isolated:
        yield f"  The kernel isolates CPUs {isolated}."
