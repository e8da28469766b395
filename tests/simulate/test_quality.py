from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.allocation.devices.state import RegisteredDevice
from proxy.config import parse
from proxy.engine.node import Node
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.requests import MEMORY
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.simulate.machines import NamedMachine
from proxy.simulate.nodes import SimulatedNode
from proxy.simulate.picture import lines_of, rows_of
from proxy.simulate.pods import SimulatedPod
from proxy.simulate.quality import AlignmentMeter, _nodes_of_devices, alignments_of, remaining_cpus_of
from proxy.simulate.simulation import SimulationRules, simulate, simulated_nodes_of
from proxy.simulate.summary import find
from proxy.topology.regular_machine import regular_machine

GPU = "example.com/gpu"
MACHINE = regular_machine(2, 2, 4, 2, mem_bytes_per_node=8 << 30)  # 4 nodes of 8 CPUs
PLUGIN = {
    GPU: {
        "a": RegisteredDevice("a", Mask([0])),
        "b": RegisteredDevice("b", Mask([1])),
        "wide": RegisteredDevice("wide", Mask([2, 3])),
        "free": RegisteredDevice("free"),
        "ill": RegisteredDevice("ill", Mask([3]), healthy=False),
    }
}


def simulated_node(config: str = "cpuManagerPolicy: static") -> SimulatedNode:
    return simulated_nodes_of(parse(config, "test"), [NamedMachine("m", MACHINE)], SimulationRules(PLUGIN))[0]


@pytest.fixture
def node() -> Node:
    return simulated_node().node


def container(
    cpus: str = "",
    memory: tuple[str, int] | None = None,
    devices: tuple[str, ...] = (),
    phase: Phase = Phase.RUNNING,
) -> Container:
    blocks = (Block(Mask.parse(memory[0]), MEMORY, memory[1] << 30),) if memory else ()
    pool = Pool.OWN if cpus else Pool.SHARED
    given = ((GPU, devices),) if devices else ()
    placement = Placement(pool, CpuSet.parse(cpus), Mask([0]), blocks=blocks, devices=given)
    return Container("id", "c", Pod("s", "u", "n", "p"), Request(), placement, phase)


@pytest.mark.parametrize(
    ("placed", "nodes", "least"),
    [
        (container("0-3"), "0", 1),
        (container("0-3,16-19"), "0", 1),
        (container("0-1,4-5"), "0-1", 1),
        (container("0-3,16-19,4"), "0-1", 2),
        (container("0-1", ("0", 1)), "0", 1),
        (container("0-1", ("1", 1)), "0-1", 1),
        (container(memory=("0-1", 9)), "0-1", 2),
        (container("0-1", devices=("a",)), "0", 1),
        (container("0-1", devices=("b",)), "0-1", 1),
        (container("0-1", devices=("a", "b")), "0-1", 2),
        (container("8-9", devices=("wide",)), "2", 1),
        (container("12-13", devices=("wide",)), "3", 1),
        (container(devices=("wide",)), "2", 1),
        (container("0-1", devices=("free",)), "0", 1),
        (container("0-1", ("2", 1), ("a",)), "0,2", 1),
    ],
)
def test_where_a_container_alignments(node: Node, placed: Container, nodes: str, least: int) -> None:
    alignment = AlignmentMeter().alignment(node, placed)
    assert alignment is not None
    assert (str(alignment.nodes), alignment.least) == (nodes, least)
    assert alignment.together is (len(alignment.nodes) <= least)


def test_what_was_given_nothing_or_has_ended_lies_nowhere(node: Node) -> None:
    assert alignments_of(AlignmentMeter(), node, [container(), container(devices=("free",))]) == []
    assert alignments_of(AlignmentMeter(), node, [container("0", phase=Phase.EXITED)]) == []


def test_what_is_left_in_one_piece(node: Node) -> None:
    # Node 0 has core 3 (CPUs 3,19) and the second threads of 0 and 1; node 1 one thread of each core.
    left = remaining_cpus_of(node, CpuSet.parse("3,19,16,17,4-7,8"))
    assert (left.cpus, left.whole, left.largest, left.largest_whole, left.largest_when_empty) == (
        9,
        2,
        4,
        2,
        8,
    )
    empty = remaining_cpus_of(node, CpuSet())
    assert (empty.cpus, empty.whole, empty.largest, empty.largest_whole) == (0, 0, 0, 0)


def test_reserved_cpus_do_not_count_as_free() -> None:
    one = simulated_node("cpuManagerPolicy: static\nreservedSystemCPUs: 0,4,8,12")
    left = remaining_cpus_of(one.node, one.ownable)
    assert (left.cpus, left.whole, left.largest, left.largest_whole, left.largest_when_empty) == (
        28,
        24,
        7,
        6,
        7,
    )


@pytest.mark.parametrize(
    ("touched", "near", "nodes"),
    [
        ([], [[0, 1], [1, 2]], [1]),
        ([0], [[0, 1], [1, 2]], [0, 1]),
        ([], [[3], [2, 3], [0]], [0, 3]),
        ([], [[0, 1], [2, 3], [1, 2]], [0, 2]),
        ([5], [], [5]),
        ([], [[node, node + 1] for node in range(0, 32, 2)], list(range(0, 32, 2))),
    ],
)
def test_devices_that_are_near_to_several_nodes_count_on_the_fewest(
    touched: list[int], near: list[list[int]], nodes: list[int]
) -> None:
    found = _nodes_of_devices(Mask(touched).bits, map(Mask, near))
    assert Mask.from_bits(found) == Mask(nodes)


def test_rows_show_what_is_on_each_node(pod: Callable[..., SimulatedPod]) -> None:
    config = parse(
        "cpuManagerPolicy: static\nreservedSystemCPUs: 0,16\ntopologyManagerPolicy: restricted\n"
        "memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]",
        "test",
    )
    simulated_nodes = simulated_nodes_of(config, [NamedMachine("m", MACHINE)], SimulationRules(PLUGIN))
    played = simulate(
        config,
        simulated_nodes,
        [pod(cpu=2, memory="2Gi", **{"example.com_gpu": 1}), pod(cpu=2, memory="1Gi")],
        SimulationRules(PLUGIN),
    )
    assert [result.outcome for result in played.results] == ["placed", "placed"]
    first, second, _, fourth, nowhere = rows_of(simulated_nodes[0])
    assert (str(first.reserved), len(first.owned), len(first.remaining), first.pods) == ("0,16", 4, 2, 2)
    assert first.memory == (3 << 30, 7 << 30)
    assert first.devices == {GPU: (1, 1)}
    assert (len(second.owned), len(second.remaining), second.memory, second.pods) == (0, 8, (0, 8 << 30), 0)
    assert fourth.devices == {GPU: (0, 1)}, "the ill one counts as nothing that can be given"
    assert (nowhere.node, nowhere.devices, nowhere.pods) == (None, {GPU: (0, 1)}, 0)


def test_a_summary_adds_up(pod: Callable[..., SimulatedPod]) -> None:
    config = parse("cpuManagerPolicy: static\ntopologyManagerPolicy: restricted", "test")
    rules = SimulationRules({})
    simulated_pods = [
        *(pod(cpu=6, memory="1Gi") for _ in range(5)),
        pod(requests={"cpu": 1}),
        pod(cpu=64, memory="1Gi"),
        pod(cpu=1, memory="1Ti"),
    ]
    summary = find(
        simulate(
            config, simulated_nodes_of(config, [NamedMachine("m", MACHINE)], rules), simulated_pods, rules
        )
    ).summary
    assert (summary.machines, summary.pods, summary.cpus) == (1, 8, 32)
    assert (summary.placed, summary.together, summary.spread, summary.sharing) == (5, 4, 0, 1)
    assert summary.rejected == {"TopologyAffinityError": 1}
    assert summary.unschedulable == {"cpu": 1, "memory": 1}
    assert (summary.owned, summary.left, summary.whole) == (24, 8, 8)
    assert (summary.largest, summary.largest_whole, summary.largest_when_empty) == (2, 2, 8)


def test_a_device_of_no_node_has_a_row_of_its_own(pod: Callable[..., SimulatedPod]) -> None:
    rules = SimulationRules({GPU: {"free": RegisteredDevice("free")}})
    config = parse("cpuManagerPolicy: static", "test")
    simulated_nodes = simulated_nodes_of(config, [NamedMachine("m", MACHINE)], rules)
    simulate(config, simulated_nodes, [pod(cpu=2, memory="1Gi", **{"example.com_gpu": 1})], rules)
    assert [(row.node, row.pods) for row in rows_of(simulated_nodes[0])] == [
        (0, 1),
        (1, 0),
        (2, 0),
        (3, 0),
        (None, 1),
    ]
    assert [line.split() for line in lines_of(simulated_nodes[0])][5] == [
        "no",
        "node",
        GPU,
        "1",
        "of",
        "1",
        "1",
        "pod",
    ]


def test_the_largest_piece_is_looked_for_on_all_machines(pod: Callable[..., SimulatedPod]) -> None:
    config = parse("cpuManagerPolicy: static", "test")
    machines = [NamedMachine("a", MACHINE), NamedMachine("b", regular_machine(1, 1, 2))]
    simulated_pods = [pod(node_name="a", cpu=1, memory="1Gi"), pod(node_name="b", cpu=1, memory="1Gi")]
    summary = find(
        simulate(
            config,
            simulated_nodes_of(config, machines, SimulationRules({})),
            simulated_pods,
            SimulationRules({}),
        )
    ).summary
    assert (summary.left, summary.largest, summary.largest_whole, summary.largest_when_empty) == (34, 8, 8, 8)
