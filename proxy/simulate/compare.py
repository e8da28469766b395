"""Compare two simulations of the same pods on the same machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.model.phrases import counted
from proxy.observe.value_text import clean
from proxy.simulate.cluster import PodOutcome, Result
from proxy.simulate.data import Data
from proxy.simulate.picture import columns
from proxy.simulate.quality import Alignment
from proxy.simulate.simulation import Simulation
from proxy.simulate.summary import Findings
from proxy.simulate.text import ALL, numbers, outcome_text, short_text

SHOWN = 5
"""Pods that are named for each kind of difference unless all are requested."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A pod with different results in the two simulations.

    Attributes:
        one, other: The results.
        one_word, other_word: The results in short form: equal for pods with equal differences.
        one_text, other_text: The same in full.
        changes: Which of ``fate``, ``reason`` and ``together`` differ.
    """

    one: Result
    other: Result
    one_word: str
    other_word: str
    one_text: str
    other_text: str
    changes: tuple[str, ...]


def differences(
    one: Simulation, one_found: Findings, other: Simulation, other_found: Findings
) -> list[Difference]:
    """Find the pods with different results; another machine alone is not a difference."""
    found: list[Difference] = []
    pairs = zip(one.results, one_found.alignments, other.results, other_found.alignments, strict=True)
    for a, a_alignments, b, b_alignments in pairs:
        changes = {
            "fate": a.outcome is not b.outcome,
            "reason": a.reason != b.reason or a.lacking != b.lacking,
            "together": _is_aligned(a_alignments) != _is_aligned(b_alignments),
        }
        if any(changes.values()):
            names = tuple(name for name, changed in changes.items() if changed)
            words = _word(a, a_alignments), _word(b, b_alignments)
            found.append(Difference(a, b, *words, _text(a, a_alignments), _text(b, b_alignments), names))
    return found


def compare_lines(
    one: Simulation,
    one_found: Findings,
    other: Simulation,
    other_found: Findings,
    notes: Sequence[str],
    *,
    verbose: bool,
) -> list[str]:
    """Write both, side by side."""
    changed = differences(one, one_found, other, other_found)
    lines = [f"A: {clean(one.config.source)}", f"B: {clean(other.config.source)}", ""]
    lines += _table(one_found, other_found)
    moved = sum(
        a.outcome is b.outcome is PodOutcome.PLACED and a.host != b.host
        for a, b in zip(one.results, other.results, strict=True)
    )
    lines += ["", f"{counted(len(changed), 'pod')} fared differently, {moved} others only ran elsewhere"]
    lines += _each(changed) if verbose else _kinds(changed)
    return lines + [f"note: {clean(note)}" for note in notes]


def _each(changed: Sequence[Difference]) -> list[str]:
    """List every pod."""
    return [
        line
        for each in changed
        for line in (clean(each.one.simulated_pod.ref), f"  A: {each.one_text}", f"  B: {each.other_text}")
    ]


def _kinds(changed: Sequence[Difference]) -> list[str]:
    """Count the pods that fared differently in the same way, and name some."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for each in changed:
        kinds.setdefault((each.one_word, each.other_word), []).append(clean(each.one.simulated_pod.ref))
    lines: list[str] = []
    for (one, other), refs in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        lines += [f"{counted(len(refs), 'pod')}: {one} under A, {other} under B"]
        more = f", and {len(refs) - SHOWN} more ({ALL})" if len(refs) > SHOWN else ""
        lines += [f"  {', '.join(refs[:SHOWN])}{more}"]
    return lines


def differences_data(changed: Sequence[Difference]) -> list[Data]:
    """Return the pods with different results, as plain data."""
    return [
        {
            "pod": each.one.simulated_pod.ref,
            "changed": list(each.changes),
            "a": {"outcome": each.one_word, "text": each.one_text},
            "b": {"outcome": each.other_word, "text": each.other_text},
        }
        for each in changed
    ]


def _table(one: Findings, other: Findings) -> list[str]:
    left = {label: value for label, value, _ in numbers(one.summary)}
    right = {label: value for label, value, _ in numbers(other.summary)}
    rows = [("", "A", "B", "B - A")]
    for label in _merged(list(left), list(right)):
        a, b = left.get(label, 0), right.get(label, 0)
        rows.append((label, str(a), str(b), f"{b - a:+d}" if a != b else ""))
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return columns([(row[0], *(row[at].rjust(widths[at]) for at in (1, 2, 3))) for row in rows])


def _merged(left: list[str], right: list[str]) -> list[str]:
    """Return all labels once, those that only one has behind the label that they follow there."""
    merged = list(left)
    for at, label in enumerate(right):
        if label not in merged:
            merged.insert(merged.index(right[at - 1]) + 1 if at else 0, label)
    return merged


def _is_aligned(alignments: Sequence[Alignment]) -> bool | None:
    return all(alignment.together for alignment in alignments) if alignments else None


def _word(result: Result, alignments: Sequence[Alignment]) -> str:
    if result.outcome is PodOutcome.PLACED:
        return _MANNERS[_is_aligned(alignments)]
    if result.outcome is PodOutcome.UNSCHEDULABLE:
        return f"unschedulable ({short_text(', '.join(result.lacking) or result.reason)})"
    return f"refused ({clean(result.reason)})"


def _text(result: Result, alignments: Sequence[Alignment]) -> str:
    placed = result.outcome is PodOutcome.PLACED
    return outcome_text(result) + (f", {_MANNERS[_is_aligned(alignments)]}" if placed else "")


_MANNERS = {True: "together", False: "spread", None: "sharing"}
