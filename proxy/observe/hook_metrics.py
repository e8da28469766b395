"""Hooks in numbers, read off what ``/status`` says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from proxy.observe.json_access import as_list, as_map
from proxy.telemetry import metrics as named
from proxy.telemetry.exposition import Sample, family

_COUNTERS = {
    "calls": named.HOOK_CALLS,
    "conflicts": named.HOOK_CONFLICTS,
    "vetoes": named.HOOK_VETOES,
    "skipped": named.HOOK_SKIPPED,
    "lost": named.HOOK_LOST,
}


def hook_metrics(status: Mapping[str, object]) -> Iterator[str]:
    """Write the metrics of hooks; none where there are no hooks."""
    entries = [as_map(entry) for entry in as_list(as_map(status.get("hooks")).get("hooks"))]
    if not entries:
        return
    states = Counter(str(entry.get("state")) for entry in entries)
    yield family(named.HOOKS, [({"state": state}, n) for state, n in sorted(states.items())])
    for metric, key in ((named.HOOK_BROKEN, "broken"), (named.HOOK_BREAKER_OPEN, "breaker_open")):
        samples = [(_hook(e), int(value)) for e in entries if isinstance(value := e.get(key), bool)]
        if samples:
            yield family(metric, samples)
    called = [entry for entry in entries if isinstance(entry.get("calls"), int)]
    if called:
        yield from _called(called)


def _called(entries: list[Mapping[str, object]]) -> Iterator[str]:
    for key, metric in _COUNTERS.items():
        yield family(metric, _numbers(entries, key))
    failures = [
        (_hook(entry) | {"kind": kind}, n)
        for entry in entries
        for kind, n in as_map(entry.get("failures")).items()
        if isinstance(n, int)
    ]
    yield family(named.HOOK_FAILURES, failures)
    yield family(named.HOOK_HUNG_CALLS, _numbers(entries, "hung"))
    lengths = [
        (_hook(entry) | {"of": of}, value)
        for entry in entries
        for of, key in (("median", "p50_s"), ("longest", "max_s"))
        if isinstance(value := entry.get(key), int | float)
    ]
    yield family(named.HOOK_CALL_SECONDS, lengths)


def _numbers(entries: list[Mapping[str, object]], key: str) -> list[Sample]:
    return [(_hook(e), value) for e in entries if isinstance(value := e.get(key), int | float)]


def _hook(entry: Mapping[str, object]) -> dict[str, object]:
    return {"hook": entry.get("name", "")}
