"""The accumulator in cases that the tables do not cover: its own rules, odd machines, random requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.koordinator.accumulator import accumulate
from proxy.allocation.koordinator.bind import holds
from proxy.allocation.koordinator.bind_request import Allocated, BindRequest
from proxy.allocation.packed import NotEnoughCpus
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NumaStrategy
from tests.oracles.binding_orders import free_cpus
from tests.testkit.changed_copy import changed_copy as replace

FULL, SPREAD = BindRequest(), BindRequest(BindPolicy.SPREAD_BY_PCPUS)
CORE, NODE = ExclusivePolicy.PCPU_LEVEL, ExclusivePolicy.NUMA_NODE_LEVEL


def machine(sockets: int, nodes: int, cores: int, threads: int = 2, offline: str = "") -> CpuTopology:
    """Build a machine whose CPU ids count up by thread, core, node and socket; some CPUs may be offline."""
    missing = CpuSet.parse(offline)
    rows = []
    for cpu in range(sockets * nodes * cores * threads):
        core = cpu // threads
        node = core // cores
        if cpu not in missing:
            rows.append(CpuRow(cpu, core, node // nodes, node, node // nodes))
    return CpuTopology.of_rows(rows)


def held(text: str, policy: ExclusivePolicy) -> Allocated:
    return Allocated().add(CpuSet.parse(text), policy)


def take(
    topo: CpuTopology, n: int, bind_request: BindRequest, taken: Allocated | None = None, **more: bool
) -> str:
    taken = taken or Allocated()
    free = free_cpus(taken, topo.cpus, bind_request.max_ref_count)
    return str(accumulate(topo, free, n, bind_request, taken, **more))


def test_no_more_cpus_than_requested_are_taken() -> None:
    assert take(machine(3, 1, 4), 11, FULL) == "0-10"
    assert take(machine(4, 1, 4), 13, FULL, held("8", ExclusivePolicy.NONE)) == "0-7,9-13", (
        "the remaining CPU is in a broken core"
    )


def test_the_last_core_fits_exactly() -> None:
    assert take(machine(3, 1, 4), 10, FULL) == "0-9"


def test_cores_are_avoided_in_a_socket_and_everywhere() -> None:
    topo, free = machine(1, 2, 2), CpuSet.parse("1-2,4,6")
    for level in (CORE, NODE):
        bind_request, others = replace(SPREAD, exclusive=level), held("0", level)
        assert str(accumulate(topo, free, 3, bind_request, others)) == "2,4,6"
        literal = accumulate(topo, free, 3, bind_request, others, degrade=False)
        assert str(literal) == {CORE: "2,4,6", NODE: "1-2,4"}[level], "only PCPULevel, as Koordinator's code"
    bind_request, others = replace(FULL, exclusive=CORE), held("0", CORE)
    assert take(machine(2, 1, 2), 6, bind_request, others) == "2-7"
    assert take(machine(2, 1, 2), 7, bind_request, others) == "1-7", "avoided cores are taken last"


def test_threads_used_by_fewer_pods_are_preferred() -> None:
    bind_request = replace(SPREAD, max_ref_count=2)
    assert take(machine(1, 1, 2), 2, bind_request, Allocated({0: 1, 2: 1})) == "1,3"


@pytest.mark.parametrize(
    ("topo", "free", "n", "policy", "most", "least"),
    [
        (machine(2, 1, 2), "1-7", 5, BindPolicy.SPREAD_BY_PCPUS, "1-4,6", "1-2,4-6"),
        (machine(1, 2, 2), "0,2,4,6-7", 3, BindPolicy.FULL_PCPUS, "4,6-7", "0,6-7"),
    ],
)
def test_single_threads_come_from_where_the_strategy_says(
    topo: CpuTopology, free: str, n: int, policy: BindPolicy, most: str, least: str
) -> None:
    for strategy, expected in ((NumaStrategy.MOST_ALLOCATED, most), (NumaStrategy.LEAST_ALLOCATED, least)):
        bind_request = BindRequest(policy, strategy=strategy)
        assert str(accumulate(topo, CpuSet.parse(free), n, bind_request, Allocated())) == expected


@pytest.mark.parametrize(
    ("offline", "n", "expected", "why"),
    [
        ("1", 3, "2-4", "whole cores first: those of two threads before the one that has one"),
        ("1", 7, "0,2-7", "a core with one thread is whole too"),
        ("8-15", 8, "0-7", "a node without CPUs is no node"),
        ("9,11,13,15", 4, "8,10,12,14", "the node with fewer CPUs is the fuller one"),
    ],
)
def test_units_are_sized_by_their_online_cpus(offline: str, n: int, expected: str, why: str) -> None:
    assert take(machine(2, 1, 4, offline=offline), n, FULL) == expected, why


@pytest.mark.parametrize("degrade", [True, False])
@pytest.mark.parametrize("level", [ExclusivePolicy.NONE, CORE, NODE])
@pytest.mark.parametrize(
    ("request_", "others", "most", "expected"),
    [
        (FULL, "", 1, {2: "0-1", 3: "0-2", 4: "0-3", 5: "0-4", 8: "0-7", 9: "0-8"}),
        (SPREAD, "", 1, {2: "0,2", 3: "0-2", 4: "0-3", 5: "0-2,4,6", 8: "0-7", 9: "0-2,4,6,8,10,12,14"}),
        (FULL, "1,3,5,7,9,11,13,15", 1, {2: "0,2", 3: "0,2,4", 5: "0,2,4,6,8"}),
        (SPREAD, "1,3,5,7,9,11,13,15", 1, {2: "0,2", 3: "0,2,4", 5: "0,2,4,6,8"}),
        (FULL, "0-15", 2, {2: "0-1", 4: "0-3", 5: "0-4", 9: "0-8"}),
        (SPREAD, "0-15", 2, {2: "0,2", 4: "0-3", 5: "0-2,4,6", 9: "0-2,4,6,8,10,12,14"}),
    ],
)
def test_where_no_cpu_or_every_cpu_is_to_be_avoided_the_first_ones_are_taken(
    request_: BindRequest,
    others: str,
    most: int,
    expected: dict[int, str],
    level: ExclusivePolicy,
    *,
    degrade: bool,
) -> None:
    bind_request = replace(request_, exclusive=level, max_ref_count=most)
    topo, taken = machine(2, 2, 2), held(others, level)
    assert {n: take(topo, n, bind_request, taken, degrade=degrade) for n in expected} == expected


def test_without_a_free_node_cores_are_avoided() -> None:
    topo, others = machine(1, 2, 4), held("0,8", NODE)
    bind_request = replace(SPREAD, exclusive=NODE)
    assert take(topo, 3, bind_request, others) == "2,4,6"
    assert take(topo, 3, bind_request, others, degrade=False) == "1-2,4", "as Koordinator's code"
    assert take(topo, 12, bind_request, others) == "1-7,9-12,14", "any CPU if necessary"


def test_cores_of_the_same_policy_are_avoided_by_whole_cores_too() -> None:
    topo, others = machine(1, 1, 3), held("0-1", CORE)
    bind_request = replace(FULL, exclusive=CORE, max_ref_count=2)
    assert take(topo, 2, replace(bind_request, exclusive=ExclusivePolicy.NONE), others) == "2-3", (
        "fewer pods use it"
    )
    both = others.add(CpuSet.parse("2-5")).add(CpuSet())
    assert take(topo, 4, bind_request, both) == "2-5"
    assert take(topo, 4, bind_request, both, degrade=False) == "0-3"
    assert take(topo, 6, bind_request, both) == "0-5", "only preferred"


def test_the_second_part_of_a_request_does_not_avoid_the_first() -> None:
    topo = machine(2, 1, 2)
    bind_request = replace(FULL, exclusive=NODE)
    assert take(topo, 3, bind_request, held("0,4", ExclusivePolicy.NONE)) == "1-3"


def test_the_steps_of_an_allocation_are_described() -> None:
    steps: list[str] = []
    topo = machine(3, 1, 4)
    accumulate(topo, topo.cpus, 11, FULL, Allocated(), steps=steps)
    assert steps == [
        "8 CPUs: all whole cores of socket 0: CPUs 0-7",
        "2 CPUs: as many whole cores as fit, of socket 1: CPUs 8-9",
        "1 CPU: single CPUs, one of each core in turn: CPU 10",
    ]
    steps.clear()
    bind_request = replace(SPREAD, strategy=NumaStrategy.LEAST_ALLOCATED)
    accumulate(topo, topo.cpus, 3, bind_request, Allocated(), steps=steps)
    assert steps == [
        "3 CPUs: one thread of each core of NUMA node 0, which has the most free (4): CPUs 0,2,4"
    ]


def test_a_request_for_more_cpus_than_are_available_is_refused() -> None:
    topo = machine(1, 1, 2)
    with pytest.raises(NotEnoughCpus, match="requested=5, available=4"):
        accumulate(topo, CpuSet.parse("0-3,70"), 5, FULL, Allocated())
    assert accumulate(topo, CpuSet(), 0, FULL, Allocated()) == CpuSet()


@st.composite
def requests(draw: st.DrawFn) -> tuple[CpuTopology, CpuSet, int, BindRequest, Allocated]:
    size = [draw(st.integers(1, most)) for most in (3, 2, 4, 3)]
    total = size[0] * size[1] * size[2] * size[3]
    ids = st.integers(0, total - 1)
    offline = CpuSet(draw(st.sets(ids, max_size=3)))
    topo = machine(*size, offline=str(offline)) if len(offline) < total else machine(*size)
    most = draw(st.integers(1, 2))
    counts = draw(st.dictionaries(ids, st.integers(1, most)))
    policies = {cpu: draw(st.sampled_from(ExclusivePolicy)) for cpu in counts}
    bind_request = BindRequest(
        draw(st.sampled_from((BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS))),
        exclusive=draw(st.sampled_from(ExclusivePolicy)),
        strategy=draw(st.sampled_from(NumaStrategy)),
        max_ref_count=most,
    )
    taken = Allocated(counts, policies)
    free = free_cpus(taken, topo.cpus, most)
    return topo, free, draw(st.integers(0, len(free))), bind_request, taken


@given(requests(), st.booleans())
def test_exactly_the_requested_number_of_free_cpus_is_taken_deterministically(
    request: tuple[CpuTopology, CpuSet, int, BindRequest, Allocated], degrade: bool
) -> None:
    topo, free, n, bind_request, taken = request
    steps: list[str] = []
    found = accumulate(topo, free, n, bind_request, taken, degrade=degrade, steps=steps)
    assert len(found) == n
    assert found <= free
    assert found == accumulate(topo, free, n, bind_request, taken, degrade=degrade)
    assert bool(steps) == (n > 0)


@given(requests())
def test_other_pods_are_avoided_if_a_node_has_room(
    request: tuple[CpuTopology, CpuSet, int, BindRequest, Allocated],
) -> None:
    topo, free, n, bind_request, taken = request
    if bind_request.exclusive not in (CORE, NODE):
        return
    theirs = taken.under(bind_request.exclusive)
    units = topo.cores if bind_request.exclusive is CORE else topo.nodes
    shunned = CpuSet()
    for bits in units.values():
        if bits & theirs.bits:
            shunned |= CpuSet.from_bits(bits)
    clean = free - shunned
    whole = [c for c in topo.cores.values() if not c & ~clean.bits]
    spread = bind_request.policy is BindPolicy.SPREAD_BY_PCPUS and topo.cpus_per_core > 1
    pieces = [c & clean.bits & -(c & clean.bits) for c in topo.cores.values()] if spread else whole
    if any(sum((piece & node).bit_count() for piece in pieces) >= n for node in topo.nodes.values()):
        assert accumulate(topo, free, n, bind_request, taken).isdisjoint(shunned)


@given(requests())
def test_the_policy_holds_if_a_node_has_room_for_it(
    request: tuple[CpuTopology, CpuSet, int, BindRequest, Allocated],
) -> None:
    topo, free, n, bind_request, taken = request
    bind_request = replace(bind_request, exclusive=ExclusivePolicy.NONE)
    if bind_request.policy is BindPolicy.FULL_PCPUS:
        sizes = {c.bit_count() for c in topo.cores.values()}
        pieces = [c for c in topo.cores.values() if not c & ~free.bits]
        possible = len(sizes) == 1 and n % topo.cpus_per_core == 0
    else:
        pieces = [c & free.bits & -(c & free.bits) for c in topo.cores.values()]
        possible = topo.cpus_per_core > 1
    if possible and any(sum((p & node).bit_count() for p in pieces) >= n for node in topo.nodes.values()):
        assert holds(topo, accumulate(topo, free, n, bind_request, taken), bind_request.policy)
