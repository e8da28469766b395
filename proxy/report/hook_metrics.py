"""Hooks in numbers, read off what ``/status`` says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from proxy.report.exposition import Sample, family
from proxy.report.parts import as_list, as_map

_COUNTERS = {
    "calls": "Calls of hooks.",
    "conflicts": "Answers of hooks that were left out, as a hook before them had set the same field.",
    "vetoes": "Calls that a hook has refused.",
    "skipped": "Times that a hook was not asked, because it had failed several times in a row.",
    "lost": "Events that a hook was not told, because too many waited.",
}


def hook_metrics(status: Mapping[str, object]) -> Iterator[str]:
    """Write the metrics of hooks; none where there are no hooks."""
    entries = [as_map(entry) for entry in as_list(as_map(status.get("hooks")).get("hooks"))]
    if not entries:
        return
    states = Counter(str(entry.get("state")) for entry in entries)
    words = "Hooks, by their state."
    yield family("hooks", "gauge", words, [({"state": state}, n) for state, n in sorted(states.items())])
    for name, told, of in (
        ("hook_broken", "Whether the newest version of a hook does not load.", "broken"),
        ("hook_breaker_open", "Whether a hook is not asked now, as it failed several times.", "breaker_open"),
    ):
        samples = [(_hook(e), int(value)) for e in entries if isinstance(value := e.get(of), bool)]
        if samples:
            yield family(name, "gauge", told, samples)
    asked = [entry for entry in entries if isinstance(entry.get("calls"), int)]
    if asked:
        yield from _asked(asked)


def _asked(entries: list[Mapping[str, object]]) -> Iterator[str]:
    for key, words in _COUNTERS.items():
        yield family(f"hook_{key}_total", "counter", words, _numbers(entries, key))
    failures = [
        (_hook(entry) | {"kind": kind}, n)
        for entry in entries
        for kind, n in as_map(entry.get("failures")).items()
        if isinstance(n, int)
    ]
    yield family("hook_failures_total", "counter", "Failures of hooks, by their kind.", failures)
    words = "Calls of hooks that have not come back after their deadline."
    yield family("hook_hung_calls", "gauge", words, _numbers(entries, "hung"))
    lengths = [
        (_hook(entry) | {"of": of}, value)
        for entry in entries
        for of, key in (("median", "p50_s"), ("longest", "max_s"))
        if isinstance(value := entry.get(key), int | float)
    ]
    words = "Seconds of one answer: in the middle of the last ones, and the longest ever."
    yield family("hook_call_seconds", "gauge", words, lengths)


def _numbers(entries: list[Mapping[str, object]], key: str) -> list[Sample]:
    return [(_hook(e), value) for e in entries if isinstance(value := e.get(key), int | float)]


def _hook(entry: Mapping[str, object]) -> dict[str, object]:
    return {"hook": entry.get("name", "")}
