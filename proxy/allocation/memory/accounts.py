"""Which container holds which memory: a function of the pods and containers that exist.

Theory. A container holds its memory while it lives. One that has ended holds it as long as it may come back,
which only kubelet knows: where the pod's containers are known, until its pod goes (an ordinary init
container: until a later one starts); where they are not, it has released it. What was reserved for a pod
counts until the container that it is for exists.

The memory of the nodes is carried from state to state and changed only where an entry has changed: charging a
few hundred containers again for every create would cost more than all the rest.
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
"""Pod key and container name; the name is empty for what a pod holds as a whole."""


def entries_of(pods: Iterable[Pod], containers: Iterable[Container]) -> set[Entry]:
    """Return the entries that these pods and containers may have, or may end."""
    found = {(c.pod.key, c.name) for c in containers if _may_hold(c)}
    for pod in pods:
        if pod.reserved_for_pod is not None:
            found |= {(pod.key, part.name) for part in pod.reserved_for_pod.parts if part.blocks}
            if pod.reserved_for_pod.blocks:
                found.add((pod.key, ""))
    return found


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
    """Return the memory of the nodes with what some entries hold now: new blocks charged, others released."""
    if not entries:
        return memory
    keys = {key for key, _ in entries}
    # What a container takes over is no longer held by the init container of its pod.
    entries = {*entries, *((key, name) for key in keys for name in memory.assignments.get(key, ()))}
    now = _held(pods, containers, keys)
    plain = True
    for key, name in sorted(entries):
        before, after = memory.blocks(key, name) or (), now.get((key, name), ())
        if before == after:
            continue
        for block in before:
            plain = plain and _is_plain(memory, block, gone=True)
            memory = memory.uncharged(block)
        for block in after:
            plain = plain and _is_plain(memory, block, gone=False)
            memory = _with(memory, block)
        memory = memory.with_blocks(key, name, after or None)
    return memory if plain else _recharged(memory)


def _is_plain(memory: MemoryState, block: Block, *, gone: bool) -> bool:
    """Return whether charging and releasing a block leaves the tables as they were.

    A running container is adopted although its nodes may lack the memory, or serve another group. Then less
    is charged than is held, and releasing the block would release what others hold.
    """
    nodes = [memory.nodes[i] for i in block.affinity if i in memory.nodes]
    if len(nodes) < len(block.affinity):
        return False
    free = sum(node.table(block.resource).free for node in nodes)
    has_all = free > 0 if gone else block.size <= free
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
    # Where a node was taken out, the other nodes of its group carry what is held.
    existing = Mask(node for node in block.affinity if node in memory.nodes)
    if not existing:
        return memory
    return memory.charged(structs.replace(block, affinity=existing), block.size)


def _recharged(memory: MemoryState) -> MemoryState:
    """Charge everything that is held from the beginning, in one order."""
    nodes = {
        i: NumaMemory(
            {name: structs.replace(t, reserved=0, free=t.allocatable) for name, t in node.tables.items()},
            Mask((i,)),
        )
        for i, node in memory.nodes.items()
    }
    again = structs.replace(memory, nodes=nodes)
    for _, pod in sorted(memory.assignments.items()):
        for _, held in sorted(pod.items()):
            for block in held:
                again = _with(again, block)
    return again


def _held(
    pods: Mapping[str, Pod], containers: Mapping[str, Container], keys: Collection[str]
) -> dict[Entry, Blocks]:
    found: dict[Entry, Blocks] = {}
    divided: set[str] = set()
    for pod in pods.values():
        if pod.reserved_for_pod is not None and pod.key in keys:
            found[pod.key, ""] = pod.reserved_for_pod.blocks
            found.update({(pod.key, part.name): part.blocks for part in pod.reserved_for_pod.parts})
            divided.add(pod.key)
    attempts: dict[Entry, int] = {}
    known: dict[str, PodRequests] = {}
    for container in containers.values():
        # Most are of other pods, and comparing the uid is enough.
        if (uid := container.pod.uid) not in keys and (uid or container.pod.key not in keys):
            continue
        entry = container.pod.key, container.name
        if _holds(container, pods) and container.attempt >= attempts.get(entry, -1):
            attempts[entry] = container.attempt
            found[entry] = container.placement.blocks
            if container.pod.requests is not None:
                known[entry[0]] = container.pod.requests
    for key, requests in known.items():
        if key not in divided:  # the parts of a pod are divided already
            _take_over(found, key, requests)
    return found


def _take_over(found: dict[Entry, Blocks], key: str, requests: PodRequests) -> None:
    """Subtract from init containers what later ones have taken over on the same nodes.

    Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/policy_static.go ``updatePodReusableMemory`` and
    ``updateInitContainersMemoryBlocks``.
    """
    inits: list[Entry] = []
    for container in requests.containers:
        entry = key, container.name
        for block in found.get(entry, ()):
            left = block.size
            for earlier in inits:
                rest = []
                for own in found[earlier]:
                    same = (own.resource, own.affinity) == (block.resource, block.affinity)
                    part = min(own.size, left) if same else 0
                    left -= part
                    rest.append(structs.replace(own, size=own.size - part) if part else own)
                found[earlier] = tuple(rest)
        if container.kind is ContainerKind.INIT and found.get(entry):
            inits.append(entry)


def _holds(container: Container, pods: Mapping[str, Pod]) -> bool:
    if container.phase is not Phase.EXITED:
        return True
    return container.pod.requests is not None and container.pod.sandbox_id in pods


def inits_before(requests: PodRequests, name: str) -> set[str]:
    """Return the names of the ordinary init containers that have ended when a container is created."""
    found: set[str] = set()
    for container in requests.containers:
        if container.name == name:
            return found
        if container.kind is ContainerKind.INIT:
            found.add(container.name)
    return set()
