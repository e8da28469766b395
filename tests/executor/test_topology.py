"""Days under a topology policy: pods decided as a whole, and kubelet asked for what the CRI leaves out."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.calls.held_call import CallContext
from proxy.engine.invariants import violations
from proxy.engine.pod_events import PodLearned
from proxy.engine.state import NodeState
from proxy.executor.ports import DeviceFacts
from proxy.executor.runtime_ports import RuntimePod
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import LocatedDevice, Phase
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import TWO_CPUS

MIB = 1 << 20
FOUR = {"cpu_shares": 4096, "cpu_quota": 400_000, "cpu_period": 100_000}
SIX = {"cpu_shares": 6144, "cpu_quota": 600_000, "cpu_period": 100_000}
BY_POD = {"policy": TopologyPolicy.RESTRICTED, "scope": Scope.POD}
BY_CONTAINER = {"policy": TopologyPolicy.RESTRICTED}
AFFINITY = "TopologyAffinityError: Resources cannot be allocated with Topology locality"


def ask(name: str, cpus: int, kind: ContainerKind = ContainerKind.APP, mib: int = 1) -> ContainerResources:
    amounts = {"cpu": cpus * 1000, "memory": mib * MIB}
    return ContainerResources(name, kind, amounts, amounts)


class PlayedKubelet:
    """What kubelet knows; ``gate`` holds its answers, ``error`` is raised instead of one."""

    def __init__(self, *asks: ContainerResources) -> None:
        self.knows_pods, self.knows_devices = True, False
        self.answer: Any = (PodRequests("?", asks), "kubelet's /pods") if asks else None
        self.near: Any = {}
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0
        self.error: Exception | None = None

    def _wait(self) -> None:
        self.asked += 1
        self.gate.wait(60)
        if self.error is not None:
            raise self.error

    def asks(self, uid: str, namespace: str, name: str) -> Any:
        self._wait()
        return self.answer

    def devices(self, namespace: str, pod: str, container: str) -> Any:
        self._wait()
        return self.near.get(container)

    def allocatable(self) -> Mapping[str, Mapping[str, Mask | None]]:
        return {}

    def close(self) -> None:
        self.gate.set()


class PlayedHardware:
    def __init__(self, *near: LocatedDevice) -> None:
        self.found = near
        self.error: Exception | None = None

    def near(self, given: DeviceFacts) -> tuple[LocatedDevice, ...]:
        if self.error is not None:
            raise self.error
        return self.found


def sandbox(uid: str, attempt: int = 0, parent: str | None = None, **total: int) -> pb.RunPodSandboxRequest:
    return pb.RunPodSandboxRequest(
        config=pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=uid, uid=uid, namespace="ns", attempt=attempt),
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=f"/kubepods/pod{uid}" if parent is None else parent,
                resources=pb.LinuxContainerResources(**total),
            ),
        )
    )


def asides(w: Any) -> dict[str, str]:
    return {
        p.uid: str(p.reserved_for_pod.cpus)
        for p in w.executor.state.pods.values()
        if p.reserved_for_pod is not None
    }


def records(w: Any, query: str) -> list[tuple[str, bool, bool]]:
    """Give what explain finds: the pod or container, admitted or not, there or gone."""
    found = w.executor.history.find(query)
    return [(r.explanation.ref, r.explanation.verdict.admitted, r.there) for r in found]


def nothing_is_left(w: Any) -> None:
    state = w.executor.state
    assert violations(state) == []
    assert (state.pools.shared, state.aside()) == (w.machine.online, CpuSet())
    assert not w.executor.state.runtime.arriving
    assert not state.pods


# -- sandboxes under scope pod ----------------------------------------------------------------------------


def test_a_pod_is_admitted_once_and_its_containers_use_the_set_aside(live) -> None:
    async def day(w: Any) -> None:
        s = await w.pod("a", total=FOUR)
        assert asides(w) == {"a": "0-1,8-9"}
        assert w.executor.state.pools.shared == w.machine.online
        await w.quiet()
        assert w.ledger.entries[f"p/{s}"]["aside"]["cpus"] == "0-1,8-9"
        first = await w.run(s, "x", **TWO_CPUS)
        second = await w.run(s, "y", **TWO_CPUS)
        assert {w.on(first), w.on(second)} == {"0,8", "1,9"}
        assert records(w, "ns/a") == [("ns/a", True, True), ("ns/a/x", True, True), ("ns/a/y", True, True)]
        w.check()
        call = await w.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=s))
        w.cgroups.sets.clear()
        w.wire.finished(call, 0)
        nothing_is_left(w)
        await w.quiet()
        assert f"p/{s}" not in w.ledger.entries

    live(day, rules=BY_POD)


def test_a_refused_pod_leaves_its_reason_and_nothing_else(live) -> None:
    async def day(w: Any) -> None:
        await w.pod("a", total=SIX)
        await w.pod("b", total=SIX)
        before = w.executor.state
        refusal = await w.pod("c", total=FOUR, may_be_refused=True)
        assert refusal.startswith(f"{AFFINITY} (ns/c: ")
        assert w.executor.state is before
        assert records(w, "ns/c") == [("ns/c", False, False)]
        assert w.executor.telemetry.value(metrics.PODS_REFUSED) == 1
        assert not w.executor.state.runtime.arriving
        assert any(line.startswith("refused a pod pod=ns/c ") for line in w.logged)

    live(day, rules=BY_POD)


@pytest.mark.parametrize("status", [2, 13, None], ids=["fails", "breaks", "is-cancelled"])
def test_a_failed_sandbox_returns_what_was_set_aside(live, status: int | None) -> None:
    async def day(w: Any) -> None:
        call = await w.call("RunPodSandbox", sandbox("a", **FOUR))
        assert asides(w) == {"a": "0-1,8-9"}
        await w.sync.once()
        assert asides(w) == {"a": "0-1,8-9"}, "the runtime's list does not have it yet"
        w.wire.finished(call, status)
        nothing_is_left(w)
        assert records(w, "ns/a") == [("ns/a", True, False)]
        await w.executor.journal.flush()
        assert w.ledger.entries == {}

    live(day, rules=BY_POD)


def test_an_answer_without_an_id_counts_as_none(live) -> None:
    async def day(w: Any) -> None:
        call = await w.call("RunPodSandbox", sandbox("a", **FOUR))
        w.wire.response(call, b"")
        w.wire.finished(call, 0)
        nothing_is_left(w)

    live(day, rules=BY_POD)


def test_a_sandbox_without_an_answer_is_known_by_its_containers(live) -> None:
    async def day(w: Any) -> None:
        request = sandbox("a", **FOUR)
        call = await w.call("RunPodSandbox", request)
        w.runtime.pods["s-a"] = RuntimePod("s-a", "a", "ns", "a", 0, True, {}, {})
        w.wire.finished(call, None)
        create = pb.CreateContainerRequest(pod_sandbox_id="s-a", sandbox_config=request.config)
        create.config.metadata.name = "c"
        create.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**FOUR))
        call = await w.call("CreateContainer", create)
        container_id = w.finish(call, "x")
        await w.start(container_id)
        assert w.on(container_id) == "0-1,8-9"
        assert asides(w) == {}
        w.check()

    live(day, rules=BY_POD)


def test_a_sandbox_made_again_keeps_what_was_decided_for_its_pod(live) -> None:
    async def day(w: Any) -> None:
        old = await w.pod("a", total=FOUR)
        await w.pod("b", total=FOUR)
        await w.run(old, "c", **FOUR)
        new = await w.pod("a", attempt=1, sandbox="new", total=FOUR)
        assert asides(w)["a"] == "0-1,8-9"
        w.cgroups.sets.clear()
        w.wire.finished(await w.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=old)), 0)
        again = await w.run(new, "c", **FOUR)
        assert w.on(again) == "0-1,8-9"
        assert set(w.executor.state.pods) == {"s-b", "new"}

    live(day, rules=BY_POD)


def test_two_pods_at_once_are_not_promised_the_same_cpus(live) -> None:
    kubelet = PlayedKubelet(ask("c", 4))

    async def day(w: Any) -> None:
        kubelet.gate.clear()
        calls = [asyncio.create_task(w.call("RunPodSandbox", sandbox(uid, **FOUR))) for uid in "abcd"]
        while kubelet.asked < 4:
            await asyncio.sleep(0.001)
        assert asides(w) == {}
        kubelet.gate.set()
        done = await asyncio.gather(*calls)
        assert sorted(call.refused is None for call in done) == [False, True, True, True]
        assert w.executor.state.aside() == CpuSet.parse("0-5,8-13"), "the last one would have left nothing"
        assert sum(len(p.reserved_for_pod.cpus) for p in w.executor.state.pods.values()) == 12

    live(day, rules=BY_POD, sources=(kubelet, None))


def test_a_pod_without_a_cgroup_parent_keeps_what_was_set_aside(live) -> None:
    async def day(w: Any) -> None:
        request = sandbox("a", parent="", **FOUR)
        call = await w.call("RunPodSandbox", request)
        w.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s-a").SerializeToString())
        w.wire.finished(call, 0)
        create = pb.CreateContainerRequest(pod_sandbox_id="s-a", sandbox_config=request.config)
        create.config.metadata.name = "c"
        create.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
        await w.call("CreateContainer", create)
        assert asides(w) == {"a": "0-1,8-9"}

    live(day, rules=BY_POD)


# -- crashes ----------------------------------------------------------------------------------------------


def test_a_crash_between_deciding_and_the_answer_leaves_nothing_set_aside(live) -> None:
    async def day(w: Any) -> None:
        kept = await w.pod("kept", total=FOUR)
        await w.call("RunPodSandbox", sandbox("a", **FOUR))
        await w.quiet()
        await w.executor.close()
        w.boot()
        await w.sync.once()
        assert asides(w) == {"kept": "0-1,8-9"}
        first = await w.run(kept, "c", **FOUR)
        assert w.on(first) == "0-1,8-9"
        await w.pod("a", total=FOUR)
        assert asides(w)["a"] == "2-3,10-11"

    live(day, rules=BY_POD)


def test_memory_and_parts_are_found_again_after_a_crash(live) -> None:
    kubelet = PlayedKubelet(ask("i", 4, ContainerKind.INIT), ask("c", 2))
    rules = BY_POD | {"reserved_memory": {0: {"memory": MIB}}}

    async def day(w: Any) -> None:
        s = await w.pod("a", total=FOUR)
        await w.run(s, "i", memory_limit_in_bytes=MIB, **FOUR)
        before = w.executor.state
        await w.quiet()
        await w.executor.close()
        w.boot()
        await w.sync.once()
        after = w.executor.state
        assert (after.owners, after.pools, after.aside()) == (before.owners, before.pools, before.aside())
        assert after.memory == before.memory
        assert after.memory == NodeState.of(after.node, after.pods.values(), after.containers.values()).memory
        assert after.pods[s].reserved_for_pod == before.pods[s].reserved_for_pod

    live(day, rules=rules, sources=(kubelet, None))


def test_memory_of_an_init_container_is_not_promised_after_a_crash(live) -> None:
    kubelet = PlayedKubelet(ask("i", 4, ContainerKind.INIT, 20), ask("c", 2))

    async def day(w: Any) -> None:
        s = await w.pod("a", total=FOUR)
        first = await w.run(s, "i", memory_limit_in_bytes=20 * MIB, **FOUR)
        await w.stop(first)
        await w.run(s, "c", memory_limit_in_bytes=MIB, **TWO_CPUS)
        before = w.executor.state.memory
        assert {name for name, blocks in before.assignments["a"].items() if blocks} == {"c"}
        await w.quiet()
        await w.executor.close()
        w.boot()
        await w.sync.once()
        assert w.executor.state.memory == before

    live(day, rules=BY_POD | {"reserved_memory": {0: {"memory": MIB}}}, sources=(kubelet, None))


def test_a_fault_while_a_sandbox_is_recorded_leaves_nothing_set_aside(live, monkeypatch) -> None:
    async def day(w: Any) -> None:
        async def broken() -> None:
            raise RuntimeError("ours")

        with monkeypatch.context() as patch:
            patch.setattr(w.executor.journal, "flush", broken)
            call = await w.call("RunPodSandbox", sandbox("a", **FOUR))
        assert call.sent == call.body
        w.wire.finished(call, 2)
        nothing_is_left(w)
        assert records(w, "ns/a") == [("ns/a", True, False)]

    live(day, rules=BY_POD)


def test_records_of_the_version_before_are_read(live) -> None:
    async def day(w: Any) -> None:
        s = await w.pod("a")
        container = await w.run(s, "c", memory_limit_in_bytes=MIB, **TWO_CPUS)
        await w.quiet()
        old = copy.deepcopy(w.ledger.entries)
        for value in (*old.values(), old[f"c/{container}"]["pod"]):
            value.pop("aside", None)
        old[f"c/{container}"]["placement"].pop("blocks", None)
        old[f"c/{container}"]["request"].pop("huge_pages", None)
        await w.executor.close()
        w.ledger.entries = old
        w.rules = BY_POD | {"reserved_memory": {0: {"memory": MIB}}}
        w.boot()
        await w.sync.once()
        assert w.executor.state.containers[container].placement.exclusive == CpuSet.parse("0,8")
        memory = w.executor.state.memory
        assert memory is not None
        assert [n.table("memory").reserved for n in memory.nodes.values()] == [MIB, 0]  # it uses it already
        assert (await w.pod("b", total=FOUR), asides(w)) == ("s-b", {"b": "1-2,9-10"})
        w.check()

    live(day)


@pytest.mark.parametrize("where", ["aside", "blocks"])
def test_a_record_with_a_damaged_part_is_built_again(live, where: str) -> None:
    async def day(w: Any) -> None:
        s = await w.pod("a", total=FOUR)
        container = await w.run(s, "c", memory_limit_in_bytes=MIB, **FOUR)
        await w.quiet()
        if where == "aside":
            w.ledger.entries[f"p/{s}"]["aside"]["cpus"] = 7
        else:
            w.ledger.entries[f"c/{container}"]["placement"]["blocks"] = [["0", "memory"]]
        await w.executor.close()
        w.boot()
        await w.sync.once()
        assert violations(w.executor.state) == []
        assert container in w.executor.state.containers

    live(day, rules=BY_POD | {"reserved_memory": {0: {"memory": MIB}}})


# -- what kubelet reports ---------------------------------------------------------------------------------


def test_facts_of_kubelet_take_precedence_over_the_cri(live) -> None:
    kubelet = PlayedKubelet(
        ask("c", 3), ContainerResources("half", ContainerKind.APP, {"cpu": 2500}, {"cpu": 2500})
    )

    async def day(w: Any) -> None:
        s = await w.pod("a")
        assert kubelet.asked == 1, "known with the sandbox"
        assert w.on(await w.run(s, "c", **TWO_CPUS)) == "0-1,8"
        half, unheard = await w.create(s, "half", **TWO_CPUS), await w.create(s, "unheard", **TWO_CPUS)
        assert w.executor.state.containers[half].owner == ""
        assert w.executor.state.containers[unheard].owner == "a/unheard"
        assert kubelet.asked == 1
        facts = w.executor.history.find("ns/a/c")[0].explanation.facts
        assert ("cpu request", "3 CPUs", "kubelet's /pods") in [(f.what, f.value, f.source) for f in facts]

    live(day, sources=(kubelet, None))


def test_kubelet_that_learns_of_a_pod_late_is_asked_again(live) -> None:
    kubelet = PlayedKubelet()

    async def day(w: Any) -> None:
        s = await w.pod("a")
        assert w.executor.state.pods[s].asks is None
        kubelet.answer = PodRequests("?", (ask("c", 3),)), "kubelet's /pods"
        container = await w.create(s, "c", **TWO_CPUS)
        assert len(w.executor.state.containers[container].placement.exclusive) == 3
        assert kubelet.asked == 2

    live(day, sources=(kubelet, None))


@pytest.mark.parametrize("method", ["RunPodSandbox", "CreateContainer"])
@pytest.mark.parametrize("rules", [{}, BY_POD, BY_CONTAINER], ids=["none", "pod", "container"])
def test_a_client_that_goes_away_while_kubelet_is_asked_gets_nothing(live, method: str, rules: Any) -> None:
    kubelet = PlayedKubelet(ask("c", 4))

    async def day(w: Any) -> None:
        kubelet.answer = None
        s = await w.pod("a")
        before, asked = w.executor.state, kubelet.asked
        kubelet.gate.clear()
        message: Any = sandbox("b", **FOUR)
        if method == "CreateContainer":
            message = pb.CreateContainerRequest(pod_sandbox_id=s)
            message.config.metadata.name = "c"
            message.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**FOUR))
        call = w.played(method, message)
        w.wire.request(call)
        while kubelet.asked == asked:
            await asyncio.sleep(0.001)
        call.done = True
        w.wire.finished(call, None)
        kubelet.gate.set()
        await w.quiet()
        assert (call.sent, call.refused) == (None, None)
        assert not isinstance(call.state, CallContext), "nothing would end it"
        assert w.executor.state.containers == before.containers
        assert w.executor.state.aside() == CpuSet()
        assert not w.executor.state.runtime.arriving

    live(day, rules=rules, sources=(kubelet, None))


@pytest.mark.parametrize("what", ["pods", "devices", "sysfs"])
@pytest.mark.parametrize("error", [OSError("gone"), ValueError("rubbish"), KeyError("x")])
def test_a_port_that_breaks_is_done_without(live, what: str, error: Exception) -> None:
    kubelet, hardware = PlayedKubelet(), PlayedHardware()
    kubelet.knows_pods, kubelet.knows_devices = what == "pods", what == "devices"
    kubelet.error = hardware.error = error

    async def day(w: Any) -> None:
        s = await w.pod("a", total=FOUR)
        request = pb.CreateContainerRequest(pod_sandbox_id=s)
        request.config.metadata.name = "c"
        request.config.devices.add(container_path="/dev/gpu", host_path="/dev/gpu", permissions="rw")
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**FOUR))
        call = await w.call("CreateContainer", request)
        assert call.refused is None
        assert pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus == "0-1,8-9"
        await w.quiet()
        assert w.executor.telemetry.value(metrics.INTERNAL_ERRORS) > 0

    live(day, rules=BY_POD, sources=(kubelet, hardware))


@pytest.mark.parametrize("answer", [(None, ""), ("text", 5), (PodRequests("?", ()), ""), 7], ids=str)
def test_rubbish_from_kubelet_is_done_without(live, answer: Any) -> None:
    kubelet = PlayedKubelet()
    kubelet.answer = answer

    async def day(w: Any) -> None:
        s = await w.pod("a", total=FOUR)
        assert w.on(await w.run(s, "c", **FOUR)) == "0-1,8-9"
        w.check()

    for rules in ({}, BY_POD, BY_CONTAINER):
        live(day, rules=rules, sources=(kubelet, None))


def test_an_empty_answer_takes_back_nothing(live) -> None:
    """Two creates of a pod ask at once; the one that gets no answer must not forget the other's."""
    kubelet = PlayedKubelet()

    async def day(w: Any) -> None:
        s = await w.pod("a")
        kubelet.gate.clear()
        silent = asyncio.create_task(w.begin(s, "c", **TWO_CPUS))
        await w.until(lambda: kubelet.asked == 2)
        pod = w.executor.state.pods[s]
        pod = changed_copy(pod, asks=PodRequests("a", (ask("c", 2),)), source="kubelet's /pods")
        w.executor.store.handle(PodLearned(pod, "a test", recorded=False))
        kubelet.gate.set()
        await silent
        assert w.executor.state.pods[s] == pod

    live(day, sources=(kubelet, None))


def test_facts_that_arrive_after_the_pod_has_stopped_do_not_bring_it_back(live) -> None:
    kubelet = PlayedKubelet()

    async def day(w: Any) -> None:
        s = await w.pod("a")
        kubelet.answer = PodRequests("?", (ask("c", 4),)), "kubelet's /pods"
        kubelet.gate.clear()
        creating = asyncio.create_task(w.begin(s, "c", **FOUR))
        while kubelet.asked < 2:
            await asyncio.sleep(0.001)
        for method, done in (
            ("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=s)),
            ("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=s)),
        ):
            w.wire.finished(await w.call(method, done), 0)
        kubelet.gate.set()
        call = await creating
        assert s not in w.executor.state.pods
        w.wire.finished(call, 5)
        nothing_is_left(w)
        assert not w.executor.state.containers
        assert records(w, "ns/a/c") == [("ns/a/c", True, False)]

    live(day, sources=(kubelet, None))


def test_cpus_of_an_init_container_that_ended_unseen_are_used_again(live) -> None:
    """Nothing reports that a container ends by itself, but kubelet asks for the next one only then."""
    kubelet = PlayedKubelet(ask("i", 6, ContainerKind.INIT), ask("c", 6))

    async def day(w: Any) -> None:
        s = await w.pod("a")
        first = await w.run(s, "i", **SIX)
        had = w.executor.state.containers[first].placement.exclusive
        w.cgroups.sets.pop(first)
        w._state(first, "EXITED")
        second = await w.run(s, "c", **SIX)
        assert w.executor.state.containers[second].placement.exclusive == had
        assert w.executor.state.containers[first].phase is Phase.EXITED
        w.check()

    for rules in ({}, BY_CONTAINER, BY_POD):
        live(day, rules=rules, sources=(kubelet, None))


def test_devices_draw_cpus_to_their_nodes(live) -> None:
    near = LocatedDevice("GPU-1", "vendor/gpu", Mask([1]), "the pod-resources API")
    kubelet = PlayedKubelet(ask("c", 4))
    kubelet.knows_devices, kubelet.near = True, {"c": (near,)}

    async def day(w: Any) -> None:
        s = await w.pod("a", total=FOUR)
        assert w.on(await w.run(s, "c", **FOUR)) == "4-5,12-13"

    for rules in ({}, BY_CONTAINER, BY_POD):
        live(day, rules=rules, sources=(kubelet, None))


# -- ways to run ------------------------------------------------------------------------------------------


def test_observing_changes_nothing(live) -> None:
    async def day(w: Any) -> None:
        for uid in "abc":
            call = await w.call("RunPodSandbox", sandbox(uid, **SIX))
            assert (call.sent, call.refused) == (call.body, None)
            w.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id=f"s-{uid}").SerializeToString())
            w.wire.finished(call, 0)
        assert asides(w) == {"a": "0-2,8-10", "b": "4-6,12-14"}
        assert records(w, "ns/c") == [("ns/c", False, True)]
        call = await w.begin("s-a", "c", **SIX)
        assert call.sent == call.body
        assert not [line for line in w.log if not line.startswith(("forward", "ledger"))]

    live(day, rules=BY_POD, mode=NodeMode.OBSERVE)


@pytest.mark.parametrize(
    ("policy", "kube", "strict"),
    [
        (TopologyPolicy.RESTRICTED, "", True),
        (TopologyPolicy.SINGLE_NUMA_NODE, "", True),
        (TopologyPolicy.BEST_EFFORT, "", False),
        (TopologyPolicy.RESTRICTED, "burstable", False),
    ],
)
def test_an_internal_fault_refuses_only_pods_with_a_strict_policy(
    live, monkeypatch: pytest.MonkeyPatch, policy: TopologyPolicy, kube: str, *, strict: bool
) -> None:
    async def day(w: Any) -> None:
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name="a", uid="a", namespace="ns"),
            linux=pb.LinuxPodSandboxConfig(cgroup_parent=f"/kubepods/{kube}/poda"),
        )
        request = pb.CreateContainerRequest(pod_sandbox_id="s", sandbox_config=config)
        request.config.metadata.name = "c"

        def broken(*_: object) -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(w.executor.creates, "place", broken)
        call = await w.call("CreateContainer", request)
        assert (call.refused is not None) is strict
        assert strict or call.sent == call.body
        monkeypatch.setattr(w.executor.sandboxes, "admit", broken)
        pod = await w.call("RunPodSandbox", sandbox("b", **FOUR))
        assert pod.sent == pod.body, "its containers are decided one by one"

    live(day, rules={"policy": policy, "scope": Scope.POD})


def test_kubelet_does_not_make_a_pod_guaranteed_against_its_cgroup(live) -> None:
    near = LocatedDevice("GPU-1", "vendor/gpu", Mask([1]), "the pod-resources API")
    kubelet = PlayedKubelet(ask("c", 2))
    kubelet.knows_devices, kubelet.near = True, {"c": (near,)}

    async def day(w: Any) -> None:
        s = await w.pod("a", kube="burstable", total=TWO_CPUS)
        container = await w.run(s, "c", **TWO_CPUS)
        placement = w.executor.state.containers[container].placement
        assert (placement.exclusive, placement.blocks) == (CpuSet(), ())
        assert w.executor.state.pods[s].asks.guaranteed is False

    live(day, rules=BY_POD | {"reserved_memory": {0: {"memory": MIB}}}, sources=(kubelet, None))
