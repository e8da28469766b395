"""The way of requests through interceptors and executor, as a client's day."""

from __future__ import annotations

import asyncio

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.errors import RuntimeCallError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.observe.sentences import headline
from proxy.telemetry import metrics
from tests.testkit.cri import TWO_CPUS, created_with


def test_each_class_runs_where_it_belongs(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS", "burstable"))
        be = await w.run(await w.pod("be", "", "besteffort"))
        assert (w.on(ls), w.on(be)) == ("0-15", "0-15")
        lsr = await w.run(await w.pod("lsr", "LSR", "burstable", "0-1"))
        assert (w.on(lsr), w.on(ls), w.on(be)) == ("0-1", "2-15", "0-15")
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        assert (w.on(lse), w.on(ls), w.on(be)) == ("2-3", "4-15", "0-1,4-15")
        own = await w.run(await w.pod("g"), **TWO_CPUS)
        assert w.on(own) == "4,12"
        w.check()
        for gone in (lse, own):
            await w.stop(gone)
        assert (w.on(ls), w.on(be)) == ("2-15", "0-15")
        await w.remove(lsr)
        assert w.on(ls) == "0-15"
        w.check()

    live(day)


def test_others_leave_before_the_create_and_after_the_ledger_write(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        await w.quiet()
        w.log.clear()
        call = await w.begin(sandbox)
        assert w.log == ["ledger +i/", f"kernel {ls} 4-15", "forward CreateContainer"]
        assert (created_with(call).cpuset_cpus, created_with(call).cpuset_mems) == ("0-3", "0")

    live(day)


def test_only_owners_are_logged_above_debug_level(live) -> None:
    """A node with 1,000 sharing containers writes no line for each of them."""

    async def day(w) -> None:
        w.executor.telemetry._sink.levels = ("info", "warning", "error")
        await w.run(await w.pod("quiet", "LS"))
        await w.run(await w.pod("own", "LSE", "", "0-3"))
        assert [line for line in w.logged if "quiet" in line] == []
        assert len([line for line in w.logged if line.startswith("placed pod=ns/own ")]) == 1
        w.executor.telemetry._sink.levels = ("debug",)
        await w.run(await w.pod("loud", "LS"))
        assert len([line for line in w.logged if line.startswith("placed pod=ns/loud ")]) == 1

    live(day)


def test_a_failed_create_puts_the_others_back(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert w.on(ls) == "4-15"
        w.wire.finished(call, 2)
        await w.quiet()
        assert w.on(ls) == "0-15"
        assert [k for k in w.ledger.entries if k.startswith("i/")] == []
        w.check()

    live(day)


def test_a_create_that_cannot_move_the_others_is_refused_and_undone(live) -> None:
    async def day(w) -> None:
        one = await w.run(await w.pod("one", "LS"))
        two = await w.run(await w.pod("two", "LS"))
        w.cgroups.broken.add(two)
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.refused[0] == 9
        assert "busy" in call.refused[1]
        await w.quiet()
        assert (w.on(one), w.on(two)) == ("0-15", "0-15")
        assert w.executor.state.owners == {}

    live(day)


def test_creates_of_different_pods_overlap(live) -> None:
    async def day(w) -> None:
        first = await w.begin(await w.pod("a", "LSE", "", "0-3"))
        second = await w.begin(await w.pod("b", "LSE", "", "4-7"))
        clash = await w.begin(await w.pod("c", "LSE", "", "7-8"))
        assert clash.refused[0] == 9
        assert (created_with(first).cpuset_cpus, created_with(second).cpuset_cpus) == ("0-3", "4-7")
        w.finish(second, "id-b")
        w.wire.finished(first, 2)
        await w.quiet()
        assert str(w.executor.state.pools.shared) == "0-3,8-15"

    live(day)


def test_a_created_container_starts_with_todays_set(live) -> None:
    async def day(w) -> None:
        early = await w.create(await w.pod("early", "LS"))
        assert w.runtime.specs[early] == "0-15"
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.log.clear()
        await w.start(early)
        assert w.log[0:2] == [f"runtime {early} 4-15", "forward StartContainer"]
        assert w.on(early) == "4-15"

    live(day)


def test_a_created_container_that_cannot_be_corrected_does_not_start(live) -> None:
    async def day(w) -> None:
        early = await w.create(await w.pod("early", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.runtime.update_error = RuntimeCallError("cannot update: no", 2)
        call = await w.start(early)
        assert call.refused[0] == 9

    live(day)


def test_a_shrink_waits_for_a_start_in_flight(live) -> None:
    async def day(w) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        start = await w.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        create = asyncio.create_task(w.begin(sandbox))
        await asyncio.sleep(0.1)
        assert not create.done(), "the start may still bring its old set to the kernel"
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        w.wire.finished(start, 0)
        call = await create
        assert w.on(ls) == "4-15"
        assert created_with(call).cpuset_cpus == "0-3"

    live(day)


def test_a_call_in_flight_that_never_ends_refuses_the_create(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.refused[0] == 9
        assert "busy" in call.refused[1]
        assert w.executor.state.owners == {}

    live(day, call_timeout=0.5)


def test_an_update_leaves_with_our_cpuset_and_all_else_as_it_came(live) -> None:
    async def day(w) -> None:
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        ls = await w.run(await w.pod("ls", "LS"))
        for container_id, cpus, mems in ((lse, "2-3", "0"), (ls, "0-1,4-15", "0-1")):
            request = pb.UpdateContainerResourcesRequest(container_id=container_id)
            request.linux.cpu_quota = 50_000
            request.linux.cpuset_cpus = "0-15"
            request.linux.unified["memory.high"] = "1"
            request.annotations["a"] = "b"
            call = await w.call("UpdateContainerResources", request)
            assert call.sent.startswith(call.body)
            got = pb.UpdateContainerResourcesRequest.FromString(call.sent)
            request.linux.cpuset_cpus, request.linux.cpuset_mems = cpus, mems
            if container_id == lse:
                request.linux.cpu_quota = -1
            assert got == request
            w.wire.finished(call, 0)

    live(day)


def test_what_an_old_update_brought_to_the_kernel_is_put_right(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        call = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        await w.stop(lse)
        w.cgroups.sets[ls] = CpuSet.parse("4-15")  # what the update carries
        w.wire.finished(call, 0)
        await w.quiet()
        assert w.on(ls) == "0-15"

    live(day)


def test_strict_pods_are_refused_with_the_reason(live) -> None:
    async def day(w) -> None:
        for number, annotation in enumerate(('{"cpuset":"90"}', "{nonsense", '{"cpuset":"3-1"}')):
            for qos in ("LSE", "LSR"):
                call = await w.begin(await w.pod(f"{qos}{number}", qos, annotation=annotation))
                assert call.refused[0] == 3
                assert call.refused[1].startswith(f"cannot place ns/{qos}{number}/c: ")
        ls = await w.begin(await w.pod("ls", "LS", annotation="{nonsense"))
        assert created_with(ls).cpuset_cpus == "0-15"
        ls = await w.begin(await w.pod("ls", "LS", annotation="{nonsense"))
        problems = [p for p in w.executor.telemetry.problems() if "ns/ls" in p["what"]]
        assert len(problems) == 1
        assert problems[0]["count"] == 1, "reported once for a pod, however often it is tried"
        counted = {
            kind: n
            for kind, n in w.executor.telemetry.registry.page().items()
            if kind.startswith("bad_input_") and n
        }
        assert counted == {"bad_input_cpu-list": 4, "bad_input_annotation": 3}

    live(day)


def test_everything_is_known_without_run_pod_sandbox(live) -> None:
    async def day(w) -> None:
        request = pb.CreateContainerRequest(pod_sandbox_id="never-seen")
        request.config.metadata.name = "c"
        request.sandbox_config.metadata.uid = "u"
        request.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        request.sandbox_config.annotations["scheduling.koordinator.sh/resource-status"] = '{"cpuset":"5"}'
        request.sandbox_config.linux.cgroup_parent = "/kubepods/podu"
        call = await w.call("CreateContainer", request)
        assert created_with(call).cpuset_cpus == "5"

    live(day)


def test_restart_moves_nothing_and_gives_nothing_twice(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        own = await w.run(await w.pod("g"), **TWO_CPUS)
        lse = await w.run(await w.pod("lse", "LSE", "", "6-7"))
        created = await w.create(await w.pod("late", "LS"))
        await w.quiet()
        before = dict(w.cgroups.sets)
        w.log.clear()
        w.boot()
        await w.sync.once()
        assert [line for line in w.log if line.startswith(("kernel", "runtime"))] == []
        assert w.cgroups.sets == before
        assert {k: str(o.cpus) for k, o in w.executor.state.owners.items()} == {"g/c": "0,8", "lse": "6-7"}
        w.now += 3  # a start that was on its way at the end is over
        await w.sync.once()
        again = await w.begin(await w.pod("h"), **TWO_CPUS)
        assert created_with(again).cpuset_cpus == "1,9"
        await w.start(created)
        assert w.on(created) == "2-5,10-15"
        w.check()
        assert {ls, own, lse} <= set(w.executor.state.containers)

    live(day)


def test_killed_between_shrink_and_answer(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        for_good = await w.begin(await w.pod("made", "LSE", "", "0-1"))
        await w.begin(await w.pod("lost", "LSE", "", "2-3"))
        await w.quiet()
        # The runtime made one of them; then we were killed.
        w.runtime.specs["x"] = created_with(for_good).cpuset_cpus
        w.runtime.containers["x"] = RuntimeContainer("x", "s-made", "c", 0, "CREATED")
        w.boot()
        await w.sync.once()
        assert w.on(ls) == "4-15", "the lost one may still turn up"
        assert str(w.executor.state.containers["x"].placement.exclusive) == "0-1"
        w.now += 10
        await w.sync.once()
        await w.quiet()
        assert w.on(ls) == "2-15"
        w.now += 10
        await w.sync.once()  # a runtime that answers has nothing more to do
        await w.start("x")
        assert w.on("x") == "0-1"
        w.check()

    live(day)


def test_a_cancelled_create_is_resolved_by_asking(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        made = await w.begin(await w.pod("made", "LSE", "", "0-1"))
        lost = await w.begin(await w.pod("lost", "LSE", "", "2-3"))
        w.wire.finished(made, None)
        w.wire.finished(lost, None)
        await w.quiet()
        assert w.on(ls) == "4-15"
        w.runtime.containers["x"] = RuntimeContainer("x", "s-made", "c", 0, "CREATED")
        w.now += 10
        await w.sync.once()
        await w.quiet()
        assert w.on(ls) == "2-15"
        assert w.executor.state.containers["x"].phase is Phase.CREATED

    live(day)


def test_a_container_that_exits_by_itself_gives_its_cpus_back(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        del w.cgroups.sets[lse]
        w._state(lse, "EXITED")
        await w.sync.once()
        await w.quiet()
        assert w.on(ls) == "0-15"
        del w.runtime.containers[lse]
        await w.sync.once()
        assert lse not in w.executor.state.containers

    live(day)


def test_drift_is_repaired(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        await w.sync.once()
        assert w.on(ls) == "4-15"
        assert w.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 1

    live(day)


def test_containers_made_behind_our_back_are_adopted(live) -> None:
    async def day(w) -> None:
        labels = {"koordinator.sh/qosClass": "LSE"}
        status = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"0-3"}'}
        w.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, labels, status)
        w.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        w.runtime.containers["lse"] = RuntimeContainer("lse", "p", "c", 0, "RUNNING")
        w.runtime.containers["ls"] = RuntimeContainer("ls", "q", "c", 0, "RUNNING")
        w.runtime.containers["old"] = RuntimeContainer("old", "q", "d", 0, "EXITED")
        w.runtime.details["lse"] = RuntimeDetail("/kubepods/podu/lse", cpuset_cpus="0-15")
        w.cgroups.sets.update(lse=CpuSet.parse("0-15"), ls=CpuSet.parse("0-15"))
        await w.sync.once()
        await w.quiet()
        assert (w.on("lse"), w.on("ls")) == ("0-3", "4-15")
        assert "old" not in w.executor.state.containers
        w.check()

    live(day, reconciled=False)


def test_an_unknown_container_is_looked_up_when_it_is_named(live) -> None:
    async def day(w) -> None:
        w.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        w.runtime.containers["ls"] = RuntimeContainer("ls", "q", "c", 0, "RUNNING")
        request = pb.UpdateContainerResourcesRequest(container_id="ls")
        call = await w.call("UpdateContainerResources", request)
        assert pb.UpdateContainerResourcesRequest.FromString(call.sent).linux.cpuset_cpus == "0-15"
        for method, message in (
            ("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id="missing")),
            ("StartContainer", pb.StartContainerRequest(container_id="missing")),
        ):
            call = await w.call(method, message)
            assert call.sent == call.body, "the runtime will say that it does not know it"

    live(day)


def test_calls_wait_for_the_first_reconcile_within_a_limit(live) -> None:
    async def day(w) -> None:
        w.runtime.down = True
        sandbox = pb.CreateContainerRequest(pod_sandbox_id="s")
        passed = await w.call("CreateContainer", sandbox)
        assert passed.sent == passed.body
        sandbox.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        refused = await w.call("CreateContainer", sandbox)
        assert refused.refused[0] == 14
        waiting = asyncio.create_task(
            w.call("CreateContainer", pb.CreateContainerRequest(pod_sandbox_id="s"))
        )
        await asyncio.sleep(0.05)
        w.runtime.down = False
        await w.sync.once()
        assert created_with(await waiting).cpuset_cpus == "0-15"

    live(day, reconciled=False, call_timeout=2.0)


def test_garbage_goes_to_the_runtime_unless_it_may_make_a_container(live) -> None:
    """What the runtime makes of it is compared; a pod that must not run anywhere may be in it."""

    async def day(w) -> None:
        class Garbage:
            def SerializeToString(self) -> bytes:  # noqa: N802
                return b"\xff\xff\xff"

        for method in ("UpdateContainerResources", "StopContainer", "StartContainer", "StopPodSandbox"):
            w.executor.attention.clear()
            call = await w.call(method, Garbage())
            assert call.sent == b"\xff\xff\xff"
            assert w.executor.attention.is_set()
        for method in ("CreateContainer", "RunPodSandbox"):
            call = await w.call(method, Garbage())
            assert call.refused == (
                13,
                f"cannot place what {method} asks for: the request cannot be decoded",
            )
        assert w.executor.telemetry.value(metrics.REQUESTS_UNDECODABLE) == 6

    live(day)


@pytest.mark.parametrize(("qos", "refuses"), [("", False), ("LS", False), ("LSE", True), ("LSR", True)])
def test_a_fault_of_ours_does_not_stop_the_node(live, monkeypatch, qos: str, refuses: bool) -> None:
    async def day(w) -> None:
        sandbox = await w.pod("p", qos)
        monkeypatch.setattr(w.executor.creates, "place", lambda *_: 1 / 0)
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.sandbox_config.labels["koordinator.sh/qosClass"] = qos
        call = await w.call("CreateContainer", request)
        assert (call.refused is not None) is refuses
        assert refuses or call.sent == call.body
        await w.quiet()
        assert "division by zero" in w.executor.telemetry.problems()[-1]["what"]

    live(day)


def test_observe_changes_nothing(live) -> None:
    async def day(w) -> None:
        sandbox = await w.pod("ls", "LS")
        call = await w.begin(sandbox)
        assert call.sent == call.body
        w.finish(call, "ls")
        w.runtime.specs["ls"] = "0-15"
        await w.start("ls")
        lse = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert lse.sent == lse.body
        bad = await w.begin(await w.pod("bad", "LSE", "", "99"))
        assert bad.sent == bad.body
        update = await w.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id="ls")
        )
        assert update.sent == update.body
        await w.sync.once()
        await w.quiet()
        assert w.on("ls") == "0-15"
        assert w.ledger.entries["e/pods"]["mode"] == "observe"  # a later mode enforce goes on from here
        assert [line for line in w.log if not line.startswith(("forward", "ledger"))] == []
        assert any(line.startswith("would place pod=ns/lse container=c cpus=0-3") for line in w.logged)

    live(day, mode=NodeMode.OBSERVE)


def test_what_is_observed_is_reported_as_what_would_be(live) -> None:
    async def day(w) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        w.runtime.specs[ls] = "0-15"
        await w.start(ls)
        lse = w.finish(await w.begin(await w.pod("lse", "LSE", "", "0-3")), "lse")
        w.runtime.specs[lse] = "0-15"
        await w.start(lse)
        rival = w.finish(await w.begin(await w.pod("rival", "LSE", "", "2-3")), "rival")
        w.runtime.specs[rival] = "0-15"
        await w.start(rival)
        await w.sync.once()
        await w.quiet()
        assert rival in w.executor.state.containers
        counted = {
            metrics.CREATES_PLACED: 0,
            metrics.CREATES_REFUSED: 0,
            metrics.CREATES_WOULD_PLACE: 2,
            metrics.CREATES_WOULD_REFUSE: 1,
            metrics.CONTAINERS_WOULD_MOVE: 1,
        }
        assert {metric: w.executor.telemetry.value(metric) for metric in counted} == counted
        said = [line.partition(" pod=")[0] for line in w.logged]
        assert said.count("would place") == 2
        assert said.count("would refuse a container") == 1
        assert {"placed", "refused a container", "adopted a container"}.isdisjoint(said)
        for name, words in (("ls", "admitted to the shared"), ("lse", "admitted with CPUs 0-3 of its own")):
            (found,) = w.executor.history.find(name)
            assert f" would be {words}" in headline(found.explanation)
        (found,) = w.executor.history.find("rival")
        assert (found.container_id, found.explanation.applied) == (rival, False)
        assert headline(found.explanation).startswith("ns/rival/c would be refused: ")

    live(day, mode=NodeMode.OBSERVE)


def test_a_new_sandbox_of_a_pod_ends_what_the_old_one_held(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        await w.pod("lse", "LSE", "", "0-3", sandbox="second", attempt=1)
        await w.quiet()
        assert w.on(ls) == "0-15"

    live(day)


def test_stopping_and_removing_a_sandbox_gives_everything_back(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        lse = await w.run(sandbox)
        call = await w.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        del w.cgroups.sets[lse]
        w.wire.finished(call, 0)
        await w.quiet()
        assert w.on(ls) == "0-15"
        call = await w.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        w.wire.finished(call, 0)
        await w.quiet()
        assert (sandbox in w.executor.state.pods, lse in w.executor.state.containers) == (False, False)
        assert not any(sandbox in k or lse in k for k in w.ledger.entries)

    live(day)
