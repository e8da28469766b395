"""Hooks before calls: their answers are applied, within what the engine has decided."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.node_events import ModeChanged
from proxy.executor.runtime_ports import RuntimeContainer, RuntimePod
from proxy.frontends.cri.hook_view import CriHookView
from proxy.frontends.hook_bridge import held_call_hooks
from proxy.hooks.answers import CLEAR, Adjustment, Veto
from proxy.hooks.hook import HookFailurePolicy, Outcome
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyPolicy
from proxy.telemetry import metrics
from proxy.wire.protobuf import FIELDS_LIMIT, encode_field
from tests.executor.played_hooks import hooks
from tests.executor.test_undecodable import Raw
from tests.testkit.cri import TWO_CPUS


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def created(call: Any) -> pb.ContainerConfig:
    return pb.CreateContainerRequest.FromString(call.sent).config


def linux(call: Any) -> pb.LinuxContainerResources:
    return created(call).linux.resources


async def restarted(world: Any) -> None:
    """Start another daemon after all calls forwarded by the previous one are over."""
    await world.close()
    world.boot()
    await world.sync.once()
    for _ in range(2):
        world.now += 3
        await world.sync.once()


# -- creates ------------------------------------------------------------------------------------------------


def test_a_hook_narrows_a_pool_and_sets_resources(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            want = Adjustment(cpus=cpus("4-5"), cpu_shares=77, envs={"A": "1"}, annotations={"k": "v"})
            h.add(pre_create_container=want)
            call = await world.begin(await world.pod("ls", "LS", "burstable"), cpu_shares=512)
            config = created(call)
            assert (config.linux.resources.cpuset_cpus, config.linux.resources.cpu_shares) == ("4-5", 77)
            assert ([(e.key, e.value) for e in config.envs], config.annotations["k"]) == ([("A", b"1")], "v")
            one = world.finish(call, "one")
            await world.start(one)
            assert world.on(one) == "4-5"
            assert world.executor.history.find("ns/ls")[-1].explanation.reasons[-1] == (
                "narrowed to CPUs 4-5 by hook 10-x"
            )
            world.check()

    run_scenario(scenario)


def test_a_narrowed_container_follows_its_pool_and_survives_a_restart(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=lambda e: Adjustment(cpus=cpus("2-5")) if e.pod.name == "ls" else None)
            one = await world.run(await world.pod("ls", "LS", "burstable"))
            lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
            assert (world.on(one), world.on(lse)) == ("4-5", "0-3")
        await restarted(world)
        assert str(world.executor.state.desired_cpus(world.executor.state.containers[one])) == "4-5"
        await world.stop(lse)
        assert world.on(one) == "2-5"
        more = await world.run(await world.pod("lse2", "LSE", "", "2-5"))
        assert (world.on(one), world.on(more)) == ("0-1,6-15", "2-5")
        assert any("nothing is left of CPUs 2-5" in p["what"] for p in world.executor.telemetry.problems())
        await world.stop(more)
        assert world.on(one) == "2-5"
        world.check()

    run_scenario(scenario)


def test_cpus_named_by_hooks_are_recorded_before_the_create_is_sent(run_scenario) -> None:
    """A crash while the runtime makes the container: its list does not hold the requests of hooks."""

    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=lambda e: Adjustment(cpus=cpus("2-5")) if e.pod.name == "ls" else None)
            pod = await world.pod("ls", "LS", "burstable")
            await world.clear_log()
            call = await world.begin(pod)
            assert world.log[-2:] == ["ledger +i/", "forward CreateContainer"]
            at_the_crash = dict(world.ledger.entries)
            one = world.finish(call, "one")
            await world.executor.ledger_writer.flush()
            assert [key for key in world.ledger.entries if key.startswith("i/")] == []
            other = await world.begin(await world.pod("other", "LS"))
            await world.executor.ledger_writer.flush()
            assert [key for key in world.ledger.entries if key.startswith("i/")] == [], (
                "no other update was sent"
            )
            world.finish(other, "other")
        await world.close()
        world.ledger.entries.clear()
        world.ledger.entries.update(at_the_crash)
        world.boot()
        await world.sync.once()
        assert str(world.executor.state.desired_cpus(world.executor.state.containers[one])) == "2-5"
        assert str(world.executor.state.desired_cpus(world.executor.state.containers["other"])) == "0-15"

    run_scenario(scenario)


def test_an_owner_is_narrowed_within_its_cpus_and_the_rest_stays_unused(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=lambda e: Adjustment(cpus=cpus("0-1")) if e.decision.own else None)
            ls = await world.run(await world.pod("ls", "LS"))
            call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
            assert linux(call).cpuset_cpus == "0-1"
            assert world.on(ls) == "4-15", "owned CPUs are free before the request continues"
            await world.start(world.finish(call, "own"))
            assert (world.on("own"), world.on(ls)) == ("0-1", "4-15")
            world.check()

    run_scenario(scenario)


@pytest.mark.parametrize("kind", [("lse", "LSE", "", "0-3"), ("ls", "LS")])
def test_a_veto_refuses_the_create_and_leaves_nothing_reserved(run_scenario, kind) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            ls = await world.run(await world.pod("other", "LS"))
            h.add(pre_create_container=Veto("no room"))
            await world.clear_log()
            call = await world.begin(await world.pod(*kind))
            assert call.refused is not None
            assert call.refused[0] == 9
            assert "10-x" in call.refused[1]
            assert "no room" in call.refused[1]
            world.wire.finished(call, None)
            await world.quiet()
            assert not any(line.startswith("kernel") for line in world.log), "no container has moved"
            verdict = world.executor.history.find(f"ns/{kind[0]}")[-1].explanation.verdict
            assert (verdict.reason, verdict.message) == ("RefusedByHook", call.refused[1])
            assert (
                len(world.executor.state.containers),
                world.on(ls),
                world.executor.state.runtime.lost_creates,
            ) == (
                1,
                "0-15",
                {},
            )
            assert h.remembers() == len(("other's sandbox", "kind's sandbox", "ls"))

    run_scenario(scenario)


def test_a_hook_cannot_set_owned_cpus_unless_configured(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
            h.add(pre_create_container=Adjustment(cpus=cpus("3-4")))
            ls = await world.run(await world.pod("ls", "LS"))
            assert (world.on(lse), world.on(ls)) == ("0-3", "4-15")
            assert any("10-x" in p["what"] for p in world.executor.telemetry.problems())
            world.check()

    run_scenario(scenario)


def test_owned_cpus_may_be_given_if_that_is_configured(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world, owned_cpus=True) as h:
            h.add(pre_create_container=lambda e: Adjustment(cpus=cpus("3-4")) if e.pod.name == "ls" else None)
            lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
            ls = await world.run(await world.pod("ls", "LS"))
            assert (world.on(lse), world.on(ls)) == ("0-3", "3-4")
            second = await world.run(
                await world.pod("second", "LSE", "", "4-7")
            )  # it is not refused because of the hook
            assert (world.on(second), world.on(ls)) == ("4-7", "3")
            world.check()
            await restarted(world)
            world.check()
            assert str(world.executor.state.desired_cpus(world.executor.state.containers[ls])) == "3"

    run_scenario(scenario)


def test_a_hook_sets_memory_nodes(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=Adjustment(mems=Mask((1,))))
            call = await world.begin(await world.pod("ls", "LS"), cpuset_mems="0")
            assert linux(call).cpuset_mems == "1"
            await world.start(world.finish(call, "one"))
            world.cgroups.mems["one"] = Mask((1,))
            await world.executor.mems.once()
            assert world.cgroups.mems["one"] == Mask((1,)), "the check of memory nodes agrees"
            assert (await world.update("one", cpu_shares=9)).cpuset_mems == "1"

    run_scenario(scenario)


def test_cpus_named_by_the_client_are_ignored_when_a_hook_clears_them(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(
                pre_create_container=Adjustment(cpus=CLEAR),
                pre_update_container_resources=Adjustment(cpus=CLEAR),
            )
            one = await world.run(await world.pod("be", "BE", "besteffort"), cpuset_cpus="1-2")
            assert world.on(one) == "0-15"
            forwarded = await world.update(one, cpuset_cpus="3")
            assert forwarded.cpuset_cpus == "0-15"
            assert world.executor.state.containers[one].request.cpuset_cpus == "1-2", "3 was not requested"

    run_scenario(scenario)


def test_the_pool_at_the_time_of_the_hooks_answer_counts(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            thinks, may_answer = threading.Event(), threading.Event()

            def slow(event: Any) -> Adjustment | None:
                if event.pod.name != "ls":
                    return None
                thinks.set()
                assert may_answer.wait(30)
                return Adjustment(cpus=cpus("0-4"))

            h.add(pre_create_container=slow)
            sandbox = await world.pod("ls", "LS")
            create = asyncio.create_task(world.begin(sandbox))
            await world.until(thinks.is_set)
            lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
            may_answer.set()
            call = await create
            assert linux(call).cpuset_cpus == "4"
            await world.start(world.finish(call, "late"))
            assert (world.on("late"), world.on(lse)) == ("4", "0-3")
            world.check()

    run_scenario(scenario)


def test_cpus_freed_during_a_narrowed_create_may_be_owned_at_its_start(
    run_scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world) -> None:
        called, answer = threading.Event(), threading.Event()

        def narrow(event: Any) -> Adjustment | None:
            if event.container.name != "narrowed":
                return None
            called.set()
            answer.wait(30)
            return Adjustment(cpus=cpus("0-5"))

        async with hooks(world) as h:
            h.add(pre_create_container=narrow)
            sandbox = await world.pod("ls", "LS", "burstable")
            creating = asyncio.create_task(world.begin(sandbox, "narrowed"))
            await asyncio.to_thread(called.wait, 30)
            first = await world.run(await world.pod("first", "LSE", "", "2-3"))
            narrow = world.executor.reservations.narrow

            async def slow(container: Any) -> Any:
                ended = await narrow(container)
                if container.name == "narrowed":
                    await world.remove(first)
                    gone = pb.RemovePodSandboxRequest(pod_sandbox_id="s-first")
                    world.wire.finished(await world.call("RemovePodSandbox", gone), 0)
                return ended

            monkeypatch.setattr(world.executor.reservations, "narrow", slow)
            answer.set()
            shared = world.finish(await creating, "shared")
            assert (world.runtime.specs[shared], str(world.executor.state.runtime.saved[shared])) == (
                "0-5",
                "0-5",
            )
            owner = await world.run(await world.pod("second", "LSE", "", "2-3"))
            start = await world.call("StartContainer", pb.StartContainerRequest(container_id=shared))
            assert start.refused is None
            assert (world.runtime.specs[shared], world.on(owner)) == ("0-1,4-5", "2-3")
            world.wire.finished(start, 0)

    run_scenario(scenario)


def test_a_client_that_disconnects_while_hooks_run_leaves_nothing_reserved(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            thinks, may_answer = threading.Event(), threading.Event()

            def slow(event: Any) -> None:
                thinks.set()
                assert may_answer.wait(30)

            h.add(pre_create_container=slow)
            request = pb.CreateContainerRequest(pod_sandbox_id=await world.pod("lse", "LSE", "", "0-3"))
            request.config.metadata.name = "c"
            call = world.played("CreateContainer", request)
            world.wire.request(call)
            await world.until(thinks.is_set)
            assert world.executor.state.owners
            call.done = True
            world.wire.finished(call, None)
            may_answer.set()
            await world.until(lambda: not world.executor.state.owners)
            assert (call.sent, call.refused, world.executor.state.runtime.lost_creates) == (None, None, {})

    run_scenario(scenario)


def test_cpus_that_cannot_be_freed_are_replaced_and_hooks_called_again(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            seen: list[str] = []

            def mark_owner(event: Any) -> Adjustment | None:
                if not event.decision.own:
                    return None
                seen.append(str(event.decision.own))
                return Adjustment(envs={f"ON_{event.decision.own.first()}": str(event.decision.own)})

            h.add(pre_create_container=mark_owner)
            stuck = await world.run(await world.pod("ls", "LS"))
            world.cgroups.sets[stuck] = cpus("0,8")
            world.cgroups.broken.add(stuck)
            call = await world.begin(await world.pod("g"), **TWO_CPUS)
            config = created(call)
            assert seen == ["0,8", config.linux.resources.cpuset_cpus]
            assert [e.value.decode() for e in config.envs] == seen[1:], "the first request is not kept"

    run_scenario(scenario)


def test_a_container_removed_during_a_reconcile_stays_removed(
    run_scenario,
) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen()
            call = await world.begin(await world.pod("lse", "LSE", "", "2-3"))
            world.wire.finished(
                call, None
            )  # the client disconnected, and the runtime executes the call nevertheless
            world.runtime.specs["one"] = "2-3"
            world.runtime.containers["one"] = RuntimeContainer("one", "s-lse", "c", 0, "CREATED")
            await world.start("one")  # adopted as an unknown container
            listed, go_on = asyncio.Event(), threading.Event()
            loop, plain = asyncio.get_running_loop(), world.runtime.list_containers

            def slowly(container_id: str = "") -> Any:
                found = plain(container_id)
                loop.call_soon_threadsafe(listed.set)
                go_on.wait(30)
                return found

            world.runtime.list_containers = slowly
            comparing = asyncio.create_task(world.sync.once())
            await listed.wait()
            world.runtime.list_containers = plain
            await world.remove("one")
            go_on.set()
            await comparing
            assert "one" not in world.executor.state.containers
            world.now += 10
            await world.sync.once()
            await world.quiet()
            assert not world.executor.state.owners
            assert h.received.count("post_stop_container one") == 1

    run_scenario(scenario)


# -- faults of Koordinator's runtime proxy ------------------------------------------------------------------


def test_a_create_of_a_pod_in_an_unknown_sandbox_passes(run_scenario) -> None:
    """Koordinator's proxy dies of it (3)."""

    async def scenario(world) -> None:
        async with hooks(world) as h:
            seen: list[Any] = []
            h.add(pre_create_container=seen.append)
            request = pb.CreateContainerRequest(pod_sandbox_id="unknown")
            request.config.metadata.name, request.sandbox_config.metadata.name = "c", "p"
            call = await world.call("CreateContainer", request)
            assert call.refused is None
            assert (seen[0].pod.sandbox_id, seen[0].container.name) == ("unknown", "c")
            world.wire.finished(call, 5)
            for method, message in (
                ("StartContainer", pb.StartContainerRequest(container_id="unknown")),
                ("StopContainer", pb.StopContainerRequest(container_id="unknown")),
                ("RemoveContainer", pb.RemoveContainerRequest(container_id="unknown")),
                ("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id="unknown")),
                ("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id="unknown")),
                ("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id="unknown")),
            ):
                names = {"pre_start_container", "pre_stop_container", "pre_remove_container"}
                names |= {"pre_update_container_resources", "pre_stop_pod_sandbox", "pre_remove_pod_sandbox"}
                h.add(f"20-{method}", **dict.fromkeys(names, seen.append))
                call = await world.call(method, message)
                assert call.sent == call.body
                world.wire.finished(call, 5)
            assert len(seen) == 1, "there is nothing to report about them"

    run_scenario(scenario)


def test_a_hook_that_hangs_delays_only_its_own_call(run_scenario) -> None:
    """Koordinator's proxy waits as long as kubelet does (4)."""

    async def scenario(world) -> None:
        async with hooks(world) as h:
            released = threading.Event()
            h.add(pre_create_container=lambda e: released.wait(60) and None, timeout=2.0)
            sandbox = await world.pod("ls", "LS")
            create = asyncio.create_task(world.begin(sandbox))
            await asyncio.sleep(0.05)
            started = await world.call("StopContainer", pb.StopContainerRequest(container_id="x"))
            assert started.sent is not None
            assert not create.done(), "the hook still runs, and another call has passed"
            call = await create
            assert linux(call).cpuset_cpus == "0-15"
            assert any("10-x" in p["what"] for p in world.executor.telemetry.problems())
            released.set()

    run_scenario(scenario)


def test_a_mandatory_hook_that_fails_refuses_the_call(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=lambda e: 1 / 0, policy=HookFailurePolicy.FAIL)
            call = await world.begin(await world.pod("ls", "LS"))
            assert call.refused is not None
            assert "10-x" in call.refused[1]
            world.wire.finished(call, None)
            assert not world.executor.state.containers

    run_scenario(scenario)


def test_after_a_restart_hooks_know_pods_containers_and_requests(run_scenario) -> None:
    """Koordinator's proxy has forgotten resources and cgroup parents then (6)."""

    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_run_pod_sandbox=Adjustment(cgroup_parent="/kubepods/mine", annotations={"by": "hook"}))
            request = pb.RunPodSandboxRequest(runtime_handler="kata")
            request.config.metadata.uid = request.config.metadata.name = "ls"
            request.config.linux.cgroup_parent = "/kubepods/burstable/podls"
            request.config.labels["koordinator.sh/qosClass"] = "LS"
            call = await world.call("RunPodSandbox", request)
            world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s-ls").SerializeToString())
            world.wire.finished(call, 0)
            labels = dict(request.config.labels)
            world.runtime.pods["s-ls"] = RuntimePod("s-ls", "ls", "", "ls", 0, True, labels, {"by": "hook"})
        one = await world.create("s-ls", cpu_shares=512, memory_limit_in_bytes=1 << 20)
        await restarted(world)
        async with hooks(world) as h:
            h.read_lists()
            seen: list[Any] = []
            h.add(pre_start_container=seen.append, pre_update_container_resources=seen.append)
            h.add("20-create", pre_create_container=seen.append)
            assert (await world.start(one)).refused is None
            await world.update(one, cpu_quota=50_000)
            again = await world.update(one, memory_limit_in_bytes=2 << 20)
            start, first, second = seen
            assert (start.pod.cgroup_parent, start.pod.kube_qos, start.pod.qos) == (
                "/kubepods/mine",
                "Burstable",
                "LS",
            )
            assert start.container.resources.cpu_shares == 512
            assert (start.container.labels, start.pod.annotations) == ({"listed": "c"}, {"by": "hook"})
            assert (first.asked.cpu_quota, first.container.resources.memory_limit) == (50_000, 1 << 20)
            assert (second.container.resources.cpu_quota, second.asked.memory_limit) == (50_000, 2 << 20)
            assert again.memory_limit_in_bytes == 2 << 20
            assert again.cpuset_cpus == "0-15"
            more = await world.begin("s-ls", "more")
            parent = pb.CreateContainerRequest.FromString(more.sent).sandbox_config.linux.cgroup_parent
            assert parent == "/kubepods/mine", "of all its containers, after a restart too"

    run_scenario(scenario)


def test_two_updates_of_one_container_stay_in_order(run_scenario) -> None:
    """Koordinator's proxy merges both into one record without a lock (13)."""

    async def scenario(world) -> None:
        async with hooks(world) as h:
            may_answer = threading.Event()

            def slow(event: Any) -> Adjustment:
                if event.asked.cpu_shares == 100:
                    assert may_answer.wait(30)
                return Adjustment(
                    cpu_shares=event.asked.cpu_shares + 1,
                    unified={"memory.high": str(event.asked.cpu_shares)},
                )

            h.add(pre_update_container_resources=slow)
            one, two = (
                await world.run(await world.pod("a", "LS")),
                await world.run(await world.pod("b", "LS")),
            )

            def call(container_id: str, shares: int) -> Any:
                made = pb.UpdateContainerResourcesRequest(container_id=container_id)
                made.linux.cpu_shares = shares
                played = world.played("UpdateContainerResources", made)
                world.wire.request(played)
                return played

            first, second, third = call(one, 100), call(one, 200), call(one, 300)
            other = call(two, 400)
            await asyncio.wait_for(other.over.wait(), 30)
            await world.quiet()
            assert not any(each.over.is_set() for each in (first, second, third))
            may_answer.set()
            await asyncio.wait_for(third.over.wait(), 30)
            for each, shares in ((first, 101), (second, 201), (third, 301)):
                assert each.over.is_set()
                forwarded = pb.UpdateContainerResourcesRequest.FromString(each.sent).linux
                assert (forwarded.cpu_shares, dict(forwarded.unified)) == (
                    shares,
                    {"memory.high": str(shares - 1)},
                )
                assert forwarded.cpuset_cpus == "0-15"
            for each in (first, second, third, other):
                world.wire.finished(each, 0)
            await world.quiet()

    run_scenario(scenario)


def test_a_queued_container_that_is_removed_is_not_checked(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            may_answer, seen = threading.Event(), []

            def slow(event: Any) -> None:
                seen.append(event.asked.cpu_shares)
                assert may_answer.wait(30)

            h.add(pre_update_container_resources=slow)
            one = await world.run(await world.pod("a", "LS"))
            calls = []
            for shares in (100, 200, 300):
                made = pb.UpdateContainerResourcesRequest(container_id=one)
                made.linux.cpu_shares = shares
                calls.append(world.played("UpdateContainerResources", made))
                world.wire.request(calls[-1])
            await world.until(lambda: seen)
            calls[1].done = True
            world.wire.finished(calls[1], None)
            may_answer.set()
            await asyncio.wait_for(calls[2].over.wait(), 30)
            assert (seen, calls[1].sent) == ([100, 300], None)
            for each in (calls[0], calls[2]):
                world.wire.finished(each, 0)
            await world.quiet()

    run_scenario(scenario)


def test_answers_that_come_too_late_to_apply_are_reported(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            late = Outcome(Adjustment(mems=Mask((7,))), {"mems": "10-x"})
            h.held_call_hooks.narrow(one, late, cpus("0-15"))
            assert (
                "cannot bind ns/ls/c to memory of NUMA node 7 by hook 10-x"
                in (world.executor.telemetry.problems()[0]["what"])
            )

    run_scenario(scenario)


# -- sandboxes, starts, stops -------------------------------------------------------------------------------


def test_labels_and_annotations_set_by_a_hook_reach_the_engine(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            status = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"4-5"}'}
            want = Adjustment(labels={"koordinator.sh/qosClass": "LSE"}, annotations=status)
            h.add(pre_run_pod_sandbox=want)
            request = pb.RunPodSandboxRequest()
            request.config.metadata.uid = request.config.metadata.name = "p"
            request.config.linux.cgroup_parent = "/kubepods/podp"
            call = await world.call("RunPodSandbox", request)
            config = pb.RunPodSandboxRequest.FromString(call.sent).config
            assert config.labels["koordinator.sh/qosClass"] == "LSE"
            world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s-p").SerializeToString())
            world.wire.finished(call, 0)
            world.parents["s-p"] = "kubepods/podp"
            assert world.on(await world.run("s-p")) == "4-5"

    run_scenario(scenario)


def test_a_sandbox_and_a_start_may_be_refused(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.create(await world.pod("ls", "LS"))
            h.add(pre_run_pod_sandbox=Veto("full"), pre_start_container=Veto("wait"))
            reported = await world.pod("more", "LS", may_be_refused=True)
            assert "full" in reported
            (found,) = (record.explanation for record in world.executor.history.find("ns/more"))
            assert (found.event, found.container) == ("RunPodSandbox", "")
            assert (found.verdict.reason, found.verdict.message) == ("RefusedByHook", reported)
            call = await world.start(one)
            assert call.refused == (9, call.refused[1])
            assert "wait" in call.refused[1]
            assert world.executor.state.containers[one].phase.value == "created"

    run_scenario(scenario)


ODD_ENTRY = encode_field(1, b"k") + encode_field(2, b"\xff")
"""An entry of a map whose value is not UTF-8."""
MANY = {str(number): "" for number in range(FIELDS_LIMIT)}


@pytest.mark.parametrize(
    ("policy", "read", "message"),
    [
        (HookFailurePolicy.IGNORE, lambda e: e.pod.labels["x"], ""),
        (HookFailurePolicy.IGNORE, lambda e: e.resources.cpu_shares, ""),
        (HookFailurePolicy.IGNORE, lambda e: (e.pod.ref, e.pod.runtime_handler), "labelled"),
        (HookFailurePolicy.FAIL, lambda e: e.pod.annotations["k"], "cannot read a RunPodSandbox request"),
        (HookFailurePolicy.FAIL, lambda e: e.resources, "labelled"),
    ],
)
def test_of_a_sandbox_that_cannot_be_read_the_policy_of_a_hook_that_reads_it_decides(
    run_scenario, policy, read, message
) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            seen: list[Any] = []

            def hook(event: Any) -> Adjustment:
                seen.append(read(event))
                return Adjustment(labels={"koordinator.sh/qosClass": "LS"})

            h.add(pre_run_pod_sandbox=hook, policy=policy)
            h.listen("post_run_pod_sandbox")
            request = pb.RunPodSandboxRequest(runtime_handler="kata")
            request.config.metadata.MergeFrom(pb.PodSandboxMetadata(name="p", uid="u", namespace="ns"))
            request.config.labels.update(MANY)
            odd = request.SerializeToString() + encode_field(1, encode_field(7, ODD_ENTRY))
            call = await world.call("RunPodSandbox", Raw(odd))
            if message not in ("", "labelled"):
                assert call.refused[0] == 9
                assert message in call.refused[1]
                return
            assert call.sent.startswith(odd)
            assert (len(call.sent) > len(odd)) is (message == "labelled")
            world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id="s-p").SerializeToString())
            world.wire.finished(call, 0)
            await h.expect("post_run_pod_sandbox s-p")
            assert (len(seen) == 1) is (message == "labelled")
            assert "internal error" not in str(world.executor.telemetry.problems())
            assert ("hook=10-x" in str(world.executor.telemetry.problems())) is (message == "")

    run_scenario(scenario)


@pytest.mark.parametrize("policy", HookFailurePolicy)
def test_of_an_update_that_cannot_be_read_the_policy_of_a_hook_that_reads_it_decides(
    run_scenario, policy
) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_update_container_resources=lambda e: e.asked.cpu_shares and None, policy=policy)
            h.listen("post_update_container_resources")
            one = await world.run(await world.pod("ls", "LS"))
            request = pb.UpdateContainerResourcesRequest(container_id=one, annotations=MANY)
            odd = request.SerializeToString() + encode_field(4, ODD_ENTRY)
            call = await world.call("UpdateContainerResources", Raw(odd))
            if policy is HookFailurePolicy.FAIL:
                assert "cannot read an UpdateContainerResources request" in call.refused[1]
                return
            assert call.sent.startswith(odd)
            assert call.sent != odd, "the plan's cpuset is written into it"
            world.wire.finished(call, 0)
            await h.expect(f"post_update_container_resources {one}")
            assert world.executor.telemetry.value(metrics.REQUESTS_UNDECODABLE) == 0

    run_scenario(scenario)


def test_stops_and_removals_are_never_blocked_by_hooks(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            seen: list[Any] = []

            def bad(event: Any) -> Veto:
                seen.append(event)
                return Veto("never")

            names = (
                "pre_stop_container",
                "pre_remove_container",
                "pre_stop_pod_sandbox",
                "pre_remove_pod_sandbox",
            )
            for name in names:  # a single hook would fail so often that it is not called any more
                h.add(name, policy=HookFailurePolicy.FAIL, **{name: bad})
            sandbox = await world.pod("ls", "LS")
            one = await world.run(sandbox)
            await world.stop(one)
            await world.stop(one)  # kubelet sends the call again
            await world.remove(one)
            for method in ("StopPodSandbox", "StopPodSandbox", "RemovePodSandbox", "RemovePodSandbox"):
                kind = getattr(pb, f"{method}Request")
                call = await world.call(method, kind(pod_sandbox_id=sandbox))
                assert call.sent == call.body
                world.wire.finished(call, 0)
            assert [each.NAME for each in seen] == list(names)
            assert not world.executor.state.containers

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("limit", "recorded", "nodes"), [(80 << 30, 80 << 30, "0-1"), (1 << 30, 1 << 30, "0"), (CLEAR, 0, "0")]
)
def test_a_memory_limit_of_a_hook_decides_on_memory_nodes(run_scenario, limit, recorded, nodes) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=Adjustment(memory_limit=limit))
            call = await world.begin(await world.pod("p"), memory_limit_in_bytes=40 << 30, **TWO_CPUS)
            assert (linux(call).memory_limit_in_bytes, linux(call).cpuset_mems) == (recorded, nodes)
            one = world.finish(call, "one")
            await world.quiet()
            container = world.executor.state.containers[one]
            assert (container.request.memory_limit, str(container.placement.mems)) == (recorded, nodes)
            assert world.ledger.entries[f"c/{one}"]["request"].get("memory_limit", 0) == recorded
            world.check()

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("requested", "wanted", "restored"),
    [(200_000, 150_000, 150_000), (0, 150_000, 150_000), (200_000, CLEAR, None), (200_000, -1, None)],
)
@pytest.mark.parametrize("crash", [False, True])
def test_the_quota_that_a_hook_sets_for_an_owner_is_the_one_that_is_restored(
    run_scenario, requested, wanted, restored, crash
) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=Adjustment(cpu_quota=wanted))
            call = await world.begin(await world.pod("lse", "LSE", "", "2-3"), cpu_quota=requested)
            assert linux(call).cpu_quota == -1, "the quota of an owner is off"
            at_the_crash = dict(world.ledger.entries)
            one = world.finish(call, "one")
            await world.executor.ledger_writer.flush()
        if crash:  # before the answer of the runtime
            await world.close()
            world.ledger.entries.clear()
            world.ledger.entries.update(at_the_crash)
            world.boot()
            await world.sync.once()
        known = world.executor.quotas.known.records.get(f"qc/{one}")
        assert (None if known is None else known.quota) == restored

    run_scenario(scenario)


def test_the_memory_limit_of_a_hook_is_counted(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=Adjustment(memory_limit=60 << 30))
            await world.run(await world.pod("p"), memory_limit_in_bytes=40 << 30, **TWO_CPUS)
            assert world.executor.state.memory.nodes[0].table("memory").reserved == 60 << 30
            assert not world.executor.telemetry.problems()
            await world.run(await world.pod("q"), memory_limit_in_bytes=1 << 30, **TWO_CPUS)
            problems = [each["message"] for each in world.executor.telemetry.problems()]
            assert problems == [
                "cannot count all memory of the running containers: they were promised more than there is"
            ]

    rules = {"policy": TopologyPolicy.RESTRICTED, "reserved_memory": {0: {"memory": 1 << 20}}}
    run_scenario(scenario, rules=rules)


def test_an_update_is_changed_narrowed_and_may_be_refused(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))

            def wants(event: Any) -> Adjustment | Veto:
                if event.asked.cpu_shares == 1:
                    return Veto("too few")
                return Adjustment(cpus=cpus("6-7"), memory_limit=1 << 30)

            h.add(pre_update_container_resources=wants)
            forwarded = await world.update(one, cpu_shares=9)
            assert (forwarded.cpu_shares, forwarded.cpuset_cpus, forwarded.memory_limit_in_bytes) == (
                9,
                "6-7",
                1 << 30,
            )
            assert world.on(one) == "6-7"
            request = pb.UpdateContainerResourcesRequest(container_id=one)
            request.linux.cpu_shares = 1
            call = await world.call("UpdateContainerResources", request)
            assert call.refused == (9, call.refused[1])
            assert world.ledger.entries[f"c/{one}"]["placement"]["narrowed"] == "6-7"
            world.check()

    run_scenario(scenario)


# -- calls without hooks ------------------------------------------------------------------------------------


def test_no_hook_is_called_in_observe_mode_or_on_a_released_node(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            seen: list[Any] = []
            h.add(pre_create_container=seen.append)
            h.listen()
            call = await world.begin(await world.pod("ls", "LS"))
            assert call.sent == call.body
            world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
            call = await world.begin("s-ls", "other")
            assert call.sent == call.body
            assert not seen

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_a_node_released_while_hooks_run_only_relays(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:

            def release(event: Any) -> Adjustment:
                world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
                return Adjustment(envs={"A": "1"})

            h.add(pre_create_container=release)
            call = await world.begin(await world.pod("ls", "LS"), cpuset_cpus="7")
            assert (linux(call).cpuset_cpus, created(call).envs[0].key) == ("7", "A")

    run_scenario(scenario)


def test_answers_that_cannot_be_written_follow_the_failure_policy(run_scenario, monkeypatch) -> None:
    def never(view: CriHookView, adjustment: Adjustment) -> bytes:
        raise HookError("cannot change it")

    async def scenario(world) -> None:
        async with hooks(world) as h:
            want = Adjustment(cpus=cpus("6-7"), labels={"a": "b"})
            h.add(pre_create_container=want, pre_update_container_resources=Adjustment(cpus=cpus("6-7")))
            one = await world.run(sandbox := await world.pod("ls", "LS"))
            assert world.on(one) == "6-7"
            monkeypatch.setattr(CriHookView, "adjusted", never)
            call = await world.begin(sandbox, "second")
            assert linux(call).cpuset_cpus == "0-15", "a partial answer does not count"
            assert not created(call).labels
            assert any(
                each["keys"].get("err") == "cannot change it" for each in world.executor.telemetry.problems()
            )
            world.finish(call, "c-second")
            firm = {
                "pre_create_container": Adjustment(envs={"A": "1"}),
                "pre_run_pod_sandbox": Adjustment(labels={"a": "b"}),
                "pre_update_container_resources": Adjustment(memory_limit=1 << 30),
            }
            h.add("20-firm", policy=HookFailurePolicy.FAIL, **firm)
            before = world.executor.state.containers.keys()
            call = await world.begin(sandbox, "third")
            assert call.refused == (9, "cannot change it")
            world.wire.finished(call, None)
            assert world.executor.state.containers.keys() == before
            assert await world.pod("other", "LS", may_be_refused=True) == "cannot change it"
            update = pb.UpdateContainerResourcesRequest(container_id=one)
            assert (await world.call("UpdateContainerResources", update)).refused == (9, "cannot change it")
            world.check()

    run_scenario(scenario)


def test_a_node_released_while_hooks_run_decides_nothing(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.create(await world.pod("ls", "LS"))

            def release(event: Any) -> Adjustment:
                world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
                return Adjustment(annotations={"a": "b"})

            def start(event: Any) -> None:
                world.executor.store.handle(ModeChanged(NodeMode.RELEASED))

            h.add(pre_update_container_resources=release, pre_start_container=start)
            call = await world.call(
                "UpdateContainerResources",
                pb.UpdateContainerResourcesRequest(
                    container_id=one, linux=pb.LinuxContainerResources(cpuset_cpus="7")
                ),
            )
            sent = pb.UpdateContainerResourcesRequest.FromString(call.sent)
            assert (sent.linux.cpuset_cpus, sent.annotations["a"]) == ("7", "b")
            world.wire.finished(call, 0)
            world.executor.store.handle(ModeChanged(NodeMode.ENFORCE))
            call = await world.call("StartContainer", pb.StartContainerRequest(container_id=one))
            assert (call.refused, call.sent) == (None, call.body)
            assert call.context is None, "no start is watched"
            world.wire.finished(call, 0)

    run_scenario(scenario)


def test_an_internal_fault_skips_the_hooks_and_not_the_call(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(pre_create_container=Veto("never"))
            h.engine.call_hooks = lambda event: 1 / 0  # type: ignore[assignment,return-value]
            call = await world.begin(await world.pod("ls", "LS"))
            assert linux(call).cpuset_cpus == "0-15"
            await world.quiet()
            assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 1

    run_scenario(scenario)


def test_no_call_waits_for_hooks_that_never_answer(run_scenario, monkeypatch) -> None:
    class Never:
        outcome = None

        async def wait(self) -> Any:
            await asyncio.Event().wait()

    async def scenario(world) -> None:
        monkeypatch.setattr(held_call_hooks, "LONGEST_TIMEOUT_S", 0.1)
        monkeypatch.setattr(held_call_hooks, "_MARGIN_S", 0.0)
        async with hooks(world) as h:
            h.add(pre_create_container=Veto("never"), pre_update_container_resources=Veto("never"))
            h.engine.call_hooks = lambda event: Never()  # type: ignore[assignment,return-value]
            one = await world.run(await world.pod("ls", "LS"))
            assert (await world.update(one, cpu_shares=9)).cpu_shares == 9
            assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 2

    run_scenario(scenario)
