"""Effects of a change of a container's phase on the container and on other containers of its pod."""

from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import place
from proxy.engine.container_events import PhaseChanged
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_effects import NodeEffects, PutRecord
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.idset import Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Phase, Pod, Request
from proxy.topology.regular_machine import regular_machine

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)
NODE = Node(
    MACHINE,
    CpuTopology.of(MACHINE),
    static=True,
    policy=TopologyPolicy.BEST_EFFORT,
    scope=Scope.POD,
    reserved_memory={0: {"memory": 10 * MIB}},
)
REQUEST = Request(2048, 200_000, 100_000, 40 * MIB)


def resources(name: str, memory: int, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    amounts = {"cpu": 2000, "memory": memory * MIB}
    return ContainerResources(name, kind, amounts, amounts)


def with_container(state: NodeState, name: str, phase: Phase) -> NodeState:
    plan = place(state, state.pods["s"], name, 0, REQUEST, name)
    assert plan.container is not None, plan.verdict
    return plan.state.changed(put=(plan.container.in_phase(phase),))


def records(effects: NodeEffects) -> dict[str, object]:
    return {effect.key: effect.record for effect in effects if type(effect) is PutRecord}


def assigned_memory(state: NodeState) -> dict[str, int]:
    """Return the bytes that are set aside for each container of the pod."""
    aside = state.pods["s"].reserved_for_pod
    assert aside is not None
    return {part.name: sum(block.size for block in part.blocks) for part in aside.parts}


def test_the_memory_of_an_init_container_is_free_once_the_next_container_runs() -> None:
    # The container takes over 15 of the 40 MiB of the init container; 25 are left to it until it is released.
    requests = PodRequests("u", (resources("i", 40, ContainerKind.INIT), resources("c", 15)))
    pod = Pod("s", "u", "ns", "p", requests=requests)
    admission = admit(NodeState.empty(NODE), pod, REQUEST)
    state = with_container(admission.state.with_pod(admission.pod), "i", Phase.EXITED)
    state = with_container(state, "c", Phase.CREATED)
    assert assigned_memory(state) == {"i": 25 * MIB, "c": 15 * MIB}
    assert [block.affinity for block in state.containers["i"].placement.blocks] == [Mask((0,))]

    after, effects = handle(state, PhaseChanged("c", Phase.RUNNING))
    assert assigned_memory(after) == {"i": 0, "c": 15 * MIB}
    assert after.containers["i"].placement.blocks == ()
    assert after.containers["c"].placement == state.containers["c"].placement
    containers = {f"c/{i}": after.containers[i] for i in "ci"}
    assert records(effects) == {**containers, "p/s": after.pods["s"]}


def test_the_pod_is_not_recorded_again_if_no_init_container_held_memory() -> None:
    pod = Pod("s", "u", "ns", "p", requests=PodRequests("u", (resources("c", 15),)))
    admission = admit(NodeState.empty(NODE), pod, REQUEST)
    state = with_container(admission.state.with_pod(admission.pod), "c", Phase.CREATED)
    after, effects = handle(state, PhaseChanged("c", Phase.RUNNING))
    assert after.pods["s"] is state.pods["s"]
    assert records(effects).keys() == {"c/c"}


def test_a_start_of_an_unknown_container_changes_nothing_and_its_exit_outdates_lists_of_the_runtime() -> None:
    state = NodeState.empty(NODE)
    after, effects = handle(state, PhaseChanged("x", Phase.RUNNING))
    assert (after is state, effects) == (True, ())
    after, effects = handle(state, PhaseChanged("x", Phase.EXITED))
    assert (after.runtime.changes == state.runtime.changes, effects) == (False, ())
