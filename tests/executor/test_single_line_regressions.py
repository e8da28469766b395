"""Rare cases: each test describes the effect for a user if one line of the executor were different."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.container_events import ContainersRemoved
from proxy.executor import reconciler
from proxy.executor.ledger_codec import dump
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.errors import UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.telemetry import metrics
from proxy.telemetry.text import rendered
from tests.testkit.changed_copy import changed_copy


def test_a_lost_create_is_resolved_before_the_next_period(run_scenario, monkeypatch) -> None:
    monkeypatch.setattr(reconciler, "GRACE_S", 0.05)
    monkeypatch.setattr(reconciler, "GAP_S", 0.0)

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        lost = await world.begin(await world.pod("lost", "LSE", "", "0-3"))
        world.wire.finished(lost, None)
        # The requested reconcile would run too early to resolve the create.
        world.executor.reconcile_requested.clear()
        task = asyncio.create_task(world.sync.run())
        await asyncio.sleep(0.02)
        assert world.executor.state.runtime.lost_creates
        world.now += 10
        await world.until(lambda: (world.executor.state.runtime.lost_creates, world.on(ls)) == ({}, "0-15"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_scenario(scenario, reconcile_period=60)


def test_a_lost_create_that_never_came_is_forgotten_in_one_reconcile(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        lost = await world.begin(await world.pod("lost", "LSE", "", "0-3"))
        world.wire.finished(lost, None)
        world.now += 10
        await world.sync.once()
        assert (world.executor.state.runtime.lost_creates, world.executor.state.runtime.saved) == ({}, {})

    run_scenario(scenario)


def test_a_container_removed_during_a_search_does_not_stop_a_create(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.executor.cpuset_writer._paths.clear()

        def find(parent: str, container_id: str) -> None:
            world.executor.store.handle(ContainersRemoved((ls,)))

        world.cgroups.find = find
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.sent is not None
        assert pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus == "0-3"
        assert world.executor.telemetry.problems() == []

    run_scenario(scenario)


def test_a_start_that_never_began_is_created_again_after_a_restart(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        await world.quiet()
        container = world.executor.state.containers[ls].in_phase(Phase.STARTING)
        world.ledger.entries[f"c/{ls}"] = dump(container)
        world.boot()
        await world.sync.once()
        assert world.executor.state.containers[ls].phase is Phase.STARTING
        world.now += 3
        await world.sync.once()
        assert world.executor.state.containers[ls].phase is Phase.CREATED
        await world.start(ls)
        assert world.executor.state.containers[ls].phase is Phase.RUNNING

    run_scenario(scenario)


def test_a_list_with_state_created_does_not_stop_a_running_container(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world._state(ls, "CREATED")
        await world.sync.once()
        assert world.executor.state.containers[ls].phase is Phase.RUNNING

    run_scenario(scenario)


def test_a_start_waits_for_a_hanging_runtime_for_a_limited_time(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        await world.create(await world.pod("lse", "LSE", "", "0-3"))
        gate = threading.Event()
        world.runtime.on_update = lambda _: gate.wait(60)
        call = await world.start(ls)
        hung = not gate.is_set()
        assert world.executor.state.inflight.of(ls), "the runtime may still execute it"
        gate.set()
        assert hung
        assert call.refused is not None
        assert "does not answer" in call.refused[1]
        await world.until(lambda: not world.executor.state.inflight.of(ls))
        world.runtime.on_update = None
        assert (await world.start(ls)).refused is None
        assert world.on(ls) == "4-15"

    run_scenario(scenario, call_timeout=2.0)


def test_a_container_of_an_unknown_state_is_left_as_it_was(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world._state(ls, "UNKNOWN")
        await world.sync.once()
        assert world.executor.state.containers[ls].phase is Phase.RUNNING
        world.runtime.containers["odd"] = RuntimeContainer("odd", "s-ls", "odd", 0, "UNKNOWN")
        world.cgroups.sets["odd"] = CpuSet.parse("0")
        await world.sync.once()
        assert world.executor.state.containers["odd"].phase is Phase.RUNNING
        assert world.on("odd") == "0-15"

    run_scenario(scenario)


def test_a_start_that_fails_while_another_is_in_flight(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        world.executor.reconcile_requested.clear()
        message = pb.StartContainerRequest(container_id=ls)
        first, second = (
            await world.call("StartContainer", message),
            await world.call("StartContainer", message),
        )
        world.wire.finished(first, 2)
        assert world.executor.state.containers[ls].phase is Phase.STARTING
        assert world.executor.reconcile_requested.is_set(), "the runtime knows its state"
        world.wire.finished(second, 2)
        assert world.executor.state.containers[ls].phase is Phase.STARTING, "it may run nevertheless"
        await world.sync.once()
        assert world.executor.state.containers[ls].phase is Phase.CREATED

    run_scenario(scenario)


def test_problems_of_an_adopted_container_are_reported(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        status = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"90"}'}
        for uid, more in (("fine", {}), ("odd", status)):
            world.runtime.pods[uid] = RuntimePod(uid, uid, "ns", uid, 0, True, {}, more)
            world.runtime.containers[uid] = RuntimeContainer(uid, uid, "c", 0, "RUNNING")
            world.cgroups.sets[uid] = CpuSet.parse("0-15")
        assert (world.sync.runtime_version, world.sync.connected) == ("", False)
        await world.sync.once()
        assert (world.sync.runtime_version, world.sync.connected) == ("played 1", True)
        (problem,) = world.executor.telemetry.problems()
        assert problem["message"] == "cannot follow what a pod requests"
        assert problem["keys"] == {
            "pod": "ns/odd",
            "kind": "cpu-list",
            "reason": "annotation scheduling.koordinator.sh/resource-status: "
            "cpuset: CPU 90 is not on this machine (0-15)",
        }

    run_scenario(scenario, reconciled=False)


def test_unusable_records_are_reported_and_ignored(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        own = await world.run(await world.pod("g"), cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        await world.quiet()
        record = dict(world.ledger.entries[f"c/{own}"])
        world.ledger.entries["c/odd"] = {"id": "odd"}
        world.ledger.entries["c/away"] = {
            **record,
            "id": "away",
            "placement": {**record["placement"], "own": "90"},
        }
        world.ledger.entries["p/odd"] = {"uid": 3}
        world.ledger.entries["x/later"] = {}
        world.boot()
        assert set(world.executor.state.containers) == {own}
        assert set(world.executor.state.pods) == {"s-g"}
        await world.sync.once()
        assert [p["what"].partition(" err=")[0] for p in world.executor.telemetry.problems()] == [
            "cannot use a record of the ledger record=c/odd",
            "cannot use a record of the ledger record=c/away",
            "cannot use a record of the ledger record=p/odd",
        ]

    run_scenario(scenario)


@pytest.mark.parametrize("part", ["quotas", "mems"])
def test_a_fault_of_a_part_does_not_delay_readiness(run_scenario, part: str) -> None:
    async def scenario(world: Any) -> None:
        async def fault() -> None:
            raise RuntimeError("a fault of ours")

        getattr(world.executor, part).once = fault
        await world.sync.once()
        await asyncio.sleep(0)
        assert world.executor.reconciled.is_set()
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 1

    run_scenario(scenario, reconciled=False)


def test_a_pod_known_only_from_a_create_is_recorded(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        request = pb.CreateContainerRequest(pod_sandbox_id="s")
        request.config.metadata.name = "c"
        request.sandbox_config.metadata.uid = "u"
        await world.call("CreateContainer", request)
        await world.quiet()
        assert world.ledger.entries["p/s"]["uid"] == "u"
        assert world.executor.state.pods["s"].uid == "u"

    run_scenario(scenario)


STATUS = "scheduling.koordinator.sh/resource-status"
LSR = RuntimePod(
    "s", "u", "ns", "p", 0, True, {"koordinator.sh/qosClass": "LSR"}, {STATUS: '{"cpuset":"2-3"}'}
)


def test_a_create_without_sandbox_configuration_takes_the_pod_from_the_runtimes_list(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        world.runtime.pods["s"] = LSR
        call = await world.begin("s", cpu_shares=2048)
        assert pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus == "2-3"
        assert world.executor.state.pods["s"].name == "p"
        listed = world.runtime.list_pods
        world.runtime.list_pods = None
        call = await world.begin("s", "second", cpu_shares=2)
        assert call.sent is not None, "the pod is known, and not listed again"
        world.runtime.list_pods = listed

    run_scenario(scenario)


@pytest.mark.parametrize(("down", "code"), [(True, 14), (False, 5)])
@pytest.mark.parametrize("mode", [NodeMode.ENFORCE, NodeMode.OBSERVE])
def test_a_create_whose_pod_cannot_be_found_is_reported(
    run_scenario, mode: NodeMode, down: bool, code: int
) -> None:
    async def scenario(world: Any) -> None:
        world.runtime.down = down
        call = await world.begin("s", cpu_shares=2048)
        if mode is NodeMode.ENFORCE:
            assert call.refused[0] == code
            assert call.refused[1].startswith("cannot place c: cannot find sandbox s: ")
        else:
            assert call.sent == call.body
        problems = [problem["what"] for problem in world.executor.telemetry.problems()]
        assert any("cannot find the pod of a create" in what for what in problems)
        assert world.executor.reconcile_requested.is_set()

    run_scenario(scenario, mode=mode)


class Log:
    """A log with separate lists for levels."""

    def __init__(self, info: list[str], debug: list[str], verbose: bool) -> None:
        self.lines = {"info": info, "debug": debug}
        self.verbose = verbose

    def enabled(self, level: str) -> bool:
        return level != "debug" or self.verbose

    def write(self, level: str, message: str, keys: Any, above: int) -> None:
        self.lines[level].append(rendered(message, keys))


def test_owners_are_logged_and_others_only_at_debug_level(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        for chatty in (True, False):
            info: list[str] = []
            debug: list[str] = []
            world.executor.telemetry._sink = Log(info, debug, chatty)
            await world.begin(await world.pod(f"ls{chatty}", "LS"))
            await world.begin(await world.pod(f"lse{chatty}", "LSE", "", "1" if chatty else "2"))
            assert [line.split()[1] for line in info] == [f"pod=ns/lse{chatty}"]
            assert [line.split()[1] for line in debug] == ([f"pod=ns/ls{chatty}"] if chatty else [])

    run_scenario(scenario)


def test_a_container_named_by_two_calls_at_once_is_adopted_once(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        world.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        world.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "RUNNING")
        world.cgroups.sets["x"] = CpuSet.parse("0-15")
        one = world.sync.adoption.adopt_one
        assert await asyncio.gather(one("x"), one("x")) == [True, True]
        assert world.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 1

    run_scenario(scenario)


def test_the_start_of_an_unknown_container_carries_the_current_set(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        world.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        world.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "CREATED")
        world.runtime.details["x"] = RuntimeDetail("/kubepods/burstable/podv/x", cpuset_cpus="0-15")
        world.runtime.specs["x"] = "0-15"
        assert (await world.start("x")).refused is None
        assert world.on("x") == "4-15"
        assert world.executor.telemetry.value(metrics.CPUSETS_UPDATED_BEFORE_START) == 1

    run_scenario(scenario)


@pytest.mark.parametrize("silent", ["list_pods", "detail"])
def test_the_start_of_an_unknown_container_is_refused_if_the_runtime_does_not_answer(
    run_scenario, silent
) -> None:
    """With the saved set, the container would run on the CPUs of an owner."""

    async def scenario(world: Any) -> None:
        def hangs(*_args: str) -> Any:
            raise UnavailableError("cannot query the runtime: deadline exceeded")

        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        world.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        world.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "CREATED")
        world.runtime.specs["x"] = "0-15"
        answers = getattr(world.runtime, silent)
        setattr(world.runtime, silent, hangs)
        refused = (await world.start("x")).refused
        assert refused is not None
        assert "deadline exceeded" in refused[1]
        setattr(world.runtime, silent, answers)
        assert (await world.start("x")).refused is None
        assert world.on("x") == "4-15"

    run_scenario(scenario)


def test_cancelled_work_is_not_reported_as_a_fault(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        odd: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: odd.append(context))
        world.executor.spawn(asyncio.sleep(60))
        for task in list(world.executor._tasks):
            task.cancel()
        await world.quiet()
        assert (odd, world.executor.telemetry.value(metrics.INTERNAL_ERRORS)) == ([], 0)

    run_scenario(scenario)


def test_the_response_to_an_undecided_call_is_forwarded(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        world.runtime.down = True
        request = pb.CreateContainerRequest(pod_sandbox_id="s")
        request.sandbox_config.metadata.name = "p"
        call = await world.call("CreateContainer", request)
        assert call.sent == call.body
        world.wire.response(call, pb.CreateContainerResponse(container_id="x").SerializeToString())
        world.wire.finished(call, 0)
        assert dict(world.executor.state.containers) == {}

    run_scenario(scenario, reconciled=False, call_timeout=0.5)


def test_a_missing_runtime_is_reported_once_each_time(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        def logged() -> int:
            return world.logged.count('cannot reach the runtime err="cannot reach the runtime: down"')

        for times in (1, 2):
            world.runtime.down = True
            for _ in range(3):
                with pytest.raises(UnavailableError) as caught:
                    await world.sync.once()
                world.sync._failed(caught.value)
            assert (logged(), world.sync.connected) == (times, False)
            world.runtime.down = False
            await world.sync.once()
            assert world.sync.connected

    run_scenario(scenario, reconciled=False)


def test_containers_of_a_dead_sandbox_keep_their_cpus_until_they_end(run_scenario) -> None:
    """The sandbox's process may die alone; kubelet then stops the containers, with their grace period."""

    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        container = await world.run(s, "c", cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        before = world.executor.state.containers[container].placement
        world.runtime.pods[s] = changed_copy(world.runtime.pods[s], ready=False)
        for _ in range(3):
            await world.sync.once()
            assert world.executor.state.containers[container].phase is Phase.RUNNING
            assert world.executor.state.owners
        assert world.executor.state.containers[container].placement == before
        assert world.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 0
        world._state(container, "EXITED")
        world.cgroups.sets.clear()
        await world.sync.once()
        assert not world.executor.state.owners
        assert s not in world.executor.state.pods
        await world.quiet()
        world.check()

    run_scenario(scenario)


def test_unstarted_containers_of_a_dead_sandbox_are_not_changed(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        s = await world.pod("a")
        container = await world.create(s, "c", cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        world.runtime.pods[s] = changed_copy(world.runtime.pods[s], ready=False)
        for _ in range(5):
            await world.sync.once()
            assert not world.executor.state.owners
            assert s not in world.executor.state.pods
        assert world.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 0
        assert container in world.runtime.containers

    run_scenario(scenario)


def test_a_call_about_an_unknown_container_does_not_wait_for_a_reconcile(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        gate = threading.Event()
        held = asyncio.ensure_future(world.sync._worker.run(gate.wait, 60))  # a slow reconcile
        try:
            world.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
            world.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "RUNNING")
            async with asyncio.timeout(20):
                assert await world.sync.adoption.adopt_one("x")
        finally:
            gate.set()
            await held

    run_scenario(scenario)
