"""Which containers and pods have CPUs that another request needs."""

from __future__ import annotations

from proxy.engine.state import NodeState
from proxy.model.explanation import CpuHolder
from proxy.model.idset import CpuSet


def holders_of(state: NodeState, cpus: CpuSet, but: str = "") -> tuple[CpuHolder, ...]:
    """Return the containers and pods that have some of these CPUs, those with the most of them first.

    Args:
        state: The node.
        cpus: The CPUs.
        but: An owner, or the key of a pod, that is left out.
    """
    found: dict[str, CpuSet] = {}

    def add(ref: str, held: CpuSet) -> None:
        if not held.isdisjoint(cpus):
            found[ref] = found.get(ref, CpuSet()) | (held & cpus)

    present = set()
    for container in state.containers.values():
        present.add(container.owner)
        if container.owner not in ("", but) and container.owner in state.owners:
            add(container.ref if "/" in container.owner else container.pod.ref, container.placement.exclusive)
    for pod in state.pods.values():
        if pod.reserved_for_pod is not None and pod.key != but and pod.ref not in found:
            add(f"{pod.ref} (set aside)", pod.reserved_for_pod.cpus)
    for key, held in state.owners.items():
        if key not in present and key != but:
            add(f"{key} (by kubelet's CPU manager)", held.cpus)
    return tuple(
        CpuHolder(ref, held) for ref, held in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    )
