"""Topology policies: pods placed as a whole, and kubelet queried for facts that the CRI lacks."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.calls.undecided_call import CallContext
from proxy.engine.invariants import violations
from proxy.engine.pod_events import PodLearned
from proxy.engine.state import NodeState
from proxy.executor.fact_lookup import LATE
from proxy.executor.ports import DeviceFacts
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.explanation import Fact
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import LocatedDevice, Phase
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import TWO_CPUS

MIB = 1 << 20
THREE = {"cpu_shares": 3072, "cpu_quota": 300_000, "cpu_period": 100_000}
FOUR = {"cpu_shares": 4096, "cpu_quota": 400_000, "cpu_period": 100_000}
SIX = {"cpu_shares": 6144, "cpu_quota": 600_000, "cpu_period": 100_000}
BY_POD = {"policy": TopologyPolicy.RESTRICTED, "scope": Scope.POD}
BY_CONTAINER = {"policy": TopologyPolicy.RESTRICTED}
AFFINITY = "TopologyAffinityError: Resources cannot be allocated with Topology locality"


def container_requests(
    name: str, cpus: int, kind: ContainerKind = ContainerKind.APP, mib: int = 1
) -> ContainerResources:
    amounts = {"cpu": cpus * 1000, "memory": mib * MIB}
    return ContainerResources(name, kind, amounts, amounts)


class PlayedKubelet:
    """A simulated kubelet; ``gate`` holds its answers, ``error`` is raised instead of one."""

    def __init__(self, *containers: ContainerResources) -> None:
        self.knows_pods, self.knows_devices = True, False
        self.answer: Any = (PodRequests("?", containers), "kubelet's /pods") if containers else None
        self.near: Any = {}
        self.gate = threading.Event()
        self.gate.set()
        self.queries = 0
        self.error: Exception | None = None

    def _wait(self) -> None:
        self.queries += 1
        self.gate.wait(60)
        if self.error is not None:
            raise self.error

    def pod_requests(self, uid: str, namespace: str, name: str) -> Any:
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

    def locate(self, given: DeviceFacts) -> tuple[LocatedDevice, ...]:
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


def set_aside_cpus(world: Any) -> dict[str, str]:
    return {
        p.uid: str(p.reserved_for_pod.cpus)
        for p in world.executor.state.pods.values()
        if p.reserved_for_pod is not None
    }


def records(world: Any, query: str) -> list[tuple[str, bool, bool]]:
    """Return the records of explain: the pod or container, whether admitted, whether it exists."""
    found = world.executor.history.find(query)
    return [(r.explanation.ref, r.explanation.verdict.admitted, r.exists) for r in found]


def check_nothing_is_left(world: Any) -> None:
    state = world.executor.state
    assert violations(state) == []
    assert (state.pools.shared, state.cpus_set_aside()) == (world.machine.online, CpuSet())
    assert not world.executor.state.runtime.arriving_sandboxes
    assert not state.pods


# -- sandboxes under scope pod ----------------------------------------------------------------------------


def test_a_pod_is_admitted_once_and_its_containers_use_the_set_aside(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        assert set_aside_cpus(world) == {"a": "0-1,8-9"}
        assert world.executor.state.pools.shared == world.machine.online
        await world.quiet()
        assert world.ledger.entries[f"p/{s}"]["aside"]["cpus"] == "0-1,8-9"
        first = await world.run(s, "x", **TWO_CPUS)
        second = await world.run(s, "y", **TWO_CPUS)
        assert {world.on(first), world.on(second)} == {"0,8", "1,9"}
        assert records(world, "ns/a") == [
            ("ns/a", True, True),
            ("ns/a/x", True, True),
            ("ns/a/y", True, True),
        ]
        world.check()
        call = await world.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=s))
        world.cgroups.sets.clear()
        world.wire.finished(call, 0)
        check_nothing_is_left(world)
        await world.quiet()
        assert f"p/{s}" not in world.ledger.entries

    run_scenario(scenario, rules=BY_POD)


def test_a_refused_pod_leaves_only_its_reason(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        await world.pod("a", total=SIX)
        await world.pod("b", total=SIX)
        before = world.executor.state
        refusal = await world.pod("c", total=FOUR, may_be_refused=True)
        assert refusal.startswith(f"{AFFINITY} (ns/c: ")
        assert world.executor.state is before
        assert records(world, "ns/c") == [("ns/c", False, False)]
        assert world.executor.telemetry.value(metrics.PODS_REFUSED) == 1
        assert not world.executor.state.runtime.arriving_sandboxes
        assert any(line.startswith("rejected a pod pod=ns/c ") for line in world.logged)

    run_scenario(scenario, rules=BY_POD)


@pytest.mark.parametrize("status", [2, 13, None], ids=["fails", "breaks", "is-cancelled"])
def test_a_failed_sandbox_returns_its_set_aside_cpus(run_scenario, status: int | None) -> None:
    async def scenario(world: Any) -> None:
        call = await world.call("RunPodSandbox", sandbox("a", **FOUR))
        assert set_aside_cpus(world) == {"a": "0-1,8-9"}
        await world.sync.once()
        assert set_aside_cpus(world) == {"a": "0-1,8-9"}, "the runtime's list does not hold it yet"
        world.wire.finished(call, status)
        check_nothing_is_left(world)
        assert records(world, "ns/a") == [("ns/a", True, False)]
        await world.executor.ledger_writer.flush()
        assert world.ledger.entries == {}

    run_scenario(scenario, rules=BY_POD)


def test_an_answer_without_an_id_counts_as_none(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        call = await world.call("RunPodSandbox", sandbox("a", **FOUR))
        world.wire.response(call, b"")
        world.wire.finished(call, 0)
        check_nothing_is_left(world)

    run_scenario(scenario, rules=BY_POD)


def test_a_sandbox_without_an_answer_is_known_by_its_containers(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        request = sandbox("a", **FOUR)
        call = await world.call("RunPodSandbox", request)
        world.runtime.pods["s-a"] = RuntimePod("s-a", "a", "ns", "a", 0, True, {}, {})
        world.wire.finished(call, None)
        create = pb.CreateContainerRequest(pod_sandbox_id="s-a", sandbox_config=request.config)
        create.config.metadata.name = "c"
        create.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**FOUR))
        call = await world.call("CreateContainer", create)
        container_id = world.finish(call, "x")
        await world.start(container_id)
        assert world.on(container_id) == "0-1,8-9"
        assert set_aside_cpus(world) == {}
        world.check()

    run_scenario(scenario, rules=BY_POD)


def test_a_recreated_sandbox_keeps_the_decision_for_its_pod(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        old = await world.pod("a", total=FOUR)
        await world.pod("b", total=FOUR)
        await world.run(old, "c", **FOUR)
        new = await world.pod("a", attempt=1, sandbox="new", total=FOUR)
        assert set_aside_cpus(world)["a"] == "0-1,8-9"
        world.cgroups.sets.clear()
        world.wire.finished(
            await world.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=old)), 0
        )
        again = await world.run(new, "c", **FOUR)
        assert world.on(again) == "0-1,8-9"
        assert set(world.executor.state.pods) == {"s-b", "new"}

    run_scenario(scenario, rules=BY_POD)


def test_two_concurrent_pods_do_not_get_the_same_cpus(run_scenario) -> None:
    kubelet = PlayedKubelet(container_requests("c", 4))

    async def scenario(world: Any) -> None:
        kubelet.gate.clear()
        calls = [asyncio.create_task(world.call("RunPodSandbox", sandbox(uid, **FOUR))) for uid in "abcd"]
        while kubelet.queries < 4:
            await asyncio.sleep(0.001)
        assert set_aside_cpus(world) == {}
        kubelet.gate.set()
        done = await asyncio.gather(*calls)
        assert sorted(call.refused is None for call in done) == [False, True, True, True]
        assert world.executor.state.cpus_set_aside() == CpuSet.parse("0-5,8-13"), (
            "the last record would have left nothing"
        )
        assert sum(len(p.reserved_for_pod.cpus) for p in world.executor.state.pods.values()) == 12

    run_scenario(scenario, rules=BY_POD, sources=(kubelet, None))


def test_a_pod_without_a_cgroup_parent_keeps_its_set_aside_cpus(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        request = sandbox("a", parent="", **FOUR)
        call = await world.call("RunPodSandbox", request)
        world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s-a").SerializeToString())
        world.wire.finished(call, 0)
        create = pb.CreateContainerRequest(pod_sandbox_id="s-a", sandbox_config=request.config)
        create.config.metadata.name = "c"
        create.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
        await world.call("CreateContainer", create)
        assert set_aside_cpus(world) == {"a": "0-1,8-9"}

    run_scenario(scenario, rules=BY_POD)


# -- crashes ----------------------------------------------------------------------------------------------


def test_a_crash_between_deciding_and_the_answer_leaves_nothing_set_aside(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        kept = await world.pod("kept", total=FOUR)
        await world.call("RunPodSandbox", sandbox("a", **FOUR))
        await world.quiet()
        await world.executor.close()
        world.boot()
        await world.sync.once()
        assert set_aside_cpus(world) == {"kept": "0-1,8-9"}
        first = await world.run(kept, "c", **FOUR)
        assert world.on(first) == "0-1,8-9"
        await world.pod("a", total=FOUR)
        assert set_aside_cpus(world)["a"] == "2-3,10-11"

    run_scenario(scenario, rules=BY_POD)


def test_memory_and_parts_are_found_again_after_a_crash(run_scenario) -> None:
    kubelet = PlayedKubelet(container_requests("i", 4, ContainerKind.INIT), container_requests("c", 2))
    rules = BY_POD | {"reserved_memory": {0: {"memory": MIB}}}

    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        await world.run(s, "i", memory_limit_in_bytes=MIB, **FOUR)
        before = world.executor.state
        await world.quiet()
        await world.executor.close()
        world.boot()
        await world.sync.once()
        after = world.executor.state
        assert (after.owners, after.pools, after.cpus_set_aside()) == (
            before.owners,
            before.pools,
            before.cpus_set_aside(),
        )
        assert after.memory == before.memory
        assert after.memory == NodeState.of(after.node, after.pods.values(), after.containers.values()).memory
        assert after.pods[s].reserved_for_pod == before.pods[s].reserved_for_pod

    run_scenario(scenario, rules=rules, sources=(kubelet, None))


def test_memory_of_an_init_container_is_not_promised_after_a_crash(run_scenario) -> None:
    kubelet = PlayedKubelet(container_requests("i", 4, ContainerKind.INIT, 20), container_requests("c", 2))

    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        first = await world.run(s, "i", memory_limit_in_bytes=20 * MIB, **FOUR)
        await world.stop(first)
        await world.run(s, "c", memory_limit_in_bytes=MIB, **TWO_CPUS)
        before = world.executor.state.memory
        assert {name for name, blocks in before.assignments["a"].items() if blocks} == {"c"}
        await world.quiet()
        await world.executor.close()
        world.boot()
        await world.sync.once()
        assert world.executor.state.memory == before

    run_scenario(scenario, rules=BY_POD | {"reserved_memory": {0: {"memory": MIB}}}, sources=(kubelet, None))


def test_huge_pages_of_an_adopted_container_are_counted(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        world.runtime.pods["s-g"] = RuntimePod("s-g", "g", "ns", "g", 0, True, {}, {})
        world.runtime.containers["g"] = RuntimeContainer("g", "s-g", "c", 0, "RUNNING")
        pages = (("2MB", 180 * MIB), ("1GB", 0))
        world.runtime.details["g"] = RuntimeDetail(
            "/kubepods/podg/g", 2048, 200_000, 100_000, 300 * MIB, "0,8", "0", hugepage_limits=pages
        )
        world.cgroups.sets["g"], world.cgroups.mems["g"] = CpuSet.parse("0,8"), Mask([0])
        await world.sync.once()
        blocks = world.executor.state.containers["g"].placement.blocks
        assert [(block.affinity, block.resource, block.size) for block in blocks] == [
            (Mask([0]), "memory", 300 * MIB),
            (Mask([0]), "hugepages-2Mi", 180 * MIB),
        ]

    run_scenario(scenario, rules=BY_POD | {"reserved_memory": {0: {"memory": MIB}}}, reconciled=False)


def test_counted_memory_that_outgrows_its_node_in_a_resize_is_reported(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        owner = await world.run(await world.pod("p"), memory_limit_in_bytes=40 << 30, **TWO_CPUS)
        nodes = world.executor.state.memory.nodes
        assert nodes[0].table("memory").reserved == 40 << 30
        forwarded = await world.update(owner, memory_limit_in_bytes=60 << 30)
        assert forwarded.cpuset_mems == "0"
        assert world.executor.state.memory.nodes[0].table("memory").reserved == 60 << 30
        assert not world.executor.telemetry.problems()
        await world.update(owner, memory_limit_in_bytes=70 << 30)
        (problem,) = world.executor.telemetry.problems()
        assert "they were promised more than there is" in problem["what"]

    run_scenario(scenario, rules=BY_CONTAINER | {"reserved_memory": {0: {"memory": MIB}}})


def test_a_fault_while_a_sandbox_is_recorded_leaves_nothing_set_aside(run_scenario, monkeypatch) -> None:
    async def scenario(world: Any) -> None:
        async def broken() -> None:
            raise RuntimeError("ours")

        with monkeypatch.context() as patch:
            patch.setattr(world.executor.ledger_writer, "flush", broken)
            call = await world.call("RunPodSandbox", sandbox("a", **FOUR))
        assert call.sent == call.body
        world.wire.finished(call, 2)
        check_nothing_is_left(world)
        assert records(world, "ns/a") == [("ns/a", True, False)]

    run_scenario(scenario, rules=BY_POD)


def test_records_of_the_previous_version_are_read(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        container = await world.run(s, "c", memory_limit_in_bytes=MIB, **TWO_CPUS)
        await world.quiet()
        old = copy.deepcopy(world.ledger.entries)
        for value in (*old.values(), old[f"c/{container}"]["pod"]):
            value.pop("aside", None)
        old[f"c/{container}"]["placement"].pop("blocks", None)
        old[f"c/{container}"]["request"].pop("huge_pages", None)
        await world.executor.close()
        world.ledger.entries = old
        world.rules = BY_POD | {"reserved_memory": {0: {"memory": MIB}}}
        world.boot()
        await world.sync.once()
        assert world.executor.state.containers[container].placement.exclusive == CpuSet.parse("0,8")
        memory = world.executor.state.memory
        assert memory is not None
        assert [n.table("memory").reserved for n in memory.nodes.values()] == [
            MIB,
            0,
        ]  # the container already uses its CPUs
        assert (await world.pod("b", total=FOUR), set_aside_cpus(world)) == ("s-b", {"b": "1-2,9-10"})
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize("where", ["aside", "blocks"])
def test_a_record_with_a_damaged_part_is_built_again(run_scenario, where: str) -> None:
    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        container = await world.run(s, "c", memory_limit_in_bytes=MIB, **FOUR)
        await world.quiet()
        if where == "aside":
            world.ledger.entries[f"p/{s}"]["aside"]["cpus"] = 7
        else:
            world.ledger.entries[f"c/{container}"]["placement"]["blocks"] = [["0", "memory"]]
        await world.executor.close()
        world.boot()
        await world.sync.once()
        assert violations(world.executor.state) == []
        assert container in world.executor.state.containers

    run_scenario(scenario, rules=BY_POD | {"reserved_memory": {0: {"memory": MIB}}})


# -- what kubelet reports ---------------------------------------------------------------------------------


def test_facts_of_kubelet_are_used_without_another_query(run_scenario) -> None:
    kubelet = PlayedKubelet(
        container_requests("c", 3),
        ContainerResources("half", ContainerKind.APP, {"cpu": 2500}, {"cpu": 2500}),
    )

    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        assert kubelet.queries == 1, "known with the sandbox"
        assert world.on(await world.run(s, "c", **THREE)) == "0-1,8"
        half, unheard = (
            await world.create(s, "half", cpu_shares=2560, cpu_quota=-1, cpu_period=100_000),
            await world.create(s, "unheard", **TWO_CPUS),
        )
        assert world.executor.state.containers[half].owner == ""
        assert world.executor.state.containers[unheard].owner == "a/unheard"
        assert kubelet.queries == 1
        facts = world.executor.history.find("ns/a/c")[0].explanation.facts
        assert ("cpu request", "3 CPUs", "kubelet's /pods") in [(f.what, f.value, f.source) for f in facts]

    run_scenario(scenario, sources=(kubelet, None))


def test_kubelet_is_queried_again_for_a_pod_that_it_did_not_know(run_scenario) -> None:
    kubelet = PlayedKubelet()

    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        assert world.executor.state.pods[s].requests is None
        kubelet.answer = PodRequests("?", (container_requests("c", 3),)), "kubelet's /pods"
        container = await world.create(s, "c", **THREE)
        assert len(world.executor.state.containers[container].placement.exclusive) == 3
        assert kubelet.queries == 2

    run_scenario(scenario, sources=(kubelet, None))


@pytest.mark.parametrize("kubelet_answers", [True, False], ids=["reported", "no answer"])
def test_a_resized_container_is_placed_by_its_new_request(run_scenario, *, kubelet_answers: bool) -> None:
    kubelet = PlayedKubelet(container_requests("c", 2))

    async def scenario(world: Any) -> None:
        async def again(container: str, cpu: int, **request: int) -> str:
            await world.stop(container)
            resized = ContainerResources("c", ContainerKind.APP, {"cpu": cpu}, {"cpu": cpu})
            kubelet.answer = (PodRequests("?", (resized,)), "kubelet's /pods") if kubelet_answers else None
            queries = kubelet.queries
            again = await world.run(s, "c", **request)
            assert kubelet.queries == queries + 1
            return again

        s = await world.pod("a")
        first = await world.run(s, "c", **TWO_CPUS)
        assert (world.on(first), kubelet.queries) == ("0,8", 1)
        larger = await again(first, 4000, **FOUR)
        assert world.on(larger) == "0-1,8-9"
        facts = [f for each in world.executor.history.find("ns/a/c") for f in each.explanation.facts]
        suffix = "" if kubelet_answers else "; c as its create has it"
        assert Fact("cpu request", "4 CPUs", f"kubelet's /pods{suffix}") in facts
        shared = await again(larger, 1500, cpu_shares=1536, cpu_quota=150_000, cpu_period=100_000)
        assert (world.on(shared), world.executor.state.owners) == ("0-15", {})

    run_scenario(scenario, sources=(kubelet, None))


def test_the_containers_of_a_pod_without_a_report_share_what_it_requests(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        async def create(name: str) -> None:
            request = pb.CreateContainerRequest(pod_sandbox_id=s)
            request.config.metadata.name = name
            for carried in (request.config.linux.resources, request.sandbox_config.linux.resources):
                carried.CopyFrom(pb.LinuxContainerResources(**FOUR))
            world.finish(await world.call("CreateContainer", request), f"{s}-{name}")
            await world.start(f"{s}-{name}")

        s = await world.pod("a", total=FOUR)
        for name in ("x", "y", "z"):
            await create(name)
        assert [world.on(f"{s}-{name}") for name in "xyz"] == ["0-1,8-9", "2-7,10-15", "2-7,10-15"]
        problems = [each["keys"] for each in world.executor.telemetry.problems()]
        assert [(keys["pod"], keys["container"]) for keys in problems] == [("ns/a", "y"), ("ns/a", "z")]
        assert all("only kubelet reports" in keys["reason"] for keys in problems)

    run_scenario(scenario)


def test_what_is_set_aside_follows_the_sum_that_a_create_carries(run_scenario) -> None:
    half = {"cpu_shares": 1536, "cpu_quota": 150_000, "cpu_period": 100_000}

    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        await world.run_with_sum(s, "first", **FOUR)
        assert set_aside_cpus(world) == {"a": "0-1,8-9"}
        await world.stop("first")
        await world.run_with_sum(s, "second", **TWO_CPUS)
        assert (world.on("second"), set_aside_cpus(world)) == ("0,8", {"a": "0,8"})
        await world.stop("second")
        await world.run_with_sum(s, "third", **half)
        assert (world.on("third"), set_aside_cpus(world)) == ("0-15", {"a": ""})
        world.boot()
        assert set_aside_cpus(world) == {"a": ""}, "the ledger has it"

    run_scenario(scenario, rules=BY_POD)


def test_a_container_whose_memory_was_resized_is_counted_with_its_new_limit(run_scenario) -> None:
    kubelet = PlayedKubelet(container_requests("c", 2, mib=40))
    rules = {"policy": TopologyPolicy.SINGLE_NUMA_NODE, "reserved_memory": {0: {"memory": MIB}}}

    async def scenario(world: Any) -> None:
        def reserved() -> list[int]:
            nodes = world.executor.state.memory.nodes.values()
            return [node.table("memory").reserved // MIB for node in nodes]

        s = await world.pod("a")
        first = await world.run(s, "c", memory_limit_in_bytes=40 * MIB, **TWO_CPUS)
        assert reserved() == [40, 0]
        await world.stop(first)
        kubelet.answer = PodRequests("?", (container_requests("c", 2, mib=85),)), "kubelet's /pods"
        await world.run(s, "c", memory_limit_in_bytes=85 * MIB, **TWO_CPUS)
        assert (reserved(), kubelet.queries) == ([85, 0], 2)

    run_scenario(scenario, sources=(kubelet, None), rules=rules)


@pytest.mark.parametrize("method", ["RunPodSandbox", "CreateContainer"])
@pytest.mark.parametrize("rules", [{}, BY_POD, BY_CONTAINER], ids=["none", "pod", "container"])
def test_a_client_that_disconnects_during_a_query_of_kubelet_gets_no_cpus(
    run_scenario, method: str, rules: Any
) -> None:
    kubelet = PlayedKubelet(container_requests("c", 4))

    async def scenario(world: Any) -> None:
        kubelet.answer = None
        s = await world.pod("a")
        before, queries = world.executor.state, kubelet.queries
        kubelet.gate.clear()
        message: Any = sandbox("b", **FOUR)
        if method == "CreateContainer":
            message = pb.CreateContainerRequest(pod_sandbox_id=s)
            message.config.metadata.name = "c"
            message.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**FOUR))
        call = world.played(method, message)
        world.wire.request(call)
        while kubelet.queries == queries:
            await asyncio.sleep(0.001)
        call.done = True
        world.wire.finished(call, None)
        kubelet.gate.set()
        await world.quiet()
        assert (call.sent, call.refused) == (None, None)
        assert not isinstance(call.context, CallContext), "nothing would end it"
        assert world.executor.state.containers == before.containers
        assert world.executor.state.cpus_set_aside() == CpuSet()
        assert not world.executor.state.runtime.arriving_sandboxes

    run_scenario(scenario, rules=rules, sources=(kubelet, None))


def test_a_held_call_waits_for_its_deadline_at_most_while_kubelet_does_not_answer(run_scenario) -> None:
    kubelet = PlayedKubelet(container_requests("c", 3))
    kubelet.gate.clear()

    async def scenario(world: Any) -> None:
        world.limit_waits(world.executor.fact_lookup, "pod", 0.05)
        pods = [await world.pod(name) for name in "abcdef"]
        container = await world.create(pods[0], "c", **TWO_CPUS)
        placement = world.executor.state.containers[container].placement
        assert len(placement.exclusive) == 2, "the request of the CRI counts"
        assert f"{LATE} pod=ns/a" in " ".join(world.logged)
        kubelet.gate.set()
        await world.create(await world.pod("g"), "c", **TWO_CPUS)

    run_scenario(scenario, sources=(kubelet, None))


@pytest.mark.parametrize("what", ["pods", "devices", "sysfs"])
@pytest.mark.parametrize("error", [OSError("gone"), ValueError("rubbish"), KeyError("x")])
def test_a_pod_is_admitted_although_a_source_of_facts_fails(
    run_scenario, what: str, error: Exception
) -> None:
    kubelet, hardware = PlayedKubelet(), PlayedHardware()
    kubelet.knows_pods, kubelet.knows_devices = what == "pods", what == "devices"
    kubelet.error = hardware.error = error

    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        request = pb.CreateContainerRequest(pod_sandbox_id=s)
        request.config.metadata.name = "c"
        request.config.devices.add(container_path="/dev/gpu", host_path="/dev/gpu", permissions="rw")
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**FOUR))
        call = await world.call("CreateContainer", request)
        assert call.refused is None
        assert pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus == "0-1,8-9"
        await world.quiet()
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) > 0

    run_scenario(scenario, rules=BY_POD, sources=(kubelet, hardware))


@pytest.mark.parametrize("answer", [(None, ""), ("text", 5), (PodRequests("?", ()), ""), 7], ids=str)
def test_invalid_answers_of_kubelet_are_ignored(run_scenario, answer: Any) -> None:
    kubelet = PlayedKubelet()
    kubelet.answer = answer

    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        assert world.on(await world.run(s, "c", **FOUR)) == "0-1,8-9"
        world.check()

    for rules in ({}, BY_POD, BY_CONTAINER):
        run_scenario(scenario, rules=rules, sources=(kubelet, None))


def test_an_empty_answer_of_kubelet_releases_nothing(run_scenario) -> None:
    """Two creates of a pod query at once; a failed query must not discard the answer of the other."""
    kubelet = PlayedKubelet()

    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        kubelet.gate.clear()
        silent = asyncio.create_task(world.begin(s, "c", **TWO_CPUS))
        await world.until(lambda: kubelet.queries == 2)
        pod = world.executor.state.pods[s]
        pod = changed_copy(
            pod, requests=PodRequests("a", (container_requests("c", 2),)), source="kubelet's /pods"
        )
        world.executor.store.handle(PodLearned(pod, recorded=False))
        kubelet.gate.set()
        await silent
        assert world.executor.state.pods[s] == pod

    run_scenario(scenario, sources=(kubelet, None))


def test_facts_that_arrive_after_a_pod_has_stopped_do_not_revive_it(run_scenario) -> None:
    kubelet = PlayedKubelet()

    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        kubelet.answer = PodRequests("?", (container_requests("c", 4),)), "kubelet's /pods"
        kubelet.gate.clear()
        creating = asyncio.create_task(world.begin(s, "c", **FOUR))
        while kubelet.queries < 2:
            await asyncio.sleep(0.001)
        for method, done in (
            ("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=s)),
            ("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=s)),
        ):
            world.wire.finished(await world.call(method, done), 0)
        kubelet.gate.set()
        call = await creating
        assert s not in world.executor.state.pods
        world.wire.finished(call, 5)
        check_nothing_is_left(world)
        assert not world.executor.state.containers
        assert records(world, "ns/a/c") == [("ns/a/c", True, False)]

    run_scenario(scenario, sources=(kubelet, None))


def test_cpus_of_an_init_container_that_ended_unseen_are_used_again(run_scenario) -> None:
    """No event reports the end of a container, but kubelet creates the next one only then."""
    kubelet = PlayedKubelet(container_requests("i", 6, ContainerKind.INIT), container_requests("c", 6))

    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        first = await world.run(s, "i", **SIX)
        assigned = world.executor.state.containers[first].placement.exclusive
        world.cgroups.sets.pop(first)
        world._state(first, "EXITED")
        second = await world.run(s, "c", **SIX)
        assert world.executor.state.containers[second].placement.exclusive == assigned
        assert world.executor.state.containers[first].phase is Phase.EXITED
        world.check()

    for rules in ({}, BY_CONTAINER, BY_POD):
        run_scenario(scenario, rules=rules, sources=(kubelet, None))


def test_cpus_are_allocated_on_the_nodes_of_devices(run_scenario) -> None:
    near = LocatedDevice("GPU-1", "vendor/gpu", Mask([1]), "the pod-resources API")
    kubelet = PlayedKubelet(container_requests("c", 4))
    kubelet.knows_devices, kubelet.near = True, {"c": (near,)}

    async def scenario(world: Any) -> None:
        s = await world.pod("a", total=FOUR)
        assert world.on(await world.run(s, "c", **FOUR)) == "4-5,12-13"

    for rules in ({}, BY_CONTAINER, BY_POD):
        run_scenario(scenario, rules=rules, sources=(kubelet, None))


# -- modes ------------------------------------------------------------------------------------------------


def test_observe_mode_changes_no_request(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        for uid in "abc":
            call = await world.call("RunPodSandbox", sandbox(uid, **SIX))
            assert (call.sent, call.refused) == (call.body, None)
            world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id=f"s-{uid}").SerializeToString())
            world.wire.finished(call, 0)
        assert set_aside_cpus(world) == {"a": "0-2,8-10", "b": "4-6,12-14"}
        assert records(world, "ns/c") == [("ns/c", False, True)]
        call = await world.begin("s-a", "c", **SIX)
        assert call.sent == call.body
        assert not [line for line in world.log if not line.startswith(("forward", "ledger"))]

    run_scenario(scenario, rules=BY_POD, mode=NodeMode.OBSERVE)


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
    run_scenario, monkeypatch: pytest.MonkeyPatch, policy: TopologyPolicy, kube: str, *, strict: bool
) -> None:
    async def scenario(world: Any) -> None:
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name="a", uid="a", namespace="ns"),
            linux=pb.LinuxPodSandboxConfig(cgroup_parent=f"/kubepods/{kube}/poda"),
        )
        request = pb.CreateContainerRequest(pod_sandbox_id="s", sandbox_config=config)
        request.config.metadata.name = "c"

        def broken(*_: object) -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(world.executor.creates, "place", broken)
        call = await world.call("CreateContainer", request)
        assert (call.refused is not None) is strict
        assert strict or call.sent == call.body
        monkeypatch.setattr(world.executor.sandboxes, "admit", broken)
        pod = await world.call("RunPodSandbox", sandbox("b", **FOUR))
        assert pod.sent == pod.body, "its containers are decided one by one"

    run_scenario(scenario, rules={"policy": policy, "scope": Scope.POD})


def test_kubelet_does_not_make_a_pod_guaranteed_against_its_cgroup(run_scenario) -> None:
    near = LocatedDevice("GPU-1", "vendor/gpu", Mask([1]), "the pod-resources API")
    kubelet = PlayedKubelet(container_requests("c", 2))
    kubelet.knows_devices, kubelet.near = True, {"c": (near,)}

    async def scenario(world: Any) -> None:
        s = await world.pod("a", kube="burstable", total=TWO_CPUS)
        container = await world.run(s, "c", **TWO_CPUS)
        placement = world.executor.state.containers[container].placement
        assert (placement.exclusive, placement.blocks) == (CpuSet(), ())
        assert world.executor.state.pods[s].requests.guaranteed is False

    run_scenario(scenario, rules=BY_POD | {"reserved_memory": {0: {"memory": MIB}}}, sources=(kubelet, None))
