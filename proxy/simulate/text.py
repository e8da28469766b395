"""A simulation, and the comparison of two, as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.model.phrases import counted
from proxy.observe.sentences import render_decision
from proxy.observe.value_text import clean
from proxy.simulate.cluster import NO_SUCH_MACHINE, PodOutcome, Result
from proxy.simulate.data import Data
from proxy.simulate.picture import LEGEND, columns, lines_of
from proxy.simulate.quality import Alignment
from proxy.simulate.simulation import Simulation
from proxy.simulate.summary import Findings, Summary

MACHINES = 6
"""Machines that are drawn unless all are requested."""
FAILED = 5
"""Pods that are listed for each reason unless all are requested."""
ALL = "--verbose shows all"

SHOWN = 5
"""Pods that are named for each kind of difference unless all are requested."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A pod with different results in the two simulations.

    Attributes:
        first, other: The results.
        first_outcome, other_outcome: The results in short form, as JSON has them; equal for pods with
            equal differences.
        first_text, other_text: The same in full.
        changes: Which of ``fate``, ``reason`` and ``together`` differ.
    """

    first: Result
    other: Result
    first_outcome: str
    other_outcome: str
    first_text: str
    other_text: str
    changes: tuple[str, ...]


def differences(
    first: Simulation, first_found: Findings, other: Simulation, other_found: Findings
) -> list[Difference]:
    """Return the pods with different results; another machine alone is not a difference."""
    result: list[Difference] = []
    pairs = zip(first.results, first_found.alignments, other.results, other_found.alignments, strict=True)
    for a, a_alignments, b, b_alignments in pairs:
        changes = {
            "fate": a.outcome is not b.outcome,
            "reason": a.reason != b.reason or a.lacking != b.lacking,
            "together": _is_aligned(a_alignments) != _is_aligned(b_alignments),
        }
        if any(changes.values()):
            names = tuple(name for name, changed in changes.items() if changed)
            outcomes = _word(a, a_alignments), _word(b, b_alignments)
            result.append(Difference(a, b, *outcomes, _text(a, a_alignments), _text(b, b_alignments), names))
    return result


def compare_lines(
    first: Simulation,
    first_found: Findings,
    other: Simulation,
    other_found: Findings,
    notes: Sequence[str],
    *,
    verbose: bool,
) -> list[str]:
    """Write two simulations side by side."""
    changed = differences(first, first_found, other, other_found)
    lines = [f"A: {clean(first.config.source)}", f"B: {clean(other.config.source)}", ""]
    lines += _table(first_found, other_found)
    moved = sum(
        a.outcome is b.outcome is PodOutcome.PLACED and a.node_name != b.node_name
        for a, b in zip(first.results, other.results, strict=True)
    )
    have = "has" if len(changed) == 1 else "have"
    others = "1 other only runs" if moved == 1 else f"{moved} others only run"
    lines += ["", f"{counted(len(changed), 'pod')} {have} a different result; {others} on another machine"]
    lines += _each(changed) if verbose else _kinds(changed)
    return lines + [f"note: {clean(note)}" for note in notes]


def _each(changed: Sequence[Difference]) -> list[str]:
    """List every pod."""
    return [
        line
        for difference in changed
        for line in (
            clean(difference.first.simulated_pod.ref),
            f"  A: {difference.first_text}",
            f"  B: {difference.other_text}",
        )
    ]


def _kinds(changed: Sequence[Difference]) -> list[str]:
    """Count the pods with the same difference of results, and name some of them."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for difference in changed:
        kinds.setdefault((difference.first_outcome, difference.other_outcome), []).append(
            clean(difference.first.simulated_pod.ref)
        )
    lines: list[str] = []
    for (first, other_outcome), refs in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        outcomes = f"{_shown_outcome(first)} under A, {_shown_outcome(other_outcome)} under B"
        lines += [f"{counted(len(refs), 'pod')}: {outcomes}"]
        more = f", and {len(refs) - SHOWN} more ({ALL})" if len(refs) > SHOWN else ""
        lines += [f"  {', '.join(refs[:SHOWN])}{more}"]
    return lines


def differences_data(changed: Sequence[Difference]) -> list[Data]:
    """Return the pods with different results, as plain data."""
    return [
        {
            "pod": difference.first.simulated_pod.ref,
            "changed": list(difference.changes),
            "a": {"outcome": difference.first_outcome, "text": difference.first_text},
            "b": {"outcome": difference.other_outcome, "text": difference.other_text},
        }
        for difference in changed
    ]


def _table(first: Findings, other: Findings) -> list[str]:
    first_values = {label: value for label, value, _ in numbers(first.summary)}
    right = {label: value for label, value, _ in numbers(other.summary)}
    rows = [("", "A", "B", "B - A")]
    for label in _merged(list(first_values), list(right)):
        a, b = first_values.get(label, 0), right.get(label, 0)
        rows.append((label, str(a), str(b), f"{b - a:+d}" if a != b else ""))
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return columns([(row[0], *(row[at].rjust(widths[at]) for at in (1, 2, 3))) for row in rows])


def _merged(left: list[str], right: list[str]) -> list[str]:
    """Merge two lists of labels; a label of one list only stays behind the label that it follows there."""
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
    return f"{_REFUSED}{clean(result.reason)})"


def _shown_outcome(outcome: str) -> str:
    """Return the short form of a result for the terminal: JSON keeps the former word for a rejection."""
    return f"rejected ({outcome.removeprefix(_REFUSED)}" if outcome.startswith(_REFUSED) else outcome


def _text(result: Result, alignments: Sequence[Alignment]) -> str:
    placed = result.outcome is PodOutcome.PLACED
    return outcome_text(result) + (f", {_MANNERS[_is_aligned(alignments)]}" if placed else "")


_REFUSED = "refused ("
_MANNERS = {True: "together", False: "spread", None: "sharing"}


def report(simulation: Simulation, findings: Findings, notes: Sequence[str], *, verbose: bool) -> list[str]:
    """Write everything about a simulation."""
    lines = machine_lines(simulation, verbose=verbose)
    lines += ["", *summary_lines(findings.summary)]
    failed = failed_lines(simulation.results, verbose=verbose)
    lines += ["", *failed] if failed else []
    if verbose:
        lines += spread_lines(simulation, findings)
    return lines + [f"note: {clean(note)}" for note in notes]


def machine_lines(simulation: Simulation, *, verbose: bool) -> list[str]:
    """Draw the machines."""
    shown = simulation.simulated_nodes if verbose else simulation.simulated_nodes[:MACHINES]
    lines = [line for simulated_node in shown for line in lines_of(simulated_node)]
    more = len(simulation.simulated_nodes) - len(shown)
    lines += [f"and {counted(more, 'machine')} more ({ALL})"] if more else []
    return [*lines, LEGEND]


def summary_lines(reported: Summary) -> list[str]:
    """Write the numbers."""
    rows = [(label, str(value), explanation) for label, value, explanation in numbers(reported)]
    width = max(len(value) for _, value, _ in rows)
    return columns([(label, value.rjust(width), explanation) for label, value, explanation in rows])


def numbers(reported: Summary) -> list[tuple[str, int, str]]:
    """Return the numbers with their labels, and an explanation if the label is not enough."""
    return [
        ("machines", reported.machines, ""),
        ("pods", reported.pods, ""),
        ("  placed", reported.placed, ""),
        ("    together", reported.together, "on as few NUMA nodes as there can be"),
        ("    spread", reported.spread, "on more NUMA nodes than there had to be"),
        ("    sharing", reported.sharing, "given nothing that belongs to a NUMA node"),
        ("  rejected", sum(reported.rejected.values()), "by the machine that was chosen for it"),
        *((f"    {reason}", count, "") for reason, count in reported.rejected.items()),
        ("  unschedulable", sum(reported.unschedulable.values()), "no machine has what is requested"),
        *((f"    {short_text(resource)}", count, "") for resource, count in reported.unschedulable.items()),
        ("CPUs", reported.cpus, ""),
        ("  owned", reported.owned, ""),
        ("  left", reported.left, "without an owner, and not reserved"),
        ("    in whole cores", reported.whole, ""),
        (
            "    on one node",
            reported.largest,
            f"the most on any NUMA node ({reported.largest_when_empty} when it was empty)",
        ),
        ("    the same in whole cores", reported.largest_whole, ""),
    ]


def short_text(name: str) -> str:
    """Return the missing resource, from its name in the summary."""
    return "no machine of that name" if name == NO_SUCH_MACHINE else f"too little {name}"


def failed_lines(results: Sequence[Result], *, verbose: bool) -> list[str]:
    """List the pods that do not run, some for each reason."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.outcome is not PodOutcome.PLACED:
            groups.setdefault((result.outcome, result.reason, *result.lacking), []).append(result)
    lines: list[str] = []
    for group in groups.values():
        shown = group if verbose else group[:FAILED]
        lines += [f"{clean(result.simulated_pod.ref)}: {outcome_text(result)}" for result in shown]
        more = len(group) - len(shown)
        lines += [f"  and {counted(more, 'pod')} more like this ({ALL})"] if more else []
    return lines


def outcome_text(result: Result) -> str:
    """Return the result for a pod in one line."""
    if result.outcome is PodOutcome.PLACED:
        return f"placed on {clean(result.node_name)}"
    if result.outcome is PodOutcome.UNSCHEDULABLE:
        return f"unschedulable: {clean(result.message)}"
    reason = "" if result.message.startswith(result.reason) else f"{result.reason}: "
    return f"{_rejected_text(result)}: {clean(reason + result.message)}"


def _rejected_text(result: Result) -> str:
    container = f", container {clean(result.container)}" if result.container else ""
    return f"rejected on {clean(', '.join(result.tried))}{container}"


def spread_lines(simulation: Simulation, findings: Findings) -> list[str]:
    """List the pods with a container on more NUMA nodes than necessary."""
    lines = [
        f"{result.simulated_pod.ref}: spread on {clean(result.node_name)}: "
        f"given something on NUMA nodes {alignment.nodes}, {alignment.least} could hold it"
        for result, alignments in zip(simulation.results, findings.alignments, strict=True)
        for alignment in alignments
        if not alignment.together
    ]
    return ["", *lines] if lines else []


def explain_lines(result: Result, width: int) -> list[str]:
    """Explain the placement of a pod, container by container."""
    rejected = result.outcome is PodOutcome.REJECTED and result.explanations  # they say why
    lines = [
        f"{clean(result.simulated_pod.ref)}: {_rejected_text(result) if rejected else outcome_text(result)}"
    ]
    for reported in result.explanations:
        lines += ["", *render_decision(reported, width).rstrip("\n").split("\n")]
    for container in () if result.explanations else result.containers:
        lines += [f"  {container.name}: {clean(reason)}" for reason in container.placement.reasons]
    return lines
