from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.model.workload import QosClass
from proxy.pools.published_pools import AnnotatedCpus, NodePool, Withheld, node_pools
from tests.oracles.koordinator_pools import joined_text, on_nodes, union, without_cpus

GROUPS = {(0, 0): CpuSet.parse("0-3"), (1, 3): CpuSet.parse("4-7")}
SETS = st.builds(CpuSet.from_bits, st.integers(0, 255))
HELD = st.lists(st.builds(AnnotatedCpus, st.sampled_from(QosClass), SETS), max_size=4)
WITHHELD = st.builds(Withheld, SETS, SETS, SETS)


def part(socket: int, node: int, cpus: str) -> NodePool:
    return NodePool(socket, node, CpuSet.parse(cpus))


def test_owned_cpus_leave_the_shared_pool_and_those_of_lse_the_be_pool() -> None:
    held = [
        AnnotatedCpus(QosClass.LSR, CpuSet([0])),
        AnnotatedCpus(QosClass.LSE, CpuSet([4])),
        AnnotatedCpus(QosClass.LS, CpuSet([7])),
    ]
    pools = node_pools(GROUPS, held, Withheld())
    assert pools.shared == (part(0, 0, "1-3"), part(1, 3, "5-6"))
    assert pools.be == (part(0, 0, "0-3"), part(1, 3, "5-7"))


def test_withheld_cpus_are_in_neither_pool() -> None:
    pools = node_pools(GROUPS, (), Withheld(CpuSet([0]), CpuSet([1]), CpuSet([7])))
    assert pools.shared == pools.be == (part(0, 0, "2-3"), part(1, 3, "4-6"))


def test_an_owned_node_has_no_pool_and_a_reserved_one_an_empty_pool() -> None:
    owned = node_pools(GROUPS, [AnnotatedCpus(QosClass.LSE, CpuSet.parse("4-7"))], Withheld())
    assert owned.shared == owned.be == (part(0, 0, "0-3"),)
    kept = node_pools(GROUPS, (), Withheld(reserved=CpuSet.parse("4-7")))
    assert kept.shared == (part(0, 0, "0-3"), part(1, 3, ""))


def test_parts_are_in_the_order_of_socket_and_node() -> None:
    groups = {(1, 0): CpuSet([0]), (0, 9): CpuSet([1]), (0, 2): CpuSet([2])}
    assert [(p.socket, p.node) for p in node_pools(groups, (), Withheld()).be] == [(0, 2), (0, 9), (1, 0)]


def test_pools_of_nodes_in_the_order_of_the_nodes() -> None:
    pools = node_pools(GROUPS, (), Withheld()).shared
    assert joined_text(on_nodes(pools, (3, 7, 0))) == "4-7,0-3"
    assert joined_text(pools) == "0-3,4-7", "the text is kept as it is, although it is the set 0-7"
    assert union(pools) == CpuSet.parse("0-7")
    assert without_cpus(pools, CpuSet.parse("2-7")) == (part(0, 0, "0-1"), part(1, 3, ""))


@given(HELD, WITHHELD)
def test_pools_contain_no_owned_or_withheld_cpus(held: list[AnnotatedCpus], withheld: Withheld) -> None:
    pools = node_pools(GROUPS, held, withheld)
    kept = withheld.kubelet | withheld.reserved | withheld.system
    owned = union(NodePool(0, 0, each.cpus) for each in held)
    hard = union(NodePool(0, 0, each.cpus) for each in held if each.qos is QosClass.LSE)
    assert union(pools.shared) == CpuSet.parse("0-7") - owned - kept
    assert union(pools.be) == CpuSet.parse("0-7") - hard - kept
    assert all(pool.cpus <= GROUPS[pool.socket, pool.node] for pool in (*pools.shared, *pools.be))
