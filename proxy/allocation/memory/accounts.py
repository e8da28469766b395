"""Account which container holds which memory: a function of the pods and containers that exist.

Theory. A container holds its memory while it lives. A container that has ended holds its memory as long as it
may come back, which only kubelet knows. If the pod's containers are known, it holds the memory until its pod
goes (an ordinary init container: until a later one starts); if they are not known, it has released the
memory. Memory that was reserved for a pod counts until the container that it is for exists.

The memory of the nodes is carried from state to state and changed only for entries that have changed:
charging a few hundred containers again for every create would cost more than all the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import structs

from proxy.allocation.memory.state import MemoryState, NumaMemory
from proxy.model.grants import Block, Blocks
from proxy.model.idset import Mask
from proxy.model.requests import ContainerKind, PodRequests
from proxy.model.workload import Container, KubeQos, Phase, Pod

Entry = tuple[str, str]
"""Pod key and container name; the name is empty for memory that a pod holds as a whole."""


def entries_of(pods: Iterable[Pod], containers: Iterable[Container]) -> set[Entry]:
    """Return the entries that these pods and containers may have, or may end."""
    entries = {(c.pod.key, c.name) for c in containers if _may_hold(c)}
    for pod in pods:
        if pod.reserved_for_pod is not None:
            entries |= {(pod.key, part.name) for part in pod.reserved_for_pod.parts if part.blocks}
            if pod.reserved_for_pod.blocks:
                entries.add((pod.key, ""))
    return entries


def _may_hold(container: Container) -> bool:
    """Return whether a container may hold memory, or end what an earlier attempt or its pod held for it."""
    if container.placement.blocks or container.pod.reserved_for_pod is not None:
        return True
    return container.pod.kube_qos is KubeQos.GUARANTEED


def charged(
    memory: MemoryState,
    pods: Mapping[str, Pod],
    containers: Mapping[str, Container],
    entries: Collection[Entry],
) -> MemoryState:
    """Return the memory of the nodes after some entries have changed: new blocks charged, others released."""
    if not entries:
        return memory
    keys = {key for key, _ in entries}
    # Memory that a container takes over is no longer held by the init container of its pod.
    entries = {*entries, *((key, name) for key in keys for name in memory.assignments.get(key, ()))}
    held = _held(pods, containers, keys)
    reversible = True
    for key, name in sorted(entries):
        before, after = memory.blocks(key, name) or (), held.get((key, name), ())
        if before == after:
            continue
        for block in before:
            reversible = reversible and _is_reversible(memory, block, released=True)
            memory = memory.uncharged(block)
        for block in after:
            reversible = reversible and _is_reversible(memory, block, released=False)
            memory = _with(memory, block)
        memory = memory.with_blocks(key, name, after or None)
    return memory if reversible else _recharged(memory)


def released(memory: MemoryState, key: str, name: str) -> MemoryState:
    """Return the memory of the nodes without what one container holds."""
    return _recharged(memory.with_blocks(key, name, None))


def _is_reversible(memory: MemoryState, block: Block, *, released: bool) -> bool:
    """Return whether charging and releasing a block leaves the tables as they were.

    A running container is adopted although its nodes may lack the memory, or serve another group. Then less
    is charged than is held, and releasing the block would release what others hold.
    """
    nodes = [memory.nodes[i] for i in block.affinity if i in memory.nodes]
    if len(nodes) < len(block.affinity):
        return False
    free = sum(node.table(block.resource).free for node in nodes)
    has_all = free > 0 if released else block.size <= free
    return has_all and not _is_mixed(memory, block.affinity)


def _is_mixed(memory: MemoryState, group: Mask) -> bool:
    """Return whether blocks are held on some of these nodes, but not on all, or also on others."""
    return any(
        block.affinity != group and not block.affinity.isdisjoint(group)
        for pod in memory.assignments.values()
        for held in pod.values()
        for block in held
    )


def _with(memory: MemoryState, block: Block) -> MemoryState:
    # If a node was removed, its blocks are charged to the other nodes of its group.
    existing = Mask(node for node in block.affinity if node in memory.nodes)
    if not existing:
        return memory
    return memory.charged(structs.replace(block, affinity=existing), block.size)


def _recharged(memory: MemoryState) -> MemoryState:
    """Charge all held blocks again from the beginning, in one order."""
    nodes = {
        i: NumaMemory(
            {name: structs.replace(t, reserved=0, free=t.allocatable) for name, t in node.tables.items()},
            Mask((i,)),
        )
        for i, node in memory.nodes.items()
    }
    recharged = structs.replace(memory, nodes=nodes)
    for _, pod in sorted(memory.assignments.items()):
        for _, held in sorted(pod.items()):
            for block in held:
                recharged = _with(recharged, block)
    return recharged


def _held(
    pods: Mapping[str, Pod], containers: Mapping[str, Container], keys: Collection[str]
) -> dict[Entry, Blocks]:
    blocks: dict[Entry, Blocks] = {}
    divided: set[str] = set()
    for pod in pods.values():
        if pod.reserved_for_pod is not None and pod.key in keys:
            blocks[pod.key, ""] = pod.reserved_for_pod.blocks
            blocks.update({(pod.key, part.name): part.blocks for part in pod.reserved_for_pod.parts})
            divided.add(pod.key)
    newest: dict[Entry, tuple[bool, int]] = {}
    requests_of: dict[str, PodRequests] = {}
    for container in containers.values():
        # Most containers are of other pods; for those, comparing the uid is enough.
        if (uid := container.pod.uid) not in keys and (uid or container.pod.key not in keys):
            continue
        entry = container.pod.key, container.name
        age = age_key(container)
        if _holds(container, pods) and age >= newest.get(entry, age):
            newest[entry] = age
            blocks[entry] = container.placement.blocks
            if container.pod.requests is not None:
                requests_of[entry[0]] = container.pod.requests
    for key, requests in requests_of.items():
        if key not in divided:  # the parts of a pod are divided already
            _take_over(blocks, key, requests)
    return blocks


def age_key(container: Container) -> tuple[bool, int]:
    """Return the key by which the newest of several attempts is the greatest."""
    return container.phase is not Phase.EXITED, container.attempt


def _take_over(blocks: dict[Entry, Blocks], key: str, requests: PodRequests) -> None:
    """Reduce the blocks of init containers by the memory that later ones have taken over on the same nodes.

    Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/policy_static.go ``updatePodReusableMemory`` and
    ``updateInitContainersMemoryBlocks``.
    """
    inits: list[Entry] = []
    for container in requests.containers:
        entry = key, container.name
        for block in blocks.get(entry, ()):
            remaining = block.size
            for earlier in inits:
                reduced = []
                for own in blocks[earlier]:
                    same_place = (own.resource, own.affinity) == (block.resource, block.affinity)
                    part = min(own.size, remaining) if same_place else 0
                    remaining -= part
                    reduced.append(structs.replace(own, size=own.size - part) if part else own)
                blocks[earlier] = tuple(reduced)
        if container.kind is ContainerKind.INIT and blocks.get(entry):
            inits.append(entry)


def _holds(container: Container, pods: Mapping[str, Pod]) -> bool:
    if container.phase is not Phase.EXITED:
        return True
    return container.pod.requests is not None and container.pod.sandbox_id in pods


def inits_before(requests: PodRequests, name: str) -> set[str]:
    """Return the names of the ordinary init containers that have ended when a container is created."""
    inits: set[str] = set()
    for container in requests.containers:
        if container.name == name:
            return inits
        if container.kind is ContainerKind.INIT:
            inits.add(container.name)
    return set()
