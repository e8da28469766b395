"""Hooks are notified once after each event, whatever caused it; removed containers are forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.api.cri import api_pb2 as pb
from proxy.engine.container_events import ContainersRemoved
from proxy.engine.node_events import ModeChanged
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.hooks.answers import Adjustment
from proxy.hooks.events import Synchronize
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.telemetry import metrics
from proxy.topology.regular_machine import regular_machine
from tests.executor.played_hooks import hooks
from tests.testkit.be_load import used_beside_be
from tests.testkit.changed_copy import changed_copy


async def ended(world: Any, method: str, sandbox: str, status: int = 0) -> None:
    call = await world.call(method, getattr(pb, f"{method}Request")(pod_sandbox_id=sandbox))
    world.wire.finished(call, status)
    await world.quiet()


def test_hooks_are_notified_of_the_whole_life_of_a_pod(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen()
            sandbox = await world.pod("ls", "LS", "burstable")
            await h.expect("post_run_pod_sandbox s-ls")
            one = await world.create(sandbox, cpu_shares=512)
            await h.expect(f"post_create_container {one}")
            await world.start(one)
            await h.expect(f"post_start_container {one}")
            await world.update(one, cpu_shares=99)
            await world.until(lambda: h.notified)
            event = h.notified[0]
            assert (event.container.resources.cpu_shares, str(event.decision.cpus)) == (99, "0-15")
            assert (event.pod.ref, event.pod.kube_qos) == ("ns/ls", "Burstable")
            await h.expect(f"post_update_container_resources {one}")
            await world.stop(one)
            await world.stop(one)
            await h.expect(f"post_stop_container {one}")
            await world.remove(one)
            await h.expect(f"post_remove_container {one}")
            for _ in range(2):
                await ended(world, "StopPodSandbox", sandbox)
            await h.expect("post_stop_pod_sandbox s-ls")
            for _ in range(2):
                await ended(world, "RemovePodSandbox", sandbox)
            await h.expect("post_remove_pod_sandbox s-ls")
            assert h.remembers() == 0

    run_scenario(scenario)


def test_hooks_are_not_notified_of_failed_calls(run_scenario) -> None:
    """Koordinator's proxy notifies of failed calls, too."""

    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen()
            request = pb.RunPodSandboxRequest()
            request.config.metadata.uid = "p"
            call = await world.call("RunPodSandbox", request)
            world.wire.finished(call, 13)
            sandbox = await world.pod("ls", "LS")
            await h.expect("post_run_pod_sandbox s-ls")
            world.wire.finished(await world.begin(sandbox), 13)
            one = await world.create(sandbox)
            await h.expect(f"post_create_container {one}")
            call = await world.call("StartContainer", pb.StartContainerRequest(container_id=one))
            world.wire.finished(call, 2)
            update = pb.UpdateContainerResourcesRequest(container_id=one)
            update.linux.cpu_shares = 7
            world.wire.finished(await world.call("UpdateContainerResources", update), 2)
            world.wire.finished(
                await world.call("StopContainer", pb.StopContainerRequest(container_id=one)), 2
            )
            world.wire.finished(
                await world.call("RemoveContainer", pb.RemoveContainerRequest(container_id=one)), 2
            )
            await ended(world, "StopPodSandbox", sandbox, 13)
            await ended(world, "RemovePodSandbox", sandbox, 13)
            await h.expect()
            world.wire.finished(
                await world.call("RemoveContainer", pb.RemoveContainerRequest(container_id=one)), 5
            )
            await h.expect(f"post_remove_container {one}")  # the container does not exist, as requested

    run_scenario(scenario)


def test_hooks_are_notified_of_containers_and_pods_that_end_without_a_call(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            sandbox = await world.pod("ls", "LS")
            one, two, never = (
                await world.run(sandbox, "a"),
                await world.run(sandbox, "b"),
                await world.create(sandbox, "c"),
            )
            h.listen()
            world.end(one)
            await world.sync.once()
            await h.expect(f"post_stop_container {one}")
            for each in (one, two, never):
                del world.runtime.containers[each]
            await world.sync.once()
            await h.expect(
                f"post_remove_container {one}",
                f"post_stop_container {two}",
                f"post_remove_container {two}",
                f"post_remove_container {never}",
            )
            world.runtime.pods[sandbox] = changed_copy(world.runtime.pods[sandbox], ready=False)
            await world.sync.once()
            await h.expect("post_stop_pod_sandbox s-ls")
            world.runtime.pods.clear()
            await world.sync.once()
            await h.expect("post_remove_pod_sandbox s-ls")
            assert h.remembers() == 0

    run_scenario(scenario)


def test_removed_containers_are_forgotten(run_scenario) -> None:
    """Koordinator's proxy keeps each container that has ended by itself forever."""

    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen()
            sandbox = await world.pod("ls", "LS")
            for number in range(40):
                call = await world.begin(sandbox, f"c{number}")
                if number % 4 == 0:
                    world.wire.finished(call, 13)
                    continue
                one = world.finish(call, f"id-{number}")
                if number % 4 == 1:
                    world.end(one)
                    await world.remove(one)
                elif number % 4 == 2:
                    del world.runtime.containers[one]
            await world.sync.once()
            assert h.remembers() == len((sandbox, *world.runtime.containers))
            assert not h.lifecycle.sent
            world.runtime.containers.clear()
            await world.sync.once()
            assert h.remembers() == len((sandbox,))

    run_scenario(scenario)


def test_a_create_without_an_answer_is_notified_from_the_list(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen()
            h.add(pre_create_container=Adjustment(labels={"from": "hook"}))
            sandbox = await world.pod("ls", "LS")
            await h.expect("post_run_pod_sandbox s-ls")
            call = await world.begin(sandbox)
            world.wire.finished(call, None)
            world.runtime.containers["late"] = RuntimeContainer("late", sandbox, "c", 0, "CREATED")
            await world.sync.once()
            await world.until(lambda: h.notified)
            assert h.notified[0].container.labels == {"from": "hook"}
            await h.expect("post_create_container late")

    run_scenario(scenario)


def test_a_sandbox_that_was_removed_after_the_lists_were_requested_is_not_learned(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            sandbox = await world.pod("ls", "LS")
            h.listen("post_remove_pod_sandbox")
            await ended(world, "StopPodSandbox", sandbox)
            world.runtime.pods[sandbox] = changed_copy(world.runtime.pods[sandbox], ready=False)
            since, lists = world.executor.state.runtime.changes.number, world.runtime.raw_lists()
            await ended(world, "RemovePodSandbox", sandbox)
            h.lifecycle.read_lists(*lists, since)
            assert h.lifecycle.find_pod(sandbox) is None
            del world.runtime.pods[sandbox]
            await world.sync.once()
            await h.expect("post_remove_pod_sandbox s-ls")

    run_scenario(scenario)


def test_a_synchronize_event_holds_all_pods_and_containers(run_scenario) -> None:
    async def scenario(world) -> None:
        sandbox = await world.pod("ls", "LS")
        one = await world.run(sandbox)
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
        world.runtime.pods["old"] = changed_copy(world.runtime.pods[sandbox], id="old", uid="u", ready=False)
        world.runtime.pods["new"] = changed_copy(world.runtime.pods[sandbox], id="new", uid="n")
        async with hooks(world) as h:
            h.read_lists()
            event = h.lifecycle.synchronize_event()
            assert sorted(pod.sandbox_id for pod in event.pods) == ["old", "s-ls", "s-lse"]
            assert {pod.runtime_handler for pod in event.pods} == {"handled"}
            listed = {each.container.id: each for each in event.containers}
            assert {i: str(each.decision.cpus) for i, each in listed.items()} == {one: "0-1,4-15", lse: "2-3"}
            assert (listed[lse].container.image, listed[lse].pod.qos) == ("listed", "LSE")
            assert (str(event.pools.shared), event.machine) == ("0-1,4-15", world.executor.state.node.machine)
            assert {i: str(own) for i, own in event.pools.owners.items()} == {lse: "2-3"}
            state = world.executor.state
            world.executor.store._state = state.with_runtime(state.runtime.with_arriving_sandbox("s-lse"))
            made = [pod.sandbox_id for pod in h.lifecycle.synchronize_event().pods]
            assert sorted(made) == ["old", "s-ls"], "a sandbox in creation is not included"

    run_scenario(scenario)


def test_hooks_are_notified_of_changed_pools_and_machine(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen("pools_changed", "machine_changed")
            lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
            await world.until(lambda: h.notified and lse in h.notified[-1].after.owners)
            assert (str(h.notified[0].before.shared), str(h.notified[-1].after.shared)) == (
                "0-15",
                "0-1,4-15",
            )
            h.notified.clear()
            await world.run(await world.pod("ls", "LS"))
            await world.quiet()
            assert not h.notified, "a container without own CPUs changes nothing"
            world.executor.store.handle(ContainersRemoved((lse,)))
            for event in used_beside_be(world.executor.state, 15):
                world.executor.store.handle(event)
            assert len(world.executor.state.pools.be_now or ()) == 2
            h.lifecycle._compare_soon()
            await world.until(lambda: h.notified)
            await world.quiet()
            assert [(each.NAME, str(each.after.be)) for each in h.notified] == [
                ("pools_changed", str(world.executor.state.pools.be_now))
            ], "once"
            h.notified.clear()
            world.machine = regular_machine(2, 1, 4, 1)
            await world.executor.hotplug.reread()
            await world.until(lambda: len(h.notified) == 2)
            assert {each.NAME for each in h.notified} == {"machine_changed", "pools_changed"}
            machine = next(each for each in h.notified if each.NAME == "machine_changed")
            assert (len(machine.before.online), machine.after) == (16, world.machine)

    run_scenario(scenario)


def test_no_events_of_a_released_node_and_all_after_the_undo(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen()
            sandbox = await world.pod("ls", "LS")
            one = await world.run(sandbox)
            await h.expect(
                "post_run_pod_sandbox s-ls", f"post_create_container {one}", f"post_start_container {one}"
            )
            world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
            world.end(one)
            await world.sync.once()
            await h.expect()
            assert h.resumed == 0
            world.executor.store.handle(ModeChanged(NodeMode.ENFORCE))
            await world.sync.once()
            assert h.resumed == 1
            await world.sync.once()
            assert h.resumed == 1
            assert isinstance(h.lifecycle.synchronize_event(), Synchronize)

    run_scenario(scenario)


def test_faults_of_notified_hooks_affect_no_container(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(post_create_container=lambda e: 1 / 0)
            h.listen()
            one = await world.create(await world.pod("ls", "LS"))
            await h.expect("post_run_pod_sandbox s-ls", f"post_create_container {one}")
            h.engine.notify = lambda event: 1 / 0  # type: ignore[assignment,return-value]
            await world.start(one)
            await asyncio.sleep(0)
            assert world.executor.state.containers[one].phase.value == "running"
            assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 1

    run_scenario(scenario)


def test_containers_created_without_a_call_are_looked_up(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            sandbox = await world.pod("ls", "LS")
            await world.run(sandbox)
            await world.pod("other", "LS")
            await world.sync.once()
            assert h.incomplete == 0
            world.runtime.containers["odd"] = RuntimeContainer("odd", sandbox, "odd", 0, "RUNNING")
            world.cgroups.sets["odd"] = CpuSet.parse("0-15")
            await world.sync.once()
            assert h.incomplete == 1
            h.lifecycle.sent["gone"] = b"a create that has no known end"
            h.lifecycle.listed({sandbox}, (), world.executor.state.runtime.changes.number)
            assert not h.lifecycle.sent
            assert h.incomplete == 1, "containers that the runtime does not list are not reported"
            h.read_lists()
            assert h.lifecycle.facts(world.executor.state.containers["odd"])[1].labels == {"listed": "odd"}
            await world.sync.once()
            assert h.incomplete == 1
            h.lifecycle.object_cache.forget(sandbox)
            await world.sync.once()
            assert h.incomplete == 2, "sandboxes are reported too"
            h.lifecycle.listed((), (), world.executor.state.runtime.changes.number)
            assert h.incomplete == 2

    run_scenario(scenario)


def test_a_list_older_than_a_sandbox_stop_does_not_remove_it(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.listen("post_stop_pod_sandbox", "post_remove_pod_sandbox")
            began = world.executor.state.runtime.changes.number
            sandbox = await world.pod("ls", "LS")
            await ended(world, "StopPodSandbox", sandbox)
            h.lifecycle.listed((), (), began)
            await h.expect("post_stop_pod_sandbox s-ls")
            assert h.lifecycle.find_pod(sandbox) is not None
            h.lifecycle.listed((), (), world.executor.state.runtime.changes.number)
            await h.expect("post_remove_pod_sandbox s-ls")

    run_scenario(scenario)
