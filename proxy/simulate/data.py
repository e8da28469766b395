"""A simulation as plain data that JSON can hold. The names of the fields are in docs/simulate.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from proxy.model import schema_ids
from proxy.model.workload import Container, Pool
from proxy.observe.explain_data import to_data
from proxy.simulate.cluster import Result
from proxy.simulate.nodes import SimulatedNode
from proxy.simulate.picture import NumaNodeRow, rows_of
from proxy.simulate.quality import Alignment, RemainingCpus
from proxy.simulate.simulation import Simulation
from proxy.simulate.summary import Findings

Data = dict[str, object]

_SUMMARY_KEYS = {"rejected": "refused", "largest_when_empty": "empty"}
"""The keys in JSON of attributes of ``Summary`` that have other names there."""
_REMAINING_CPUS_KEYS = {"largest_when_empty": "of"}
"""The same for ``RemainingCpus``."""


def page(simulation: Simulation, findings: Findings, notes: Sequence[str]) -> Data:
    """Return everything about a simulation."""
    return {
        "schema": schema_ids.SIMULATE,
        "configuration": simulation.config.source,
        "notes": list(notes),
        "summary": by_json_key(dataclasses.asdict(findings.summary), _SUMMARY_KEYS),
        "machines": [
            _simulated_node(h, remaining)
            for h, remaining in zip(simulation.simulated_nodes, findings.remaining, strict=True)
        ],
        "pods": [
            _pod(r, alignments) for r, alignments in zip(simulation.results, findings.alignments, strict=True)
        ],
    }


def by_json_key(attributes: Mapping[str, object], keys: Mapping[str, str]) -> Data:
    """Return the values of attributes by their keys in JSON: those in ``keys``, otherwise their names."""
    return {keys.get(name, name): value for name, value in attributes.items()}


def _simulated_node(simulated_node: SimulatedNode, remaining: RemainingCpus) -> Data:
    machine = simulated_node.node.machine
    return {
        "name": simulated_node.name,
        "pods": simulated_node.pod_count,
        "cpus": {
            "online": str(machine.online),
            "reserved": str(simulated_node.node.reserved),
            "owned": str(simulated_node.owned),
            "left": str(simulated_node.ownable),
        },
        "left": by_json_key(dataclasses.asdict(remaining), _REMAINING_CPUS_KEYS),
        "offered": dict(simulated_node.offers),
        "asked": {name: amount - simulated_node.free[name] for name, amount in simulated_node.offers.items()},
        "nodes": [_row(row) for row in rows_of(simulated_node)],
    }


def _row(row: NumaNodeRow) -> Data:
    return {
        "id": row.node,
        "cpus": str(row.cpus),
        "owned": str(row.owned),
        "reserved": str(row.reserved),
        "left": str(row.remaining),
        "pods": row.pods,
        "memory": None if row.memory is None else {"given": row.memory[0], "of": row.memory[1]},
        "devices": {name: {"given": assigned, "of": of} for name, (assigned, of) in row.devices.items()},
    }


def _pod(result: Result, alignments: tuple[Alignment, ...]) -> Data:
    data: Data = {
        "pod": result.simulated_pod.ref,
        "from": result.simulated_pod.where,
        "outcome": result.outcome.value,
        "machine": result.node_name or None,
        "reason": result.reason,
        "message": result.message,
        "container": result.container,
        "tried": list(result.tried),
        "lacking": list(result.lacking),
        "together": all(alignment.together for alignment in alignments) if alignments else None,
        "containers": [container_data(container) for container in result.containers],
    }
    if result.explanations:
        data["explanations"] = [to_data(reported) for reported in result.explanations]
    return data


def container_data(container: Container) -> Data:
    """Return where a container was placed."""
    placement = container.placement
    owns_cpus = placement.pool is Pool.OWN
    return {
        "name": container.name,
        "phase": container.phase.value,
        "pool": placement.pool.value,
        "cpus": str(placement.exclusive) if owns_cpus else None,
        "mems": str(placement.mems),
        "memory": [
            {"nodes": list(block.affinity), "resource": block.resource, "bytes": block.size}
            for block in placement.blocks
        ],
        "devices": {resource: list(ids) for resource, ids in placement.devices},
        "reasons": list(placement.reasons),
    }
