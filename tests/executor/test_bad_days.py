"""Days on which something goes wrong: each test describes what a user would see."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import ContainersUnsettled
from proxy.engine.invariants import violations
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import TWO_CPUS, created_with

# -- a stale list -----------------------------------------------------------------------------------------


def listing_gate(w: Any) -> tuple[threading.Event, threading.Event]:
    """Hold the next list of containers after it has been made, until the gate opens."""
    listed, gate = threading.Event(), threading.Event()
    plain = w.runtime.list_containers

    def slow(container_id: str = "") -> Any:
        found = plain(container_id)
        if not gate.is_set():
            listed.set()
            gate.wait(60)
        return found

    w.runtime.list_containers = slow
    return listed, gate


def test_a_list_made_before_a_stop_does_not_bring_the_container_back(live) -> None:
    """A pass lists (RUNNING), the container is stopped, the pass compares: it takes its CPUs again.

    The user's next pod with these CPUs is refused (CPUsInUse), and the pools stay small, for a whole period.
    """

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        old = await w.run(await w.pod("old", "LSE", "", "0-3"))
        listed, gate = listing_gate(w)
        passing = asyncio.create_task(w.sync.once())
        await asyncio.to_thread(listed.wait, 5)
        await w.stop(old)
        assert w.executor.state.containers[old].phase is Phase.EXITED
        gate.set()
        await passing
        await w.quiet()
        assert w.executor.state.containers[old].phase is Phase.EXITED
        assert w.on(ls) == "0-15"
        call = await w.begin(await w.pod("new", "LSE", "", "0-3"))
        assert call.refused is None, call.refused

    live(day)


def test_a_list_made_before_a_stop_does_not_give_cpus_twice(live) -> None:
    """As above, but the freed CPUs went to another pod meanwhile: two owners of the same CPUs."""

    async def day(w: Any) -> None:
        old = await w.run(await w.pod("old", "LSE", "", "0-3"))
        new = await w.pod("new", "LSE", "", "0-3")
        listed, gate = listing_gate(w)
        passing = asyncio.create_task(w.sync.once())
        await asyncio.to_thread(listed.wait, 5)
        await w.stop(old)
        await w.create(new)
        gate.set()
        await passing
        assert violations(w.executor.state) == []

    live(day)


def test_a_failed_start_after_the_stop_does_not_revive_the_container(live) -> None:
    """Stop overtakes a start: the start's error answer arrives last and makes the container CREATED again.

    Its CPUs, given to another pod meanwhile, have two owners.
    """

    async def day(w: Any) -> None:
        old = await w.create(await w.pod("old", "LSE", "", "0-3"))
        start = await w.call("StartContainer", pb.StartContainerRequest(container_id=old))
        await w.stop(old)
        await w.create(await w.pod("new", "LSE", "", "0-3"))
        w.wire.finished(start, 2)
        assert violations(w.executor.state) == []

    live(day)


# -- calls without an answer ------------------------------------------------------------------------------


def test_a_start_without_its_client_counts_until_the_runtime_reports(live) -> None:
    """kubelet restarts while the runtime starts an LS container; the runtime finishes the start a bit later.

    Meanwhile an LSE pod is created: it is let go although the start may still make a cgroup with the old
    set, and the pass has filed the container as created, so nothing writes its cgroup: the LS container runs
    on the exclusive CPUs until the next periodic pass (10 s).
    """

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        start = await w.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        w.wire.finished(start, None)
        await w.sync.once()  # what attention brings: the runtime lists CREATED, it is still busy
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        # Only now does the runtime get to it, with the spec that it was given.
        w.cgroups.sets[ls] = CpuSet.parse(w.runtime.specs[ls])
        w._state(ls, "RUNNING")
        await w.quiet()
        if call.refused is None:
            own = w.finish(call, "own")
            await w.start(own)
            assert w.on(ls) == "4-15", "a shared container runs on exclusive CPUs"

    live(day, call_timeout=0.5)


def test_an_update_without_its_client_does_not_undo_a_shrink(live) -> None:
    """kubelet restarts during an update of an LS container, an LSE pod is made, then the update is executed.

    The update counts as landed the moment its client is gone, and nothing checks again: the LS container runs
    on the exclusive CPUs until the next periodic pass (10 s).
    """

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.executor.attention.clear()
        update = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        carried = pb.UpdateContainerResourcesRequest.FromString(update.sent).linux.cpuset_cpus
        w.wire.finished(update, None)
        await w.quiet()
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        if call.refused is None:
            await w.start(w.finish(call, "own"))
            w.cgroups.sets[ls] = CpuSet.parse(carried)  # the runtime gets to it now
            assert w.executor.attention.is_set(), "nothing reads it before the next period"

    live(day, call_timeout=0.5)


def test_a_second_start_of_a_container_is_watched_too(live) -> None:
    """A start is retried while the first one is in flight; the first fails, the second succeeds.

    The second goes to the runtime unwatched, and the first one's error makes the running container "created"
    again: its cgroup is not written when an LSE pod comes, which then shares its CPUs with it.
    """

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        message = pb.StartContainerRequest(container_id=ls)
        first, second = await w.call("StartContainer", message), await w.call("StartContainer", message)
        w.cgroups.sets[ls] = CpuSet.parse(w.runtime.specs[ls])
        w._state(ls, "RUNNING")
        w.wire.finished(second, 0)
        w.wire.finished(first, 2)
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.refused is not None or w.on(ls) == "4-15", "a shared container runs on exclusive CPUs"

    live(day)


def test_a_spec_that_is_freshened_counts_as_in_flight(live) -> None:
    """A start has the spec freshened although the container runs meanwhile, started by another client.

    Our own update is not among the calls in flight: an LSE create does not wait for it, and when the runtime
    gets to it, it undoes the shrink: the shared container runs on the exclusive CPUs.
    """

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        await w.create(await w.pod("a", "LSE", "", "7"))
        inside, gate = threading.Event(), threading.Event()
        plain = w.runtime.update_cpuset

        def update(*args: Any) -> None:
            inside.set()
            gate.wait(60)
            plain(*args)

        w.runtime.update_cpuset = update
        message = pb.StartContainerRequest(container_id=ls)
        first = asyncio.create_task(w.call("StartContainer", message))
        await asyncio.to_thread(inside.wait, 60)
        w.cgroups.sets[ls] = CpuSet.parse(w.runtime.specs[ls])
        w._state(ls, "RUNNING")
        create = asyncio.create_task(w.begin(await w.pod("lse", "LSE", "", "0-3")))
        await asyncio.sleep(0.1)
        early = create.done()
        gate.set()
        w.wire.finished(await first, 0)
        call = await create
        assert not early or call.refused is not None, "let go while our own update was on its way"
        assert CpuSet.parse(w.on(ls)).isdisjoint(CpuSet.parse("0-3"))

    live(day)


# -- the barrier before a create --------------------------------------------------------------------------


def test_a_second_container_of_a_pod_waits_for_the_barrier_too(live) -> None:
    """The first create of an LSE pod waits for an update in flight; the second one of the same pod goes on.

    (The retry of a create that kubelet gave up is the same case.) Its owner holds the CPUs already, so
    nothing "shrinks" by it, although the others have not left yet.
    """

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        update = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        first = asyncio.create_task(w.begin(sandbox, "a"))
        await asyncio.sleep(0.05)
        assert not first.done()
        second = asyncio.create_task(w.begin(sandbox, "b"))
        await asyncio.sleep(0.05)
        early = second.done() and w.on(ls) == "0-15"
        w.wire.finished(update, 0)
        await first
        await second
        assert not early, "forwarded while the shared container is on the CPUs"

    live(day)


def test_a_start_of_an_owner_fails_if_others_cannot_leave(live) -> None:
    """An LS container cannot be moved when an LSE container starts: the start goes on without a word.

    The errors of the check are dropped, so the container starts on CPUs that it shares; no problem is noted.
    """

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.create(await w.pod("lse", "LSE", "", "0-3"))
        w.cgroups.sets[ls] = CpuSet.parse("0-15")  # runc undid the write
        w.cgroups.broken.add(ls)
        call = await w.start(lse)
        said = any("busy" in p["what"] for p in w.executor.telemetry.problems())
        assert call.refused is not None or said

    live(day)


def test_a_running_container_without_a_findable_cgroup_is_reported(live) -> None:
    """A shared container's cgroup cannot be found (odd layout): the LSE pod gets its CPUs silently shared."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.executor.enforcer._paths.clear()
        w.cgroups.find = lambda parent, container_id: None
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert w.on(ls) == "0-15"
        assert call.refused is None
        assert w.executor.attention.is_set()
        assert w.executor.telemetry.problems() == [], "it may just have ended"
        await w.sync.once()
        assert (
            "cannot find the cgroup of a container: its CPUs are not controlled pod=ns/ls"
            in w.executor.telemetry.problems()[0]["what"]
        )

    live(day)


# -- keeping what a pod was promised ----------------------------------------------------------------------


def test_an_lse_pod_that_restarts_finds_its_cpus_again(live) -> None:
    """The container of an LSE pod crashes; in kubelet's back-off a Guaranteed pod is made.

    The local allocator picks the CPUs that the scheduler gave to the LSE pod, which is still on the node, and
    the LSE container is refused for as long as the other pod lives. The same happens between an LSE pod's
    init container and its main container.
    """

    async def day(w: Any) -> None:
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        await w.stop(await w.run(sandbox, "init"))
        await w.run(await w.pod("g"), **TWO_CPUS)
        call = await w.begin(sandbox, "main")
        assert call.refused is None, call.refused

    live(day)


def test_a_guaranteed_container_that_restarts_keeps_its_cpus(live) -> None:
    """A pinned container crashes and comes back as the next attempt: it is moved to other CPUs.

    kubelet keeps a container's assignment until its pod is gone.
    """

    async def day(w: Any) -> None:
        sandbox = await w.pod("g")
        first = await w.run(sandbox, **TWO_CPUS)
        had = w.on(first)
        await w.stop(first)
        await w.run(await w.pod("h"), **TWO_CPUS)
        assert created_with(await w.begin(sandbox, **TWO_CPUS)).cpuset_cpus == had

    live(day)


# -- identity ---------------------------------------------------------------------------------------------


def test_pods_without_a_uid_are_not_one_pod(live) -> None:
    """Two sandboxes with no uid in the metadata (not kubelet's): both containers get the same "own" CPUs."""

    async def day(w: Any) -> None:
        cpus = []
        for name in ("one", "two"):
            request = pb.CreateContainerRequest(pod_sandbox_id=f"s-{name}")
            request.config.metadata.name = "c"
            request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
            request.sandbox_config.metadata.name = name
            request.sandbox_config.linux.cgroup_parent = f"/kubepods/pod{name}"
            call = await w.call("CreateContainer", request)
            w.finish(call, f"x-{name}")
            cpus.append(CpuSet.parse(created_with(call).cpuset_cpus))
        assert cpus[0].isdisjoint(cpus[1]), cpus

    live(day)


# -- sandboxes that go while a create is in flight --------------------------------------------------------


def test_a_sandbox_removed_during_a_create_gives_the_cpus_back(live) -> None:
    """RemovePodSandbox overtakes a create: the owner goes from the state, but no container is moved back."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        create = await w.begin(sandbox)
        remove = await w.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        w.wire.finished(remove, 0)
        w.wire.finished(create, 5)
        await w.quiet()
        assert w.executor.state.owners == {}
        assert w.on(ls) == "0-15"

    live(day)


def test_a_sandbox_removed_during_a_create_leaves_nothing_in_the_ledger(live) -> None:
    """As above: the record of the create in flight stays in the ledger, and is an owner after a restart."""

    async def day(w: Any) -> None:
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        create = await w.begin(sandbox)
        remove = await w.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        w.wire.finished(remove, 0)
        w.wire.finished(create, 5)
        await w.quiet()
        assert w.ledger.entries == {}
        assert w.executor.state.runtime.saved == {}

    live(day)


def test_a_new_sandbox_during_a_create_of_the_old_one(live) -> None:
    """A new sandbox of the pod ends the old one's create in flight; the late answer then brings it back.

    It owns CPUs again that the others were moved back to, and they are not moved away.
    """

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        create = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        await w.pod("lse", "LSE", "", "0-3", sandbox="second", attempt=1)
        await w.quiet()
        w.finish(create, "late")
        await w.quiet()
        assert CpuSet.parse(w.on(ls)) == w.executor.state.wanted(w.executor.state.containers[ls])
        assert not [k for k in w.ledger.entries if k.startswith("c/call-")], "a token is no container"

    live(day)


# -- the comparison ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("odd answer"), KeyError("x"), OSError(5, "io")])
def test_the_comparison_survives_an_unexpected_error(live, error: Exception) -> None:
    """One unexpected exception in a pass ends reconciliation for ever, without a word.

    No drift repair, no lost creates resolved, no containers taken in; before the first pass, every call that
    needs a decision waits its full time-out from then on. The watchdog is fed all the same.
    """

    async def day(w: Any) -> None:
        plain = w.runtime.list_containers

        def once(container_id: str = "") -> Any:
            w.runtime.list_containers = plain
            raise error

        w.runtime.list_containers = once
        task = asyncio.create_task(w.sync.run())
        try:
            async with asyncio.timeout(60):
                while not (w.executor.reconciled.is_set() or task.done()):
                    await asyncio.sleep(0.05)
                    w.executor.attention.set()
            assert not task.done(), "the loop is dead"
            assert w.executor.reconciled.is_set()
            assert w.executor.telemetry.problems()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    live(day, reconciled=False, reconcile_period=0.05)


def test_settling_survives_an_unexpected_error(live) -> None:
    """The same for the settler: one odd exception and nothing is made lasting any more."""

    async def day(w: Any) -> None:
        settler = w.make_settler()
        task = asyncio.create_task(settler.run())
        ls = await w.run(await w.pod("ls", "LS"))
        w.runtime.update_error = ValueError("odd")
        await w.run(await w.pod("a", "LSE", "", "0"))
        await asyncio.sleep(0.05)
        w.runtime.update_error = None
        await w.run(await w.pod("b", "LSE", "", "1"))
        await w.until(lambda: task.done() or w.runtime.specs[ls] == "2-15")
        dead = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        settler.close()
        assert not dead
        assert w.runtime.specs[ls] == "2-15"

    live(day, settle_per_second=1000)


def test_a_container_that_ends_before_the_report_is_not_a_problem(live) -> None:
    """The runtime refuses to update a container that has just ended, and still lists it as running."""

    async def day(w: Any) -> None:
        settler = w.make_settler()
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("a", "LSE", "", "0"))
        refusal = RuntimeCallError("cannot update the cpuset: cannot update a stopped container", 2)

        async def problems_after(state: str) -> list[str]:
            w.runtime.update_error = refusal
            w.executor.store.handle(ContainersUnsettled((ls,)))
            finishing = asyncio.create_task(settler.finish(30))
            await asyncio.sleep(0)
            w.runtime.containers[ls] = changed_copy(w.runtime.containers[ls], state=state)
            await finishing
            w.runtime.update_error = None
            return [problem["what"] for problem in w.executor.telemetry.problems()]

        assert str(refusal) not in await problems_after("EXITED")
        assert str(refusal) in " ".join(await problems_after("RUNNING"))
        settler.close()

    live(day, settle_per_second=1000)


def test_a_runtime_that_is_not_ready_yet_does_not_count_as_compared(live) -> None:
    """Node boot: containerd answers "server is not initialized yet" (UNKNOWN) for some seconds.

    That opens the gate although nothing was compared: with a lost or new ledger a static container gets CPUs
    that another one runs on, and the next pass comes only after a whole period.
    """

    async def day(w: Any) -> None:
        w.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, {}, {})
        w.runtime.containers["g"] = RuntimeContainer("g", "p", "c", 0, "RUNNING")
        w.runtime.details["g"] = RuntimeDetail("/kubepods/podu/g", 2048, 200_000, 100_000, 0, "0,8")
        w.cgroups.sets["g"] = CpuSet.parse("0,8")
        plain = w.runtime.list_containers

        def not_ready(container_id: str = "") -> Any:
            raise RuntimeCallError("cannot list: server is not initialized yet (UNKNOWN)", 2)

        w.runtime.list_containers = not_ready
        task = asyncio.create_task(w.sync.run())
        try:
            await asyncio.sleep(0.1)
            w.runtime.list_containers = plain  # it is ready now
            request = pb.CreateContainerRequest(pod_sandbox_id="q")
            request.config.metadata.name = "c"
            request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
            request.sandbox_config.metadata.uid = "v"
            request.sandbox_config.linux.cgroup_parent = "/kubepods/podv"
            call = await w.call("CreateContainer", request)
            assert CpuSet.parse(created_with(call).cpuset_cpus).isdisjoint(CpuSet.parse("0,8"))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    live(day, reconciled=False)


def test_one_slow_container_does_not_stop_the_first_comparison(live) -> None:
    """Taking in a node: one status call times out (UnavailableError), and the whole pass starts from zero.

    If the runtime cannot return the status of one container in time, the proxy never gets in step.
    """

    async def day(w: Any) -> None:
        w.runtime.pods["q"] = RuntimePod("q", "v", "ns", "m", 0, True, {}, {})
        for name in ("good", "stuck"):
            w.runtime.containers[name] = RuntimeContainer(name, "q", name, 0, "RUNNING")
        plain = w.runtime.detail

        def detail(container_id: str) -> Any:
            if container_id == "stuck":
                raise UnavailableError("cannot ask: deadline exceeded")
            return plain(container_id)

        w.runtime.detail = detail
        for _ in range(3):
            try:
                await w.sync.once()
            except UnavailableError:
                continue
        assert "good" in w.executor.state.containers
        assert w.executor.reconciled.is_set()

    live(day, reconciled=False)


def test_drift_repaired_by_a_pass_is_made_lasting(live) -> None:
    """A pass repairs drift in the kernel, but does not wake the settler: runc undoes it again."""

    async def day(w: Any) -> None:
        settler = w.make_settler()
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        await w.quiet()
        w.boot()  # a restart forgets what was not settled yet
        settler.close()
        settler = w.make_settler()
        task = asyncio.create_task(settler.run())
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        await w.sync.once()
        w.now += 3
        await w.sync.once()  # calls of before the restart are over
        await w.until(lambda: w.runtime.specs[ls] == "4-15")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        settler.close()
        assert w.on(ls) == "4-15"

    live(day, settle_per_second=1000)


# -- observe ----------------------------------------------------------------------------------------------


def test_observe_never_refuses_because_the_runtime_was_not_compared(live) -> None:
    """``serve --mode observe`` beside a slow runtime: LSE pods are refused, where nothing should change."""

    async def day(w: Any) -> None:
        w.runtime.down = True
        request = pb.CreateContainerRequest(pod_sandbox_id="s")
        request.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        call = await w.call("CreateContainer", request)
        assert call.refused is None, call.refused

    live(day, reconciled=False, mode=NodeMode.OBSERVE, call_timeout=0.5)


def test_observe_never_refuses_because_of_a_fault_of_ours(live, monkeypatch) -> None:
    """The same for an internal error."""

    async def day(w: Any) -> None:
        monkeypatch.setattr(w.executor.creates, "place", lambda *_: 1 / 0)
        request = pb.CreateContainerRequest(pod_sandbox_id="s")
        request.sandbox_config.labels["koordinator.sh/qosClass"] = "LSE"
        call = await w.call("CreateContainer", request)
        assert call.refused is None, call.refused

    live(day, mode=NodeMode.OBSERVE)


# -- bad input --------------------------------------------------------------------------------------------


def test_an_annotation_with_all_cpus_keeps_a_lenient_pod_in_its_pool(live) -> None:
    """An impossible cpuset leaves the container in its pool, except for LSE and LSR; here it is refused."""

    async def day(w: Any) -> None:
        for qos in ("LS", ""):
            call = await w.begin(await w.pod(f"p{qos}", qos, "burstable", "0-15"))
            assert call.refused is None, call.refused
            assert created_with(call).cpuset_cpus == "0-15"

    live(day)


def test_a_long_annotation_does_not_fill_memory_and_log(live) -> None:
    """200 kB of nonsense in an annotation come back in every log line, problem and ledger record."""

    async def day(w: Any) -> None:
        await w.begin(await w.pod("p", "LS", annotation='{"cpuset":"' + "x" * 200_000 + '"}'))
        await w.quiet()
        assert max(map(len, w.logged)) < 10_000
        assert max(len(str(e)) for e in w.ledger.entries.values()) < 10_000

    live(day)


def test_memory_nodes_of_a_running_container_that_is_adopted_stay(live) -> None:
    """An LSE container that runs on all memory nodes is taken in; kubelet's next update moves its memory.

    (cgroup v2 migrates pages when cpuset.mems is narrowed.)
    """

    async def day(w: Any) -> None:
        labels = {"koordinator.sh/qosClass": "LSE"}
        status = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"0-3"}'}
        w.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, labels, status)
        w.runtime.containers["lse"] = RuntimeContainer("lse", "p", "c", 0, "RUNNING")
        w.runtime.details["lse"] = RuntimeDetail("/kubepods/podu/lse", cpuset_cpus="0-15")
        w.cgroups.sets["lse"] = CpuSet.parse("0-15")
        await w.sync.once()
        request = pb.UpdateContainerResourcesRequest(container_id="lse")
        call = await w.call("UpdateContainerResources", request)
        got = pb.UpdateContainerResourcesRequest.FromString(call.sent).linux.cpuset_mems
        assert got in ("", "0-1"), got

    live(day, reconciled=False)


def test_a_container_with_an_unknown_cgroup_is_not_guaranteed(live) -> None:
    """A runtime that does not report the cgroup: a created Burstable container is taken in as Guaranteed.

    It gets CPUs of its own (its shares are whole and it has no quota), and the pool shrinks for it.
    """

    async def day(w: Any) -> None:
        w.runtime.pods["p"] = RuntimePod("p", "u", "ns", "n", 0, True, {}, {})
        w.runtime.containers["b"] = RuntimeContainer("b", "p", "c", 0, "CREATED")
        w.runtime.details["b"] = RuntimeDetail("", cpu_shares=4096)
        await w.sync.once()
        assert w.executor.state.owners == {}

    live(day, reconciled=False)


# -- waiting ----------------------------------------------------------------------------------------------


def test_starts_do_not_queue_behind_each_other_without_limit(live) -> None:
    """A runtime that hangs: each start that must be freshened waits for all before it, time-out by time-out.

    Ten containers wait ten time-outs (5 s each by default), not one.
    """

    async def day(w: Any) -> None:
        made = [await w.create(await w.pod(f"p{i}", "LS")) for i in range(5)]
        await w.create(await w.pod("lse", "LSE", "", "0-3"))

        def hangs(container_id: str, cpus: Any, mems: Any) -> None:
            import time

            time.sleep(w.options.call_timeout)
            raise UnavailableError("cannot update: deadline exceeded")

        w.runtime.update_cpuset = hangs
        loop = asyncio.get_running_loop()
        began = loop.time()
        calls = [w.call("StartContainer", pb.StartContainerRequest(container_id=i)) for i in made]
        await asyncio.gather(*calls)
        assert loop.time() - began < 2 * w.options.call_timeout

    live(day, call_timeout=2.0)


def test_an_update_before_the_start_that_lands_out_of_order(live) -> None:
    """Two updates of a created container: the runtime executes the narrow one first and the wide one last.

    We believe the one that was answered last; the start goes on as fresh, and the container runs on exclusive
    CPUs until its start is answered.
    """

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        wide = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        create = asyncio.create_task(w.begin(await w.pod("lse", "LSE", "", "0-3")))
        await asyncio.sleep(0.02)
        narrow = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        w.runtime.specs[ls] = "0-15"  # the runtime: narrow, then wide
        w.wire.finished(wide, 0)
        w.wire.finished(narrow, 0)
        await create
        start = await w.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        assert start.refused is None
        assert w.runtime.specs[ls] == "4-15"

    live(day)


def test_a_pool_does_not_grow_and_shrink_again_while_a_call_is_in_flight(live) -> None:
    """A container grows, a settling call brings the narrow set back for a moment, then it grows again."""

    async def day(w: Any) -> None:
        settler = w.make_settler()
        task = asyncio.create_task(settler.run())
        ls = await w.run(await w.pod("ls", "LS"))
        inside, gate = threading.Event(), threading.Event()

        def slow(_: str) -> None:
            inside.set()
            gate.wait(60)

        w.runtime.on_update = slow
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        await asyncio.to_thread(inside.wait, 60)
        await w.stop(lse)
        w.log.clear()
        gate.set()
        await w.until(lambda: w.on(ls) == "0-15")
        await w.quiet()
        await asyncio.sleep(0.05)
        assert w.on(ls) == "0-15"
        assert [line for line in w.log if line.startswith("kernel")] == [f"kernel {ls} 0-15"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        settler.close()

    live(day, settle_per_second=1000)


def test_many_containers_without_a_cgroup_are_reported_in_one_line(live) -> None:
    """A runtime of VMs, a thousand of them: the log must not drown."""

    async def day(w: Any) -> None:
        for number in range(30):
            await w.run(await w.pod(f"p{number:02}", "LS"))
        w.cgroups.sets.clear()
        w.executor.enforcer._paths.clear()
        for _ in range(3):
            await w.sync.once()
        problems = [p["what"] for p in w.executor.telemetry.problems()]
        assert problems == [
            "cannot find the cgroups of many containers: their CPUs are not controlled",
            "cannot find the cgroup of a container: its CPUs are not controlled pod=ns/p00 container=c containerID=s-p00-c-1",  # noqa: E501
        ]

    live(day)
