"""Which containers have to move from one state to the next, because a pool changed."""

from __future__ import annotations

from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Phase, Pool


def moves(before: NodeState, after: NodeState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the containers whose CPUs change from one state to the next because a pool changed.

    Returns:
        Ids that lose CPUs (they must leave them before the owner starts), and ids that only gain some.
        Containers that have exited, or are not in both states, do not move.
    """
    still = before.node is after.node
    if still and before.pools == after.pools:
        return (), ()
    shrink: list[str] = []
    grow: list[str] = []
    known, online = before.containers, after.node.machine.online
    own, exited = Pool.OWN, Phase.EXITED
    # The CPUs of a container follow from its placement, and few placements differ.
    ways: dict[tuple[Pool, CpuSet | None, Mask | None, CpuSet | None, CpuSet], int] = {}
    for key, container in after.containers.items():
        old = known.get(key)
        if old is None or container.phase is exited:
            continue
        placement = container.placement
        alike = old is container or old.placement == placement
        if alike and placement.pool is own and still and not placement.exclusive.isdisjoint(online):
            continue
        kind = (
            placement.pool,
            placement.pool_cpus_limit,
            placement.pool_numa_limit,
            placement.hook_cpus,
            placement.hook_extra_cpus,
        )
        turn = ways.get(kind) if alike and placement.pool is not own else None
        if turn is None:
            turn = _way(before.wanted(old), after.wanted(container))
            if alike and placement.pool is not own:
                ways[kind] = turn
        if turn:
            (shrink if turn < 0 else grow).append(key)
    return tuple(sorted(shrink)), tuple(sorted(grow))


def _way(have: CpuSet, want: CpuSet) -> int:
    """Return whether CPUs must be left (-1), only some are gained (1), or nothing changes (0)."""
    if have == want:
        return 0
    return 1 if have <= want else -1
