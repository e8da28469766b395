"""The status of the daemon's hooks as plain data: files and servers, and their statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from proxy.hooks.engine.stats import HookReport
from proxy.hooks.loader.directories import HookFileEntry, HookFileState

NOT_CALLED: Final = frozenset({"open", "probing", "hangs"})
"""States of the engine in which a hook is not called."""
_BROKEN: Final = frozenset({HookFileState.OLD, HookFileState.BROKEN, HookFileState.UNTRUSTED})
_REPORTED_KEYS: Final = tuple(
    item.name
    for item in dataclasses.fields(HookReport)
    if item.name not in {"name", "points", "policy", "timeout", "state"}
)
"""Fields of a report that keep their name."""


def hooks_page(entries: Iterable[HookFileEntry], reports: Iterable[HookReport]) -> list[dict[str, Any]]:
    """Combine the state of each hook file with its statistics.

    Args:
        entries: The state of each file, in the order in which hooks are called.
        reports: The statistics of the hooks that are in use.

    Returns:
        For each file ``name``, ``state``, ``path``, ``kind`` (``file`` or ``server``), ``broken``, ``error``;
        of those in use ``points``, ``policy``, ``timeout`` (seconds), ``asked`` (the engine's state),
        ``breaker_open``, and the fields of ``HookReport``.
    """
    known = {report.name: report for report in reports}
    page = []
    for entry in entries:
        used = known.pop(entry.name, None) if entry.points else None
        page.append(_file(entry) | (_report(used) if used is not None else {}))
    page += [
        {"state": str(HookFileState.RUNNING), "broken": False, "error": ""} | _report(r)
        for r in known.values()
    ]
    return page


def _file(entry: HookFileEntry) -> dict[str, Any]:
    reported: dict[str, Any] = {
        "name": entry.name,
        "state": str(entry.state),
        "path": entry.path,
        "kind": "server" if entry.server else "file",
        "broken": entry.state in _BROKEN,
        "error": entry.error,
    }
    if entry.points:
        reported |= {"points": list(entry.points), "policy": entry.policy, "timeout": entry.timeout}
    return reported


def _report(report: HookReport) -> dict[str, Any]:
    reported: dict[str, Any] = {
        "name": report.name,
        "points": list(report.points),
        "policy": report.policy,
        "timeout": report.timeout,
        "asked": report.state,
        "breaker_open": report.state in NOT_CALLED,
    }
    for name in _REPORTED_KEYS:
        value = getattr(report, name)
        reported[name] = dict(value) if isinstance(value, Mapping) else value
    return reported
