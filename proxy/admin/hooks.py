"""The part of the status page with the hooks and their errors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from proxy.report.parts import as_list, as_map, cut, one_line

_WELL = frozenset({"running", "masked", "disabled", ""})
_ASKED = {
    "failing": "fails",
    "open": "not asked for now",
    "probing": "tried again now",
    "hangs": "not asked, as its calls hang",
}


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
    asked = [one_line(entry.get("name")) for entry in entries if as_list(entry.get("points"))]
    yield ""
    yield cut(": ".join(words for words in (f"Hooks ({len(asked)})", ", ".join(asked)) if words), width)
    for entry in entries:
        if words := trouble(entry):
            yield cut(f"  {one_line(entry.get('name')) or '?'}: {words}", width)
    if served:
        yield cut(f"  {_serving(served)}", width)


def trouble(entry: Mapping[str, object]) -> str:
    """Say what is wrong with a hook; nothing where all is well."""
    state, asked = one_line(entry.get("state")), one_line(entry.get("asked"))
    parts = []
    error = one_line(entry.get("error"))
    if state not in _WELL and (state != "being read" or error):
        parts.append(_because(state, error))
    if asked in _ASKED:
        parts.append(_because(_ASKED[asked], last_error(entry)))
    return "; ".join(parts)


def last_error(entry: Mapping[str, object], now: float | None = None) -> str:
    """Describe a hook's last failure, with its time; nothing if there was none.

    Args:
        entry: The hook's entry.
        now: Seconds since the epoch.
    """
    words, when = one_line(entry.get("last_error")), entry.get("last_error_at")
    if not words or not isinstance(when, int | float):
        return words
    ago = max(0.0, (time.time() if now is None else now) - when)
    return f"{words} ({age(ago)} ago)"


def age(seconds: float) -> str:
    """Say how long that is, in one unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _because(what: str, why: str) -> str:
    return f"{what}: {why}" if why else what


def _serving(served: Mapping[str, object]) -> str:
    words = f"served to Koordinator's runtime proxy at {one_line(served.get('socket')) or '?'}"
    calls = served.get("calls")
    return f"{words}: {calls} calls" if isinstance(calls, int) else words
