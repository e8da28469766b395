"""Binding: required policies, preferred CPUs, even parts, and nodes that are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.koordinator.bind import bind, bind_on_nodes, even_shares, holds
from proxy.allocation.koordinator.bind_request import (
    Allocated,
    BindError,
    BindRequest,
    RequiredPolicyError,
    WholeCoresError,
)
from proxy.allocation.packed import NotEnoughCpus
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NumaStrategy
from tests.testkit.changed_copy import changed_copy as replace

FULL, SPREAD = BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS
EVENLY = BindRequest(strategy=NumaStrategy.DISTRIBUTE_EVENLY)


def machine(nodes: int, cores: int, threads: int = 2, offline: str = "") -> CpuTopology:
    """Build sockets of one node each; CPU ids count up by thread, core and node."""
    missing = CpuSet.parse(offline)
    total = nodes * cores * threads
    rows = (
        CpuRow(c, c // threads, n, n, n)
        for c in range(total)
        if c not in missing
        for n in (c // threads // cores,)
    )
    return CpuTopology.of_rows(rows)


def take(
    topo: CpuTopology, free: str, n: int, bind_request: BindRequest, taken: Allocated | None = None
) -> str:
    return str(bind(topo, CpuSet.parse(free), n, bind_request, taken))


TWO = machine(2, 4)  # 0-7, 8-15


@pytest.mark.parametrize(
    ("free", "n", "policy", "expected"),
    [
        ("0-15", 4, FULL, "0-3"),
        ("0,2-7,9-15", 6, FULL, "2-7"),
        ("0,2-5,9-15", 10, FULL, "2-5,10-15"),
        ("0-15", 0, FULL, ""),
        ("0-15", 4, SPREAD, "0,2,4,6"),
        ("1-15", 4, SPREAD, "1-2,4,6"),
        ("0-15,99", 8, SPREAD, "0,2,4,6,8,10,12,14"),
    ],
)
def test_required_policies_hold(free: str, n: int, policy: BindPolicy, expected: str) -> None:
    assert take(TWO, free, n, BindRequest(policy, required=True)) == expected


def test_required_policies_refuse() -> None:
    full, spread = BindRequest(FULL, required=True), BindRequest(SPREAD, required=True)
    with pytest.raises(WholeCoresError) as unaligned:
        take(TWO, "0-15", 3, full)
    message = "node(s) requested cpus not multiple cpus per core: requested=3, cpus per core=2"
    assert str(unaligned.value) == message
    with pytest.raises(
        NotEnoughCpus, match="not enough cpus available to satisfy request: requested=4, avail"
    ):
        take(TWO, "0,2,4,6,8-9", 4, full)
    with pytest.raises(NotEnoughCpus, match="requested=9, available=8"):
        take(TWO, "0-15", 9, spread)
    assert take(TWO, "0,2,4,6,8-9", 4, BindRequest()) == "0,2,8-9", (
        "the policy is only preferred, and applied as far as possible"
    )


@pytest.mark.parametrize("strategy", list(NumaStrategy))
@pytest.mark.parametrize("preferred", ["", "0-1", "0-3,8-9"])
@pytest.mark.parametrize("policy", [FULL, SPREAD])
def test_a_refusal_names_what_is_requested_and_what_is_free(
    policy: BindPolicy, preferred: str, strategy: NumaStrategy
) -> None:
    request = BindRequest(policy, strategy=strategy, preferred=CpuSet.parse(preferred))
    with pytest.raises(NotEnoughCpus, match="requested=8, available=6"):
        take(TWO, "0-3,8-9", 8, request)
    assert take(TWO, "0-3,8-9", 6, request) == "0-3,8-9"


def test_whole_cores_of_different_sizes_add_up() -> None:
    odd = machine(3, 2, offline="1,5")  # node 0: a core of one thread and one of two; node 1 the same
    full = BindRequest(required=True)
    assert take(odd, "0-15", 4, full) == "8-11"
    assert take(odd, "0,2-4,6-7", 4, full) == "0,2-4", "a core of one thread is whole"
    assert take(odd, "0,2-4,6-7", 6, full) == "0,2-4,6-7"
    one_odd = machine(2, 2, offline="1")
    steps: list[str] = []
    found = bind(one_odd, CpuSet.parse("0,2-3,6-7"), 4, full, steps=steps)
    assert str(found) == "2-3,6-7", "not 0,2-3 and half a core"
    assert "once more, with cores of one size only" in steps
    wide = machine(2, 2, threads=4, offline="3,15")  # cores of 3 and of 4 threads
    with pytest.raises(RequiredPolicyError, match="required cpu bind policy FullPCPUs"):
        take(wide, "0-2,12-14", 4, full)


def test_preferred_cpus_come_first() -> None:
    bind_request = BindRequest(preferred=CpuSet.parse("9-13"))
    assert take(TWO, "0-15", 4, bind_request) == "10-13"
    assert take(TWO, "0-10,12-15", 6, bind_request) == "9-10,12-15", "the remainder is chosen freely"
    assert take(TWO, "0-15", 2, replace(bind_request, preferred=CpuSet([99]))) == "0-1"
    required = replace(bind_request, required=True, preferred=CpuSet.parse("9-11"))
    assert take(TWO, "0-15", 4, required) == "8-11"
    assert take(TWO, "0-7,9-15", 4, required) == "10-13", "half a core is not preferred"
    steps: list[str] = []
    bind(TWO, CpuSet.parse("0-10"), 2, bind_request, steps=steps)
    assert steps[0] == "first of the preferred CPUs that are free, 9-10"
    evenly = replace(EVENLY, preferred=CpuSet.parse("0-3"))
    assert take(TWO, "0-15", 8, evenly) == "0-3,8-11"


@pytest.mark.parametrize(
    ("free", "n", "policy", "expected", "why"),
    [
        ("0-15", 4, FULL, "0-3", "one node is enough"),
        ("0-15", 12, FULL, "0-5,8-13", "half of each, where LeastAllocated fills one first"),
        ("0-15", 10, FULL, "0-5,8-11", "in whole cores, one more from one of them"),
        ("0-15", 11, FULL, "0-5,8-12", "as even as it can be"),
        ("0-15", 10, SPREAD, "0-2,4,6,8-10,12,14", "threads of different cores first"),
        ("0-3,8-15", 12, FULL, "0-3,8-15", "what cannot be even is as near as can be"),
        ("0-3,8-15", 10, FULL, "0-3,8-13", "the emptier node gives the rest"),
        ("0-3,8,10,12,14", 6, FULL, "0-2,8,10,12", "too few whole cores: single CPUs, evenly"),
        ("0,8-15", 2, FULL, "8-9", "whole cores before broken ones"),
    ],
)
def test_even_parts_of_the_nodes_that_are_needed(
    free: str, n: int, policy: BindPolicy, expected: str, why: str
) -> None:
    assert take(TWO, free, n, replace(EVENLY, policy=policy)) == expected, why


def test_even_parts_avoid_nodes_and_cores_of_exclusive_pods() -> None:
    four = machine(4, 2)  # 0-3, 4-7, 8-11, 12-15
    others = Allocated().add(CpuSet([0]), ExclusivePolicy.NUMA_NODE_LEVEL)
    bind_request = replace(EVENLY, exclusive=ExclusivePolicy.NUMA_NODE_LEVEL)
    assert take(four, "1-15", 6, bind_request, others) == "4-9"
    assert take(four, "1-5,8-9", 3, bind_request, others) == "4-5,8"
    assert (
        take(four, "1-5,8-9", 3, replace(bind_request, exclusive=ExclusivePolicy.PCPU_LEVEL), others) == "1-3"
    )
    assert take(four, "1-15", 14, bind_request, others) == "2-15"
    cores = BindRequest(SPREAD, exclusive=ExclusivePolicy.PCPU_LEVEL, strategy=NumaStrategy.DISTRIBUTE_EVENLY)
    core = Allocated().add(CpuSet([0]), ExclusivePolicy.PCPU_LEVEL)
    assert take(TWO, "1-11", 4, cores, core) == "2-4,6"
    steps: list[str] = []
    bind(four, CpuSet.parse("1-15"), 8, bind_request, others, steps)
    assert steps[0] == "in even parts over NUMA nodes 1-2: 4 + 4"
    steps.clear()
    bind(TWO, CpuSet.parse("0-9"), 9, EVENLY, Allocated(), steps)
    assert steps[0] == "in even parts over NUMA nodes 0-1: 7 + 2", "in the order of the nodes"


def test_given_nodes_are_used() -> None:
    free = CpuSet.parse("0-15")
    assert str(bind_on_nodes(TWO, free, {1: 4, 0: 2}, BindRequest())) == "0-1,8-11"
    steps: list[str] = []
    bind_on_nodes(TWO, free, {1: 1}, BindRequest(), steps=steps)
    assert steps[0] == "1 of NUMA node 1"
    with pytest.raises(NotEnoughCpus, match="requested=9, available=8"):
        bind_on_nodes(TWO, free, {0: 9, 1: 1}, BindRequest())
    with pytest.raises(NotEnoughCpus, match="requested=2, available=0"):
        bind_on_nodes(TWO, free, {7: 2}, BindRequest())
    with pytest.raises(WholeCoresError):
        bind_on_nodes(TWO, free, {0: 2, 1: 1}, BindRequest(required=True))
    with pytest.raises(RequiredPolicyError):
        bind_on_nodes(TWO, free, {0: 1, 1: 1}, BindRequest(required=True))


def test_uneven_shares_of_whole_groups() -> None:
    assert even_shares({0: 7, 1: 3, 2: 1}, 8, 2) == {0: 6, 1: 2}
    assert even_shares({0: 7, 1: 3, 2: 1}, 10, 2) is None
    assert even_shares({}, 1) is None


def test_uneven_shares_are_as_even_as_the_emptiest_node_permits() -> None:
    assert even_shares({0: 5, 1: 5, 2: 3}, 12) == {0: 5, 1: 4, 2: 3}


counts = st.dictionaries(st.integers(0, 11), st.integers(0, 12), min_size=1, max_size=6)


@given(counts, st.integers(1, 40), st.sampled_from((1, 2)))
def test_shares_add_up_to_the_request_on_as_few_nodes_as_even_parts_need(
    has: dict[int, int], n: int, group: int
) -> None:
    n *= group
    shares = even_shares(has, n, group)
    if sum(count // group for count in has.values()) * group < n:
        assert shares is None
        return
    assert shares is not None
    assert sum(shares.values()) == n
    assert all(part <= has[node] and part % group == 0 for node, part in shares.items())
    parts = sorted(shares.values())
    if max(has.values()) >= n:
        assert parts == [n]
    full = {node for node, part in shares.items() if part == has[node] // group * group}
    even = n // len(parts) // group * group
    assert all(part >= even for node, part in shares.items() if node not in full)


@given(st.data())
def test_any_request_yields_the_requested_free_cpus_or_a_reason(data: st.DataObject) -> None:
    topo = (
        machine(
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(1, 4)),
            data.draw(st.integers(1, 3)),
            offline=data.draw(st.sampled_from(("", "1", "2,5", "0"))) or "",
        )
        if data.draw(st.booleans())
        else TWO
    )
    ids = st.sets(st.integers(0, max(topo.cpus, default=0)))
    free = CpuSet(data.draw(ids)) & topo.cpus
    others = Allocated().add(CpuSet(data.draw(ids)), data.draw(st.sampled_from(ExclusivePolicy)))
    bind_request = BindRequest(
        data.draw(st.sampled_from((FULL, SPREAD))),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(ExclusivePolicy)),
        data.draw(st.sampled_from(NumaStrategy)),
        CpuSet(data.draw(ids)),
    )
    n = data.draw(st.integers(0, len(free) + 1))
    try:
        found = bind(topo, free, n, bind_request, others)
    except (NotEnoughCpus, BindError):
        assert n > len(free) or bind_request.required
        return
    assert len(found) == n
    assert found <= free
    assert not bind_request.required or holds(topo, found, bind_request.policy)
    assert found == bind(topo, free, n, bind_request, others, [])
