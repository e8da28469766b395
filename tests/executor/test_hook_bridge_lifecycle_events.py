"""Hooks are notified once, after the event, whatever caused it; nothing stays of what is gone."""

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
from proxy.topology.build import described
from tests.executor.played_hooks import hooks
from tests.testkit.be_load import used_beside_be
from tests.testkit.changed_copy import changed_copy


async def ended(w: Any, method: str, sandbox: str, status: int = 0) -> None:
    call = await w.call(method, getattr(pb, f"{method}Request")(pod_sandbox_id=sandbox))
    w.wire.finished(call, status)
    await w.quiet()


def test_a_pods_whole_life(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            h.listen()
            sandbox = await w.pod("ls", "LS", "burstable")
            await h.hears("post_run_pod_sandbox s-ls")
            one = await w.create(sandbox, cpu_shares=512)
            await h.hears(f"post_create_container {one}")
            await w.start(one)
            await h.hears(f"post_start_container {one}")
            await w.update(one, cpu_shares=99)
            await w.until(lambda: h.notified)
            event = h.notified[0]
            assert (event.container.resources.cpu_shares, str(event.decision.cpus)) == (99, "0-15")
            assert (event.pod.ref, event.pod.kube_qos) == ("ns/ls", "Burstable")
            await h.hears(f"post_update_container_resources {one}")
            await w.stop(one)
            await w.stop(one)
            await h.hears(f"post_stop_container {one}")
            await w.remove(one)
            await h.hears(f"post_remove_container {one}")
            for _ in range(2):
                await ended(w, "StopPodSandbox", sandbox)
            await h.hears("post_stop_pod_sandbox s-ls")
            for _ in range(2):
                await ended(w, "RemovePodSandbox", sandbox)
            await h.hears("post_remove_pod_sandbox s-ls")
            assert h.remembers() == 0

    live(day)


def test_hooks_are_notified_only_of_what_has_happened(live) -> None:
    """Koordinator's proxy notifies of failed calls, too."""

    async def day(w) -> None:
        async with hooks(w) as h:
            h.listen()
            request = pb.RunPodSandboxRequest()
            request.config.metadata.uid = "p"
            call = await w.call("RunPodSandbox", request)
            w.wire.finished(call, 13)
            sandbox = await w.pod("ls", "LS")
            await h.hears("post_run_pod_sandbox s-ls")
            w.wire.finished(await w.begin(sandbox), 13)
            one = await w.create(sandbox)
            await h.hears(f"post_create_container {one}")
            call = await w.call("StartContainer", pb.StartContainerRequest(container_id=one))
            w.wire.finished(call, 2)
            update = pb.UpdateContainerResourcesRequest(container_id=one)
            update.linux.cpu_shares = 7
            w.wire.finished(await w.call("UpdateContainerResources", update), 2)
            w.wire.finished(await w.call("StopContainer", pb.StopContainerRequest(container_id=one)), 2)
            w.wire.finished(await w.call("RemoveContainer", pb.RemoveContainerRequest(container_id=one)), 2)
            await ended(w, "StopPodSandbox", sandbox, 13)
            await ended(w, "RemovePodSandbox", sandbox, 13)
            await h.hears()
            w.wire.finished(await w.call("RemoveContainer", pb.RemoveContainerRequest(container_id=one)), 5)
            await h.hears(f"post_remove_container {one}")  # it is not there, which is what was wanted

    live(day)


def test_containers_and_pods_that_end_or_go_without_a_call(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            sandbox = await w.pod("ls", "LS")
            one, two, never = (
                await w.run(sandbox, "a"),
                await w.run(sandbox, "b"),
                await w.create(sandbox, "c"),
            )
            h.listen()
            w.end(one)
            await w.sync.once()
            await h.hears(f"post_stop_container {one}")
            for each in (one, two, never):
                del w.runtime.containers[each]
            await w.sync.once()
            await h.hears(
                f"post_remove_container {one}",
                f"post_stop_container {two}",
                f"post_remove_container {two}",
                f"post_remove_container {never}",
            )
            w.runtime.pods[sandbox] = changed_copy(w.runtime.pods[sandbox], ready=False)
            await w.sync.once()
            await h.hears("post_stop_pod_sandbox s-ls")
            w.runtime.pods.clear()
            await w.sync.once()
            await h.hears("post_remove_pod_sandbox s-ls")
            assert h.remembers() == 0

    live(day)


def test_nothing_is_left_of_many_that_have_gone(live) -> None:
    """Koordinator's proxy keeps each container that has ended by itself for ever."""

    async def day(w) -> None:
        async with hooks(w) as h:
            h.listen()
            sandbox = await w.pod("ls", "LS")
            for number in range(40):
                call = await w.begin(sandbox, f"c{number}")
                if number % 4 == 0:
                    w.wire.finished(call, 13)
                    continue
                one = w.finish(call, f"id-{number}")
                if number % 4 == 1:
                    w.end(one)
                    await w.remove(one)
                elif number % 4 == 2:
                    del w.runtime.containers[one]
            await w.sync.once()
            assert h.remembers() == len((sandbox, *w.runtime.containers))
            assert not h.following.sent
            w.runtime.containers.clear()
            await w.sync.once()
            assert h.remembers() == len((sandbox,))

    live(day)


def test_a_create_without_an_answer_is_notified_from_the_list(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            h.listen()
            h.add(pre_create_container=Adjustment(labels={"from": "hook"}))
            sandbox = await w.pod("ls", "LS")
            await h.hears("post_run_pod_sandbox s-ls")
            call = await w.begin(sandbox)
            w.wire.finished(call, None)
            w.runtime.containers["late"] = RuntimeContainer("late", sandbox, "c", 0, "CREATED")
            await w.sync.once()
            await w.until(lambda: h.notified)
            assert h.notified[0].container.labels == {"from": "hook"}
            await h.hears("post_create_container late")

    live(day)


def test_all_that_exists(live) -> None:
    async def day(w) -> None:
        sandbox = await w.pod("ls", "LS")
        one = await w.run(sandbox)
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        w.runtime.pods["old"] = changed_copy(w.runtime.pods[sandbox], id="old", uid="u", ready=False)
        w.runtime.pods["new"] = changed_copy(w.runtime.pods[sandbox], id="new", uid="n")
        async with hooks(w) as h:
            h.following.learn(*w.runtime.raw_lists())
            event = h.following.everything()
            assert sorted(pod.sandbox_id for pod in event.pods) == ["old", "s-ls", "s-lse"]
            assert {pod.runtime_handler for pod in event.pods} == {"handled"}
            listed = {each.container.id: each for each in event.containers}
            assert {i: str(each.decision.cpus) for i, each in listed.items()} == {one: "0-1,4-15", lse: "2-3"}
            assert (listed[lse].container.image, listed[lse].pod.qos) == ("listed", "LSE")
            assert (str(event.pools.shared), event.machine) == ("0-1,4-15", w.executor.state.node.machine)
            assert {i: str(own) for i, own in event.pools.owners.items()} == {lse: "2-3"}
            state = w.executor.state
            w.executor.store._state = state.knowing(state.runtime.admitting("s-lse"))
            made = [pod.sandbox_id for pod in h.following.everything().pods]
            assert sorted(made) == ["old", "s-ls"], "of one that is being made nothing is sent"

    live(day)


def test_pools_and_machine_that_change(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            h.listen("pools_changed", "machine_changed")
            lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
            await w.until(lambda: h.notified and lse in h.notified[-1].after.owners)
            assert (str(h.notified[0].before.shared), str(h.notified[-1].after.shared)) == (
                "0-15",
                "0-1,4-15",
            )
            h.notified.clear()
            await w.run(await w.pod("ls", "LS"))
            await w.quiet()
            assert not h.notified, "a container without own CPUs changes nothing"
            w.executor.store.handle(ContainersRemoved((lse,)))
            for event in used_beside_be(w.executor.state, 15):
                w.executor.store.handle(event)
            assert len(w.executor.state.pools.be_now or ()) == 2
            h.following._stir()
            await w.until(lambda: h.notified)
            await w.quiet()
            assert [(each.NAME, str(each.after.be)) for each in h.notified] == [
                ("pools_changed", str(w.executor.state.pools.be_now))
            ], "once"
            h.notified.clear()
            w.machine = described(2, 1, 4, 1)
            await w.executor.hotplug.look()
            await w.until(lambda: len(h.notified) == 2)
            assert {each.NAME for each in h.notified} == {"machine_changed", "pools_changed"}
            machine = next(each for each in h.notified if each.NAME == "machine_changed")
            assert (len(machine.before.online), machine.after) == (16, w.machine)

    live(day)


def test_no_events_of_a_released_node_and_all_after_the_undo(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            h.listen()
            sandbox = await w.pod("ls", "LS")
            one = await w.run(sandbox)
            await h.hears(
                "post_run_pod_sandbox s-ls", f"post_create_container {one}", f"post_start_container {one}"
            )
            w.executor.store.handle(ModeChanged(NodeMode.RELEASED))
            w.end(one)
            await w.sync.once()
            await h.hears()
            assert h.resumed == 0
            w.executor.store.handle(ModeChanged(NodeMode.ENFORCE))
            await w.sync.once()
            assert h.resumed == 1
            await w.sync.once()
            assert h.resumed == 1
            assert isinstance(h.following.everything(), Synchronize)

    live(day)


def test_faults_of_notified_hooks_affect_no_container(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            h.add(post_create_container=lambda e: 1 / 0)
            h.listen()
            one = await w.create(await w.pod("ls", "LS"))
            await h.hears("post_run_pod_sandbox s-ls", f"post_create_container {one}")
            h.engine.notify = lambda event: 1 / 0  # type: ignore[assignment,return-value]
            await w.start(one)
            await asyncio.sleep(0)
            assert w.executor.state.containers[one].phase.value == "running"
            assert w.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 1

    live(day)


def test_what_came_without_a_call_is_learned_of(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            sandbox = await w.pod("ls", "LS")
            await w.run(sandbox)
            await w.pod("other", "LS")
            await w.sync.once()
            assert h.lacked == 0
            w.runtime.containers["odd"] = RuntimeContainer("odd", sandbox, "odd", 0, "RUNNING")
            w.cgroups.sets["odd"] = CpuSet.parse("0-15")
            await w.sync.once()
            assert h.lacked == 1
            h.following.sent["gone"] = b"a create that has no known end"
            h.following.listed({sandbox}, (), w.executor.state.runtime.changes.number)
            assert not h.following.sent
            assert h.lacked == 1, "of what the runtime does not list it tells no more"
            h.following.learn(*w.runtime.raw_lists())
            assert h.following.facts(w.executor.state.containers["odd"])[1].labels == {"listed": "odd"}
            await w.sync.once()
            assert h.lacked == 1
            h.following.memory.forget(sandbox)
            await w.sync.once()
            assert h.lacked == 2, "and of sandboxes"
            h.following.listed((), (), w.executor.state.runtime.changes.number)
            assert h.lacked == 2

    live(day)


def test_a_list_older_than_a_sandbox_stop_does_not_remove_it(live) -> None:
    async def day(w) -> None:
        async with hooks(w) as h:
            h.listen("post_stop_pod_sandbox", "post_remove_pod_sandbox")
            began = w.executor.state.runtime.changes.number
            sandbox = await w.pod("ls", "LS")
            await ended(w, "StopPodSandbox", sandbox)
            h.following.listed((), (), began)
            await h.hears("post_stop_pod_sandbox s-ls")
            assert h.following.find_pod(sandbox) is not None
            h.following.listed((), (), w.executor.state.runtime.changes.number)
            await h.hears("post_remove_pod_sandbox s-ls")

    live(day)
