"""Calls of a CRI client, and how the interceptors and the executor handle each."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.errors import RuntimeCallError
from proxy.model.explanation import FOUND, RESTORED
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.observe.sentences import headline
from proxy.telemetry import metrics
from tests.testkit.cri import TWO_CPUS, created_with


def test_each_qos_class_runs_on_its_pool(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS", "burstable"))
        be = await world.run(await world.pod("be", "", "besteffort"))
        assert (world.on(ls), world.on(be)) == ("0-15", "0-15")
        lsr = await world.run(await world.pod("lsr", "LSR", "burstable", "0-1"))
        assert (world.on(lsr), world.on(ls), world.on(be)) == ("0-1", "2-15", "0-15")
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
        assert (world.on(lse), world.on(ls), world.on(be)) == ("2-3", "4-15", "0-1,4-15")
        own = await world.run(await world.pod("g"), **TWO_CPUS)
        assert world.on(own) == "4,12"
        world.check()
        for gone in (lse, own):
            await world.stop(gone)
        assert (world.on(ls), world.on(be)) == ("2-15", "0-15")
        await world.remove(lsr)
        assert world.on(ls) == "0-15"
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize("status", [0, 2, None])
def test_an_owner_whose_memory_limit_outgrows_its_node_gets_more_nodes(run_scenario, status) -> None:
    async def scenario(world) -> None:
        owner = await world.run(await world.pod("p"), memory_limit_in_bytes=40 << 30, **TWO_CPUS)
        world.cgroups.mems[owner] = Mask((0,))
        await world.sync.once()
        resources = pb.LinuxContainerResources(memory_limit_in_bytes=80 << 30)
        resize = pb.UpdateContainerResourcesRequest(container_id=owner, linux=resources)
        call = await world.call("UpdateContainerResources", resize)
        forwarded = pb.UpdateContainerResourcesRequest.FromString(call.sent).linux
        assert (forwarded.cpuset_mems, forwarded.memory_limit_in_bytes) == ("0-1", 80 << 30)
        if status == 0:
            world.cgroups.mems[owner] = Mask((0, 1))
        world.wire.finished(call, status)
        await world.quiet()
        container = world.executor.state.containers[owner]
        limit, mems = (80 << 30, "0-1") if status == 0 else (40 << 30, "0")
        assert (container.request.memory_limit, str(container.placement.mems)) == (limit, mems)
        assert world.ledger.entries[f"c/{owner}"]["request"]["memory_limit"] == limit
        await world.sync.once()
        assert str(world.cgroups.mems[owner]) == mems
        assert world.executor.telemetry.value(metrics.MEMS_DRIFT) == 0

    run_scenario(scenario)


@pytest.mark.parametrize("status", [None, 4])
@pytest.mark.parametrize("executed", [True, False])
def test_the_memory_limit_of_an_update_without_an_answer_is_read_from_the_runtime(
    run_scenario, status, executed
) -> None:
    async def scenario(world) -> None:
        owner = await world.run(await world.pod("p"), memory_limit_in_bytes=40 << 30, **TWO_CPUS)
        resources = pb.LinuxContainerResources(memory_limit_in_bytes=80 << 30)
        resize = pb.UpdateContainerResourcesRequest(container_id=owner, linux=resources)
        call = await world.call("UpdateContainerResources", resize)
        limit, mems = (80 << 30, "0-1") if executed else (40 << 30, "0")
        world.runtime.details[owner] = RuntimeDetail(f"/kubepods/podx/{owner}", memory_limit=limit)
        world.cgroups.mems[owner] = Mask((0, 1)) if executed else Mask((0,))
        world.wire.finished(call, status)
        for _ in range(2):
            await world.sync.once()
            world.now += 3
        await world.sync.once()
        await world.quiet()
        assert not world.executor.state.inflight.of(owner)
        container = world.executor.state.containers[owner]
        assert (container.request.memory_limit, str(container.placement.mems)) == (limit, mems)
        assert str(world.cgroups.mems[owner]) == mems

    run_scenario(scenario)


def test_other_containers_leave_after_the_ledger_write_and_before_the_create(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        await world.quiet()
        await world.clear_log()
        call = await world.begin(sandbox)
        assert world.log == ["ledger +i/", f"kernel {ls} 4-15", "forward CreateContainer"]
        assert (created_with(call).cpuset_cpus, created_with(call).cpuset_mems) == ("0-3", "0")

    run_scenario(scenario)


def test_only_owners_are_logged_above_debug_level(run_scenario) -> None:
    """A node with 1,000 sharing containers writes no line for each of them."""

    async def scenario(world) -> None:
        world.executor.telemetry._sink.levels = ("info", "warning", "error")
        await world.run(await world.pod("quiet", "LS"))
        await world.run(await world.pod("own", "LSE", "", "0-3"))
        assert [line for line in world.logged if "quiet" in line] == []
        assert len([line for line in world.logged if line.startswith("placed pod=ns/own ")]) == 1
        world.executor.telemetry._sink.levels = ("debug",)
        await world.run(await world.pod("loud", "LS"))
        assert len([line for line in world.logged if line.startswith("placed pod=ns/loud ")]) == 1

    run_scenario(scenario)


def test_a_failed_create_restores_other_containers(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert world.on(ls) == "4-15"
        world.wire.finished(call, 2)
        await world.quiet()
        assert world.on(ls) == "0-15"
        assert [k for k in world.ledger.entries if k.startswith("i/")] == []
        world.check()

    run_scenario(scenario)


def test_a_create_that_cannot_move_other_containers_is_refused_and_undone(run_scenario) -> None:
    async def scenario(world) -> None:
        one = await world.run(await world.pod("one", "LS"))
        two = await world.run(await world.pod("two", "LS"))
        world.cgroups.broken.add(two)
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.refused[0] == 9
        assert "busy" in call.refused[1]
        await world.quiet()
        assert (world.on(one), world.on(two)) == ("0-15", "0-15")
        assert world.executor.state.owners == {}

    run_scenario(scenario)


def test_creates_of_different_pods_overlap(run_scenario) -> None:
    async def scenario(world) -> None:
        first = await world.begin(await world.pod("a", "LSE", "", "0-3"))
        second = await world.begin(await world.pod("b", "LSE", "", "4-7"))
        clash = await world.begin(await world.pod("c", "LSE", "", "7-8"))
        assert clash.refused[0] == 9
        assert (created_with(first).cpuset_cpus, created_with(second).cpuset_cpus) == ("0-3", "4-7")
        world.finish(second, "id-b")
        world.wire.finished(first, 2)
        await world.quiet()
        assert str(world.executor.state.pools.shared) == "0-3,8-15"

    run_scenario(scenario)


def test_a_created_container_starts_with_the_current_set(run_scenario) -> None:
    async def scenario(world) -> None:
        early = await world.create(await world.pod("early", "LS"))
        assert world.runtime.specs[early] == "0-15"
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.clear_log()
        await world.start(early)
        assert world.log[0:2] == [f"runtime {early} 4-15", "forward StartContainer"]
        assert world.on(early) == "4-15"

    run_scenario(scenario)


def test_a_created_container_that_cannot_be_corrected_does_not_start(run_scenario) -> None:
    async def scenario(world) -> None:
        early = await world.create(await world.pod("early", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        world.runtime.update_error = RuntimeCallError("cannot update: no", 2)
        call = await world.start(early)
        assert call.refused[0] == 9

    run_scenario(scenario)


def test_a_shrink_waits_for_a_start_in_flight(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        create = asyncio.create_task(world.begin(sandbox))
        await asyncio.sleep(0.1)
        assert not create.done(), "the start may still write its old set to the kernel"
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        world.wire.finished(start, 0)
        call = await create
        assert world.on(ls) == "4-15"
        assert created_with(call).cpuset_cpus == "0-3"

    run_scenario(scenario)


def test_a_call_in_flight_that_never_ends_refuses_the_create(run_scenario) -> None:
    async def scenario(world) -> None:
        world.limit_waits(world.executor.confinement, "wait", 0.5)
        ls = await world.run(await world.pod("ls", "LS"))
        await world.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.refused[0] == 9
        assert "busy" in call.refused[1]
        assert world.executor.state.owners == {}

    run_scenario(scenario)


def test_an_update_is_forwarded_with_our_cpuset_and_otherwise_unchanged(run_scenario) -> None:
    async def scenario(world) -> None:
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
        ls = await world.run(await world.pod("ls", "LS"))
        for container_id, cpus, mems in ((lse, "2-3", "0"), (ls, "0-1,4-15", "0-1")):
            request = pb.UpdateContainerResourcesRequest(container_id=container_id)
            request.linux.cpu_quota = 50_000
            request.linux.cpuset_cpus = "0-15"
            request.linux.unified["memory.high"] = "1"
            request.annotations["a"] = "b"
            call = await world.call("UpdateContainerResources", request)
            assert call.sent.startswith(call.body)
            forwarded = pb.UpdateContainerResourcesRequest.FromString(call.sent)
            request.linux.cpuset_cpus, request.linux.cpuset_mems = cpus, mems
            if container_id == lse:
                request.linux.cpu_quota = -1
            assert forwarded == request
            world.wire.finished(call, 0)

    run_scenario(scenario)


def test_a_cpuset_written_by_an_old_update_is_repaired(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        call = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)
        )
        await world.stop(lse)
        world.cgroups.sets[ls] = CpuSet.parse("4-15")  # the set that the update carries
        world.wire.finished(call, 0)
        await world.quiet()
        assert world.on(ls) == "0-15"

    run_scenario(scenario)


def test_strict_pods_are_refused_with_the_reason(run_scenario) -> None:
    async def scenario(world) -> None:
        for number, annotation in enumerate(('{"cpuset":"90"}', "{nonsense", '{"cpuset":"3-1"}')):
            for qos in ("LSE", "LSR"):
                call = await world.begin(await world.pod(f"{qos}{number}", qos, annotation=annotation))
                assert call.refused[0] == 3
                assert call.refused[1].startswith(f"cannot place ns/{qos}{number}/c: ")
        ls = await world.begin(await world.pod("ls", "LS", annotation="{nonsense"))
        assert created_with(ls).cpuset_cpus == "0-15"
        ls = await world.begin(await world.pod("ls", "LS", annotation="{nonsense"))
        problems = [p for p in world.executor.telemetry.problems() if "ns/ls" in p["what"]]
        assert len(problems) == 1
        assert problems[0]["count"] == 1, "reported once for a pod, however often it is tried"
        counted = {
            kind: n
            for kind, n in world.executor.telemetry.registry.page().items()
            if kind.startswith("bad_input_") and n
        }
        assert counted == {"bad_input_cpu-list": 4, "bad_input_annotation": 3}

    run_scenario(scenario)


def test_a_create_carries_all_facts_without_run_pod_sandbox(run_scenario) -> None:
    async def scenario(world) -> None:
        request = pb.CreateContainerRequest(pod_sandbox_id="never-seen")
        request.config.metadata.name = "c"
        request.sandbox_config.metadata.uid = "u"
        request.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        request.sandbox_config.annotations["scheduling.koordinator.sh/resource-status"] = '{"cpuset":"5"}'
        request.sandbox_config.linux.cgroup_parent = "/kubepods/podu"
        call = await world.call("CreateContainer", request)
        assert created_with(call).cpuset_cpus == "5"

    run_scenario(scenario)


def test_a_restart_moves_no_container_and_assigns_no_cpu_twice(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        own = await world.run(await world.pod("g"), **TWO_CPUS)
        lse = await world.run(await world.pod("lse", "LSE", "", "6-7"))
        created = await world.create(await world.pod("late", "LS"))
        await world.quiet()
        before = dict(world.cgroups.sets)
        await world.clear_log()
        world.boot()
        await world.sync.once()
        assert [line for line in world.log if line.startswith(("kernel", "runtime"))] == []
        assert world.cgroups.sets == before
        assert {k: str(o.cpus) for k, o in world.executor.state.owners.items()} == {
            "g/c": "0,8",
            "lse": "6-7",
        }
        world.now += 3  # a start that was in flight at the shutdown is over
        await world.sync.once()
        again = await world.begin(await world.pod("h"), **TWO_CPUS)
        assert created_with(again).cpuset_cpus == "1,9"
        await world.start(created)
        assert world.on(created) == "2-5,10-15"
        world.check()
        assert {ls, own, lse} <= set(world.executor.state.containers)

    run_scenario(scenario)


def test_a_kill_between_shrink_and_answer_is_recovered(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        for_good = await world.begin(await world.pod("made", "LSE", "", "0-1"))
        await world.begin(await world.pod("lost", "LSE", "", "2-3"))
        await world.quiet()
        # The runtime made one of them; then the daemon was killed.
        world.runtime.specs["x"] = created_with(for_good).cpuset_cpus
        world.runtime.containers["x"] = RuntimeContainer("x", "s-made", "c", 0, "CREATED")
        world.boot()
        await world.sync.once()
        assert world.on(ls) == "4-15", "the lost container may still appear"
        assert str(world.executor.state.containers["x"].placement.exclusive) == "0-1"
        world.now += 10
        await world.sync.once()
        await world.quiet()
        assert world.on(ls) == "2-15"
        world.now += 10
        await world.sync.once()  # a runtime that answers has no older call left
        await world.start("x")
        assert world.on("x") == "0-1"
        world.check()

    run_scenario(scenario)


def test_a_cancelled_create_is_resolved_by_querying_the_runtime(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        made = await world.begin(await world.pod("made", "LSE", "", "0-1"))
        lost = await world.begin(await world.pod("lost", "LSE", "", "2-3"))
        world.wire.finished(made, None)
        world.wire.finished(lost, None)
        await world.quiet()
        assert world.on(ls) == "4-15"
        world.runtime.containers["x"] = RuntimeContainer("x", "s-made", "c", 0, "CREATED")
        world.now += 10
        await world.sync.once()
        await world.quiet()
        assert world.on(ls) == "2-15"
        assert world.executor.state.containers["x"].phase is Phase.CREATED

    run_scenario(scenario)


def test_a_container_that_exits_by_itself_releases_its_cpus(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        del world.cgroups.sets[lse]
        world._state(lse, "EXITED")
        await world.sync.once()
        await world.quiet()
        assert world.on(ls) == "0-15"
        del world.runtime.containers[lse]
        await world.sync.once()
        assert lse not in world.executor.state.containers

    run_scenario(scenario)


def test_drift_is_repaired(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        await world.sync.once()
        assert world.on(ls) == "4-15"
        assert world.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 1

    run_scenario(scenario)


def test_containers_created_without_the_proxy_are_adopted(run_scenario) -> None:
    async def scenario(world) -> None:
        labels = {"koordinator.sh/qosClass": "LSE"}
        status = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"0-3"}'}
        world.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, labels, status)
        world.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        world.runtime.containers["lse"] = RuntimeContainer("lse", "p", "c", 0, "RUNNING")
        world.runtime.containers["ls"] = RuntimeContainer("ls", "q", "c", 0, "RUNNING")
        world.runtime.containers["old"] = RuntimeContainer("old", "q", "d", 0, "EXITED")
        world.runtime.details["lse"] = RuntimeDetail("/kubepods/podu/lse", cpuset_cpus="0-15")
        world.cgroups.sets.update(lse=CpuSet.parse("0-15"), ls=CpuSet.parse("0-15"))
        await world.sync.once()
        await world.quiet()
        assert (world.on("lse"), world.on("ls")) == ("0-3", "4-15")
        assert "old" not in world.executor.state.containers
        world.check()
        for pod, container_id in (("ns/n", "lse"), ("ns/m", "ls")):
            (found,) = world.executor.history.find(pod)
            assert (found.container_id, found.explanation.event) == (container_id, FOUND), "no create came"
        await world.close()
        world.boot()
        (restored,) = world.executor.history.find("ns/n")
        assert restored.explanation.event == RESTORED

    run_scenario(scenario, reconciled=False)


def test_an_unknown_container_is_looked_up_when_it_is_named(run_scenario) -> None:
    async def scenario(world) -> None:
        world.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        world.runtime.containers["ls"] = RuntimeContainer("ls", "q", "c", 0, "RUNNING")
        request = pb.UpdateContainerResourcesRequest(container_id="ls")
        call = await world.call("UpdateContainerResources", request)
        assert pb.UpdateContainerResourcesRequest.FromString(call.sent).linux.cpuset_cpus == "0-15"
        for method, message in (
            ("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id="missing")),
            ("StartContainer", pb.StartContainerRequest(container_id="missing")),
        ):
            call = await world.call(method, message)
            assert call.sent == call.body, "the runtime will report that it does not know the container"

    run_scenario(scenario)


def test_calls_wait_for_the_first_reconcile_within_a_limit(run_scenario) -> None:
    async def scenario(world) -> None:
        world.runtime.down = True
        sandbox = pb.CreateContainerRequest(pod_sandbox_id="s")
        sandbox.sandbox_config.metadata.name = "p"
        passed = await world.call("CreateContainer", sandbox)
        assert passed.sent == passed.body
        sandbox.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        refused = await world.call("CreateContainer", sandbox)
        assert refused.refused[0] == 14
        sandbox.sandbox_config.ClearField("labels")
        world.executor.options = structs.replace(world.executor.options, call_timeout=60.0)
        waiting = asyncio.create_task(world.call("CreateContainer", sandbox))
        await asyncio.sleep(0.05)
        world.runtime.down = False
        await world.sync.once()
        assert created_with(await waiting).cpuset_cpus == "0-15"

    run_scenario(scenario, reconciled=False, call_timeout=0.5)


def test_an_undecodable_call_is_forwarded_unless_it_may_create_a_container(run_scenario) -> None:
    """The result at the runtime is compared; the request may hold a pod that must not run just anywhere."""

    async def scenario(world) -> None:
        class Garbage:
            def SerializeToString(self) -> bytes:  # noqa: N802
                return b"\xff\xff\xff"

        for method in ("UpdateContainerResources", "StopContainer", "StartContainer", "StopPodSandbox"):
            world.executor.reconcile_requested.clear()
            call = await world.call(method, Garbage())
            assert call.sent == b"\xff\xff\xff"
            assert world.executor.reconcile_requested.is_set()
        for method in ("CreateContainer", "RunPodSandbox"):
            call = await world.call(method, Garbage())
            assert call.refused == (
                13,
                f"cannot apply the plan to {method}: the request cannot be decoded",
            )
        assert world.executor.telemetry.value(metrics.REQUESTS_UNDECODABLE) == 6

    run_scenario(scenario)


@pytest.mark.parametrize(("qos", "refuses"), [("", False), ("LS", False), ("LSE", True), ("LSR", True)])
def test_an_internal_fault_does_not_stop_the_node(run_scenario, monkeypatch, qos: str, refuses: bool) -> None:
    async def scenario(world) -> None:
        sandbox = await world.pod("p", qos)
        monkeypatch.setattr(world.executor.creates, "place", lambda *_: 1 / 0)
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.sandbox_config.labels["koordinator.sh/qosClass"] = qos
        call = await world.call("CreateContainer", request)
        assert (call.refused is not None) is refuses
        assert refuses or call.sent == call.body
        await world.quiet()
        assert "division by zero" in world.executor.telemetry.problems()[-1]["what"]

    run_scenario(scenario)


def test_observe_mode_changes_nothing(run_scenario) -> None:
    async def scenario(world) -> None:
        sandbox = await world.pod("ls", "LS")
        call = await world.begin(sandbox)
        assert call.sent == call.body
        world.finish(call, "ls")
        world.runtime.specs["ls"] = "0-15"
        await world.start("ls")
        lse = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert lse.sent == lse.body
        bad = await world.begin(await world.pod("bad", "LSE", "", "99"))
        assert bad.sent == bad.body
        update = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id="ls")
        )
        assert update.sent == update.body
        await world.sync.once()
        await world.quiet()
        assert world.on("ls") == "0-15"
        assert world.ledger.entries["e/pods"]["mode"] == "observe"  # a later mode enforce continues from here
        assert [line for line in world.log if not line.startswith(("forward", "ledger"))] == []
        assert any(line.startswith("would place pod=ns/lse container=c cpus=0-3") for line in world.logged)

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_decisions_in_observe_mode_are_reported_as_hypothetical(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        world.runtime.specs[ls] = "0-15"
        await world.start(ls)
        lse = world.finish(await world.begin(await world.pod("lse", "LSE", "", "0-3")), "lse")
        world.runtime.specs[lse] = "0-15"
        await world.start(lse)
        rival = world.finish(await world.begin(await world.pod("rival", "LSE", "", "2-3")), "rival")
        world.runtime.specs[rival] = "0-15"
        await world.start(rival)
        await world.sync.once()
        await world.quiet()
        assert rival in world.executor.state.containers
        counted = {
            metrics.CREATES_PLACED: 0,
            metrics.CREATES_REFUSED: 0,
            metrics.CREATES_WOULD_PLACE: 2,
            metrics.CREATES_WOULD_REFUSE: 1,
            metrics.CONTAINERS_WOULD_MOVE: 1,
        }
        assert {metric: world.executor.telemetry.value(metric) for metric in counted} == counted
        reported = [line.partition(" pod=")[0] for line in world.logged]
        assert reported.count("would place") == 2
        assert reported.count("would reject a container") == 1
        assert {"placed", "rejected a container", "adopted a container"}.isdisjoint(reported)
        for name, text in (("ls", "admitted to the shared"), ("lse", "admitted with CPUs 0-3 of its own")):
            (found,) = world.executor.history.find(name)
            assert f" would be {text}" in headline(found.explanation)
        (found,) = world.executor.history.find("rival")
        assert (found.container_id, found.explanation.applied) == (rival, False)
        assert headline(found.explanation).startswith("ns/rival/c would be rejected: ")

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_a_new_sandbox_of_a_pod_releases_cpus_of_the_old_one(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.pod("lse", "LSE", "", "0-3", sandbox="second", attempt=1)
        await world.quiet()
        assert world.on(ls) == "0-15"

    run_scenario(scenario)


def test_stopping_and_removing_a_sandbox_releases_its_cpus(run_scenario) -> None:
    async def scenario(world) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        lse = await world.run(sandbox)
        call = await world.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        del world.cgroups.sets[lse]
        world.wire.finished(call, 0)
        await world.quiet()
        assert world.on(ls) == "0-15"
        call = await world.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        world.wire.finished(call, 0)
        await world.quiet()
        assert (sandbox in world.executor.state.pods, lse in world.executor.state.containers) == (
            False,
            False,
        )
        assert not any(sandbox in k or lse in k for k in world.ledger.entries)

    run_scenario(scenario)


@pytest.mark.parametrize("status", [None, 13], ids=["its client disconnected", "it failed"])
@pytest.mark.parametrize("method", ["StopPodSandbox", "RemovePodSandbox"])
def test_the_end_of_a_sandbox_is_looked_up_if_its_call_did_not_succeed(
    run_scenario, method: str, status: int | None
) -> None:
    """The runtime may have stopped or removed the sandbox: nothing else may show that soon."""

    async def scenario(world) -> None:
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        world.executor.reconcile_requested.clear()
        request = getattr(pb, f"{method}Request")(pod_sandbox_id=sandbox)
        call = await world.call(method, request)
        world.wire.finished(call, status)
        assert sandbox in world.executor.state.pods
        assert world.executor.reconcile_requested.is_set()
        world.executor.reconcile_requested.clear()
        call = await world.call(method, request)
        world.wire.finished(call, 0)
        assert not world.executor.reconcile_requested.is_set()

    run_scenario(scenario)


def test_a_sandbox_that_the_runtime_has_named_is_known_without_the_end_of_its_answer(run_scenario) -> None:
    async def scenario(world) -> None:
        call = await world.begin_pod("ls", "LS")
        world.make_pod(call, "s-ls")
        world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s-ls").SerializeToString())
        world.wire.finished(call, None)
        assert "s-ls" in world.executor.state.pods

    run_scenario(scenario)


def test_a_sandbox_whose_answer_is_lost_is_looked_for_at_the_runtime(run_scenario) -> None:
    async def scenario(world) -> None:
        total = {"cpu_shares": 4096, "cpu_quota": 400_000, "cpu_period": 100_000}
        call = await world.begin_pod("lse", "LSE", total=total)
        world.make_pod(call, "s-lse")
        world.executor.reconcile_requested.clear()
        world.wire.finished(call, None)
        assert world.executor.reconcile_requested.is_set()

    run_scenario(scenario)
