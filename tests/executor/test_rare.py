"""Rare moments: each test describes what a user would see if one line of the executor were another."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.container_events import ContainersRemoved
from proxy.executor import reconciler
from proxy.executor.codec import dump
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.errors import UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase
from proxy.telemetry import metrics
from proxy.telemetry.text import rendered
from tests.testkit.changed_copy import changed_copy


def test_a_lost_create_is_resolved_before_the_next_period(live, monkeypatch) -> None:
    monkeypatch.setattr(reconciler, "GRACE_S", 0.05)
    monkeypatch.setattr(reconciler, "GAP_S", 0.0)

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        lost = await w.begin(await w.pod("lost", "LSE", "", "0-3"))
        w.wire.finished(lost, None)
        w.executor.attention.clear()  # the pass that it asks for comes at once, too early to know
        task = asyncio.create_task(w.sync.run())
        await asyncio.sleep(0.02)
        assert w.executor.state.runtime.lost
        w.now += 10
        await w.until(lambda: (w.executor.state.runtime.lost, w.on(ls)) == ({}, "0-15"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    live(day, reconcile_period=60)


def test_a_lost_create_that_never_came_is_forgotten_in_one_pass(live) -> None:
    async def day(w: Any) -> None:
        lost = await w.begin(await w.pod("lost", "LSE", "", "0-3"))
        w.wire.finished(lost, None)
        w.now += 10
        await w.sync.once()
        assert (w.executor.state.runtime.lost, w.executor.state.runtime.saved) == ({}, {})

    live(day)


def test_a_container_that_goes_during_a_search_stops_no_other(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.executor.enforcer._paths.clear()

        def find(parent: str, container_id: str) -> None:
            w.executor.store.handle(ContainersRemoved((ls,)))

        w.cgroups.find = find
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.sent is not None
        assert pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus == "0-3"
        assert w.executor.telemetry.problems() == []

    live(day)


def test_a_start_that_never_began_is_created_again_after_a_restart(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        await w.quiet()
        container = w.executor.state.containers[ls].in_phase(Phase.STARTING)
        w.ledger.entries[f"c/{ls}"] = dump(container)
        w.boot()
        await w.sync.once()
        assert w.executor.state.containers[ls].phase is Phase.STARTING
        w.now += 3
        await w.sync.once()
        assert w.executor.state.containers[ls].phase is Phase.CREATED
        await w.start(ls)
        assert w.executor.state.containers[ls].phase is Phase.RUNNING

    live(day)


def test_a_list_that_says_created_does_not_stop_what_runs(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w._state(ls, "CREATED")
        await w.sync.once()
        assert w.executor.state.containers[ls].phase is Phase.RUNNING

    live(day)


def test_a_start_waits_no_longer_than_agreed_for_a_runtime_that_hangs(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        await w.create(await w.pod("lse", "LSE", "", "0-3"))
        gate = threading.Event()
        w.runtime.on_update = lambda _: gate.wait(60)
        call = await w.start(ls)
        hung = not gate.is_set()
        assert w.executor.state.inflight.of(ls), "the runtime may still take it"
        gate.set()
        assert hung
        assert call.refused is not None
        assert "does not answer" in call.refused[1]
        await w.until(lambda: not w.executor.state.inflight.of(ls))
        w.runtime.on_update = None
        assert (await w.start(ls)).refused is None
        assert w.on(ls) == "4-15"

    live(day, call_timeout=2.0)


def test_a_container_of_an_unknown_state_is_left_as_it_was(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w._state(ls, "UNKNOWN")
        await w.sync.once()
        assert w.executor.state.containers[ls].phase is Phase.RUNNING
        w.runtime.containers["odd"] = RuntimeContainer("odd", "s-ls", "odd", 0, "UNKNOWN")
        w.cgroups.sets["odd"] = CpuSet.parse("0")
        await w.sync.once()
        assert w.executor.state.containers["odd"].phase is Phase.RUNNING
        assert w.on("odd") == "0-15"

    live(day)


def test_a_start_that_fails_while_another_is_on_its_way(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        w.executor.attention.clear()
        message = pb.StartContainerRequest(container_id=ls)
        first, second = await w.call("StartContainer", message), await w.call("StartContainer", message)
        w.wire.finished(first, 2)
        assert w.executor.state.containers[ls].phase is Phase.STARTING
        assert w.executor.attention.is_set(), "the runtime knows what became of it"
        w.wire.finished(second, 2)
        assert w.executor.state.containers[ls].phase is Phase.STARTING, "it may run all the same"
        await w.sync.once()
        assert w.executor.state.containers[ls].phase is Phase.CREATED

    live(day)


def test_problems_of_an_adopted_container_are_reported(live) -> None:
    async def day(w: Any) -> None:
        status = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"90"}'}
        for uid, more in (("fine", {}), ("odd", status)):
            w.runtime.pods[uid] = RuntimePod(uid, uid, "ns", uid, 0, True, {}, more)
            w.runtime.containers[uid] = RuntimeContainer(uid, uid, "c", 0, "RUNNING")
            w.cgroups.sets[uid] = CpuSet.parse("0-15")
        assert (w.sync.runtime_version, w.sync.connected) == ("", False)
        await w.sync.once()
        assert (w.sync.runtime_version, w.sync.connected) == ("played 1", True)
        (problem,) = w.executor.telemetry.problems()
        assert problem["message"] == "cannot follow what a pod requests"
        assert problem["keys"] == {
            "pod": "ns/odd",
            "kind": "cpu-list",
            "reason": "annotation scheduling.koordinator.sh/resource-status: "
            "cpuset: CPU 90 is not on this machine (0-15)",
        }

    live(day, reconciled=False)


def test_unusable_records_are_reported_and_ignored(live) -> None:
    async def day(w: Any) -> None:
        own = await w.run(await w.pod("g"), cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        await w.quiet()
        record = dict(w.ledger.entries[f"c/{own}"])
        w.ledger.entries["c/odd"] = {"id": "odd"}
        w.ledger.entries["c/away"] = {
            **record,
            "id": "away",
            "placement": {**record["placement"], "own": "90"},
        }
        w.ledger.entries["p/odd"] = {"uid": 3}
        w.ledger.entries["x/later"] = {}
        w.boot()
        assert set(w.executor.state.containers) == {own}
        assert set(w.executor.state.pods) == {"s-g"}
        await w.sync.once()
        assert [p["what"].partition(" err=")[0] for p in w.executor.telemetry.problems()] == [
            "cannot use a record of the ledger record=c/odd",
            "cannot use a record of the ledger record=c/away",
            "cannot use a record of the ledger record=p/odd",
        ]

    live(day)


@pytest.mark.parametrize("part", ["quotas", "mems"])
def test_a_fault_beside_the_reconcile_does_not_delay_readiness(live, part: str) -> None:
    async def day(w: Any) -> None:
        async def fault() -> None:
            raise RuntimeError("a fault of ours")

        getattr(w.executor, part).once = fault
        await w.sync.once()
        await asyncio.sleep(0)
        assert w.executor.reconciled.is_set()
        assert w.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 1

    live(day, reconciled=False)


def test_a_pod_known_only_from_a_create_is_recorded(live) -> None:
    async def day(w: Any) -> None:
        request = pb.CreateContainerRequest(pod_sandbox_id="s")
        request.config.metadata.name = "c"
        request.sandbox_config.metadata.uid = "u"
        await w.call("CreateContainer", request)
        await w.quiet()
        assert w.ledger.entries["p/s"]["uid"] == "u"
        assert w.executor.state.pods["s"].uid == "u"

    live(day)


class Log:
    """A log with the levels apart."""

    def __init__(self, info: list[str], debug: list[str], verbose: bool) -> None:
        self.lines = {"info": info, "debug": debug}
        self.verbose = verbose

    def enabled(self, level: str) -> bool:
        return level != "debug" or self.verbose

    def write(self, level: str, message: str, keys: Any, above: int) -> None:
        self.lines[level].append(rendered(message, keys))


def test_owners_are_logged_and_others_only_at_debug_level(live) -> None:
    async def day(w: Any) -> None:
        for chatty in (True, False):
            info: list[str] = []
            debug: list[str] = []
            w.executor.telemetry._sink = Log(info, debug, chatty)
            await w.begin(await w.pod(f"ls{chatty}", "LS"))
            await w.begin(await w.pod(f"lse{chatty}", "LSE", "", "1" if chatty else "2"))
            assert [line.split()[1] for line in info] == [f"pod=ns/lse{chatty}"]
            assert [line.split()[1] for line in debug] == ([f"pod=ns/ls{chatty}"] if chatty else [])

    live(day)


def test_a_container_named_by_two_calls_at_once_is_adopted_once(live) -> None:
    async def day(w: Any) -> None:
        w.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        w.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "RUNNING")
        w.cgroups.sets["x"] = CpuSet.parse("0-15")
        one = w.sync.adoption.adopt_one
        assert await asyncio.gather(one("x"), one("x")) == [True, True]
        assert w.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 1

    live(day)


def test_the_start_of_an_unknown_container_brings_the_current_set(live) -> None:
    async def day(w: Any) -> None:
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        w.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "CREATED")
        w.runtime.details["x"] = RuntimeDetail("/kubepods/burstable/podv/x", cpuset_cpus="0-15")
        w.runtime.specs["x"] = "0-15"
        assert (await w.start("x")).refused is None
        assert w.on("x") == "4-15"
        assert w.executor.telemetry.value(metrics.CPUSETS_UPDATED_BEFORE_START) == 1

    live(day)


@pytest.mark.parametrize("silent", ["list_pods", "detail"])
def test_the_start_of_an_unknown_container_is_refused_where_the_runtime_does_not_answer(live, silent) -> None:
    """With the set that is saved, it would run on the CPUs of an owner."""

    async def day(w: Any) -> None:
        def hangs(*_args: str) -> Any:
            raise UnavailableError("cannot query the runtime: deadline exceeded")

        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        w.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "CREATED")
        w.runtime.specs["x"] = "0-15"
        answers = getattr(w.runtime, silent)
        setattr(w.runtime, silent, hangs)
        refused = (await w.start("x")).refused
        assert refused is not None
        assert "deadline exceeded" in refused[1]
        setattr(w.runtime, silent, answers)
        assert (await w.start("x")).refused is None
        assert w.on("x") == "4-15"

    live(day)


def test_work_that_is_cancelled_is_not_a_fault(live) -> None:
    async def day(w: Any) -> None:
        odd: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: odd.append(context))
        w.executor.spawn(asyncio.sleep(60))
        for task in list(w.executor._tasks):
            task.cancel()
        await w.quiet()
        assert (odd, w.executor.telemetry.value(metrics.INTERNAL_ERRORS)) == ([], 0)

    live(day)


def test_the_answer_to_a_call_that_passed_undecided_passes_too(live) -> None:
    async def day(w: Any) -> None:
        w.runtime.down = True
        call = await w.call("CreateContainer", pb.CreateContainerRequest(pod_sandbox_id="s"))
        assert call.sent == call.body
        w.wire.response(call, pb.CreateContainerResponse(container_id="x").SerializeToString())
        w.wire.finished(call, 0)
        assert dict(w.executor.state.containers) == {}

    live(day, reconciled=False, call_timeout=0.5)


def test_a_missing_runtime_is_reported_once_each_time(live) -> None:
    async def day(w: Any) -> None:
        def logged() -> int:
            return w.logged.count('cannot reach the runtime err="cannot reach the runtime: down"')

        for times in (1, 2):
            w.runtime.down = True
            for _ in range(3):
                with pytest.raises(UnavailableError) as caught:
                    await w.sync.once()
                w.sync._failed(caught.value)
            assert (logged(), w.sync.connected) == (times, False)
            w.runtime.down = False
            await w.sync.once()
            assert w.sync.connected

    live(day, reconciled=False)


def test_containers_of_a_dead_sandbox_keep_their_cpus_until_they_end(live) -> None:
    """The sandbox's own process may die alone; kubelet then stops the containers, with their grace period."""

    async def day(w: Any) -> None:
        s = await w.pod("a")
        container = await w.run(s, "c", cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        before = w.executor.state.containers[container].placement
        w.runtime.pods[s] = changed_copy(w.runtime.pods[s], ready=False)
        for _ in range(3):
            await w.sync.once()
            assert w.executor.state.containers[container].phase is Phase.RUNNING
            assert w.executor.state.owners
        assert w.executor.state.containers[container].placement == before
        assert w.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 0
        w._state(container, "EXITED")
        w.cgroups.sets.clear()
        await w.sync.once()
        assert not w.executor.state.owners
        assert s not in w.executor.state.pods
        await w.quiet()
        w.check()

    live(day)


def test_unstarted_containers_of_a_dead_sandbox_are_not_changed(live) -> None:
    async def day(w: Any) -> None:
        s = await w.pod("a")
        container = await w.create(s, "c", cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        w.runtime.pods[s] = changed_copy(w.runtime.pods[s], ready=False)
        for _ in range(5):
            await w.sync.once()
            assert not w.executor.state.owners
            assert s not in w.executor.state.pods
        assert w.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 0
        assert container in w.runtime.containers

    live(day)


def test_a_call_about_an_unknown_container_does_not_wait_for_a_comparison(live) -> None:
    async def day(w: Any) -> None:
        gate = threading.Event()
        held = asyncio.ensure_future(w.sync._worker.run(gate.wait, 60))  # a comparison that takes its time
        try:
            w.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
            w.runtime.containers["x"] = RuntimeContainer("x", "q", "c", 0, "RUNNING")
            async with asyncio.timeout(20):
                assert await w.sync.adoption.adopt_one("x")
        finally:
            gate.set()
            await held

    live(day)
