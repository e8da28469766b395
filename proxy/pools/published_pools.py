"""Shared pools by socket and NUMA node, as Koordinator publishes them.

See Koordinator v1.8.0 pkg/koordlet/statesinformer/impl/states_noderesourcetopology.go, calCPUSharePools.

    base   = online CPUs - CPUs that kubelet's static policy gave to pods
    shared = base - CPUs of every pod that owns CPUs
    BE     = base - CPUs of LSE pods
    both  -= the node's reservation, and CPUs that only class SYSTEM may use

kubelet's own reserve stays in both, so that pods that request next to nothing always have a CPU. A NUMA node
on which nothing is left has no pool at all; a NUMA node that the reservation empties keeps an empty pool,
which is published without a CPU list.

A pool is a group of CPUs of one socket *and* one node. On all but unusual machines a node lies in one socket;
a node that spans sockets has a pool for each. ``proxy.pools`` spells out the QoS classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from proxy.model.idset import CpuSet
from proxy.model.workload import QosClass

Groups = Mapping[tuple[int, int], CpuSet]
"""Socket and NUMA node to their CPUs."""


class NodePool(Struct, frozen=True):
    """A part of a pool.

    Attributes:
        socket, node: Its socket and NUMA node.
        cpus: Its CPUs.
    """

    socket: int
    node: int
    cpus: CpuSet


class NodePools(Struct, frozen=True):
    """The two pools in their parts, by socket and node."""

    shared: tuple[NodePool, ...] = ()
    be: tuple[NodePool, ...] = ()


class AnnotatedCpus(Struct, frozen=True):
    """CPUs of a pod, by annotation."""

    qos: QosClass
    cpus: CpuSet


class Withheld(Struct, frozen=True):
    """CPUs that neither pool may use.

    Attributes:
        kubelet: CPUs that kubelet's static policy gave to pods.
        reserved: The node's reservation.
        system: CPUs that only class SYSTEM may use.
    """

    kubelet: CpuSet = field(default_factory=CpuSet)
    reserved: CpuSet = field(default_factory=CpuSet)
    system: CpuSet = field(default_factory=CpuSet)


def node_pools(groups: Groups, held: Iterable[AnnotatedCpus], withheld: Withheld) -> NodePools:
    """Compute the pools.

    Args:
        groups: The online CPUs.
        held: CPUs of live pods.
        withheld: CPUs that neither pool may use.
    """
    owned = outside_be = withheld.kubelet.bits
    for pod in held:
        owned |= pod.cpus.bits
        if pod.qos is QosClass.LSE:
            outside_be |= pod.cpus.bits
    withheld_bits = withheld.reserved.bits | withheld.system.bits
    return NodePools(_parts(groups, owned, withheld_bits), _parts(groups, outside_be, withheld_bits))


def _parts(groups: Groups, owned: int, withheld_bits: int) -> tuple[NodePool, ...]:
    remaining = ((group, groups[group].bits & ~owned) for group in sorted(groups))
    return tuple(
        NodePool(socket, node, CpuSet.from_bits(bits & ~withheld_bits))
        for (socket, node), bits in remaining
        if bits
    )
