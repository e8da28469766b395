"""A fleet simulation as plain data that JSON can hold; docs/simulate-cluster.md has the fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from proxy.model import schema_ids
from proxy.simulate.fleet.figures import FleetFigures, figures_of
from proxy.simulate.fleet.fleet_run import FleetPodResult, FleetRun
from proxy.simulate.fleet.fleet_simulation import FleetSettings, FleetSimulation

Data = dict[str, object]


def fleet_page(done: FleetSimulation, *, each_pod: bool) -> Data:
    """Return everything about a simulation.

    Args:
        done: The simulation.
        each_pod: Whether the pods are listed, too.
    """
    return {
        "schema": schema_ids.SIMULATE_CLUSTER,
        "notes": list(done.notes),
        "fleet": dataclasses.asdict(done.fleet),
        "settings": _settings(done.settings),
        "runs": [_run(run, figures_of(run), each_pod=each_pod) for run in done.runs],
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


def _run(run: FleetRun, found: FleetFigures, *, each_pod: bool) -> Data:
    data = dataclasses.asdict(found)
    data["useless_cpus"] = _useless(found.useless_cpus)
    samples = [{**dataclasses.asdict(sample), "useless": _useless(sample.useless)} for sample in run.samples]
    pods = [_pod(record) for record in run.records] if each_pod else []
    return {**data, "samples": samples, "each_pod": pods}


def _useless(sizes: Mapping[int, int]) -> list[Data]:
    return [{"size": size, "cpus": cpus} for size, cpus in sizes.items()]


def _pod(record: FleetPodResult) -> Data:
    return {
        "pod": record.pod.guest.ref,
        "from": record.pod.guest.where,
        "outcome": record.fate.value,
        "node": record.node or None,
        "reason": record.reason,
        "exclusive": list(record.pod.kind.sizes),
        "possible": record.possible,
        "on_one": record.on_one,
        "came": round(record.came, 6),
        "bound": round(record.bound, 6) if record.node else None,
    }
