"""Failures of the ledger, the kernel, the runtime and clients: each test describes the effect for a user."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import RuntimeSyncDue
from proxy.engine.invariants import violations
from proxy.executor.context import CANNOT_WRITE
from proxy.executor.missing_cgroups import NO_CGROUP, NO_CGROUPS
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.release.service import enter_mode
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import TWO_CPUS, created_with

# -- a stale list -----------------------------------------------------------------------------------------


def listing_gate(world: Any) -> tuple[threading.Event, threading.Event]:
    """Delay the next list of containers after it has been made, until the gate opens."""
    listed, gate = threading.Event(), threading.Event()
    plain = world.runtime.list_containers

    def slow(container_id: str = "") -> Any:
        found = plain(container_id)
        if not gate.is_set():
            listed.set()
            gate.wait(60)
        return found

    world.runtime.list_containers = slow
    return listed, gate


def test_a_list_from_before_a_stop_does_not_revive_the_container(run_scenario) -> None:
    """A reconcile lists (RUNNING), the container is stopped, and then takes its CPUs again by that list.

    The user's next pod with these CPUs is refused (CPUsInUse), and the pools stay small, for a whole period.
    """

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        old = await world.run(await world.pod("old", "LSE", "", "0-3"))
        listed, gate = listing_gate(world)
        passing = asyncio.create_task(world.sync.once())
        await asyncio.to_thread(listed.wait, 5)
        await world.stop(old)
        assert world.executor.state.containers[old].phase is Phase.EXITED
        gate.set()
        await passing
        await world.quiet()
        assert world.executor.state.containers[old].phase is Phase.EXITED
        assert world.on(ls) == "0-15"
        call = await world.begin(await world.pod("new", "LSE", "", "0-3"))
        assert call.refused is None, call.refused

    run_scenario(scenario)


def test_a_list_from_before_a_stop_does_not_assign_cpus_twice(run_scenario) -> None:
    """As above, but another pod got the freed CPUs meanwhile: two owners of the same CPUs."""

    async def scenario(world: Any) -> None:
        old = await world.run(await world.pod("old", "LSE", "", "0-3"))
        new = await world.pod("new", "LSE", "", "0-3")
        listed, gate = listing_gate(world)
        passing = asyncio.create_task(world.sync.once())
        await asyncio.to_thread(listed.wait, 5)
        await world.stop(old)
        await world.create(new)
        gate.set()
        await passing
        assert violations(world.executor.state) == []

    run_scenario(scenario)


def test_a_failed_start_after_the_stop_does_not_revive_the_container(run_scenario) -> None:
    """Stop overtakes a start: the start's error answer arrives last and makes the container CREATED again.

    Its CPUs, given to another pod meanwhile, have two owners.
    """

    async def scenario(world: Any) -> None:
        old = await world.create(await world.pod("old", "LSE", "", "0-3"))
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=old))
        await world.stop(old)
        await world.create(await world.pod("new", "LSE", "", "0-3"))
        world.wire.finished(start, 2)
        assert violations(world.executor.state) == []

    run_scenario(scenario)


# -- calls without an answer ------------------------------------------------------------------------------


def test_a_start_without_its_client_counts_until_the_runtime_reports(run_scenario) -> None:
    """kubelet restarts while the runtime starts an LS container; the runtime finishes the start a bit later.

    Meanwhile an LSE pod is created: the create is forwarded although the start may still make a cgroup with
    the old set. The reconcile has recorded the LS container as created, so nothing writes its cgroup: it runs
    on the exclusive CPUs until the next periodic reconcile (10 s).
    """

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        world.wire.finished(start, None)
        await world.sync.once()  # the requested reconcile: the runtime is still busy, and lists CREATED
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        # Only now does the runtime execute the start, with the spec that it received.
        world.cgroups.sets[ls] = CpuSet.parse(world.runtime.specs[ls])
        world._state(ls, "RUNNING")
        await world.quiet()
        if call.refused is None:
            own = world.finish(call, "own")
            await world.start(own)
            assert world.on(ls) == "4-15", "a shared container runs on exclusive CPUs"

    run_scenario(scenario, call_timeout=0.5)


def test_an_update_without_its_client_does_not_undo_a_shrink(run_scenario) -> None:
    """kubelet restarts during an update of an LS container, an LSE pod is made, then the update is executed.

    The update counts as completed as soon as its client is gone, and nothing checks again: the LS container
    runs on the exclusive CPUs until the next periodic reconcile (10 s).
    """

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.executor.reconcile_requested.clear()
        update = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)
        )
        carried = pb.UpdateContainerResourcesRequest.FromString(update.sent).linux.cpuset_cpus
        world.wire.finished(update, None)
        await world.quiet()
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        if call.refused is None:
            await world.start(world.finish(call, "own"))
            world.cgroups.sets[ls] = CpuSet.parse(carried)  # the runtime executes the update now
            assert world.executor.reconcile_requested.is_set(), "nothing reads it before the next period"

    run_scenario(scenario, call_timeout=0.5)


def test_a_second_start_of_a_container_is_watched_too(run_scenario) -> None:
    """A start is retried while the first one is in flight; the first fails, the second succeeds.

    The second goes to the runtime unwatched, and the first one's error makes the running container "created"
    again: its cgroup is not written when an LSE pod comes, which then shares its CPUs with it.
    """

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        message = pb.StartContainerRequest(container_id=ls)
        first, second = (
            await world.call("StartContainer", message),
            await world.call("StartContainer", message),
        )
        world.cgroups.sets[ls] = CpuSet.parse(world.runtime.specs[ls])
        world._state(ls, "RUNNING")
        world.wire.finished(second, 0)
        world.wire.finished(first, 2)
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.refused is not None or world.on(ls) == "4-15", "a shared container runs on exclusive CPUs"

    run_scenario(scenario)


def test_a_spec_update_before_a_start_counts_as_in_flight(run_scenario) -> None:
    """A start updates the spec although another client has started the container meanwhile.

    Our own update is not among the calls in flight: an LSE create does not wait for it, and when the runtime
    executes it, it undoes the shrink: the shared container runs on the exclusive CPUs.
    """

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        await world.create(await world.pod("a", "LSE", "", "7"))
        inside, gate = threading.Event(), threading.Event()
        plain = world.runtime.update_cpuset

        def update(*args: Any) -> None:
            inside.set()
            gate.wait(60)
            plain(*args)

        world.runtime.update_cpuset = update
        message = pb.StartContainerRequest(container_id=ls)
        first = asyncio.create_task(world.call("StartContainer", message))
        await asyncio.to_thread(inside.wait, 60)
        world.cgroups.sets[ls] = CpuSet.parse(world.runtime.specs[ls])
        world._state(ls, "RUNNING")
        create = asyncio.create_task(world.begin(await world.pod("lse", "LSE", "", "0-3")))
        await asyncio.sleep(0.1)
        early = create.done()
        gate.set()
        world.wire.finished(await first, 0)
        call = await create
        assert not early or call.refused is not None, "forwarded while our own update was in flight"
        assert CpuSet.parse(world.on(ls)).isdisjoint(CpuSet.parse("0-3"))

    run_scenario(scenario)


# -- the barrier before a create --------------------------------------------------------------------------


def test_a_second_container_of_a_pod_waits_for_the_barrier_too(run_scenario) -> None:
    """The first create of an LSE pod waits for an update in flight; the second one of this pod does not.

    (The retry of a create that kubelet gave up is the same case.) Its owner holds the CPUs already, so
    nothing "shrinks" by it, although the others have not left yet.
    """

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        update = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)
        )
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        first = asyncio.create_task(world.begin(sandbox, "a"))
        await asyncio.sleep(0.05)
        assert not first.done()
        second = asyncio.create_task(world.begin(sandbox, "b"))
        await asyncio.sleep(0.05)
        early = second.done() and world.on(ls) == "0-15"
        world.wire.finished(update, 0)
        await first
        await second
        assert not early, "forwarded while the shared container is on the CPUs"

    run_scenario(scenario)


def test_a_start_of_an_owner_fails_if_other_containers_cannot_leave(run_scenario) -> None:
    """An LS container cannot be moved when an LSE container starts: the start continues silently.

    The errors of the check are dropped: the container starts on CPUs that it shares; no problem is reported.
    """

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.create(await world.pod("lse", "LSE", "", "0-3"))
        world.cgroups.sets[ls] = CpuSet.parse("0-15")  # runc undid the write
        world.cgroups.broken.add(ls)
        call = await world.start(lse)
        reported = any("busy" in p["what"] for p in world.executor.telemetry.problems())
        assert call.refused is not None or reported

    run_scenario(scenario)


def test_a_running_container_without_a_findable_cgroup_is_reported(run_scenario) -> None:
    """A shared container's cgroup cannot be found (unusual layout): the LSE pod silently shares its CPUs."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.executor.cpuset_writer._paths.clear()
        world.cgroups.find = lambda parent, container_id: None
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert world.on(ls) == "0-15"
        assert call.refused is None
        assert world.executor.reconcile_requested.is_set()
        assert world.executor.telemetry.problems() == [], "the container may just have ended"
        await world.sync.once()
        assert (
            "cannot find the cgroup of a container: its CPUs are not controlled pod=ns/ls"
            in world.executor.telemetry.problems()[0]["what"]
        )

    run_scenario(scenario)


# -- keeping the CPUs promised to a pod -------------------------------------------------------------------


def test_an_lse_pod_that_restarts_finds_its_cpus_again(run_scenario) -> None:
    """The container of an LSE pod crashes; a Guaranteed pod is created during kubelet's back-off.

    The local allocator picks the CPUs that the scheduler gave to the LSE pod, which is still on the node, and
    the LSE container is refused for as long as the other pod lives. The same happens between an LSE pod's
    init container and its main container.
    """

    async def scenario(world: Any) -> None:
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        await world.stop(await world.run(sandbox, "init"))
        await world.run(await world.pod("g"), **TWO_CPUS)
        call = await world.begin(sandbox, "main")
        assert call.refused is None, call.refused

    run_scenario(scenario)


def test_a_guaranteed_container_that_restarts_keeps_its_cpus(run_scenario) -> None:
    """A pinned container crashes and returns as the next attempt: it is moved to other CPUs.

    kubelet keeps a container's assignment until its pod is gone.
    """

    async def scenario(world: Any) -> None:
        sandbox = await world.pod("g")
        first = await world.run(sandbox, **TWO_CPUS)
        cpus_before = world.on(first)
        await world.stop(first)
        await world.run(await world.pod("h"), **TWO_CPUS)
        assert created_with(await world.begin(sandbox, **TWO_CPUS)).cpuset_cpus == cpus_before

    run_scenario(scenario)


# -- identity ---------------------------------------------------------------------------------------------


def test_pods_without_a_uid_are_not_one_pod(run_scenario) -> None:
    """Two sandboxes with no uid in the metadata (not kubelet's): both containers get the same "own" CPUs."""

    async def scenario(world: Any) -> None:
        cpus = []
        for name in ("one", "two"):
            request = pb.CreateContainerRequest(pod_sandbox_id=f"s-{name}")
            request.config.metadata.name = "c"
            request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
            request.sandbox_config.metadata.name = name
            request.sandbox_config.linux.cgroup_parent = f"/kubepods/pod{name}"
            call = await world.call("CreateContainer", request)
            world.finish(call, f"x-{name}")
            cpus.append(CpuSet.parse(created_with(call).cpuset_cpus))
        assert cpus[0].isdisjoint(cpus[1]), cpus

    run_scenario(scenario)


# -- sandboxes that end while a create is in flight -------------------------------------------------------


def test_a_sandbox_removed_during_a_create_releases_the_cpus(run_scenario) -> None:
    """RemovePodSandbox overtakes a create: the owner leaves the state, but no container is moved back."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        create = await world.begin(sandbox)
        remove = await world.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        world.wire.finished(remove, 0)
        world.wire.finished(create, 5)
        await world.quiet()
        assert world.executor.state.owners == {}
        assert world.on(ls) == "0-15"

    run_scenario(scenario)


def test_a_sandbox_removed_during_a_create_leaves_nothing_in_the_ledger(run_scenario) -> None:
    """As above: the record of the create in flight stays in the ledger, and is an owner after a restart."""

    async def scenario(world: Any) -> None:
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        create = await world.begin(sandbox)
        remove = await world.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        world.wire.finished(remove, 0)
        world.wire.finished(create, 5)
        await world.quiet()
        assert world.ledger.entries == {}
        assert world.executor.state.runtime.saved == {}

    run_scenario(scenario)


def test_a_container_that_is_created_while_its_sandbox_is_stopped_keeps_no_cpus(run_scenario) -> None:
    """The runtime lists it as created, in a sandbox that is not ready: it never starts."""

    async def scenario(world: Any) -> None:
        sandbox = await world.pod("lse", "LSE", "", "2-3")
        creating = await world.begin(sandbox, **TWO_CPUS)
        call = await world.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        world.wire.finished(call, 0)
        world.finish(creating, "late")
        world.runtime.pods[sandbox] = changed_copy(world.runtime.pods[sandbox], ready=False)
        assert [str(owner.cpus) for owner in world.executor.state.owners.values()] == ["2-3"]
        await world.sync.once()
        assert world.executor.state.owners == {}
        assert world.executor.state.containers["late"].phase is Phase.EXITED

    run_scenario(scenario)


def test_a_create_in_a_sandbox_of_crio_from_before_a_restart_is_sent_again_before_the_start(
    run_scenario,
) -> None:
    """CRI-O answers it with the container of a create that an earlier daemon sent, which has other CPUs."""

    async def scenario(world: Any) -> None:
        earlier, other = await world.pod("ls", "LS"), await world.pod("more", "LS")
        await world.executor.ledger_writer.flush()
        world.boot()
        await world.sync.once()
        world.executor.cpuset_writer.sandbox_cgroups.monitored.add(earlier)  # its group is one of CRI-O
        owner = await world.run(await world.pod("lse", "LSE", "", "2-3"), **TWO_CPUS)
        for sandbox in (earlier, other, await world.pod("new", "LS")):
            container = await world.create(sandbox)
            world.runtime.specs[container] = "0-15"  # what the earlier request had
            await world.clear_log()
            await world.start(container)
            updated = f"runtime {container} 0-1,4-15" in world.log
            assert updated is (sandbox == earlier)
            if updated:
                assert world.on(container) == "0-1,4-15"
        assert world.on(owner) == "2-3"

    run_scenario(scenario)


def test_a_new_sandbox_during_a_create_of_the_old_one(run_scenario) -> None:
    """A new sandbox of the pod ends the old one's create in flight; the late response then revives it.

    It owns CPUs again to which other containers were moved back, and they are not moved away.
    """

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        create = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        await world.pod("lse", "LSE", "", "0-3", sandbox="second", attempt=1)
        await world.quiet()
        world.finish(create, "late")
        await world.quiet()
        assert CpuSet.parse(world.on(ls)) == world.executor.state.desired_cpus(
            world.executor.state.containers[ls]
        )
        assert not [k for k in world.ledger.entries if k.startswith("c/call-")], "a token is no container"

    run_scenario(scenario)


# -- the reconcile ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("odd answer"), KeyError("x"), OSError(5, "io")])
def test_the_reconciler_survives_an_unexpected_error(run_scenario, error: Exception) -> None:
    """One unexpected exception in a reconcile silently ends all later ones.

    No drift is repaired, no lost create is resolved, no container is adopted. Before the first reconcile,
    every call that needs a decision waits for its full timeout. The watchdog is fed all the same.
    """

    async def scenario(world: Any) -> None:
        plain = world.runtime.list_containers

        def once(container_id: str = "") -> Any:
            world.runtime.list_containers = plain
            raise error

        world.runtime.list_containers = once
        task = asyncio.create_task(world.sync.run())
        try:
            async with asyncio.timeout(60):
                while not (world.executor.reconciled.is_set() or task.done()):
                    await asyncio.sleep(0.05)
                    world.executor.reconcile_requested.set()
            assert not task.done(), "the loop is dead"
            assert world.executor.reconciled.is_set()
            assert world.executor.telemetry.problems()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_scenario(scenario, reconciled=False, reconcile_period=0.05)


def test_the_runtime_sync_survives_an_unexpected_error(run_scenario) -> None:
    """An unexpected exception ended the runtime sync."""

    async def scenario(world: Any) -> None:
        runtime_sync = world.make_runtime_sync()
        task = asyncio.create_task(runtime_sync.run())
        ls = await world.run(await world.pod("ls", "LS"))
        world.runtime.update_error = ValueError("odd")
        await world.run(await world.pod("a", "LSE", "", "0"))
        await asyncio.sleep(0.05)
        world.runtime.update_error = None
        await world.run(await world.pod("b", "LSE", "", "1"))
        await world.until(lambda: task.done() or world.runtime.specs[ls] == "2-15")
        dead = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        runtime_sync.close()
        assert not dead
        assert world.runtime.specs[ls] == "2-15"

    run_scenario(scenario, settle_per_second=1000)


def test_a_container_that_ends_before_the_report_is_not_a_problem(run_scenario) -> None:
    """The runtime refuses to update a container that has just ended, and still lists it as running."""

    async def scenario(world: Any) -> None:
        runtime_sync = world.make_runtime_sync()
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("a", "LSE", "", "0"))
        refusal = RuntimeCallError("cannot update the cpuset: cannot update a stopped container", 2)

        async def problems_after(state: str) -> list[str]:
            world.runtime.update_error = refusal
            world.executor.store.handle(RuntimeSyncDue((ls,)))
            finishing = asyncio.create_task(runtime_sync.finish(30))
            await asyncio.sleep(0)
            world.runtime.containers[ls] = changed_copy(world.runtime.containers[ls], state=state)
            await finishing
            world.runtime.update_error = None
            return [problem["what"] for problem in world.executor.telemetry.problems()]

        assert str(refusal) not in await problems_after("EXITED")
        assert str(refusal) in " ".join(await problems_after("RUNNING"))
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_a_runtime_that_is_not_ready_yet_does_not_count_as_compared(run_scenario) -> None:
    """Node boot: containerd answers "server is not initialized yet" (UNKNOWN) for some seconds.

    These answers release held calls although nothing was compared: with a lost ledger a static container gets
    CPUs that another one runs on, and the next reconcile comes only after a whole period.
    """

    async def scenario(world: Any) -> None:
        world.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, {}, {})
        world.runtime.containers["g"] = RuntimeContainer("g", "p", "c", 0, "RUNNING")
        world.runtime.details["g"] = RuntimeDetail("/kubepods/podu/g", 2048, 200_000, 100_000, 0, "0,8")
        world.cgroups.sets["g"] = CpuSet.parse("0,8")
        plain = world.runtime.list_containers

        def not_ready(container_id: str = "") -> Any:
            raise RuntimeCallError("cannot list: server is not initialized yet (UNKNOWN)", 2)

        world.runtime.list_containers = not_ready
        task = asyncio.create_task(world.sync.run())
        try:
            await asyncio.sleep(0.1)
            world.runtime.list_containers = plain  # it is ready now
            request = pb.CreateContainerRequest(pod_sandbox_id="q")
            request.config.metadata.name = "c"
            request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
            request.sandbox_config.metadata.uid = "v"
            request.sandbox_config.linux.cgroup_parent = "/kubepods/podv"
            call = await world.call("CreateContainer", request)
            assert CpuSet.parse(created_with(call).cpuset_cpus).isdisjoint(CpuSet.parse("0,8"))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_scenario(scenario, reconciled=False)


def test_one_slow_container_does_not_block_the_first_reconcile(run_scenario) -> None:
    """First adoption: one status call times out (UnavailableError), and the whole reconcile starts again.

    If the runtime cannot return the status of one container in time, the first reconcile never ends.
    """

    async def scenario(world: Any) -> None:
        world.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        for name in ("good", "stuck"):
            world.runtime.containers[name] = RuntimeContainer(name, "q", name, 0, "RUNNING")
        plain = world.runtime.detail

        def detail(container_id: str) -> Any:
            if container_id == "stuck":
                raise UnavailableError("cannot ask: deadline exceeded")
            return plain(container_id)

        world.runtime.detail = detail
        for _ in range(3):
            try:
                await world.sync.once()
            except UnavailableError:
                continue
        assert "good" in world.executor.state.containers
        assert world.executor.reconciled.is_set()

    run_scenario(scenario, reconciled=False)


def test_drift_repaired_by_a_reconcile_is_also_updated_at_the_runtime(run_scenario) -> None:
    """A reconcile repairs drift in the kernel, but does not wake the runtime sync: runc undoes the repair."""

    async def scenario(world: Any) -> None:
        runtime_sync = world.make_runtime_sync()
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.quiet()
        world.boot()  # a restart forgets what was not sent to the runtime yet
        runtime_sync.close()
        runtime_sync = world.make_runtime_sync()
        task = asyncio.create_task(runtime_sync.run())
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        await world.sync.once()
        world.now += 3
        await world.sync.once()  # calls from before the restart are over
        await world.until(lambda: world.runtime.specs[ls] == "4-15")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        runtime_sync.close()
        assert world.on(ls) == "4-15"

    run_scenario(scenario, settle_per_second=1000)


# -- observe ----------------------------------------------------------------------------------------------


def test_observe_mode_never_refuses_because_the_runtime_was_not_compared(run_scenario) -> None:
    """``serve --mode observe`` with a slow runtime: LSE pods are refused, although nothing should change."""

    async def scenario(world: Any) -> None:
        world.runtime.down = True
        request = pb.CreateContainerRequest(pod_sandbox_id="s")
        request.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        call = await world.call("CreateContainer", request)
        assert call.refused is None, call.refused

    run_scenario(scenario, reconciled=False, mode=NodeMode.OBSERVE, call_timeout=0.5)


def test_observe_mode_never_refuses_because_of_an_internal_fault(run_scenario, monkeypatch) -> None:
    """LSE pods are refused after an internal error, although nothing should change."""

    async def scenario(world: Any) -> None:
        monkeypatch.setattr(world.executor.creates, "place", lambda *_: 1 / 0)
        request = pb.CreateContainerRequest(pod_sandbox_id="s")
        request.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        call = await world.call("CreateContainer", request)
        assert call.refused is None, call.refused

    run_scenario(scenario, mode=NodeMode.OBSERVE)


# -- bad input --------------------------------------------------------------------------------------------


def test_an_annotation_with_all_cpus_keeps_a_lenient_pod_in_its_pool(run_scenario) -> None:
    """An impossible cpuset leaves the container in its pool, except for LSE and LSR; here it is refused."""

    async def scenario(world: Any) -> None:
        for qos in ("LS", ""):
            call = await world.begin(await world.pod(f"p{qos}", qos, "burstable", "0-15"))
            assert call.refused is None, call.refused
            assert created_with(call).cpuset_cpus == "0-15"

    run_scenario(scenario)


def test_a_long_annotation_does_not_fill_memory_and_log(run_scenario) -> None:
    """200 kB of garbage in an annotation are repeated in every log line, problem and ledger record."""

    async def scenario(world: Any) -> None:
        await world.begin(await world.pod("p", "LS", annotation='{"cpuset":"' + "x" * 200_000 + '"}'))
        await world.quiet()
        assert max(map(len, world.logged)) < 10_000
        assert max(len(str(e)) for e in world.ledger.entries.values()) < 10_000

    run_scenario(scenario)


def test_memory_nodes_of_a_running_container_that_is_adopted_stay(run_scenario) -> None:
    """An LSE container that runs on all memory nodes is adopted; kubelet's next update moves its memory.

    (cgroup v2 migrates pages when cpuset.mems is narrowed.)
    """

    async def scenario(world: Any) -> None:
        labels = {"koordinator.sh/qosClass": "LSE"}
        status = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"0-3"}'}
        world.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, labels, status)
        world.runtime.containers["lse"] = RuntimeContainer("lse", "p", "c", 0, "RUNNING")
        world.runtime.details["lse"] = RuntimeDetail("/kubepods/podu/lse", cpuset_cpus="0-15")
        world.cgroups.sets["lse"] = CpuSet.parse("0-15")
        await world.sync.once()
        request = pb.UpdateContainerResourcesRequest(container_id="lse")
        call = await world.call("UpdateContainerResources", request)
        mems = pb.UpdateContainerResourcesRequest.FromString(call.sent).linux.cpuset_mems
        assert mems in ("", "0-1"), mems

    run_scenario(scenario, reconciled=False)


def test_a_container_with_an_unknown_cgroup_is_not_guaranteed(run_scenario) -> None:
    """A runtime that does not report the cgroup: a created Burstable container is adopted as Guaranteed.

    It gets CPUs of its own (its shares are whole and it has no quota), and the pool shrinks for it.
    """

    async def scenario(world: Any) -> None:
        world.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, {}, {})
        world.runtime.containers["b"] = RuntimeContainer("b", "p", "c", 0, "CREATED")
        world.runtime.details["b"] = RuntimeDetail("", cpu_shares=4096)
        await world.sync.once()
        assert world.executor.state.owners == {}

    run_scenario(scenario, reconciled=False)


# -- waiting ----------------------------------------------------------------------------------------------


def test_starts_do_not_wait_for_each_other_without_limit(run_scenario) -> None:
    """A runtime that hangs: each start that needs an update waits for all earlier ones to time out.

    Ten containers wait ten time-outs (5 s each by default), not one.
    """

    async def scenario(world: Any) -> None:
        made = [await world.create(await world.pod(f"p{i}", "LS")) for i in range(5)]
        await world.create(await world.pod("lse", "LSE", "", "0-3"))

        together = threading.Barrier(len(made))

        def hangs(*_: Any) -> None:
            together.wait(20)
            raise UnavailableError("cannot update: deadline exceeded")

        world.runtime.update_cpuset = hangs
        calls = [world.call("StartContainer", pb.StartContainerRequest(container_id=i)) for i in made]
        await asyncio.gather(*calls)
        assert not together.broken, "one update waited for another"

    run_scenario(scenario)


def test_updates_before_a_start_that_complete_out_of_order(run_scenario) -> None:
    """Two updates of a created container: the runtime executes the narrow one first and the wide one last.

    The daemon trusts the one that completed last; the start continues unchanged, and the container runs on
    exclusive CPUs until its start is answered.
    """

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        wide = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)
        )
        create = asyncio.create_task(world.begin(await world.pod("lse", "LSE", "", "0-3")))
        await asyncio.sleep(0.02)
        narrow = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)
        )
        world.runtime.specs[ls] = "0-15"  # the runtime: narrow, then wide
        world.wire.finished(wide, 0)
        world.wire.finished(narrow, 0)
        await create
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        assert start.refused is None
        assert world.runtime.specs[ls] == "4-15"

    run_scenario(scenario)


def test_a_pool_does_not_grow_and_shrink_again_while_a_call_is_in_flight(run_scenario) -> None:
    """A container grows, an update restores the narrow set for a moment, then the container grows again."""

    async def scenario(world: Any) -> None:
        runtime_sync = world.make_runtime_sync()
        task = asyncio.create_task(runtime_sync.run())
        ls = await world.run(await world.pod("ls", "LS"))
        inside, gate = threading.Event(), threading.Event()

        def slow(_: str) -> None:
            inside.set()
            gate.wait(60)

        world.runtime.on_update = slow
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await asyncio.to_thread(inside.wait, 60)
        await world.stop(lse)
        await world.clear_log()
        gate.set()
        await world.until(lambda: world.on(ls) == "0-15")
        await world.quiet()
        await asyncio.sleep(0.05)
        assert world.on(ls) == "0-15"
        assert [line for line in world.log if line.startswith("kernel")] == [f"kernel {ls} 0-15"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_many_containers_without_a_cgroup_are_reported_in_one_line(run_scenario) -> None:
    """A runtime with a thousand VMs: the log must not be flooded."""

    async def scenario(world: Any) -> None:
        for number in range(30):
            await world.run(await world.pod(f"p{number:02}", "LS"))
        world.cgroups.sets.clear()
        world.executor.cpuset_writer._paths.clear()
        for _ in range(3):
            await world.sync.once()
        problems = [p["what"] for p in world.executor.telemetry.problems()]
        assert problems == [
            "cannot find the cgroups of many containers: their CPUs are not controlled",
            "cannot find the cgroup of a container: its CPUs are not controlled pod=ns/p00 container=c containerID=s-p00-c-1",  # noqa: E501
        ]
        world.cgroups.sets.update(
            {i: CpuSet.parse("0-15") for i in world.executor.state.containers if "-p00-" not in i}
        )
        for _ in range(32):
            await world.sync.once()
        (problem,) = world.executor.telemetry.problems()
        assert problem["what"].startswith("cannot find the cgroup of a container"), "only one is missing"
        world.cgroups.sets["s-p00-c-1"] = CpuSet.parse("0-15")
        for _ in range(32):
            await world.sync.once()
        assert world.executor.telemetry.problems() == []

    run_scenario(scenario)


def test_a_node_that_does_not_erase_any_more_remembers_the_groups_that_it_narrowed_until_a_release(
    run_scenario,
) -> None:
    async def scenario(world: Any) -> None:
        await world.executor.ledger_writer.flush()
        assert "b/groups" in world.ledger.entries
        await world.close()
        world.rules = {}
        world.boot()
        assert world.executor.state.facts.be_groups
        enter_mode(world.executor, NodeMode.RELEASED)
        await world.executor.ledger_writer.flush()
        assert "b/groups" not in world.ledger.entries

    run_scenario(scenario, rules={"be_cpuset": BeCpuset.ERASE})


def test_after_a_release_cpusets_that_are_not_written_are_no_problem(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ids = [await world.run(await world.pod(f"p{number}", "LS")) for number in range(7)]
        refused = ids.pop()
        for container_id in ids:
            del world.cgroups.sets[container_id]
        world.executor.cpuset_writer._paths.clear()
        world.cgroups.broken.add(refused)
        world.cgroups.sets[refused] = CpuSet.parse("0-1")
        for _ in range(3):
            await world.sync.once()
        problems = {p["message"] for p in world.executor.telemetry.problems()}
        assert problems == {NO_CGROUP, NO_CGROUPS, CANNOT_WRITE}
        enter_mode(world.executor, NodeMode.RELEASED)
        await world.sync.once()
        assert world.executor.telemetry.problems() == []
        enter_mode(world.executor, NodeMode.ENFORCE)
        for _ in range(32):
            await world.sync.once()
        assert {p["message"] for p in world.executor.telemetry.problems()} == problems

    run_scenario(scenario)


def test_a_missing_cgroup_is_no_problem_once_it_is_found_by_its_name_or_not_needed(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        found, ended = [await world.run(await world.pod(name, "LS")) for name in ("found", "ended")]
        world.cgroups.sets.clear()
        world.executor.cpuset_writer._paths.clear()
        for _ in range(3):
            await world.sync.once()
        assert len(world.executor.telemetry.problems()) == 2
        world.cgroups.sets[found] = CpuSet.parse("0-15")
        world._state(ended, "EXITED")
        await world.executor.writes.write_now([found])
        await world.sync.once()
        assert world.executor.telemetry.problems() == []
        logged = [line for line in world.logged if "resolved" in line]
        assert len(logged) == 1, "one has ended: its cgroup was not found"
        assert found in logged[0]

    run_scenario(scenario)
