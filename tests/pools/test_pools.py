from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("system", [None, "6-7", "2", "2,6"])
@pytest.mark.parametrize("be_limit", [None, "3-4", "0"])
def test_each_pool_has_cpus_of_its_own_rule(system: str | None, be_limit: str | None) -> None:
    kept, limit = (None if text is None else CpuSet.parse(text) for text in (system, be_limit))
    pools = pools_of(ONLINE, [LSE, LSR], kept, limit)
    shared, be = CpuSet.parse("3-7"), CpuSet.parse("2-7")
    assert (pools.shared, pools.be) == (shared, be)
    assert pools.of(Pool.SHARED) == shared
    assert pools.of(Pool.BE) == (CpuSet.parse("3-4") if be_limit == "3-4" else be)
    own = {"6-7": CpuSet.parse("6-7"), "2,6": CpuSet.parse("6")}  # 2 is owned
    assert pools.of(Pool.SYSTEM) == own.get(system or "", shared)


def test_the_part_of_each_node_that_has_cpus() -> None:
    machine = described(2, 1, 2, 2)  # node 0: 0-1,4-5; node 1: 2-3,6-7
    machine = changed_copy(machine, nodes=(*machine.nodes, NumaNode(2, CpuSet())))
    assert pools_of(ONLINE, [LSE, LSR]).per_node(machine) == {
        0: CpuPools(CpuSet.parse("4-5"), CpuSet.parse("4-5")),
        1: CpuPools(CpuSet.parse("3,6-7"), CpuSet.parse("2-3,6-7")),
    }
