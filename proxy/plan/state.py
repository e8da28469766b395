"""The state of a node: who is there, who owns what, and what the pools are.

A state is a value. Every change gives a new one, so that a worker thread can hold a consistent picture while
the loop goes on deciding. What follows from the containers (owners, pools) is computed when an owner comes or
goes and carried along otherwise: most containers own nothing, and placing them must cost next to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.table import Table
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass
from proxy.place.cputopo import CpuTopology
from proxy.pools.pools import Owner, Pools, pools_of


@dataclass(frozen=True, slots=True)
class Node:
    """What does not change while the daemon runs.

    Attributes:
        machine: The hardware.
        topology: The same as the allocator reads it.
        static: Whole-CPU Guaranteed containers get CPUs of their own (``cpuManagerPolicy: static``).
        reserved: CPUs that are never given to one container alone (``reservedSystemCPUs``).
        follow_mems: Containers that own CPUs get the memory nodes of those CPUs.
    """

    machine: Machine
    topology: CpuTopology
    static: bool = False
    reserved: CpuSet = field(default_factory=CpuSet)
    follow_mems: bool = True
    alike: dict[object, Placement] = field(default_factory=dict, compare=False, repr=False)
    """Placements of containers that own nothing, made once for each class (see ``place._at_once``)."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """Pods, containers, and what follows from them.

    Attributes:
        pods: Sandboxes by id.
        containers: Containers by id (by token while a create is in flight).
        owners: Who owns CPUs, by ``Container.owner``.
        pools: What is left for the others.
    """

    node: Node
    pods: Table[Pod]
    containers: Table[Container]
    owners: Mapping[str, Owner]
    pools: Pools

    @classmethod
    def empty(cls, node: Node) -> NodeState:
        """The state of a node with nothing on it."""
        return cls(node, Table(), Table(), {}, pools_of(node.machine.online, ()))

    @classmethod
    def of(cls, node: Node, pods: Iterable[Pod], containers: Iterable[Container]) -> NodeState:
        """Build a state from what is known to exist."""
        there = Table({c.id: c for c in containers})
        owners = _owners(there.values())
        pools = pools_of(node.machine.online, owners.values())
        return cls(node, Table({p.sandbox_id: p for p in pods}), there, owners, pools)

    def on(self, machine: Machine) -> NodeState:
        """Give the state after CPUs came or went."""
        node = dataclasses.replace(
            self.node, machine=machine, topology=CpuTopology.of(machine), alike=dict[object, Placement]()
        )
        return NodeState.of(node, self.pods.values(), self.containers.values())

    def wanted(self, container: Container) -> CpuSet:
        """Give the CPUs that a container must run on."""
        placement = container.placement
        if placement.pool is not Pool.OWN:
            return self.pools.of(placement.pool)
        # A CPU that is offline comes back, and is still its owner's then.
        return placement.own & self.node.machine.online or placement.own

    def changed(self, put: Iterable[Container] = (), drop: Iterable[str] = ()) -> NodeState:
        """Give the state after containers came, changed or went.

        Args:
            put: Containers that are new or changed (their id decides).
            drop: Ids that are gone; unknown ones are ignored.
        """
        containers = self.containers
        owners_change = False
        for gone in drop:
            old = containers.get(gone)
            if old is not None:
                containers = containers.drop(gone)
                owners_change |= old.placement.pool is Pool.OWN
        for new in put:
            before = containers.get(new.id)
            containers = containers.put(new.id, new)
            owners_change |= new.placement.pool is Pool.OWN
            owners_change |= before is not None and before.placement.pool is Pool.OWN
        if not owners_change:
            return NodeState(self.node, self.pods, containers, self.owners, self.pools)
        owners = _owners(containers.values())
        pools = pools_of(self.node.machine.online, owners.values())
        return NodeState(self.node, self.pods, containers, owners, pools)

    def renamed(self, old_id: str, container: Container) -> NodeState:
        """Give the state after a container got its id; without an old id, after one that owns nothing came.

        Neither changes who owns what, unless the id was an owner's before.
        """
        before = self.containers.get(container.id)
        if before is not None and before.placement.pool is Pool.OWN:
            return self.changed(put=(container,), drop=(old_id,))
        containers = self.containers.drop(old_id) if old_id else self.containers
        containers = containers.put(container.id, container)
        return NodeState(self.node, self.pods, containers, self.owners, self.pools)

    def with_pod(self, pod: Pod) -> NodeState:
        """Give the state after a sandbox came."""
        return dataclasses.replace(self, pods=self.pods.put(pod.sandbox_id, pod))

    def without_pod(self, sandbox_id: str) -> NodeState:
        """Give the state after a sandbox went; its containers go by themselves."""
        return dataclasses.replace(self, pods=self.pods.drop(sandbox_id))

    def promised(self, owner: str) -> CpuSet:
        """Give the CPUs that others than an owner count on, although nobody runs there now.

        A pod whose sandbox lives comes back to the CPUs of its annotation, and a container that has ended to
        those that it had (kubelet keeps them until the pod is gone). Pools use them meanwhile; giving them to
        a new owner would leave the old one without.
        """
        bits = 0
        for pod in self.pods.values():
            honoured = pod.cpuset and pod.qos is not QosClass.BE and not pod.problem
            if honoured and pod.cpuset and pod.key != owner:
                bits |= pod.cpuset.bits
        for container in self.containers.values():
            ended = container.phase is Phase.EXITED and container.owner not in ("", owner)
            if ended and container.pod.sandbox_id in self.pods:
                bits |= container.placement.own.bits
        return CpuSet.from_bits(bits)

    def had(self, owner: str) -> CpuSet:
        """Give the CPUs that an owner holds, or held when it ended; empty where it never did."""
        held = self.owners.get(owner)
        if held is not None:
            return held.cpus
        ended = [c for c in self.containers.values() if c.owner == owner]
        return max(ended, key=lambda c: c.attempt).placement.own if ended else CpuSet()

    def in_sandbox(self, sandbox_id: str) -> list[Container]:
        """Give the containers of a sandbox."""
        return [c for c in self.containers.values() if c.pod.sandbox_id == sandbox_id]


def moves(before: NodeState, after: NodeState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tell whose CPUs change from one state to the next because a pool changed.

    Returns:
        Ids that lose CPUs (they must leave them before the owner starts), and ids that only gain some.
        Containers that have exited, or are not in both states, do not move.
    """
    if before.pools == after.pools:
        return (), ()
    shrink: list[str] = []
    grow: list[str] = []
    for key, container in after.containers.items():
        old = before.containers.get(key)
        if old is None or container.phase is Phase.EXITED:
            continue
        have, want = before.wanted(old), after.wanted(container)
        if not have <= want:
            shrink.append(key)
        elif have != want:
            grow.append(key)
    return tuple(sorted(shrink)), tuple(sorted(grow))


def _owners(containers: Iterable[Container]) -> dict[str, Owner]:
    owners: dict[str, Owner] = {}
    for container in containers:
        placement = container.placement
        if placement.pool is not Pool.OWN or container.phase is Phase.EXITED:
            continue
        old = owners.get(container.owner)
        cpus = placement.own | old.cpus if old else placement.own
        owners[container.owner] = Owner(cpus, placement.hard or (old is not None and old.hard))
    return owners
