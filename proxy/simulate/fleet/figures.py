"""The results of a fleet simulation: numbers, a picture, a text, and data for JSON.

The picture is an SVG that shows both schedulers over time, one panel below the other. The text shows them
side by side. docs/simulate-cluster.md has the fields of the data.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from proxy.model import schema_ids
from proxy.observe.value_text import clean
from proxy.simulate.data import by_json_key
from proxy.simulate.fleet.fleet_run import FleetPodResult, FleetPodState, FleetRun, Sample
from proxy.simulate.fleet.fleet_simulation import FleetSettings, FleetSimulation
from proxy.simulate.picture import columns

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 760, 150, 64, 20, 48, 46
COLOURS = ("#888888", "#0b6e99", "#b3541e")
DASHES = ("6 3", "", "2 2")
_SVG = "http://www.w3.org/2000/svg"
_STYLE = "font-family='sans-serif' font-size='12'"

Data = dict[str, object]

_KEYS = {
    "pods_with_exclusive_cpus": "exclusive",
    "pods_possible_on_one_numa_node": "possible",
    "pods_on_one_numa_node": "on_one",
}
"""The keys in JSON of attributes of ``FleetFigures`` that have other names there."""


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """How long decisions took, in milliseconds of real time."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """A run in numbers; numbers of pods unless stated otherwise.

    Attributes:
        scheduler: Its name.
        pods: How many arrived.
        placed: How many were admitted by a node, those that have left included.
        rejected: How many were bound to a node that rejected them, by reason.
        waiting: How many no node had room for until the end.
        pods_with_exclusive_cpus: How many request CPUs of their own.
        pods_possible_on_one_numa_node: For how many of these a node had room on one NUMA node when they
            were last decided on.
        pods_on_one_numa_node: How many of these have been placed on one NUMA node.
        free_cpus: CPUs that could still be given to one container alone, at the end.
        unusable_cpus: Of these, by size of container, those that no container of that size can use.
        decisions: How long the decisions took.
    """

    scheduler: str
    pods: int
    placed: int
    rejected: Mapping[str, int]
    waiting: int
    pods_with_exclusive_cpus: int
    pods_possible_on_one_numa_node: int
    pods_on_one_numa_node: int
    free_cpus: int
    unusable_cpus: Mapping[int, int]
    decisions: DecisionTimes


def figures_of(run: FleetRun) -> FleetFigures:
    """Count the results of a run."""
    outcomes = Counter(record.outcome for record in run.records)
    rejected = Counter(record.reason for record in run.records if record.outcome is FleetPodState.REJECTED)
    last = run.samples[-1]
    return FleetFigures(
        run.name,
        len(run.records),
        outcomes[FleetPodState.PLACED],
        dict(rejected.most_common()),
        outcomes[FleetPodState.WAITING],
        sum(bool(record.pod.kind.sizes) for record in run.records),
        sum(record.could_be_on_one_numa_node for record in run.records),
        sum(record.is_on_one_numa_node for record in run.records),
        last.free,
        last.unusable,
        _times(run.decisions),
    )


def _times(decisions: Sequence[float]) -> DecisionTimes:
    ordered = sorted(decisions) or [0.0]
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.99))
    return DecisionTimes(
        len(decisions),
        round(1000 * p50, 3),
        round(1000 * p99, 3),
        round(1000 * ordered[-1], 3),
        round(1000 * sum(decisions), 1),
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    value: Callable[[Sample], float]


def svg_of(runs: Sequence[FleetRun], cpus: int) -> str:
    """Draw runs.

    Args:
        runs: The runs, of the same pods on the same nodes.
        cpus: How many CPUs could be owned in the beginning.
    """
    largest = max(runs[0].sizes, default=1)
    panels = (
        _Panel("CPUs that are owned (%)", lambda sample: 100 * (cpus - sample.free) / max(cpus, 1)),
        _Panel("pods rejected on their node", lambda sample: sample.rejected),
        _Panel("pods that wait", lambda sample: sample.waiting),
        _Panel(
            f"free CPUs that no container of {largest} CPUs can use on one NUMA node",
            lambda sample: sample.unusable.get(largest, 0),
        ),
    )
    height = TOP + len(panels) * (PANEL + GAP)
    size = f"width='{WIDTH}' height='{height}'"
    parts = [
        f"<svg xmlns='{_SVG}' {size} viewBox='0 0 {WIDTH} {height}' role='img'>",
        f"<rect {size} fill='#ffffff'/>",
        *_legend(runs),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, runs, TOP + number * (PANEL + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _legend(runs: Sequence[FleetRun]) -> list[str]:
    parts = []
    for number, run in enumerate(runs):
        x = LEFT + number * 300
        line = f"<line x1='{x}' y1='18' x2='{x + 30}' y2='18' {_stroke(number)}/>"
        parts += [line, f"<text x='{x + 38}' y='22' {_STYLE}>{escape(run.name)}</text>"]
    return parts


def _panel(panel: _Panel, runs: Sequence[FleetRun], top: int) -> list[str]:
    last = max((run.samples[-1].arrived for run in runs), default=1) or 1
    highest = max((panel.value(sample) for run in runs for sample in run.samples), default=0) or 1
    width, bottom = WIDTH - LEFT - RIGHT, top + 8 + PANEL
    parts = [
        f"<text x='{LEFT}' y='{top}' {_STYLE}>{escape(panel.title)}</text>",
        f"<rect x='{LEFT}' y='{top + 8}' width='{width}' height='{PANEL}' fill='none' stroke='#cccccc'/>",
        f"<text x='{LEFT - 6}' y='{top + 18}' {_STYLE} text-anchor='end'>{highest:,.0f}</text>",
        f"<text x='{LEFT - 6}' y='{bottom}' {_STYLE} text-anchor='end'>0</text>",
        f"<text x='{LEFT + width}' y='{top + PANEL + 24}' {_STYLE} text-anchor='end'>{last:,} pods</text>",
    ]
    for number, run in enumerate(runs):
        points = " ".join(
            f"{LEFT + width * sample.arrived / last:.1f},{bottom - PANEL * panel.value(sample) / highest:.1f}"
            for sample in run.samples
        )
        parts.append(f"<polyline points='{points}' fill='none' {_stroke(number)}/>")
    return parts


def _stroke(number: int) -> str:
    return f"stroke='{COLOURS[number]}' stroke-width='2' stroke-dasharray='{DASHES[number]}'"


def fleet_lines(simulation: FleetSimulation) -> list[str]:
    """Write a simulation."""
    fleet = simulation.fleet
    hardware = ((fleet.nodes, "node"), (fleet.numa_nodes, "NUMA node"), (fleet.cpus, "CPU"))
    pods = ((fleet.running, "running pod"), (fleet.pods, "pod"))
    lines = [
        f"{', '.join(_counted(*item) for item in hardware)} that can be owned",
        f"{', '.join(_counted(*item) for item in pods)} to schedule: {_arrival(simulation)}",
        "",
    ]
    lines += _table([figures_of(run) for run in simulation.runs])
    return lines + [f"note: {clean(note)}" for note in simulation.notes]


def time_lines(simulation: FleetSimulation) -> list[str]:
    """Write the time that decisions took."""
    return [
        f"{run.name}: {times.count:,} decisions, median {times.p50_ms:.2f} ms, p99 {times.p99_ms:.2f} ms, "
        f"longest {times.max_ms:.2f} ms"
        for run in simulation.runs
        for times in (figures_of(run).decisions,)
    ]


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _arrival(simulation: FleetSimulation) -> str:
    pattern = simulation.settings.pattern
    how = "all at once" if pattern.arrival == "burst" else f"{pattern.rate:g} a second"
    stay = f"each stays {pattern.lifetime:g} s on average" if pattern.lifetime else "they stay"
    return f"{how}; {stay}"


def _shares(figures: Sequence[FleetFigures]) -> str:
    """Return the share of pods on one NUMA node, of those that one NUMA node could hold."""
    shares = (100 * f.pods_on_one_numa_node / (f.pods_possible_on_one_numa_node or 1) for f in figures)
    return " and ".join(f"{share:.1f} %" for share in shares) + " of these"


def _table(figures: Sequence[FleetFigures]) -> list[str]:
    reasons = list(dict.fromkeys(reason for run_figures in figures for reason in run_figures.rejected))
    sizes = figures[0].unusable_cpus if figures else {}
    rows: list[tuple[str, Sequence[int], str]] = [
        ("pods", [f.pods for f in figures], ""),
        ("  placed", [f.placed for f in figures], ""),
        ("  rejected", [sum(f.rejected.values()) for f in figures], "by the node that was chosen for them"),
        *((f"    {clean(reason)}", [f.rejected.get(reason, 0) for f in figures], "") for reason in reasons),
        ("  waiting", [f.waiting for f in figures], "no node has room"),
        ("pods with CPUs of their own", [f.pods_with_exclusive_cpus for f in figures], ""),
        (
            "  one NUMA node possible",
            [f.pods_possible_on_one_numa_node for f in figures],
            "some node had room on one",
        ),
        ("  placed on one", [f.pods_on_one_numa_node for f in figures], _shares(figures)),
        ("free CPUs", [f.free_cpus for f in figures], "can still be given to one container alone"),
        *((f"  unusable for {size}", [f.unusable_cpus[size] for f in figures], "") for size in sizes),
    ]
    head = ["", *(run_figures.scheduler for run_figures in figures), ""]
    cells = [[label, *(f"{value:,}" for value in values), note] for label, values, note in rows]
    widths = [max(len(row[at]) for row in (head, *cells)) for at in range(len(head))]
    return columns(
        [
            [label, *(cell.rjust(width) for cell, width in zip(values, widths[1:], strict=False)), note]
            for label, *values, note in (head, *cells)
        ]
    )


def fleet_page(simulation: FleetSimulation, *, each_pod: bool) -> Data:
    """Return everything about a simulation.

    Args:
        simulation: The simulation.
        each_pod: Whether the pods are listed, too.
    """
    return {
        "schema": schema_ids.SIMULATE_CLUSTER,
        "notes": list(simulation.notes),
        "fleet": dataclasses.asdict(simulation.fleet),
        "settings": _settings(simulation.settings),
        "runs": [_run(run, figures_of(run), each_pod=each_pod) for run in simulation.runs],
    }


def _settings(settings: FleetSettings) -> Data:
    pattern = settings.pattern
    return {
        "arrival": pattern.arrival.value,
        "rate": pattern.rate,
        "lifetime": pattern.lifetime,
        "seed": settings.seed,
        "percentage_of_nodes_to_score": settings.percentage,
        "extended_percentage_of_nodes_to_score": settings.extended_percentage,
        "extender_weight": settings.weight,
        "strategy": settings.strategy.value,
    }


def _run(run: FleetRun, figures: FleetFigures, *, each_pod: bool) -> Data:
    data = by_json_key(dataclasses.asdict(figures), _KEYS)
    data["unusable_cpus"] = _unusable(figures.unusable_cpus)
    samples = [
        {**dataclasses.asdict(sample), "unusable": _unusable(sample.unusable)} for sample in run.samples
    ]
    pods = [_pod(record) for record in run.records] if each_pod else []
    return {**data, "samples": samples, "each_pod": pods}


def _unusable(sizes: Mapping[int, int]) -> list[Data]:
    return [{"size": size, "cpus": cpus} for size, cpus in sizes.items()]


def _pod(record: FleetPodResult) -> Data:
    return {
        "pod": record.pod.simulated_pod.ref,
        "from": record.pod.simulated_pod.where,
        "outcome": record.outcome.value,
        "node": record.node or None,
        "reason": record.reason,
        "exclusive": list(record.pod.kind.sizes),
        "possible": record.could_be_on_one_numa_node,
        "on_one": record.is_on_one_numa_node,
        "arrived": round(record.arrived, 6),
        "bound": round(record.bound, 6) if record.node else None,
    }
