from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from proxy.config import parse
from proxy.model.idset import CpuSet
from proxy.simulate.machines import NamedMachine, copies
from proxy.simulate.picture import NumaNodeRow, bar, columns
from proxy.simulate.pods import SimulatedPod
from proxy.simulate.simulation import Simulation, SimulationRules, simulate, simulated_nodes_of
from proxy.simulate.summary import Findings, find
from proxy.simulate.text import (
    FAILED,
    MACHINES,
    compare_lines,
    differences,
    differences_data,
    explain_lines,
    report,
)
from proxy.topology.regular_machine import regular_machine

MakePod = Callable[..., SimulatedPod]
STATIC = """
cpuManagerPolicy: static
admission: {sharedFloor: 0, sharedFloorPerNUMANode: 0}
"""
RESTRICTED = f"{STATIC}topologyManagerPolicy: restricted\nreservedSystemCPUs: 0,8\n"


def play(
    config: str,
    simulated_pods: Sequence[SimulatedPod],
    count: int = 1,
    source: str = "test",
    explain: str = "",
) -> tuple[Simulation, Findings]:
    rules = SimulationRules({}, explain=frozenset({explain}))
    read = parse(config, source)
    machines = copies([NamedMachine("m", regular_machine(2, 1, 4))], count)
    played = simulate(read, simulated_nodes_of(read, machines, rules), simulated_pods, rules)
    return played, find(played)


def row(cpus: int, owned: int, reserved: int = 0) -> NumaNodeRow:
    return NumaNodeRow(
        0, CpuSet(range(cpus)), CpuSet(range(owned)), CpuSet(range(owned, owned + reserved)), 0, None, {}
    )


@pytest.mark.parametrize(
    ("of", "scale", "drawn"),
    [
        (row(8, 3, 2), 1.0, "###==..."),
        (row(8, 0), 1.0, "........"),
        (row(8, 8), 1.0, "########"),
        (row(128, 64), 0.25, "#" * 16 + "." * 16),
        (row(128, 1), 0.25, "#" + "." * 31),
        (row(128, 127), 0.25, "#" * 31 + "."),
        (row(128, 125, 2), 0.25, "#" * 30 + "=."),
        (row(2, 1), 0.1, "#."),
        (row(0, 0), 1.0, ""),
    ],
)
def test_a_bar_hides_nothing(of: NumaNodeRow, scale: float, drawn: str) -> None:
    assert bar(of, scale) == drawn


def test_columns_that_are_empty_are_left_out() -> None:
    assert columns([["a", "", "b"], ["ccc", "", ""]]) == ["a    b", "ccc"]
    assert columns([]) == []


def test_a_report_counts_pods_and_cpus_and_draws_the_nodes(pod: MakePod) -> None:
    simulated_pods = [
        pod("a", cpu=4, memory="1Gi"),
        pod("b", cpu=4, memory="1Gi"),
        pod("c", cpu=4, memory="1Gi"),
    ]
    simulated_pods += [pod("d", requests={"cpu": "500m"})]
    lines = report(*play(RESTRICTED, simulated_pods), ["some note"], verbose=False)
    assert lines == [
        "m: 4 pods, 12 of 16 CPUs owned; requested: cpu 12.5 of 14, memory 3 GiB of 128 GiB",
        "  node 0  ####==..  4 owned  2 reserved  2 left  1 pod",
        "  node 1  ########  8 owned              0 left  2 pods",
        "  left 2 CPUs, 2 in whole cores; at most 2 on one node, or 2 in whole cores",
        "# owned by one container or pod, = reserved, . shared and left to be owned",
        "",
        "machines                      1",
        "pods                          4",
        "  placed                      4",
        "    together                  3  on as few NUMA nodes as there can be",
        "    spread                    0  on more NUMA nodes than there had to be",
        "    sharing                   1  given nothing that belongs to a NUMA node",
        "  rejected                    0  by the machine that was chosen for it",
        "  unschedulable               0  no machine has what is requested",
        "CPUs                         16",
        "  owned                      12",
        "  left                        2  without an owner, and not reserved",
        "    in whole cores            2",
        "    on one node               2  the most on any NUMA node (8 when it was empty)",
        "    the same in whole cores   2",
        "note: some note",
    ]


def test_what_failed_is_listed_with_its_reason(pod: MakePod) -> None:
    simulated_pods = [pod(f"wide{i}", cpu=14, memory="1Gi") for i in range(FAILED + 2)]
    simulated_pods += [pod("tall", cpu=99, memory="1Gi")]
    played = play(RESTRICTED.replace("restricted", "single-numa-node"), simulated_pods)
    short = report(*played, [], verbose=False)
    refused = [line for line in short if line.startswith("default/wide")]
    assert len(refused) == FAILED
    assert refused[0].startswith(
        "default/wide0: rejected on m, container c: TopologyAffinityError: Resources"
    )
    assert "  and 2 pods more like this (--verbose shows all)" in short
    assert "default/tall: unschedulable: m has too little cpu" in short
    full = report(*played, [], verbose=True)
    assert len([line for line in full if line.startswith("default/wide")]) == FAILED + 2
    assert not [line for line in full if "--verbose" in line]


def test_only_some_machines_are_drawn(pod: MakePod) -> None:
    played = play(STATIC, [pod()], count=MACHINES + 3)
    short = report(*played, [], verbose=False)
    assert "and 3 machines more (--verbose shows all)" in short
    assert sum(line.startswith("m-") for line in short) == MACHINES
    assert sum(line.startswith("m-") for line in report(*played, [], verbose=True)) == MACHINES + 3


def test_what_is_spread_is_named(pod: MakePod) -> None:
    simulated_pods = [pod(cpu=6, memory="1Gi"), pod(cpu=6, memory="1Gi"), pod("torn", cpu=3, memory="1Gi")]
    lines = report(*play(STATIC, simulated_pods), [], verbose=True)
    assert lines[-1] == "default/torn: spread on m: given something on NUMA nodes 0-1, 1 could hold it"


def test_decisions_are_reported(pod: MakePod) -> None:
    simulated_pods = [pod("a", cpu=2, memory="1Gi"), pod("b", cpu=2, memory="1Gi")]
    played, _ = play(STATIC, simulated_pods, explain="default/a")
    lines = explain_lines(played.results[0], 100)
    assert lines[0] == "default/a: placed on m"
    assert any("default/a/c was admitted with CPUs 0,8" in line for line in lines)
    untold = explain_lines(played.results[1], 100)
    assert untold[0] == "default/b: placed on m"
    assert untold[1].startswith("  c: Guaranteed container with 2 whole CPUs")


def test_a_refusal_is_reported_once(pod: MakePod) -> None:
    config = RESTRICTED.replace("restricted", "single-numa-node")
    played, _ = play(config, [pod("a", cpu=14, memory="1Gi")], explain="default/a")
    lines = explain_lines(played.results[0], 200)
    assert lines[0] == "default/a: rejected on m, container c"
    assert lines[2].startswith("default/a/c was rejected: ")


def test_two_rehearsals_side_by_side(pod: MakePod) -> None:
    simulated_pods = [
        pod("a", cpu=6, memory="1Gi"),
        pod("b", cpu=6, memory="1Gi"),
        pod("c", cpu=3, memory="1Gi"),
    ]
    one, other = (
        play(STATIC, simulated_pods, source="one.yaml"),
        play(f"{STATIC}topologyManagerPolicy: restricted", simulated_pods, source="two.yaml"),
    )
    lines = compare_lines(*one, *other, ["n"], verbose=False)
    assert lines[:2] == ["A: one.yaml", "B: two.yaml"]
    table = {line[:28].strip(): line[28:].split() for line in lines}
    assert table["placed"] == ["3", "2", "-1"]
    assert table["rejected"] == ["0", "1", "+1"]
    assert table["TopologyAffinityError"] == ["0", "1", "+1"]
    assert table["together"] == ["2", "2"]
    assert table["spread"] == ["1", "0", "-1"]
    assert "1 pod has a different result; 0 others only run on another machine" in lines
    assert "1 pod: spread under A, rejected (TopologyAffinityError) under B" in lines
    assert "  default/c" in lines
    changed = differences(*one, *other)
    assert differences_data(changed)[0]["changed"] == ["fate", "reason", "together"]
    assert differences_data(changed)[0]["b"]["outcome"] == "refused (TopologyAffinityError)"
    verbose = compare_lines(*one, *other, [], verbose=True)
    at = verbose.index("default/c")
    assert verbose[at + 1] == "  A: placed on m, spread"
    assert verbose[at + 2].startswith("  B: rejected on m, container c: TopologyAffinityError")


def test_the_largest_group_comes_first(pod: MakePod) -> None:
    simulated_pods = [pod(cpu=6, memory="1Gi"), pod(cpu=6, memory="1Gi"), pod(cpu=3, memory="1Gi")]
    one, other = play("", simulated_pods), play(STATIC, simulated_pods)
    groups = [line for line in compare_lines(*one, *other, [], verbose=False) if " under A, " in line]
    assert groups == [
        "2 pods: sharing under A, together under B",
        "1 pod: sharing under A, spread under B",
    ]
    assert {each.changes for each in differences(*one, *other)} == {("together",)}


def test_the_same_twice_differs_in_nothing(pod: MakePod) -> None:
    simulated_pods = [pod(cpu=6, memory="1Gi"), pod(cpu=60, memory="1Gi")]
    one, other = play(STATIC, simulated_pods), play(STATIC, simulated_pods)
    assert differences(*one, *other) == []
    lines = compare_lines(*one, *other, [], verbose=False)
    assert "0 pods have a different result; 0 others only run on another machine" in lines


def test_a_missing_machine_is_not_a_shortage(pod: MakePod) -> None:
    one = play(STATIC, [pod("a", node_name="gone")])
    assert "    no machine of that name   1" in report(*one, [], verbose=False)
    other = play(STATIC, [pod("a", node_name="m")])
    lines = compare_lines(*one, *other, [], verbose=False)
    assert "1 pod: unschedulable (no machine of that name) under A, sharing under B" in lines
