from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.admission import AdmissionRule, AdmissionRules
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine, NumaNode
from proxy.model.workload import Placement, Pool
from proxy.pools.pools import CpuPools, Floor, Floors, Owner, default_floor, floors_of, pool_cpus, pools_of
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

ONLINE = CpuSet.parse("0-7")
LSE, LSR = Owner(CpuSet.parse("0-1"), excludes_be=True), Owner(CpuSet.parse("2"), excludes_be=False)


def test_owned_cpus_leave_the_shared_pool_and_hard_ones_the_be_pool_too() -> None:
    assert pools_of(ONLINE, ()) == CpuPools(ONLINE, ONLINE)
    assert pools_of(ONLINE, [LSR]) == CpuPools(CpuSet.parse("0-1,3-7"), ONLINE)
    assert pools_of(ONLINE, [LSE, LSR]) == CpuPools(CpuSet.parse("3-7"), CpuSet.parse("2-7"))
    other = Owner(CpuSet.parse("4,9"), excludes_be=True)
    assert pools_of(ONLINE, [LSE, other]) == CpuPools(CpuSet.parse("2-3,5-7"), CpuSet.parse("2-3,5-7"))


def test_be_is_limited_to_what_the_be_pool_has() -> None:
    def limited(cpus: str) -> CpuSet | None:
        return pools_of(CpuSet.parse("0-3"), [LSE], be_limit=CpuSet.parse(cpus)).be_now

    assert limited("1-2,9") == CpuSet.parse("2")
    assert limited("0-1") is None, "no container is left without CPUs"


def test_pools_by_name() -> None:
    pools = pools_of(ONLINE, [LSR])
    assert pools.cpus_of(Pool.BE) == ONLINE
    assert pools.cpus_of(Pool.SHARED) == CpuSet.parse("0-1,3-7")


@pytest.mark.parametrize("system", [None, "6-7", "2", "2,6"])
@pytest.mark.parametrize("be_limit", [None, "3-4", "0"])
def test_each_pool_has_cpus_of_its_own_rule(system: str | None, be_limit: str | None) -> None:
    kept, limit = (None if text is None else CpuSet.parse(text) for text in (system, be_limit))
    pools = pools_of(ONLINE, [LSE, LSR], kept, limit)
    shared, be = CpuSet.parse("3-7"), CpuSet.parse("2-7")
    assert (pools.shared, pools.be) == (shared, be)
    assert pools.cpus_of(Pool.SHARED) == shared
    assert pools.cpus_of(Pool.BE) == (CpuSet.parse("3-4") if be_limit == "3-4" else be)
    own = {"6-7": CpuSet.parse("6-7"), "2,6": CpuSet.parse("6")}  # 2 is owned
    assert pools.cpus_of(Pool.SYSTEM) == own.get(system or "", shared)


def test_the_part_of_each_node_that_has_cpus() -> None:
    machine = regular_machine(2, 1, 2, 2)  # node 0: 0-1,4-5; node 1: 2-3,6-7
    machine = changed_copy(machine, nodes=(*machine.nodes, NumaNode(2, CpuSet())))
    assert pools_of(ONLINE, [LSE, LSR]).per_node(machine) == {
        0: CpuPools(CpuSet.parse("4-5"), CpuSet.parse("4-5")),
        1: CpuPools(CpuSet.parse("3,6-7"), CpuSet.parse("2-3,6-7")),
    }


AUTO = AdmissionRules(floor=None, numa_floor=None)
MACHINES = [
    regular_machine(1, 1, 1, 1),
    regular_machine(1, 1, 1, 2),
    regular_machine(1, 1, 2, 1),
    regular_machine(1, 2, 1, 1),
    regular_machine(2, 1, 4, 2),
    regular_machine(2, 2, 8, 2),
    regular_machine(2, 4, 3, 1),
    regular_machine(1, 1, 40, 4),
]


@pytest.mark.parametrize(
    ("cpus", "threads", "floor"),
    [
        (1, 1, 0),  # half of one CPU, rounded down: the only CPU cannot have an owner
        (2, 1, 1),
        (2, 2, 1),  # one core would be the whole pool
        (3, 1, 1),
        (4, 2, 2),
        (4, 1, 1),
        (16, 2, 2),
        (40, 2, 2),
        (42, 2, 3),  # 2.1 is rounded up
        (64, 2, 4),
        (96, 2, 5),
        (101, 1, 6),
        (128, 1, 7),
        (160, 4, 8),
    ],
)
def test_the_default_is_a_core_or_a_twentieth_and_at_most_half(cpus: int, threads: int, floor: int) -> None:
    machine = regular_machine(1, 1, -(-cpus // threads), threads)
    assert default_floor(machine, CpuSet(range(cpus))) == floor


@pytest.mark.parametrize("machine", MACHINES)
def test_one_cpu_can_be_owned_wherever_two_are_there(machine: Machine) -> None:
    floors = floors_of(AUTO, machine, machine.online)
    for node in machine.nodes:
        if len(node.cpus) > 1 and len(machine.online) > 1:
            taken = CpuSet([node.cpus.first()])
            assert floors.breach(machine.online - taken, taken) is None


def test_withheld_cpus_do_not_count_for_the_floor() -> None:
    """Four CPUs of which two are withheld: the pool is two CPUs, and one of them can be owned."""
    machine = regular_machine(1, 1, 2, 2)
    assert [f.least for f in floors_of(AUTO, machine, CpuSet([0, 1])).floors] == [1, 1]


def test_configured_floors_are_used_unchanged() -> None:
    machine = regular_machine(2, 1, 4, 2)
    floors = floors_of(AdmissionRules(floor=15, numa_floor=3), machine, machine.online)
    assert [(f.least, f.node) for f in floors.floors] == [(15, None), (3, 0), (3, 1)]
    assert not floors_of(AdmissionRules(), machine, machine.online)
    assert not floors_of(AdmissionRules(floor=0, numa_floor=0), machine, machine.online)


def test_only_floors_of_nodes_that_lose_cpus_are_broken() -> None:
    floors = Floors((Floor(2, CpuSet([0, 1, 2, 3]), 0), Floor(2, CpuSet([4, 5, 6, 7]), 1)))
    left = CpuSet([0, 4, 5, 6])  # node 0 is below its floor already
    assert floors.breach(left, CpuSet([7])) is None
    breach = floors.breach(left, CpuSet([3]))
    assert breach is not None
    assert breach.rule is AdmissionRule.SHARED_FLOOR
    assert "NUMA node 0 (admission.sharedFloorPerNUMANode), and 1 would be left" in breach.message
    assert floors.breach(left, CpuSet()) is None
    whole = Floors((Floor(5),)).breach(left, CpuSet([7]))
    assert whole is not None
    assert "5 CPUs of this node (admission.sharedFloor), and 4 would be left" in whole.message


@given(
    st.sampled_from(MACHINES),
    st.sets(st.integers(0, 159)),
    st.sets(st.integers(0, 159), max_size=3),
    st.none() | st.integers(0, 12),
    st.none() | st.integers(0, 6),
    st.randoms(),
)
def test_cpus_chosen_outside_the_kept_cpus_break_no_floor(
    machine: Machine, owned: set[int], reserved: set[int], floor: int | None, numa: int | None, chance: object
) -> None:
    floors = floors_of(AdmissionRules(floor=floor, numa_floor=numa), machine, machine.online)
    never = CpuSet(reserved) & machine.online
    pool = machine.online - (CpuSet(owned) - never)
    kept = floors.choose(pool, machine, never)
    assert kept <= pool
    free = list(pool - kept - never)
    taken = CpuSet(cpu for cpu in free if chance.random() < 0.5)  # type: ignore[attr-defined]
    assert floors.breach(pool - taken, taken) is None


def test_reserved_cpus_and_parts_of_cores_are_kept_first() -> None:
    machine = regular_machine(1, 1, 4, 2)  # cores 0,4 1,5 2,6 3,7
    floors = Floors((Floor(2),))
    assert floors.choose(machine.online, machine, CpuSet([0])) == CpuSet([0, 4])
    assert floors.choose(machine.online - CpuSet([1]), machine, CpuSet()) == CpuSet([5, 7])
    assert floors.choose(machine.online, machine, CpuSet()) == CpuSet([3, 7])


def test_cpus_that_are_kept_for_a_numa_node_count_for_the_whole_node() -> None:
    machine = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
    floors = floors_of(AdmissionRules(floor=3, numa_floor=1), machine, machine.online)
    assert floors.choose(machine.online, machine, CpuSet()) == CpuSet([7, 11, 15])


def test_a_node_without_cpus_has_no_floor() -> None:
    machine = regular_machine(2, 1, 4, 1)
    only_memory = changed_copy(machine.nodes[1], cpus=CpuSet())
    there = tuple(cpu for cpu in machine.cpus if cpu.id < 4)
    machine = changed_copy(machine, cpus=there, nodes=(machine.nodes[0], only_memory))
    floors = floors_of(AdmissionRules(floor=0, numa_floor=2), machine, machine.online)
    assert [(f.least, f.node) for f in floors.floors] == [(2, 0)]


def test_a_node_whose_cpus_are_all_withheld_has_no_floor() -> None:
    machine = regular_machine(2, 1, 4, 1)
    assert floors_of(AUTO, machine, machine.nodes[0].cpus).floors == (
        Floor(1),
        Floor(1, machine.nodes[0].cpus, 0),
    )
    assert not floors_of(AUTO, machine, CpuSet())


def test_the_default_counts_the_cores_of_the_given_cpus_only() -> None:
    machine = regular_machine(1, 1, 6, 2)  # cores 0,6 1,7 2,8 3,9 4,10 5,11
    single = tuple(cpu for cpu in machine.cpus if cpu.id not in (6, 7, 8, 9))  # 0 to 3 have no second thread
    machine = changed_copy(machine, cpus=single)
    assert default_floor(machine, CpuSet([0, 1, 2, 3])) == 1
    assert default_floor(machine, CpuSet([0, 1, 4, 10])) == 2


TWO_NODES = regular_machine(2, 1, 4, 1)  # CPUs 0-3 and 4-7
POOLS = CpuPools(CpuSet.parse("0-5"), CpuSet.parse("0-6"), CpuSet(), CpuSet.parse("0-1"))


@pytest.mark.parametrize(
    ("pool", "within", "numa", "hook", "extra", "cpus"),
    [
        (Pool.SHARED, None, None, None, "", "0-5"),
        (Pool.SHARED, "2-3", None, None, "", "2-3"),
        (Pool.SHARED, None, "1", None, "", "4-5"),
        (Pool.SHARED, "2-3", "1", None, "", "4-5"),  # NUMA nodes before CPUs
        (Pool.SHARED, "6-7", None, None, "", "0-5"),  # no CPUs are left: the whole pool
        (Pool.SHARED, None, None, "3-4", "", "3-4"),
        (Pool.SHARED, None, "1", "3-4", "", "4"),
        (Pool.SHARED, None, "1", "0-3", "", "4-5"),  # the limit of a hook is dropped first
        (Pool.SHARED, None, None, "7", "", "0-5"),
        (Pool.SHARED, None, None, "3", "6,99", "3,6"),
        (Pool.SHARED, None, None, "7", "6", "6"),
        (Pool.BE, None, None, None, "", "0-1"),
        (Pool.BE, "1-2", None, None, "", "1"),
        (Pool.BE, "2-3", None, None, "", "2-3"),  # suppression does not move it out of the limit
        (Pool.BE, "7", None, None, "", "0-1"),
        (Pool.BE, None, None, "2,7", "", "2"),
        (Pool.BE, None, None, "7", "", "0-1"),
        (Pool.BE, "1-3", None, "2", "", "2"),
        (Pool.BE, None, None, "1-2", "", "1"),  # suppression holds among the CPUs of a hook, too
    ],
)
def test_a_pool_is_limited_as_far_as_that_leaves_cpus(
    pool: Pool, within: str | None, numa: str | None, hook: str | None, extra: str, cpus: str
) -> None:
    placement = Placement(
        pool,
        CpuSet(),
        Mask((0, 1)),
        pool_cpus_limit=None if within is None else CpuSet.parse(within),
        pool_numa_limit=None if numa is None else Mask.parse(numa),
        hook_cpus=None if hook is None else CpuSet.parse(hook),
        hook_extra_cpus=CpuSet.parse(extra),
    )
    assert str(pool_cpus(TWO_NODES, POOLS, placement)) == cpus
