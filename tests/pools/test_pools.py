from __future__ import annotations

from proxy.model.idset import CpuSet
from proxy.model.machine import NumaNode
from proxy.model.workload import Pool
from proxy.pools.pools import CpuPools, Owner, pools_of
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy

ONLINE = CpuSet.parse("0-7")
LSE, LSR = Owner(CpuSet.parse("0-1"), hard=True), Owner(CpuSet.parse("2"), hard=False)


def test_owned_cpus_leave_the_shared_pool_and_hard_ones_the_be_pool_too() -> None:
    assert pools_of(ONLINE, ()) == CpuPools(ONLINE, ONLINE)
    assert pools_of(ONLINE, [LSR]) == CpuPools(CpuSet.parse("0-1,3-7"), ONLINE)
    assert pools_of(ONLINE, [LSE, LSR]) == CpuPools(CpuSet.parse("3-7"), CpuSet.parse("2-7"))
    other = Owner(CpuSet.parse("4,9"), hard=True)
    assert pools_of(ONLINE, [LSE, other]) == CpuPools(CpuSet.parse("2-3,5-7"), CpuSet.parse("2-3,5-7"))


def test_be_is_limited_to_what_the_be_pool_has() -> None:
    def limited(cpus: str) -> CpuSet | None:
        return pools_of(CpuSet.parse("0-3"), [LSE], be_limit=CpuSet.parse(cpus)).be_now

    assert limited("1-2,9") == CpuSet.parse("2")
    assert limited("0-1") is None, "no container is left without CPUs"


def test_pools_by_name() -> None:
    pools = pools_of(ONLINE, [LSR])
    assert pools.of(Pool.BE) == ONLINE
    assert pools.of(Pool.SHARED) == CpuSet.parse("0-1,3-7")


def test_the_part_of_each_node_that_has_cpus() -> None:
    machine = described(2, 1, 2, 2)  # node 0: 0-1,4-5; node 1: 2-3,6-7
    machine = changed_copy(machine, nodes=(*machine.nodes, NumaNode(2, CpuSet())))
    assert pools_of(ONLINE, [LSE, LSR]).per_node(machine) == {
        0: CpuPools(CpuSet.parse("4-5"), CpuSet.parse("4-5")),
        1: CpuPools(CpuSet.parse("3,6-7"), CpuSet.parse("2-3,6-7")),
    }
