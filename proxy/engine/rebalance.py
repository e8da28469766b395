"""Find the containers that have to move from one state to the next because a pool changed."""

from __future__ import annotations

from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Phase, Placement, Pool


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
    online = after.node.machine.online
    # The CPUs of a container follow from its placement, and few placements differ.
    unlimited = {id(pool): _way(before.pools.of(pool), after.pools.of(pool)) for pool in Pool}
    ways: dict[tuple[Pool, CpuSet | None, Mask | None, CpuSet | None, CpuSet], int] = {}
    for key, container, old in after.containers.compared(before.containers):
        if old is None or container.phase is Phase.EXITED:
            continue
        placement = container.placement
        if not (old is container or old.placement == placement):
            turn = _way(before.wanted(old), after.wanted(container))
        elif placement.pool is Pool.OWN:
            if still and not placement.exclusive.isdisjoint(online):
                continue
            turn = _way(before.wanted(old), after.wanted(container))
        elif _is_unlimited(placement):
            turn = unlimited[id(placement.pool)]
        else:
            kind = (
                placement.pool,
                placement.pool_cpus_limit,
                placement.pool_numa_limit,
                placement.hook_cpus,
                placement.hook_extra_cpus,
            )
            if kind not in ways:
                ways[kind] = _way(before.wanted(old), after.wanted(container))
            turn = ways[kind]
        if turn < 0:
            shrink.append(key)
        elif turn:
            grow.append(key)
    return tuple(sorted(shrink)), tuple(sorted(grow))


def _is_unlimited(placement: Placement) -> bool:
    """Return whether a placement in a shared pool follows the whole pool."""
    return (
        placement.hook_cpus is None
        and placement.pool_cpus_limit is None
        and placement.pool_numa_limit is None
    )


def _way(have: CpuSet, want: CpuSet) -> int:
    """Return whether CPUs must be left (-1), only some are gained (1), or nothing changes (0)."""
    if have == want:
        return 0
    return 1 if have <= want else -1
