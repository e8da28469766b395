"""The steps that the allocators report."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_policy import CpuPolicy, CpuState, take
from proxy.allocation.cpu_static import allocate, take_under
from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import CpuOptions
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.oracles.cpu_manager_state import start
from tests.oracles.pod_level_cpu import allocate_pod

TOPO = (
    CpuTopology.of_rows(  # two sockets of two nodes of two caches of two cores: core c has CPUs c and c + 16
        CpuRow(c + 16 * t, c, c // 8, c // 4, c // 2) for t in range(2) for c in range(16)
    )
)
UNCORE = {"prefer_align_cpus_by_uncorecache": True}
SPREAD = {"distribute_cpus_across_cores": True}
NUMA = {"distribute_cpus_across_numa": True}


@pytest.mark.parametrize(
    ("available", "n", "options", "expected"),
    [
        ("0-31", 16, {}, ["socket 0 whole: CPUs 0-7,16-23"]),
        ("0-31", 24, {}, ["socket 0 whole: CPUs 0-7,16-23", "NUMA node 2 whole: CPUs 8-11,24-27"]),
        ("0-31", 3, {}, ["1 whole core of NUMA node 0: CPUs 0,16", "1 single CPU of core 1: CPU 1"]),
        (
            "1-5,17-21",
            9,
            {},
            [
                "2 whole cores of NUMA node 1: CPUs 4-5,20-21",
                "2 whole cores of NUMA node 0: CPUs 1-2,17-18",
                "1 single CPU of core 3: CPU 3",
            ],
        ),
        ("0-3", 3, {}, ["3 single CPUs of NUMA node 0: CPUs 0-2"]),
        ("0-31", 4, UNCORE, ["uncore cache 0 whole: CPUs 0-1,16-17"]),
        ("1-31", 3, UNCORE, ["all that was still wanted from uncore cache 0: CPUs 1,16-17"]),
        ("0-31", 4, SPREAD, ["4 single CPUs of NUMA node 0: CPUs 0-3"]),
        ("0-31", 10, NUMA, ["5 CPUs from each of NUMA nodes 0-1: CPUs 0-2,4-6,16-17,20-21"]),
        (
            "0-31",
            25,
            NUMA,
            [
                "6 CPUs from each of NUMA nodes 0-3: CPUs 0-2,4-6,8-10,12-14,16-18,20-22,24-26,28-30",
                "1 more of NUMA node 0: CPU 3",
            ],
        ),
        ("0-31", 1, NUMA, ["1 CPU of NUMA node 0: CPU 0"]),
        ("0-31", 0, {}, []),
        (
            "0,4-5",
            3,
            {**NUMA, "full_pcpus_only": True},
            ["1 single CPU of core 0: CPU 0", "2 single CPUs of NUMA node 1: CPUs 4-5"],
        ),
        (
            "0-1,16,20",
            4,
            {**NUMA, "full_pcpus_only": True},
            [
                "1 whole core of NUMA node 0: CPUs 0,16",
                "1 single CPU of core 1: CPU 1",
                "1 single CPU of core 4: CPU 20",
            ],
        ),
    ],
)
def test_steps_say_which_units_were_taken(
    available: str, n: int, options: dict[str, bool], expected: list[str]
) -> None:
    steps = ["before"]
    chosen = CpuOptions(**options)
    taken = take(TOPO, chosen, CpuSet.parse(available), n, steps)
    assert steps == ["before", *expected]
    assert taken == take(TOPO, chosen, CpuSet.parse(available), n), "the same CPUs with and without a trace"


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 32),
    st.sampled_from([{}, UNCORE, SPREAD, NUMA, {**NUMA, "full_pcpus_only": True}]),
)
def test_steps_name_every_cpu_once(free: int, n: int, options: dict[str, bool]) -> None:
    steps: list[str] = []
    available = CpuSet.from_bits(free)
    taken = take(TOPO, CpuOptions(**options), available, min(n, len(available)), steps)
    named = [CpuSet.parse(step.rpartition(" ")[2]) for step in steps]
    assert sum(len(cpus) for cpus in named) == len(taken)
    assert CpuSet(cpu for cpus in named for cpu in cpus) == taken
    assert all(re.fullmatch(r".+: CPUs? [0-9,-]+", step) for step in steps)


def test_leaving_the_nodes_of_the_hint_is_reported() -> None:
    def reported(free: str, n: int, nodes: list[int] | None, *, by_socket: bool = False) -> list[str]:
        steps: list[str] = []
        policy = CpuPolicy.of(TOPO, CpuOptions(align_by_socket=by_socket))
        affinity = None if nodes is None else Mask(nodes)
        take_under(policy, CpuState(CpuSet.parse(free)), n, affinity, CpuSet(), steps)
        return steps

    whole = "2 whole cores of NUMA node 0: CPUs 0-1,16-17"
    assert reported("0-1,16-17,12-15,28-31", 4, [0, 1]) == [whole]
    assert reported("0-1,16-17,12-13,28-29", 6, [0, 1]) == [
        whole,
        "NUMA nodes 0-1 had only 4 free CPUs, 2 more from NUMA node 3",
        "1 whole core of NUMA node 3: CPUs 12,28",
    ]
    assert reported("0-1,16-17", 4, [2])[0] == "NUMA node 2 had no free CPUs, 4 more from NUMA node 0"
    assert reported("0-1,16-17", 4, None) == [whole]
    away = "the sockets of NUMA node 1 had only 1 free CPU, 1 more from NUMA node 2"
    assert reported("0,8", 2, [1], by_socket=True)[1] == away


def test_allocations_pass_the_trace_on() -> None:
    amounts = {"cpu": 2000, "memory": 1}
    policy = CpuPolicy.of(TOPO)
    steps: list[str] = []
    pod = PodRequests(
        "p", (ContainerResources("a", ContainerKind.APP, amounts, amounts), ContainerResources("b"))
    )
    after = allocate(policy, start(policy), pod, "a", Mask([3]), steps)
    assert steps == ["1 whole core of NUMA node 3: CPUs 12,28"]
    allocate(policy, after, pod, "a", Mask([3]), steps)
    assert len(steps) == 1, "CPUs that it owns are not taken again"
    bubble: list[str] = []
    allocate_pod(
        policy, start(policy), PodRequests("p", pod.containers, True, {"cpu": 3000}, True), steps=bubble
    )
    assert bubble == [
        "1 whole core of NUMA node 0: CPUs 0,16",
        "1 single CPU of core 1: CPU 1",
        "container a of them: CPUs 0,16",
        "container b of them: CPU 1",
    ]
