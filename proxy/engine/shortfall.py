"""What a refused request was short of: how much one NUMA node has too little of.

Only single NUMA nodes are considered, as operators think in them, and only those that could hold the request
if they were empty. Of these the one with the smallest shortfall is reported: the fewest resources, then the
fewest CPUs.
"""

from __future__ import annotations

from proxy.allocation.cpu_request import CPU
from proxy.engine.topology_manager import AdmissionContext
from proxy.model.explanation import Shortfall
from proxy.model.requests import in_bytes


def shortfall(context: AdmissionContext) -> tuple[Shortfall, ...]:
    """Return what was missing for a refused request; empty where no single NUMA node could ever hold it."""
    found: list[tuple[int, int, int, tuple[Shortfall, ...]]] = []
    for node in context.node.nodes:
        missing = _on_node(context, node)
        if missing:
            cpus = sum(lack.wanted - lack.free for lack in missing if lack.resource == CPU)
            found.append((len(missing), cpus, node, tuple(missing)))
    return min(found)[-1] if found else ()


def _on_node(context: AdmissionContext, node: int) -> list[Shortfall] | None:
    """Return what one NUMA node is short of; None where it could not hold the request even if empty."""
    found: list[Shortfall] = []
    for provider in context.providers:
        missing = provider.explain_shortfall(context.request, node)
        if missing is None:
            return None
        found += missing
    return sorted(found, key=_reading_order)


def _reading_order(lack: Shortfall) -> int:
    """Sort CPUs before memory, and memory before resources that are counted."""
    return 0 if lack.resource == CPU else 1 if in_bytes(lack.resource) else 2
