"""Who holds which memory and which devices: a function of the pods and containers that are there.

Theory. A container holds its memory while it lives. One that has ended holds it as long as it may come back,
which kubelet alone knows: where the pod's containers are known, until its pod goes (an ordinary init
container: until a later one starts); where they are not, it has let go. What was set aside for a pod counts
until the container that it is for is there.

The memory of the nodes is carried from state to state and changed only where an entry has changed: charging
a few hundred containers anew for every create would cost more than all the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from proxy.model.asks import Kind, PodAsk
from proxy.model.memory import Blocks
from proxy.model.workload import Container, Phase, Pod
from proxy.place.devices.state import Device, DeviceState
from proxy.place.memory.state import MemoryState

Entry = tuple[str, str]
"""Pod key and container name; the name is empty for what a pod holds as a whole."""


def entries_of(pods: Iterable[Pod], containers: Iterable[Container]) -> set[Entry]:
    """Name the entries that these pods and containers may have."""
    found = {(c.pod.key, c.name) for c in containers if c.placement.blocks}
    for pod in pods:
        if pod.aside is not None:
            found |= {(pod.key, part.name) for part in pod.aside.parts if part.blocks}
            if pod.aside.blocks:
                found.add((pod.key, ""))
    return found


def charged(
    memory: MemoryState,
    pods: Mapping[str, Pod],
    containers: Mapping[str, Container],
    entries: Collection[Entry],
) -> MemoryState:
    """Bring the memory of the nodes in line with what some entries hold now."""
    if not entries:
        return memory
    now = _held(pods, containers, entries)
    for key, name in sorted(entries):
        before, after = memory.blocks(key, name) or (), now.get((key, name), ())
        if before == after:
            continue
        for block in before:
            memory = memory.discharged(block)
        for block in after:
            known = all(node in memory.nodes for node in block.affinity)
            memory = memory.charged(block, block.size) if known else memory
        memory = memory.with_blocks(key, name, after or None)
    return memory


def _held(
    pods: Mapping[str, Pod], containers: Mapping[str, Container], entries: Collection[Entry]
) -> dict[Entry, Blocks]:
    keys = {key for key, _ in entries}
    found: dict[Entry, Blocks] = {}
    for pod in pods.values():
        if pod.aside is not None and pod.key in keys:
            found[pod.key, ""] = pod.aside.blocks
            found.update({(pod.key, part.name): part.blocks for part in pod.aside.parts})
    attempts: dict[Entry, int] = {}
    for container in containers.values():
        # Most are of other pods, and the uid alone tells so.
        if (uid := container.pod.uid) not in keys and (uid or container.pod.key not in keys):
            continue
        entry = container.pod.key, container.name
        if _holds(container, pods) and container.attempt >= attempts.get(entry, -1):
            attempts[entry] = container.attempt
            found[entry] = container.placement.blocks
    return found


def _holds(container: Container, pods: Mapping[str, Pod]) -> bool:
    if container.phase is not Phase.EXITED:
        return True
    return container.pod.asks is not None and container.pod.sandbox_id in pods


def let_go(
    pod: Pod | None, siblings: Iterable[Container], started: Container
) -> tuple[Pod | None, list[Container]]:
    """Take memory back from ordinary init containers that have ended, once a later container has started.

    Source: kubelet 1.36, reference D.

    Args:
        pod: The pod as it is known now.
        siblings: The containers of its sandbox.
        started: The container that has started.

    Returns:
        The pod, and the containers, that are changed by it; None and an empty list where nothing is.
    """
    asks = started.pod.asks or (pod.asks if pod else None)
    if asks is None:
        return None, []
    ended = _inits_before(asks, started.name)
    changed = [
        dataclasses.replace(c, placement=dataclasses.replace(c.placement, blocks=()))
        for c in siblings
        if c.name in ended and c.phase is Phase.EXITED and c.placement.blocks
    ]
    aside = pod.aside if pod else None
    if pod is None or aside is None or not any(p.blocks for p in aside.parts if p.name in ended):
        return None, changed
    parts = tuple(dataclasses.replace(p, blocks=()) if p.name in ended else p for p in aside.parts)
    return dataclasses.replace(pod, aside=dataclasses.replace(aside, parts=parts)), changed


def _inits_before(asks: PodAsk, name: str) -> set[str]:
    found: set[str] = set()
    for ask in asks.containers:
        if ask.name == name:
            return found
        if ask.kind is Kind.INIT:
            found.add(ask.name)
    return set()


def devices_of(
    registered: Mapping[str, Mapping[str, Device]], pods: Iterable[Pod], containers: Iterable[Container]
) -> DeviceState:
    """Tell who holds the devices that we give out."""
    state = DeviceState(registered)
    if not registered:
        return state
    there = {pod.key for pod in pods}
    for container in containers:
        if container.phase is Phase.EXITED and container.pod.key not in there:
            continue
        for resource, ids in container.placement.devices:
            state = state.give(container.pod.key, container.name, resource, frozenset(ids))
    return state
