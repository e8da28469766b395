"""Runs as a picture: an SVG with the course of both schedulers, one panel below the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from proxy.simulate.fleet.fleet_run import FleetRun, Sample

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 760, 150, 64, 20, 48, 46
COLOURS = ("#888888", "#0b6e99", "#b3541e")
DASHES = ("6 3", "", "2 2")
_SVG = "http://www.w3.org/2000/svg"
_STYLE = "font-family='sans-serif' font-size='12'"


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
            lambda sample: sample.useless.get(largest, 0),
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
        left = LEFT + number * 300
        line = f"<line x1='{left}' y1='18' x2='{left + 30}' y2='18' {_stroke(number)}/>"
        parts += [line, f"<text x='{left + 38}' y='22' {_STYLE}>{escape(run.name)}</text>"]
    return parts


def _panel(panel: _Panel, runs: Sequence[FleetRun], top: int) -> list[str]:
    last = max((run.samples[-1].came for run in runs), default=1) or 1
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
            f"{LEFT + width * sample.came / last:.1f},{bottom - PANEL * panel.value(sample) / highest:.1f}"
            for sample in run.samples
        )
        parts.append(f"<polyline points='{points}' fill='none' {_stroke(number)}/>")
    return parts


def _stroke(number: int) -> str:
    return f"stroke='{COLOURS[number]}' stroke-width='2' stroke-dasharray='{DASHES[number]}'"
