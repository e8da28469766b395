"""A simulation as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.model.phrases import counted
from proxy.observe.sentences import render_decision
from proxy.observe.value_text import clean
from proxy.simulate.cluster import NO_SUCH_MACHINE, PodOutcome, Result
from proxy.simulate.picture import LEGEND, columns, lines_of
from proxy.simulate.simulation import Simulation
from proxy.simulate.summary import Findings, Summary

MACHINES = 6
"""Machines that are drawn unless all are requested."""
FAILED = 5
"""Pods that are listed for each reason unless all are requested."""
ALL = "--verbose shows all"


def report(simulation: Simulation, found: Findings, notes: Sequence[str], *, verbose: bool) -> list[str]:
    """Write everything about a simulation."""
    lines = machine_lines(simulation, verbose=verbose)
    lines += ["", *summary_lines(found.summary)]
    failed = failed_lines(simulation.results, verbose=verbose)
    lines += ["", *failed] if failed else []
    if verbose:
        lines += spread_lines(simulation, found)
    return lines + [f"note: {clean(note)}" for note in notes]


def machine_lines(simulation: Simulation, *, verbose: bool) -> list[str]:
    """Draw the machines."""
    shown = simulation.hosts if verbose else simulation.hosts[:MACHINES]
    lines = [line for host in shown for line in lines_of(host)]
    more = len(simulation.hosts) - len(shown)
    lines += [f"and {counted(more, 'machine')} more ({ALL})"] if more else []
    return [*lines, LEGEND]


def summary_lines(reported: Summary) -> list[str]:
    """Write the numbers."""
    rows = [(label, str(value), words) for label, value, words in numbers(reported)]
    width = max(len(value) for _, value, _ in rows)
    return columns([(label, value.rjust(width), words) for label, value, words in rows])


def numbers(reported: Summary) -> list[tuple[str, int, str]]:
    """Return the numbers with their labels, and what they mean where the label does not say it."""
    return [
        ("machines", reported.machines, ""),
        ("pods", reported.pods, ""),
        ("  placed", reported.placed, ""),
        ("    together", reported.together, "on as few NUMA nodes as there can be"),
        ("    spread", reported.spread, "on more NUMA nodes than there had to be"),
        ("    sharing", reported.sharing, "given nothing that lies on a NUMA node"),
        ("  refused", sum(reported.refused.values()), "by the machine that was chosen for it"),
        *((f"    {reason}", count, "") for reason, count in reported.refused.items()),
        ("  unschedulable", sum(reported.unschedulable.values()), "no machine has what is requested"),
        *((f"    {short_text(what)}", count, "") for what, count in reported.unschedulable.items()),
        ("CPUs", reported.cpus, ""),
        ("  owned", reported.owned, ""),
        ("  left", reported.left, "can still be given to one container alone"),
        ("    in whole cores", reported.whole, ""),
        (
            "    on one node",
            reported.largest,
            f"the most on any NUMA node ({reported.empty} when it was empty)",
        ),
        ("    the same in whole cores", reported.largest_whole, ""),
    ]


def short_text(what: str) -> str:
    """Return the missing resource, from its name in the summary."""
    return "no machine of that name" if what == NO_SUCH_MACHINE else f"too little {what}"


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
        return f"placed on {clean(result.host)}"
    if result.outcome is PodOutcome.UNSCHEDULABLE:
        return f"unschedulable: {clean(result.message)}"
    reason = "" if result.message.startswith(result.reason) else f"{result.reason}: "
    return f"{_refused_text(result)}: {clean(reason + result.message)}"


def _refused_text(result: Result) -> str:
    container = f", container {clean(result.container)}" if result.container else ""
    return f"refused on {clean(', '.join(result.tried))}{container}"


def spread_lines(simulation: Simulation, found: Findings) -> list[str]:
    """List the pods of which a container is on more nodes than it had to be."""
    lines = [
        f"{result.simulated_pod.ref}: spread on {clean(result.host)}: "
        f"given something on NUMA nodes {alignment.nodes}, {alignment.least} could hold it"
        for result, alignments in zip(simulation.results, found.alignments, strict=True)
        for alignment in alignments
        if not alignment.together
    ]
    return ["", *lines] if lines else []


def explain_lines(result: Result, width: int) -> list[str]:
    """Write why a pod is where it is, container by container."""
    refused = result.outcome is PodOutcome.REFUSED and result.explanations  # they say why
    lines = [
        f"{clean(result.simulated_pod.ref)}: {_refused_text(result) if refused else outcome_text(result)}"
    ]
    for reported in result.explanations:
        lines += ["", *render_decision(reported, width).rstrip("\n").split("\n")]
    for container in () if result.explanations else result.containers:
        lines += [f"  {container.name}: {clean(reason)}" for reason in container.placement.reasons]
    return lines
