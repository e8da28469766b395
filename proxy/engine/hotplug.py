"""Compute the consequences of CPUs and memory nodes that come or go while containers run.

The pools and the owners are computed again on the new machine (``NodeState.with_machine``). The difference
between a container's placement and the hardware that it has now is its hardware loss. A loss is reported when
it begins, changes and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from proxy.engine.enforcement import applies_to
from proxy.engine.replacement_cpus import MissingCpus
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.phrases import cpus, numa_nodes_text
from proxy.model.workload import Container, Phase, Pool


def differences(before: Machine, after: Machine) -> list[tuple[str, object, object]]:
    """Return the sets that differ between two machines: name, before and after."""
    sets: tuple[tuple[str, object, object], ...] = (
        ("CPUs", before.online, after.online),
        ("NUMA nodes with memory", before.memory_nodes, after.memory_nodes),
    )
    return [difference for difference in sets if difference[1] != difference[2]]


def containers_with_other_mems(before: NodeState, after: NodeState) -> list[str]:
    """Return the containers whose memory nodes differ; the runtime may have saved nodes that are gone."""
    return [c.id for c in after.containers.values() if before.desired_mems(c) != after.desired_mems(c)]


def replacements_in_use(state: NodeState, shortage: MissingCpus) -> CpuSet:
    """Return the replacement CPUs that an owner still needs."""
    return CpuSet.union_of(state.cpus_without_hooks(c) & c.placement.replacement for c in shortage.containers)


def with_replacement(containers: Iterable[Container], replacement: CpuSet) -> list[Container]:
    """Return containers with other replacement CPUs for their offline CPUs."""
    return [
        structs.replace(c, placement=structs.replace(c.placement, replacement=replacement))
        for c in containers
    ]


class HardwareLoss(Struct, frozen=True):
    """The part of its placement that a container lacks, and what it has instead.

    Attributes:
        offline: Its exclusive CPUs that are offline.
        replacement: CPUs that it has in their place.
        cpus: The CPUs that it runs on.
        nodes: Memory nodes of its own that are gone.
        mems: The memory nodes that it has.
    """

    offline: CpuSet
    replacement: CpuSet
    cpus: CpuSet
    nodes: Mask
    mems: Mask

    @property
    def missing(self) -> int:
        """How many CPUs fewer it has than it was promised."""
        return max(len(self.offline) - len(self.replacement), 0)

    def text(self) -> str:
        """Return the loss as text, to follow the name of the container."""
        parts = []
        if self.offline:
            is_single = len(self.offline) == 1
            text = f"its {cpus(self.offline)} {'is' if is_single else 'are'} offline: it runs on {self.cpus}"
            if self.replacement:
                text += f", with {cpus(self.replacement)} in {'its' if is_single else 'their'} place"
            if self.missing:
                text += f", {self.missing} fewer than it was promised"
            parts.append(text)
        if self.nodes:
            gone, has = numa_nodes_text(self.nodes), numa_nodes_text(self.mems)
            parts.append(f"its memory of {gone} is gone: it has that of {has}")
        return "; ".join(parts)


def loss_of(state: NodeState, container: Container) -> HardwareLoss | None:
    """Return the hardware loss of a container; None if it lacks nothing of its placement.

    A container to which the plan is not applied was promised nothing. Missing memory nodes matter only to
    containers that are bound to some nodes: a container on all nodes loses nothing of its placement.
    """
    machine, placement = state.node.machine, container.placement
    offline = placement.exclusive - machine.online
    nodes = placement.mems - machine.memory_nodes
    follows = placement.pool is Pool.OWN and state.node.follow_mems
    bound = follows or bool(placement.blocks) or placement.pool_numa_limit is not None
    if container.phase in (Phase.EXITED, Phase.CREATING) or not (offline or (nodes and bound)):
        return None
    if not applies_to(state, container.pod):
        return None
    current = state.desired_cpus(container)
    mems = state.desired_mems(container)
    return HardwareLoss(offline, current & placement.replacement, current, nodes if bound else Mask(), mems)


def losses(state: NodeState) -> dict[str, HardwareLoss]:
    """Return the hardware losses of all containers, by container id."""
    all_losses = ((i, loss_of(state, container)) for i, container in state.containers.items())
    return {i: loss for i, loss in all_losses if loss is not None}


def changed_losses(
    reported: Mapping[str, str], state: NodeState
) -> tuple[dict[str, str], list[tuple[Container, str]]]:
    """Compare the reported losses with the current ones.

    Args:
        reported: The losses that were reported last, by container id.
        state: The node.

    Returns:
        The current losses, and the containers whose loss has changed, with the loss as text; the text is
        empty if the loss has ended.
    """
    current = {container_id: loss.text() for container_id, loss in losses(state).items()}
    ended = dict.fromkeys(reported.keys() - current.keys(), "")
    differ = {i: text for i, text in current.items() if reported.get(i) != text} | ended
    changed = ((container, text) for i, text in differ.items() if (container := state.containers.get(i)))
    return current, [(container, text) for container, text in changed if applies_to(state, container.pod)]
