"""The CPUs that each group of BE pods must have, in Koordinator's terms."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.model.idset import CpuSet
from proxy.pools.write_order import CONTAINER, BeGroup


def wanted_cpus(
    groups: Iterable[BeGroup],
    target: CpuSet,
    every: CpuSet,
    *,
    static: bool,
    apart: frozenset[str] = frozenset(),
) -> dict[str, CpuSet]:
    """Return the CPUs that each group must have.

    Args:
        groups: All of them.
        target: The CPUs for the budget; empty if everything stays as it is.
        every: All that BE pods may ever use; as target, nothing is suppressed. Empty if unknown.
        static: Whether kubelet's CPU manager is static.
        apart: Paths of containers that a scheduler bound to CPUs or NUMA nodes: those stay.

    Returns:
        Path to CPUs; groups that stay are not in it.
    """
    if not target:
        return {}
    shall = {
        group.path: every if static and group.depth < CONTAINER else target
        for group in groups
        if group.depth <= CONTAINER and group.path not in apart
    }
    return {path: cpus for path, cpus in shall.items() if cpus}
