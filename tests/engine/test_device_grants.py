"""Devices that topoproxy assigns, as playbooks of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.allocate import QueryPreference
from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.call_answers import AllocateFirst, Forward, Refuse, ReserveFirst
from proxy.engine.container_events import (
    AllocateFailed,
    ContainerFound,
    CreateRequested,
    CreateResumed,
    CreateWithoutDevices,
    DevicesAllocated,
)
from proxy.engine.handle import handle
from proxy.engine.held_devices import DeviceRecord, load_record, record_of, salvaged
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_effects import NodeEffects, NotifyFailed, PlanDecided, PodDecided, PutRecord
from proxy.engine.node_events import (
    DevicesChanged,
    DevicesImported,
    EnforcementChanged,
    LedgerRead,
    ModeChanged,
    NodeEvent,
    RuntimeListed,
    TakeoverChanged,
)
from proxy.engine.owners import ReservationCpus
from proxy.engine.pod_events import (
    PodLearned,
    SandboxFailed,
    SandboxRemoved,
    SandboxRequested,
    SandboxRunning,
    SandboxStopped,
)
from proxy.engine.state import NodeState
from proxy.model.devices import AllocateAnswer, DeviceNode
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.pod_selection import PodSelection
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, KubeQos, Phase, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
NIC, GPU = "example.com/nic", "example.com/gpu"
NICS = {f"nic{i}": RegisteredDevice(f"nic{i}", Mask((i // 2,))) for i in range(4)}
ANSWER = AllocateAnswer(envs={"NIC": "nic0"}, devices=(DeviceNode("/dev/nic0", "/dev/nic0", "rw"),))


class DeviceGrantScenario:
    """A node with NICs, and the events of a test."""

    def __init__(self, node: Node = NODE, **devices: Any) -> None:
        self.state = NodeState.empty(node)
        self.play(DevicesChanged(NIC, devices or NICS))

    def play(self, event: NodeEvent) -> NodeEffects:
        self.state, effects = handle(self.state, event)
        assert violations(self.state) == []
        return effects

    def pod(self, uid: str, *containers: ContainerResources, kube: KubeQos = KubeQos.BURSTABLE) -> Pod:
        pod = Pod(f"s-{uid}", uid, "ns", uid, kube_qos=kube, requests=PodRequests(uid, containers))
        self.play(PodLearned(pod))
        return pod

    def create(self, pod: Pod, name: str = "c", request: Request | None = None, **more: Any) -> Any:
        """Decide a create; return the answer."""
        last = self.play(CreateRequested(pod, name, 0, request or Request(), f"{pod.uid}/{name}", **more))[-1]
        return last.answer if type(last) is PlanDecided else last

    def given(self, pod: Pod, name: str = "c", answer: AllocateAnswer = ANSWER) -> Any:
        """Let plugins answer for a create; return its outcome."""
        waiting = self.state.devices.unanswered(pod.key, name)
        self.play(DevicesAllocated(pod.key, name, dict.fromkeys(waiting, answer), waiting))
        return self.play(CreateResumed(self.state.containers[f"{pod.uid}/{name}"]))[-1]

    def held(self, pod: Pod, name: str = "c", resource: str = NIC) -> set[str]:
        return set(self.state.devices.of_container(pod.key, name, resource))


def resources(
    count: int = 1, name: str = "c", kind: ContainerKind = ContainerKind.APP, **more: int
) -> ContainerResources:
    limits = {NIC: count} if count else {}
    return ContainerResources(name, kind, dict(more), {**more, **limits})


def records(effects: NodeEffects) -> dict[str, object]:
    return {effect.key: effect.record for effect in effects if type(effect) is PutRecord}


def test_the_newest_device_list_of_a_resource_takes_effect() -> None:
    scenario = DeviceGrantScenario()
    assert scenario.state.devices.available(NIC) == NICS.keys()
    ill = RegisteredDevice("nic0", Mask((0,)), healthy=False)
    assert scenario.play(DevicesChanged(NIC, {"nic0": ill, "nic1": NICS["nic1"]})) == (), (
        "it is known already"
    )
    assert scenario.state.devices.available(NIC) == {"nic1"}
    scenario.play(TakeoverChanged(not NODE.static, CpuSet()))
    assert scenario.state.devices.available(NIC) == {"nic1"}, "a change of the rules keeps the devices"
    assert records(scenario.play(DevicesChanged(NIC, None))) == {f"dr/{NIC}": None}
    assert scenario.state.devices.registered == {}
    assert scenario.play(DevicesChanged(NIC, None)) == (), "withdrawn twice"


def test_a_create_reserves_devices_and_is_forwarded_with_the_allocate_responses() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources(2))
    effects = scenario.play(CreateRequested(pod, "c", 0, Request(), "a/c"))
    container = scenario.state.containers["a/c"]
    assert effects[-1].answer == AllocateFirst()  # type: ignore[union-attr]
    assert container.placement.devices == ((NIC, ("nic0", "nic1")),)
    assert container.placement.pool is Pool.SHARED, "it owns no CPUs"
    assert records(effects) == {"d/a": {"c": {NIC: {"ids": ("nic0", "nic1"), "answer": None}}}}
    done = scenario.play(DevicesAllocated("a", "c", {NIC: ANSWER, GPU: ANSWER}, {NIC: ("nic0", "nic1")}))
    assert load_record(records(done)["d/a"])["c"][NIC].answer == ANSWER  # type: ignore[arg-type]
    assert scenario.state.devices.answers_of("a", "c") == {NIC: ANSWER}, "only for the devices that it holds"
    assert isinstance(scenario.play(CreateResumed(container))[-1], Forward)


def test_two_creates_at_the_same_time_get_different_devices() -> None:
    scenario = DeviceGrantScenario()
    one, two, three = (scenario.pod(uid, resources(2)) for uid in "abc")
    assert isinstance(scenario.create(one), AllocateFirst)
    assert isinstance(scenario.create(two), AllocateFirst), "while Allocate of the first is in flight"
    assert scenario.held(one) | scenario.held(two) == NICS.keys()
    refusal = scenario.create(three)
    assert isinstance(refusal, Refuse)
    assert refusal.message == (
        f"UnexpectedAdmissionError: Allocate failed due to requested number of devices unavailable for {NIC}."
        " Requested: 2, Available: 0, which is unexpected (ns/c/c)"
    )


def test_a_failed_allocate_releases_the_reserved_devices() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources(3))
    scenario.create(pod)
    assert records(scenario.play(AllocateFailed("a", "c", {NIC: ("nic0", "nic1", "nic2")}))) == {"d/a": None}
    refused = scenario.play(CreateWithoutDevices(scenario.state.containers["a/c"], "it hangs"))
    assert NotifyFailed("a/c") in refused
    assert refused[-1] == Refuse(
        9, "UnexpectedAdmissionError: Allocate failed due to it hangs, which is unexpected (ns/a/c)"
    )
    assert (scenario.state.devices.available(NIC), scenario.state.containers.get("a/c")) == (
        NICS.keys(),
        None,
    )
    allocated = {NIC: ("nic0", "nic1", "nic2")}
    assert scenario.play(AllocateFailed("a", "c", allocated)) == ()
    assert scenario.play(DevicesAllocated("a", "c", {NIC: ANSWER}, allocated)) == (), (
        "the answer comes too late"
    )
    assert isinstance(scenario.create(pod), AllocateFirst), "the next attempt"


def test_a_container_keeps_its_devices_until_its_pod_is_removed() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources())
    scenario.create(pod)
    scenario.given(pod)
    scenario.play(CreateWithoutDevices(scenario.state.containers["a/c"], "a hook refuses"))
    assert scenario.held(pod) == {"nic0"}, "the next attempt gets the same"
    scenario.play(DevicesChanged(NIC, {}))
    assert isinstance(scenario.create(pod), AllocateFirst), "although it has vanished"
    assert isinstance(scenario.given(pod), Forward)
    scenario.play(DevicesChanged(NIC, None))
    assert isinstance(scenario.create(pod), AllocateFirst), "although the resource was withdrawn"
    scenario.play(DevicesChanged(NIC, NICS))
    again = structs.replace(pod, sandbox_id="s2", attempt=1)
    scenario.play(SandboxRunning(again))
    scenario.play(SandboxStopped("s-a"))
    assert scenario.held(pod) == {"nic0"}, "the pod has another sandbox"
    assert records(scenario.play(SandboxRemoved("s2")))["d/a"] is None
    assert scenario.state.devices.available(NIC) == NICS.keys()


def test_a_create_whose_sandbox_was_stopped_meanwhile_is_refused() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources())
    scenario.create(pod)
    scenario.play(SandboxStopped("s-a"))
    assert scenario.play(DevicesAllocated("a", "c", {NIC: ANSWER}, {NIC: ("nic0",)})) == ()
    refused = scenario.play(CreateResumed(scenario.state.containers["a/c"]))[-1]
    assert isinstance(refused, Refuse)
    assert "they were released with its sandbox" in refused.message


def test_a_response_for_devices_that_have_gone_is_not_used_for_new_devices() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources())
    scenario.create(pod)
    scenario.play(SandboxStopped("s-a"))
    other = scenario.pod("b", resources())
    scenario.create(other)
    again = structs.replace(pod, sandbox_id="s2", attempt=1)
    scenario.play(SandboxRunning(again))
    scenario.play(CreateRequested(again, "c", 1, Request(), "a/c2"))
    assert (scenario.held(pod), scenario.held(other)) == ({"nic1"}, {"nic0"})
    late = {NIC: ("nic0",)}
    assert scenario.play(DevicesAllocated("a", "c", {NIC: ANSWER}, late)) == ()
    assert scenario.play(AllocateFailed("a", "c", late)) == ()
    assert scenario.state.devices.unanswered("a", "c") == {NIC: ("nic1",)}


def test_a_plugin_is_queried_for_its_preference_before_the_state_changes() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources(2))
    before = scenario.state
    question = scenario.create(pod, preferred={("c", NIC): None})
    assert question == QueryPreference("c", NIC, frozenset(NICS), frozenset(), 2)
    assert scenario.state is before
    scenario.create(pod, preferred={("c", NIC): ("nic3", "nic1", "nic9")})
    assert scenario.held(pod) == {"nic1", "nic3"}
    other = scenario.pod("b", resources(2))
    answer = scenario.create(other, preferred={("c", NIC): ("nic1",), ("d", NIC): None})
    assert isinstance(answer, AllocateFirst), "devices that were assigned in the meantime do not count"
    assert scenario.held(other) == {"nic0", "nic2"}


def test_devices_are_near_to_the_cpus_of_their_container() -> None:
    scenario = DeviceGrantScenario(
        Node(MACHINE, CpuTopology.of(MACHINE), static=True, policy=TopologyPolicy.SINGLE_NUMA_NODE)
    )
    four = Request(4096, 400_000, 100_000)
    amounts = {"cpu": 4000, "memory": 1}
    first = scenario.pod("a", resources(1, **amounts), kube=KubeQos.GUARANTEED)
    scenario.create(scenario.pod("x", resources(1)))
    scenario.create(scenario.pod("y", resources(1)))
    assert isinstance(scenario.create(first, request=four), AllocateFirst)
    assert (str(scenario.state.containers["a/c"].placement.exclusive), scenario.held(first)) == (
        "4-5,12-13",
        {"nic2"},
    )
    assert isinstance(scenario.given(first), ReserveFirst), "then its CPUs are reserved"
    wide = scenario.pod("b", resources(2, **amounts), kube=KubeQos.GUARANTEED)
    refusal = scenario.create(wide, request=four)
    assert isinstance(refusal, Refuse)
    assert scenario.held(wide) == set()


def test_devices_of_init_containers_pass_to_later_containers() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod(
        "a", resources(3, "i", ContainerKind.INIT), resources(2, "s", ContainerKind.SIDECAR), resources(2)
    )
    for name in ("i", "s", "c"):
        scenario.create(pod, name)
        scenario.given(pod, name)
    held = {name: scenario.held(pod, name) for name in ("i", "s", "c")}
    assert held["s"] < held["i"]
    assert held["c"].isdisjoint(held["s"])
    assert len(held["c"] & held["i"]) == 1
    assert scenario.state.devices.in_use(NIC) == NICS.keys()


@pytest.mark.parametrize("refused", [False, True])
def test_scope_pod_sets_devices_aside(*, refused: bool) -> None:
    node = Node(
        MACHINE, CpuTopology.of(MACHINE), static=True, policy=TopologyPolicy.RESTRICTED, scope=Scope.POD
    )
    scenario = DeviceGrantScenario(node)
    containers = (resources(1, "c"), resources(1, "d"))
    pod = Pod("token", "a", "ns", "a", kube_qos=KubeQos.BURSTABLE, requests=PodRequests("a", containers))
    question = scenario.play(SandboxRequested(pod, Request(), {("c", NIC): None}))[-1]
    assert question == QueryPreference("c", NIC, frozenset({"nic0", "nic1"}), frozenset(), 1)
    effects = scenario.play(SandboxRequested(pod, Request()))
    assert isinstance(effects[-1], PodDecided)
    assert set(records(effects)) == {"p/token", "d/a"}
    assert [scenario.held(pod, name) for name in "cd"] == [{"nic0"}, {"nic1"}]
    if refused:
        assert records(scenario.play(SandboxFailed("token"))) == {"p/token": None, "d/a": None}
        assert scenario.state.devices.available(NIC) == NICS.keys()
        return
    running = structs.replace(scenario.state.pods["token"], sandbox_id="s-a")
    assert "d/a" not in records(scenario.play(SandboxRunning(running, "token")))
    assert isinstance(scenario.create(running, "d"), AllocateFirst)
    assert scenario.held(pod, "d") == {"nic1"}
    assert isinstance(scenario.given(running, "d"), Forward)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("qos", [QosClass.LSE, QosClass.LSR])
def test_devices_take_part_if_cpus_are_chosen_for_a_pod_as_a_whole(scope: Scope, qos: QosClass) -> None:
    node = Node(
        MACHINE, CpuTopology.of(MACHINE), static=True, policy=TopologyPolicy.SINGLE_NUMA_NODE, scope=scope
    )
    scenario = DeviceGrantScenario(node)
    containers = (
        resources(1, "i", ContainerKind.INIT, cpu=2000, memory=1),
        resources(1, "s", ContainerKind.SIDECAR, cpu=1000, memory=1),
        resources(1, "c", cpu=1000, memory=1),
    )

    def request(uid: str, **more: Any) -> NodeEffects:
        of = Pod(f"t-{uid}", uid, "ns", uid, qos=qos, kube_qos=KubeQos.GUARANTEED)
        of = structs.replace(of, requests=PodRequests(uid, containers))
        return scenario.play(SandboxRequested(of, Request(2048, 200_000, 100_000), **more))

    for uid in "xy":
        scenario.create(scenario.pod(uid, resources(1)))
    question = request("a", preferred={("i", NIC): None})[-1]
    assert question == QueryPreference("i", NIC, frozenset({"nic2", "nic3"}), frozenset(), 1)
    request("a")
    pod = scenario.state.pods["t-a"]
    assert str(pod.cpuset) == "4,12"
    held = [scenario.held(pod, name) for name in ("i", "s", "c")]
    assert held == [{"nic2"}, {"nic2"}, {"nic3"}]
    late = request("b")[-1]
    assert type(late) is PodDecided
    assert late.admission.verdict.reason == "TopologyAffinityError", (
        "the NICs are set aside for the first pod"
    )
    running = structs.replace(pod, sandbox_id="s-a")
    scenario.play(SandboxRunning(running, "t-a"))
    for name in ("i", "s", "c"):
        assert isinstance(scenario.create(running, name), AllocateFirst)
        assert isinstance(scenario.given(running, name), ReserveFirst | Forward)
        assert str(scenario.state.containers[f"a/{name}"].placement.exclusive) == "4,12"
    assert [scenario.held(pod, name) for name in ("i", "s", "c")] == held


def test_without_a_decision_on_nodes_devices_follow_the_cpus_of_the_pod() -> None:
    scenario = DeviceGrantScenario()
    scenario.state = scenario.state.with_reservation(
        "x", ReservationCpus("x", MACHINE.nodes[0].cpus - CpuSet((0,)))
    )
    pod = Pod("t", "a", "ns", "a", qos=QosClass.LSR, kube_qos=KubeQos.GUARANTEED)
    pod = structs.replace(pod, requests=PodRequests("a", (resources(1, cpu=4000, memory=1),)))
    scenario.play(SandboxRequested(pod, Request(4096, 400_000, 100_000)))
    running = structs.replace(scenario.state.pods["t"], sandbox_id="s-a")
    assert scenario.held(pod) == set()
    scenario.play(SandboxRunning(running, "t"))
    scenario.create(running)
    assert scenario.held(pod) == {"nic2"}


@pytest.mark.parametrize("mode", [NodeMode.OBSERVE, NodeMode.ENFORCE])
def test_observed_pods_are_given_no_devices(mode: NodeMode) -> None:
    scenario = DeviceGrantScenario()
    scenario.play(ModeChanged(mode))
    if mode is NodeMode.ENFORCE:
        scenario.play(EnforcementChanged(PodSelection(percent=0)))
    one, two = scenario.pod("a", resources(3)), scenario.pod("b", resources(3))
    for pod in (one, two):
        answer = scenario.create(pod)
        assert not isinstance(answer, AllocateFirst | Refuse), "the call is forwarded unchanged"
        assert scenario.held(pod) == set()
        assert scenario.state.containers[f"{pod.uid}/c"].placement.devices, "the devices that it would have"


def test_a_restarted_daemon_reads_device_assignments_from_the_ledger() -> None:
    scenario = DeviceGrantScenario()
    pod, other = scenario.pod("a", resources()), scenario.pod("b", resources())
    scenario.create(pod)
    scenario.given(pod)
    scenario.create(other)
    ledger = {key: load_record(record_of(scenario.state.devices, key) or {}) for key in "ab"}
    after = DeviceGrantScenario.__new__(DeviceGrantScenario)
    after.state = NodeState.empty(NODE)
    after.play(LedgerRead((pod, other), (), {}, (), 0.0, ledger, (NIC,)))
    assert after.held(pod) == {"nic0"}
    assert after.held(other) == set(), "its container was never created"
    assert after.state.devices.answers_of("a", "c") == {NIC: ANSWER}
    refused = after.create(other)
    assert isinstance(refused, Refuse), "the plugin has not registered again"
    assert "no healthy devices present" in refused.message
    after.play(DevicesChanged(NIC, NICS))
    after.create(other)
    assert after.held(other) == {"nic1"}
    assert isinstance(after.create(pod), AllocateFirst)
    assert isinstance(after.play(CreateResumed(after.state.containers["a/c"]))[-1], Forward), (
        "its Allocate was answered before the restart"
    )


def test_devices_that_were_never_allocated_are_deleted_from_the_ledger() -> None:
    scenario = DeviceGrantScenario()
    pod, answered = scenario.pod("a", resources()), scenario.pod("b", resources())
    scenario.create(pod)
    scenario.create(answered)
    scenario.given(answered)
    ledger = {key: load_record(record_of(scenario.state.devices, key) or {}) for key in "ab"}
    read = LedgerRead((pod, answered), (), {}, (), 0.0, ledger, (NIC,))
    _, effects = handle(NodeState.empty(NODE), read)
    assert records(effects) == {"d/a": None}, "the record of the other pod is valid"


def test_imported_devices_stay_with_their_containers() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources(), resources(1, "d"))
    scenario.create(pod)
    scenario.given(pod)
    kept = {name: {NIC: DeviceRecord((nic,), ANSWER)} for name, nic in (("c", "nic3"), ("d", "nic2"))}
    other = DevicesImported(GPU, {"a": kept}, every=False)
    assert scenario.play(other) == ()
    done = scenario.play(DevicesImported(NIC, {"a": kept, "gone": kept}, every=False))
    assert set(records(done)) == {"d/a"}
    assert [scenario.held(pod, name) for name in "cd"] == [{"nic0"}, {"nic2"}]
    assert scenario.state.devices.answers_of("a", "d") == {NIC: ANSWER}
    after, effects = handle(scenario.state, DevicesImported(NIC, {"gone": kept}, every=True))
    assert set(records(effects)) == {"d/gone"}, "devices of unknown pods are imported too"
    assert after.devices.answers_of("gone", "c") == {NIC: ANSWER}


def test_pods_that_the_runtime_does_not_have_lose_their_devices() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources())
    scenario.create(pod)
    scenario.given(pod)
    lost = load_record(record_of(scenario.state.devices, "a") or {})
    scenario.state, _ = handle(NodeState.empty(NODE), LedgerRead((), (), {}, (), 0.0, {"gone": lost}, (NIC,)))
    assert records(scenario.play(RuntimeListed([], [], 0))) == {"d/gone": None}
    assert scenario.state.devices.held == {}


def test_an_existing_container_is_given_no_devices() -> None:
    scenario = DeviceGrantScenario()
    pod = scenario.pod("a", resources())
    scenario.play(ContainerFound("x", pod, "c", 0, Request(), Phase.CREATED, None))
    assert isinstance(scenario.state.containers["x"], Container)
    assert scenario.held(pod) == set()
    assert scenario.state.devices.available(NIC) == NICS.keys()


def test_named_cpus_and_devices_together() -> None:
    scenario = DeviceGrantScenario()
    lse = Pod(
        "s-l",
        "l",
        "ns",
        "l",
        kube_qos=KubeQos.GUARANTEED,
        cpuset=CpuSet.parse("4-5"),
        requests=PodRequests("l", (resources(1, cpu=2000, memory=1),)),
    )
    scenario.play(PodLearned(structs.replace(lse, qos=lse.qos)))
    scenario.create(lse, request=Request(2048, 200_000, 100_000), preferred={("c", NIC): ("nic3",)})
    assert scenario.held(lse) == {"nic3"}, "preferred by the plugin among the devices near its CPUs"


@pytest.mark.parametrize("broken", [{"c": 1}, {"c": {NIC: {"ids": 3}}}, {"c": {NIC: {}}}])
def test_invalid_device_records_are_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_record(broken)
    assert salvaged(broken) == ({}, False)


def test_devices_of_a_damaged_record_stay_held() -> None:
    whole = {"ids": ["nic2"], "answer": {"envs": {"NIC": "nic2"}}}
    broken = {"c": {NIC: {"ids": ["nic0"], "answer": 5}, GPU: {"ids": 3}}, "d": {NIC: whole}, "e": 1}
    found, complete = salvaged(broken)
    assert not complete
    answer = AllocateAnswer(envs={"NIC": "nic2"})
    assert found == {
        "c": {NIC: DeviceRecord(("nic0",), AllocateAnswer())},
        "d": {NIC: DeviceRecord(("nic2",), answer)},
    }
