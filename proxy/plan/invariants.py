"""What must hold on a node at any moment, checked on a state. Used by tests, status and the demo."""

from __future__ import annotations

from proxy.model.workload import Phase, Pool
from proxy.plan.state import NodeState


def violations(state: NodeState) -> list[str]:
    """Name what is wrong with a state; an empty list when nothing is.

    Checked: nobody's CPUs are empty or offline, no CPU has two owners, no container that owns nothing runs on
    owned CPUs (BE may on those of LSR).
    """
    found: list[str] = []
    online = state.node.machine.online
    keys = sorted(state.owners)
    for i, key in enumerate(keys):
        for other in keys[i + 1 :]:
            both = state.owners[key].cpus & state.owners[other].cpus
            if both:
                found.append(f"CPUs {both} are owned by {key} and by {other}")
    hard = [o.cpus for o in state.owners.values() if o.hard]
    soft = [o.cpus for o in state.owners.values()]
    for container in state.containers.values():
        if container.phase is Phase.EXITED:
            continue
        want = state.wanted(container)
        if not want:
            found.append(f"{container.ref} has no CPU")
        if not want <= online:
            found.append(f"{container.ref} has CPUs {want - online} that are not online")
        if container.placement.pool is not Pool.OWN:
            owned = hard if container.placement.pool is Pool.BE else soft
            found += [f"{container.ref} shares owned CPUs {want & cpus}" for cpus in owned if want & cpus]
    return found
