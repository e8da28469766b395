"""The part of the status page that says which hooks run, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.report.parts import as_list, as_map, cut, one_line

WELL = frozenset({"running", "masked"})
"""States of hooks that need no words."""


def hooks(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the part; nothing where there are no hooks.

    Args:
        data: What the status says under ``hooks``.
        width: Columns of the terminal; long lines are cut at it.
    """
    entries = [as_map(entry) for entry in as_list(data.get("hooks"))]
    served = as_map(data.get("serving"))
    if not entries and not served:
        return
    asked = sum(bool(as_list(entry.get("points"))) for entry in entries)
    yield ""
    yield f"Hooks ({asked} asked)"
    for entry in entries:
        if words := trouble(entry):
            yield cut(f"  {one_line(entry.get('name')) or '?'}: {words}", width)
    if served:
        yield cut(f"  {_serving(served)}", width)


def trouble(entry: Mapping[str, object]) -> str:
    """Say what is wrong with a hook; nothing where all is well."""
    state = one_line(entry.get("state"))
    why = one_line(entry.get("trouble") or entry.get("last_error"))
    if state in WELL or not state:
        return ""
    return f"{state}: {why}" if why else state


def _serving(served: Mapping[str, object]) -> str:
    words = f"served to Koordinator's runtime proxy at {one_line(served.get('socket')) or '?'}"
    calls = served.get("calls")
    return f"{words}: {calls} calls" if isinstance(calls, int) else words
