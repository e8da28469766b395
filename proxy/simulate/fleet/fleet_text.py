"""A fleet simulation for people: both schedulers side by side."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.observe.value_text import clean
from proxy.simulate.fleet.figures import FleetFigures, figures_of
from proxy.simulate.fleet.fleet_simulation import FleetSimulation
from proxy.simulate.picture import columns


def fleet_lines(done: FleetSimulation) -> list[str]:
    """Write a simulation."""
    fleet = done.fleet
    hardware = ((fleet.nodes, "node"), (fleet.numa_nodes, "NUMA node"), (fleet.cpus, "CPU"))
    pods = ((fleet.running, "running pod"), (fleet.pods, "pod"))
    lines = [
        f"{', '.join(_counted(*each) for each in hardware)} that can be owned",
        f"{', '.join(_counted(*each) for each in pods)} to schedule: {_arrival(done)}",
        "",
    ]
    lines += _table([figures_of(run) for run in done.runs])
    return lines + [f"note: {clean(note)}" for note in done.notes]


def time_lines(done: FleetSimulation) -> list[str]:
    """Write what decisions took."""
    return [
        f"{run.name}: {found.count:,} decisions, median {found.p50_ms:.2f} ms, p99 {found.p99_ms:.2f} ms, "
        f"longest {found.max_ms:.2f} ms"
        for run in done.runs
        for found in (figures_of(run).decisions,)
    ]


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _arrival(done: FleetSimulation) -> str:
    pattern = done.settings.pattern
    how = "all at once" if pattern.arrival == "burst" else f"{pattern.rate:g} a second"
    stay = f"each stays {pattern.lifetime:g} s on average" if pattern.lifetime else "they stay"
    return f"{how}; {stay}"


def _shares(found: Sequence[FleetFigures]) -> str:
    """Return the share of pods on one NUMA node, of those that one NUMA node could hold."""
    return " and ".join(f"{100 * f.on_one / (f.possible or 1):.1f} %" for f in found) + " of these"


def _table(found: Sequence[FleetFigures]) -> list[str]:
    reasons = list(dict.fromkeys(reason for each in found for reason in each.rejected))
    sizes = found[0].useless_cpus if found else {}
    rows: list[tuple[str, Sequence[int], str]] = [
        ("pods", [f.pods for f in found], ""),
        ("  placed", [f.placed for f in found], ""),
        ("  rejected", [sum(f.rejected.values()) for f in found], "by the node that was chosen for them"),
        *((f"    {clean(reason)}", [f.rejected.get(reason, 0) for f in found], "") for reason in reasons),
        ("  waiting", [f.waiting for f in found], "no node has room"),
        ("pods with CPUs of their own", [f.exclusive for f in found], ""),
        ("  one NUMA node possible", [f.possible for f in found], "some node had room on one"),
        ("  placed on one", [f.on_one for f in found], _shares(found)),
        ("free CPUs", [f.free_cpus for f in found], "can still be given to one container alone"),
        *((f"  useless for {size}", [f.useless_cpus[size] for f in found], "") for size in sizes),
    ]
    head = ["", *(each.scheduler for each in found), ""]
    cells = [[label, *(f"{value:,}" for value in values), note] for label, values, note in rows]
    widths = [max(len(row[at]) for row in (head, *cells)) for at in range(len(head))]
    return columns(
        [
            [label, *(cell.rjust(width) for cell, width in zip(values, widths[1:], strict=False)), note]
            for label, *values, note in (head, *cells)
        ]
    )
