"""Drift on the status page: which other programs write cpusets, and which do so repeatedly.

As everywhere on that page, a part that is missing or something else than expected is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.report.parts import as_list, as_map, cut, one_line, table


def drift(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the section; nothing where no other program has written.

    Args:
        data: ``drift`` of what ``/status`` answered.
        width: Columns of the terminal; long lines are cut at it.
    """
    by = {one_line(writer): n for writer, n in as_map(data.get("by")).items() if isinstance(n, int) and n > 0}
    wars = [as_map(entry) for entry in as_list(data.get("writeConflicts"))]
    if not by and not wars:
        return
    count = ", ".join(f"{writer} {n}" for writer, n in sorted(by.items(), key=lambda one: (-one[1], one[0])))
    yield ""
    yield cut(f"Cpusets written by other programs and restored (by probable writer): {count or '-'}", width)
    if lack := one_line(data.get("not_watched")):
        yield cut(f"  not all writes are noticed: {lack}", width)
    if wars:
        rows = [("WRITTEN AGAIN AND AGAIN", "BY", "FOUND", "INSTEAD OF", "TIMES", "SINCE", "PUT BACK IN")]
        rows += [
            (
                one_line(war.get("container")) or one_line(war.get("id"))[:13],
                one_line(war.get("by")),
                one_line(war.get("found")) or "-",
                one_line(war.get("cpus")) or "-",
                one_line(war.get("times")),
                _seconds(war.get("seconds")),
                _seconds(war.get("next_s")),
            )
            for war in wars
        ]
        yield from (cut(f"  {line}", width) for line in table(rows))


def _seconds(value: object) -> str:
    if not isinstance(value, int | float):
        return ""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"  # half a second is not none
