"""Koordinator's topologies, bind requests and scored hints as its files write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.koordinator.bind_request import BindRequest
from proxy.allocation.koordinator.hints import Answer, ScoredHint
from proxy.allocation.koordinator.scored_merge import NodeStatus
from proxy.model.idset import Mask
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NumaStrategy
from tests.conformance.cases import BadCaseError, Case


def topology(case: Case) -> CpuTopology:
    """Build the machine of a case: CPU ids are given out in order thread, core, NUMA node, socket."""
    shape = case.value("topology", list)
    if len(shape) != 4 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise BadCaseError(f"it has an unusable 'topology': {shape!r}")
    sockets, nodes, cores, threads = shape
    packed = case.optional("core_id", str) is not None  # socket<<16|core
    rows = []
    for cpu in range(sockets * nodes * cores * threads):
        core = cpu // threads
        node = core // cores
        socket = node // nodes
        rows.append(CpuRow(cpu, socket << 16 | core if packed else core, socket, node, socket))
    return CpuTopology.of_rows(rows)


def bind_request(raw: Mapping[str, Any]) -> BindRequest:
    """Read the rules by which CPUs are taken."""
    try:
        return BindRequest(
            policy=BindPolicy(raw.get("bind_policy", BindPolicy.SPREAD_BY_PCPUS)),
            exclusive=exclusive(raw["exclusive_policy"]),
            strategy=NumaStrategy(raw["numa_strategy"]),
            max_ref_count=int(raw.get("max_ref_count", 1)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadCaseError(f"it has an unusable policy: {error!r}") from None


def exclusive(text: str | None) -> ExclusivePolicy:
    """Read an exclusive policy; ``None`` and null are none."""
    return ExclusivePolicy("" if text in (None, "None") else text)


def hint(raw: Mapping[str, Any]) -> ScoredHint:
    """Read a hint."""
    affinity = raw.get("affinity")
    return ScoredHint(
        None if affinity is None else Mask(affinity),
        bool(raw.get("preferred")),
        bool(raw.get("unsatisfied")),
        int(raw.get("score") or 0),
    )


def answer(raw: Mapping[str, Any] | None) -> Answer:
    """Read a provider's answer: hints by resource."""
    if raw is None:
        return None
    return {name: None if each is None else [hint(h) for h in each] for name, each in raw.items()}


def plain(value: ScoredHint) -> dict[str, Any]:
    """Write a hint with all four of its parts."""
    affinity = value.affinity
    return {
        "affinity": None if affinity is None else list(affinity),
        "preferred": value.preferred,
        "unsatisfied": value.unsatisfied,
        "score": value.score,
    }


def status(case: Case) -> dict[int, NodeStatus]:
    """Read how pods use the NUMA nodes, node by node."""
    return {node: NodeStatus(raw) for node, raw in enumerate(case.optional("numa_status", list, []))}
