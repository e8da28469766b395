"""Calls that a replaced daemon still relays: its successor expects their effects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.calls.hook_gateway import END_POINTS, HookGateway
from proxy.executor.runtime_ports import RuntimeContainer, RuntimePod
from proxy.executor.sandboxes import _listed_as
from proxy.model.idset import CpuSet
from proxy.model.workload import Pod
from proxy.telemetry import metrics
from tests.executor.test_confinement import HangingStart, Limits
from tests.testkit.waiting import begin_held_create

LONG = 3
"""Times that two seconds pass: more than a call has that only an ended daemon may have sent."""


async def long(world: Any) -> None:
    """Let the runtime answer other calls for a long time."""
    for _ in range(LONG):
        await world.sync.once()
        world.now += 3
    await world.sync.once()
    await world.quiet()


async def hanging_update(world: Any, container: str) -> Any:
    """Forward an update, with the CPUs that the container has now, and leave it without a response."""
    request = pb.UpdateContainerResourcesRequest(container_id=container)
    call = await world.call("UpdateContainerResources", request)
    assert call.sent is not None
    return call


@pytest.mark.parametrize("answered", [True, False])
def test_a_successor_waits_for_a_relayed_update_until_it_is_over(
    run_scenario: Callable[..., None], *, answered: bool
) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        call = await hanging_update(world, ls)
        former = await world.hand_over(call)
        await long(world)
        create = await begin_held_create(world, await world.pod("lse", "LSE", "", "0-3"))
        world.cgroups.sets[ls] = CpuSet.parse("0-15")  # the runtime executes it
        if answered:
            former.finished(call, 0)
        else:
            world.call_tracker.former_calls.all_over()  # the process that relayed it was killed
        await world.sync.once()
        await world.quiet()
        assert not create.done(), "one answer of the runtime since then is not enough"
        await long(world)
        assert (await create).refused is None
        assert world.on(ls) == "4-15"
        assert not world.executor.state.inflight.of(ls)

    run_scenario(scenario, call_timeout=20.0)


def test_an_update_passes_through_two_replacements(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        call = await hanging_update(world, ls)
        first = await world.hand_over(call)
        await long(world)
        second = world.call_tracker.former_calls
        await world.hand_over()
        await long(world)
        assert world.executor.state.inflight.of(ls), "the first of three processes still relays it"
        first.finished(call, 0)
        await asyncio.wait_for(second.wait(), 60)
        await long(world)
        assert not world.executor.state.inflight.of(ls)

    run_scenario(scenario)


def test_a_start_that_is_relayed_stays_confined_until_the_runtime_lists_it(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        start = await HangingStart.of(world, group=False)
        await world.hand_over(start.call)
        assert world.executor.state.inflight.is_starting(start.id)
        await long(world)
        create = await begin_held_create(world, await world.pod("lse", "LSE", "", "0-3"))
        start.write()  # its cgroup is created only now, from the cpuset saved before the start
        assert (await create).refused is None
        assert world.on(start.id) == "4-15"
        world._state(start.id, "RUNNING")
        await world.sync.once()
        await world.quiet()
        assert not world.executor.state.inflight.of(start.id)
        world.check()

    run_scenario(scenario, call_timeout=20.0)


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_create_that_is_relayed_keeps_its_cpus_until_it_is_over(
    run_scenario: Callable[..., None], *, carried_out: bool
) -> None:
    async def scenario(world: Any) -> None:
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        call = await world.begin(sandbox)
        assert call.refused is None
        former = await world.hand_over(call)
        await long(world)
        assert str(world.executor.state.pools.shared) == "4-15"
        if carried_out:
            world.runtime.containers["late"] = RuntimeContainer("late", sandbox, "c", 0, "CREATED")
            world.runtime.specs["late"] = "0-3"
        former.finished(call, 0 if carried_out else None)
        await long(world)
        assert list(world.executor.state.containers) == (["late"] if carried_out else [])
        assert str(world.executor.state.pools.shared) == ("4-15" if carried_out else "0-15")
        assert not any(key.startswith("i/") for key in world.ledger.entries)

    run_scenario(scenario)


def test_a_resize_that_is_relayed_is_recorded(run_scenario: Callable[..., None]) -> None:
    """The answer passes in the former process, and the client does not send the resize again."""

    async def scenario(world: Any) -> None:
        owner = await world.run(await world.pod("p"), memory_limit_in_bytes=40 << 30, **WHOLE)
        resources = pb.LinuxContainerResources(memory_limit_in_bytes=80 << 30)
        resize = pb.UpdateContainerResourcesRequest(container_id=owner, linux=resources)
        call = await world.call("UpdateContainerResources", resize)
        former = await world.hand_over(call)
        former.finished(call, 0)
        await long(world)
        container = world.executor.state.containers[owner]
        assert (container.request.memory_limit, str(container.placement.mems)) == (80 << 30, "0-1")

    run_scenario(scenario)


WHOLE = {"cpu_shares": 4096, "cpu_quota": 400_000, "cpu_period": 100_000}


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_relayed_sandbox_keeps_its_set_aside_cpus_until_the_call_is_over(
    run_scenario: Callable[..., None], *, carried_out: bool, listed: bool
) -> None:
    async def scenario(world: Any) -> None:
        call = await world.begin_pod("lse", "LSE", total=WHOLE)
        (admitted,) = world.executor.state.pods.values()
        assert len(admitted.cpuset) == 4
        former = await world.hand_over(call)
        await long(world)
        assert [pod.cpuset for pod in world.executor.state.pods.values()] == [admitted.cpuset]
        if carried_out:
            world.make_pod(call, "late")
        former.finished(call, 0 if carried_out else None)
        if listed:
            await long(world)
        else:
            await world.quiet()  # the client's next call comes before the runtime's next list
        if not carried_out:
            await long(world)
            assert not world.executor.state.pods
            assert not any(key.startswith("p/") for key in world.ledger.entries)
            return
        create = pb.CreateContainerRequest(pod_sandbox_id="late")
        create.config.linux.resources.CopyFrom(pb.LinuxContainerResources(cpu_shares=512))
        create.sandbox_config.CopyFrom(pb.RunPodSandboxRequest.FromString(call.body).config)
        sent = pb.CreateContainerRequest.FromString((await world.call("CreateContainer", create)).sent)
        assert sent.config.linux.resources.cpuset_cpus == str(admitted.cpuset)
        await long(world)
        assert list(world.executor.state.pods) == ["late"]
        assert [key for key in world.ledger.entries if key.startswith("p/")] == ["p/late"]

    run_scenario(scenario)


def test_on_v2_the_limits_of_pods_stay_for_calls_that_are_relayed(run_scenario: Callable[..., None]) -> None:
    """An owner was created in spite of an update that hangs: the update must never take effect."""

    async def scenario(world: Any) -> None:
        limits, pod = Limits(world), "kubepods/podls"
        ls = await world.run(await world.pod("ls", "LS"))
        call = await hanging_update(world, ls)
        own = world.finish(await world.begin(await world.pod("lse", "LSE", "", "0-3")), "own")
        await world.start(own)
        assert str(limits.lists[pod]) == "4-15"
        former = await world.hand_over(call)
        assert str(limits.lists[pod]) == "4-15"
        world.executor.unit_properties.fencing.fences = limits
        await world.sync.once()
        await long(world)
        limits.lists[pod] = CpuSet.parse("0-15")  # another program
        await world.until(lambda: str(limits.lists[pod]) == "4-15")
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        former.finished(call, 0)
        await long(world)
        assert world.on(ls) == "4-15"
        assert not world.executor.unit_properties.fencing._active

    run_scenario(scenario, call_timeout=20.0)


def test_on_v2_a_limit_of_an_earlier_daemon_is_widened_after_the_call(
    run_scenario: Callable[..., None],
) -> None:
    """The old limit must not be set again: another container owns its CPUs by now."""

    async def scenario(world: Any) -> None:
        limits, pod = Limits(world), "kubepods/podls"
        ls = await world.run(await world.pod("ls", "LS"))
        limits.lists[pod] = CpuSet.parse("0-3")
        call = world.executor.inflight_calls.track(ls, CpuSet.parse("0-15"))
        own = world.finish(await world.begin(await world.pod("lse", "LSE", "", "0-3")), "own")
        await world.start(own)
        world.call_tracker.completed(call, call.carries)
        await world.until(lambda: not world.executor.unit_properties.fencing._active)
        await world.quiet()
        assert str(limits.effective(world, ls, pod)) == "4-15"

    run_scenario(scenario, call_timeout=20.0)


def test_a_job_that_waits_for_the_kernel_writes_nothing_more_once_another_process_has_the_node(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        one, two = [await world.run(await world.pod(uid, "LS")) for uid in ("one", "two")]
        cpuset_writer, write = world.executor.cpuset_writer, world.cgroups.write

        def hangs(path: str, *args: Any, **more: Any) -> bool:
            cpuset_writer.end()  # work of the daemon meanwhile
            done: bool = write(path, *args, **more)
            return done

        world.cgroups.sets[one] = world.cgroups.sets[two] = CpuSet.parse("0-1")
        world.cgroups.write = hangs
        cpuset_writer.write([one, two])
        world.cgroups.write = write
        assert (world.on(one), world.on(two)) == ("0-15", "0-1")
        assert cpuset_writer.write([two]).written == []

    run_scenario(scenario)


@pytest.mark.parametrize("waits_already", [True, False])
def test_a_held_create_is_not_decided_once_another_process_has_the_node(
    run_scenario: Callable[..., None], *, waits_already: bool
) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        call = await hanging_update(world, ls)
        request = pb.CreateContainerRequest(pod_sandbox_id=await world.pod("lse", "LSE", "", "0-3"))
        held = world.played("CreateContainer", request)
        world.wire.request(held)
        if waits_already:
            await world.quiet()
        executor = world.executor
        await world.hand_over(call)
        for update in executor.state.inflight.of(ls):  # what the create has waited for
            executor.inflight_calls.complete(update)
        await asyncio.sleep(0.1)
        assert executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0
        assert not held.over.is_set()
        await long(world)
        assert not world.executor.state.owners, "no trace of the call is left"

    run_scenario(scenario)


def test_a_sandbox_is_found_by_name_if_the_client_sends_no_uid() -> None:
    pod = Pod("token", "", "ns", "a")
    listed = [RuntimePod(name, "", "ns", name, 0, True, {}, {}) for name in ("b", "a")]
    assert _listed_as(pod, listed) == "a"
    assert _listed_as(pod, listed[:1]) == ""


@pytest.mark.parametrize("method", sorted(END_POINTS))
def test_a_stop_or_a_removal_that_waits_for_a_hook_is_sent_on_at_a_hand_over(
    run_scenario: Callable[..., None], method: str
) -> None:
    class Hooks:
        points = frozenset(END_POINTS.values())
        active = True

        def before(self, *_: object) -> None:
            """A hook that has not answered yet."""

    async def scenario(world: Any) -> None:
        world.wire.set_hooks(cast("HookGateway", Hooks()))
        call, late = (world.played(method, pb.StopContainerRequest(container_id=name)) for name in ("a", "b"))
        world.wire.request(call)
        create = world.played("CreateContainer", pb.CreateContainerRequest())
        held, refused = [call, create], list[Any]()

        def refuse_undecided(code: int, message: str) -> None:
            refused.extend(each for each in held if not each.decided)

        world.wire.hand_over(refuse_undecided, lambda: held, lambda name: None)
        assert call.sent == call.body
        assert refused == [create]
        world.wire.request(late)
        assert late.sent == late.body

    run_scenario(scenario)
