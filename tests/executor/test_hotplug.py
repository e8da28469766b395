"""CPUs and memory that come and go."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from proxy.executor.node_executor import Ports
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.executor.status_data import node_page
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, TopologyPolicy
from proxy.observe.explain_data import history_page
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import TWO_CPUS, cpu_request


def without(machine: Machine, text: str) -> Machine:
    gone = CpuSet.parse(text)
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in machine.nodes)
    return changed_copy(machine, cpus=tuple(c for c in machine.cpus if c.id not in gone), nodes=nodes)


async def look(world: Any) -> None:
    """Report a change by the kernel, and wait until the node has followed it."""
    await world.executor.hotplug.reread()
    await world.quiet()
    await world.executor.hotplug.update_replacements()
    await world.quiet()


async def sharer_and_owner(world: Any) -> tuple[str, str, CpuSet]:
    """Start an LS container and one that owns two CPUs; returns their ids and these CPUs."""
    ls = await world.run(await world.pod("ls", "LS"))
    own = await world.run(await world.pod("g"), **TWO_CPUS)
    await world.quiet()
    return ls, own, world.executor.state.containers[own].placement.exclusive


def explained(world: Any, query: str) -> tuple[list[str], str]:
    """Return the reasons and the current facts that ``topoproxy explain`` prints for a container."""
    hardware_losses = world.executor.hotplug.hardware_losses
    page = history_page(
        world.executor.history, {"query": query}, lambda one: hardware_losses.explained(one.container_id)
    )
    (record,) = page["records"]
    return record["decision"]["reasons"], record.get("now", "")


def test_every_container_leaves_an_offline_cpu_and_returns_to_it(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
        world.machine = without(whole, "3,15")
        await world.sync.once()
        await world.quiet()
        assert (world.on(ls), world.on(lse)) == ("0-1,4-14", "2")
        call = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)
        )
        forwarded = pb.UpdateContainerResourcesRequest.FromString(call.sent)
        assert forwarded.linux.cpuset_cpus == "0-1,4-14", "the runtime would fail with a missing CPU"
        world.wire.finished(call, 0)
        clash = await world.begin(await world.pod("other", "LSE", "", "3"))
        assert clash.refused[0] == 3
        world.machine = whole
        await world.sync.once()
        await world.quiet()
        assert (world.on(ls), world.on(lse)) == ("0-1,4-15", "2-3")
        assert any("the machine changed what=CPUs now=0-15 before=0-2,4-14" in line for line in world.logged)
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize(("strict", "shared"), [(False, "0-15"), (True, "2-15")])
def test_a_start_while_only_reserved_cpus_are_online(run_scenario, strict: bool, shared: str) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        world.machine = without(whole, "2-15")
        world.boot()
        await world.sync.once()
        ls = await world.run(await world.pod("ls", "LS"))
        assert world.on(ls) == "0-1"
        rejected = await world.begin(await world.pod("early"), **TWO_CPUS)
        assert "not enough" in rejected.refused[1]
        world.check()
        world.machine = whole
        await world.sync.once()
        await world.quiet()
        assert world.on(ls) == shared
        own = await world.run(await world.pod("late"), **TWO_CPUS)
        await world.quiet()
        cpus = world.executor.state.containers[own].placement.exclusive
        assert len(cpus) == 2
        assert str(CpuSet.parse(shared) - cpus) == world.on(ls)
        assert cpus.isdisjoint(CpuSet.parse("0-1"))
        world.check()

    rules = {"reserved": CpuSet.parse("0-1"), "options": CpuOptions(strict_cpu_reservation=strict)}
    run_scenario(scenario, reconciled=False, rules=rules)


def test_the_runtime_is_notified_of_cpus_that_the_kernel_itself_has_taken(run_scenario) -> None:
    """On v1 nothing is left to write, and an update with a missing CPU would fail."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.machine = without(world.machine, "3")
        world.cgroups.sets[ls] = world.cgroups.sets[ls] & world.machine.online
        await look(world)
        runtime_sync = world.make_runtime_sync()
        await runtime_sync.finish(5)
        assert (world.on(ls), world.runtime.specs[ls]) == ("0-2,4-15", "0-2,4-15")
        runtime_sync.close()

    run_scenario(scenario)


class BroughtBack:
    """Records for which groups processes were to be moved back."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.refuses = False

    def move_back(self, path: str) -> int:
        self.paths.append(path)
        if self.refuses:
            raise CgroupError(f"cannot move process 7 back into cgroup /{path}: busy", errno.EBUSY)
        return 0


def test_processes_moved_away_while_no_daemon_ran_are_moved_back(run_scenario, monkeypatch) -> None:
    async def scenario(world: Any) -> None:
        own = await world.run(await world.pod("lse", "LSE", "", "3"))
        world.machine, displaced = without(world.machine, "3"), BroughtBack()
        ports = functools.partial(Ports, displaced=displaced)
        monkeypatch.setitem(type(world).boot.__globals__, "Ports", ports)
        world.boot()  # the first machine that the daemon reads lacks the CPU
        for _ in range(2):
            await world.sync.once()
            await world.quiet()
        assert own in displaced.paths

    run_scenario(scenario)


def test_processes_whose_move_the_kernel_refuses_are_moved_back_later(run_scenario, monkeypatch) -> None:
    async def scenario(world: Any) -> None:
        own = await world.run(await world.pod("lse", "LSE", "", "3"))
        displaced = world.executor.hotplug.displaced = BroughtBack()
        displaced.refuses = True
        world.machine = without(world.machine, "2")

        async def reconcile(times: int) -> int:
            before = displaced.paths.count(own)
            for _ in range(times):
                await world.sync.once()
                await world.quiet()
            return displaced.paths.count(own) - before

        assert await reconcile(8) >= 7
        assert any("cannot bring back processes" in p["what"] for p in world.executor.telemetry.problems())
        displaced.refuses = False
        assert await reconcile(3) > 0
        assert not any("bring back" in p["what"] for p in world.executor.telemetry.problems())
        assert await reconcile(3) == 0

    run_scenario(scenario)


def test_a_restart_while_a_cpu_is_offline_keeps_its_owner(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        ls = await world.run(await world.pod("ls", "LS"))
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
        own = await world.run(await world.pod("g"), **TWO_CPUS)
        previous = world.on(own)
        world.runtime.details[own] = RuntimeDetail(
            f"/kubepods/podg/{own}", 2048, 200_000, 100_000, 0, previous
        )
        await world.quiet()
        world.machine = without(whole, "3")
        for entries in (dict(world.ledger.entries), {}):  # with its ledger, and from the runtime alone
            world.ledger.entries = entries
            world.boot()
            await world.sync.once()
            await world.quiet()
            assert (world.on(ls), world.on(lse)) == ("1,4-7,9-15", "2")
        world.machine = whole
        await world.sync.once()
        await world.quiet()
        assert (world.on(lse), world.on(own)) == ("2-3", previous)
        world.check()

    run_scenario(scenario)


def test_a_machine_without_shared_cpus_is_not_followed(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        world.machine = without(world.machine, "4-15")
        await world.sync.once()
        await world.quiet()
        assert world.on(ls) == "4-15"
        assert any("the shared pool would be empty" in p["what"] for p in world.executor.telemetry.problems())

    run_scenario(scenario)


def test_an_owner_gets_another_cpu_until_its_own_returns(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        ls, own, previous = await sharer_and_owner(world)
        gone = max(previous)
        world.machine = without(whole, str(gone))
        await world.clear_log()
        await look(world)
        now = CpuSet.parse(world.on(own))
        (other,) = now - previous
        assert len(now) == 2
        assert now & previous == previous - CpuSet([gone])
        assert world.machine.nodes_of(now) == whole.nodes_of(previous), "on its NUMA node"
        assert CpuSet.parse(world.on(ls)) == world.machine.online - now
        moves = [line for line in world.log if line.startswith("kernel")]
        last_ls = max(i for i, line in enumerate(moves) if ls in line)
        assert moves.index(f"kernel {own} {now}") > last_ls, "other containers had left it before"
        (entry,) = world.executor.hotplug.hardware_losses.page()
        assert (entry["away"], entry["instead"], entry["missing"]) == (str(gone), str(other), 0)
        expected = f"its CPU {gone} is offline: it runs on {now}, with CPU {other} in its place"
        reasons, reported = explained(world, "g")
        assert reported == expected
        assert reasons[-1].endswith(expected)
        assert any(
            line.startswith("a container has less") and f'reason="{expected}"' in line
            for line in world.logged
        )
        assert violations(world.executor.state) == []

        for entries in (None, dict(world.ledger.entries)):  # without and with a restart meanwhile
            if entries is not None:
                world.machine = without(whole, str(gone))
                await look(world)
                world.boot()
                await world.sync.once()
                world.now += 3
                await world.sync.once()  # calls from before the restart are over
                await world.quiet()
                assert CpuSet.parse(world.on(own)) == now, "existing replacements stay"
            await world.clear_log()
            world.machine = whole
            await look(world)
            assert world.on(own) == str(previous)
            assert CpuSet.parse(world.on(ls)) == whole.online - previous
            moves = [line for line in world.log if line.startswith("kernel")]
            assert moves.index(f"kernel {own} {previous}") < moves.index(f"kernel {ls} {world.on(ls)}")
            assert world.executor.hotplug.hardware_losses.page() == []
            assert any(
                "a container has all that was promised again pod=ns/g" in line for line in world.logged
            )
            assert "at 1970" in explained(world, "g")[0][-1]
        world.check()

    run_scenario(scenario)


def test_replacement_cpus_are_released_once_a_call_in_flight_is_over(run_scenario) -> None:
    """No reconcile is needed for that: the next one may be far away."""

    async def scenario(world: Any) -> None:
        whole = world.machine
        ls, own, previous = await sharer_and_owner(world)
        world.machine = without(whole, str(max(previous)))
        await look(world)
        replaced = CpuSet.parse(world.on(own))
        call = world.executor.inflight_calls.track(own, replaced)
        world.machine = whole
        await look(world)
        await look(world)
        assert world.on(own) == str(previous)
        assert CpuSet.parse(world.on(ls)) == whole.online - previous - replaced, (
            "the call may move the owner back"
        )
        world.cgroups.sets[own] = replaced
        world.call_tracker.completed(call, replaced)
        await world.quiet()
        assert world.on(own) == str(previous)
        assert CpuSet.parse(world.on(ls)) == whole.online - previous
        world.check()

    run_scenario(scenario)


def test_replacement_cpus_stay_if_a_cpu_goes_offline_again_while_they_are_released(
    run_scenario, monkeypatch
) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        ls, own, previous = await sharer_and_owner(world)
        world.machine = fewer = without(whole, str(max(previous)))
        await look(world)
        replaced = CpuSet.parse(world.on(own))
        world.machine = whole
        writes, run_writes = world.executor.writes, world.executor.writes.run

        async def run_and_lose(job: Any, *args: Any) -> Any:
            done = await run_writes(job, *args)
            if job == world.executor.cpuset_writer.write and [own] in args:
                monkeypatch.undo()
                world.machine = fewer
                await world.executor.hotplug.reread()
            return done

        monkeypatch.setattr(writes, "run", run_and_lose)
        await world.clear_log()
        await look(world)
        assert writes.run == run_writes, "the CPU went offline while the owner was written"
        assert world.executor.state.containers[own].placement.replacement == replaced - previous
        written = [line.rpartition(" ")[2] for line in world.log if line.startswith(f"kernel {own} ")]
        assert written == [str(previous), str(replaced)], "it has two CPUs all the time"
        assert not CpuSet.parse(world.on(ls)) & (replaced - previous)
        assert CpuSet.parse(world.on(own)) == replaced

    run_scenario(scenario)


def test_cpus_named_by_a_scheduler_are_not_replaced_but_reported(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
        world.machine = without(world.machine, "3")
        for _ in range(2):
            await look(world)
        assert world.on(lse) == "2"
        (entry,) = world.executor.hotplug.hardware_losses.page()
        assert (entry["away"], entry["instead"], entry["missing"]) == ("3", "", 1)
        assert entry["what"] == "its CPU 3 is offline: it runs on 2, 1 fewer than it was promised"
        assert sum(f'reason="{entry["what"]}"' in line for line in world.logged) == 1, "once"
        assert world.executor.telemetry.value(metrics.EXCLUSIVE_CPU_SHORTFALLS) == 1
        await world.remove(lse)
        await look(world)
        assert world.executor.hotplug.hardware_losses.page() == []
        assert not any("again" in line for line in world.logged), "a removed container has no entry"
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("full", "policy"), [(True, TopologyPolicy.NONE), (False, TopologyPolicy.SINGLE_NUMA_NODE)]
)
def test_smt_switched_off_leaves_one_thread_of_each_core(
    run_scenario, full: bool, policy: TopologyPolicy
) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        ls, be = (
            await world.run(await world.pod("ls", "LS")),
            await world.run(await world.pod("be", "BE", "besteffort")),
        )
        own = await world.run(await world.pod("g"), **TWO_CPUS)
        previous = world.executor.state.containers[own].placement.exclusive
        assert len({whole.by_id[cpu].core for cpu in previous}) == 1, "both threads of a core"
        second = CpuSet.from_bits(sum(1 << max(core) for core in whole.cores.values()))
        world.machine = without(whole, str(second))
        await look(world)
        now = CpuSet.parse(world.on(own))
        assert len(now) == 2, "two cores of one thread"
        assert now <= world.machine.online
        assert len(world.machine.nodes_of(now)) == 1
        for sharer in (ls, be):
            assert CpuSet.parse(world.on(sharer)) == world.machine.online - now
        late = await world.run(await world.pod("late"), **TWO_CPUS)
        assert len(CpuSet.parse(world.on(late))) == 2, "a whole core is a single CPU now"
        world.check()
        world.machine = whole
        await look(world)
        assert world.on(own) == str(previous)
        assert len(CpuSet.parse(world.on(late))) == 2
        world.check()

    run_scenario(scenario, rules={"options": CpuOptions(full_pcpus_only=full), "policy": policy})


def test_half_a_core_does_not_replace_a_whole_core(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        own = await world.run(await world.pod("g"), **TWO_CPUS)
        previous = world.executor.state.containers[own].placement.exclusive
        world.machine = without(world.machine, str(max(previous)))
        await look(world)
        assert CpuSet.parse(world.on(own)) == previous - CpuSet([max(previous)])
        assert world.executor.hotplug.hardware_losses.page()[0]["missing"] == 1
        world.check()

    run_scenario(scenario, rules={"options": CpuOptions(full_pcpus_only=True)})


def test_cpus_that_cannot_be_freed_do_not_serve_as_replacement(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        own = await world.run(await world.pod("g"), **TWO_CPUS)
        previous = world.executor.state.containers[own].placement.exclusive
        world.machine = without(world.machine, str(max(previous)))
        world.cgroups.broken.add(ls)
        await look(world)
        assert world.on(own) == str(min(previous))
        assert any(
            "cannot replace offline CPUs" in problem["what"]
            for problem in world.executor.telemetry.problems()
        )
        assert {c.id for c in world.executor.state.containers.values()} == {ls, own}, (
            "nothing of the attempt is left"
        )
        world.cgroups.broken.clear()
        await world.sync.once()
        await world.until(lambda: len(CpuSet.parse(world.on(own))) == 2)
        await world.quiet()
        world.check()

    run_scenario(scenario)


def test_a_container_of_an_owning_pod_restarts_while_a_cpu_is_offline(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        pod = await world.pod("lse", "LSE", "", "2-3")
        first = await world.run(pod)
        world.machine = without(whole, "3")
        await look(world)
        await world.stop(first)
        second = await world.run(pod)
        assert world.on(second) == "2"
        world.machine = whole
        await look(world)
        assert world.on(second) == "2-3"
        world.check()

    run_scenario(scenario)


def test_an_owner_without_cpus_leaves_those_of_a_new_owner(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        lost = await world.run(await world.pod("lost", "LSE", "", "3"))
        world.machine = without(whole, "3")
        await look(world)
        assert world.on(lost) == "0-2,4-15"
        await world.clear_log()
        await world.begin(await world.pod("new", "LSE", "", "4-5"))
        assert world.log.index(f"kernel {lost} 0-2,6-15") < world.log.index("forward CreateContainer")
        world.cgroups.broken.add(lost)
        call = await world.begin(await world.pod("other", "LSE", "", "6"))
        assert call.refused, "no other container may be left on its CPUs"
        world.cgroups.broken.clear()
        world.machine = whole
        await look(world)
        assert world.on(lost) == "3"
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize("named", [True, False])
def test_an_owner_that_shared_is_off_the_cpus_of_the_next_one_despite_an_update_in_flight(
    run_scenario, named: bool
) -> None:
    """The update carries shared CPUs, and its container has own CPUs, or replacements, by now."""

    async def scenario(world: Any) -> None:
        whole = world.machine
        sandbox = await world.pod("lost", "LSE" if named else "", "", "3" if named else "")
        lost = await world.run(sandbox, **({} if named else cpu_request(1)))
        own = world.executor.state.containers[lost].placement.exclusive
        world.machine = without(whole, str(own))
        await look(world)
        world.machine = whole if named else world.machine
        await look(world)
        has = world.executor.state.desired_cpus(world.executor.state.containers[lost])
        assert len(has) == 1, "it does not share any more"
        inflight_call = world.executor.inflight_calls.track(lost, whole.online - own)  # before that
        create = pb.CreateContainerRequest(pod_sandbox_id=await world.pod("new", "LSE", "", "6-7"))
        create.config.metadata.name = "c"
        call = world.played("CreateContainer", create)
        world.wire.request(call)
        await world.quiet()
        assert not call.over.is_set(), "the update may still give its container these CPUs"
        world.cgroups.sets[lost] = inflight_call.carries & world.machine.online
        world.call_tracker.completed(inflight_call, inflight_call.carries)
        await asyncio.wait_for(call.over.wait(), 60)
        assert call.refused is None
        assert CpuSet.parse(world.on(lost)) == has

    run_scenario(scenario)


@pytest.mark.parametrize("named", [True, False])
def test_an_owner_that_shared_and_was_not_written_is_moved_before_the_next_one(
    run_scenario, named: bool
) -> None:
    async def scenario(world: Any) -> None:
        whole = world.machine
        sandbox = await world.pod("lost", "LSE" if named else "", "", "3" if named else "")
        lost = await world.run(sandbox, **({} if named else cpu_request(1)))
        own = world.executor.state.containers[lost].placement.exclusive
        inflight_call = world.executor.inflight_calls.track(lost, own)
        world.machine = without(whole, str(own))
        await look(world)
        world.machine = whole if named else world.machine
        await look(world)
        has = world.executor.state.desired_cpus(world.executor.state.containers[lost])
        world.cgroups.sets[lost] = world.machine.online - own
        call = await world.begin(await world.pod("new", "LSE", "", "6-7"))
        assert call.refused is None
        assert CpuSet.parse(world.on(lost)) == has
        world.call_tracker.completed(inflight_call, own)

    run_scenario(scenario)


def blocks(machine: Machine, nodes: str) -> Machine:
    """The machine while only some nodes have memory."""
    there = Mask.parse(nodes)
    held = (changed_copy(n, mem_bytes=(8 << 30) if n.id in there else 0) for n in machine.nodes)
    return changed_copy(machine, nodes=tuple(held))


def test_containers_follow_a_numa_node_that_loses_its_memory(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        world.machine = blocks(world.machine, "0-1")
        await look(world)
        ls = await world.run(await world.pod("ls", "LS"))
        own = await world.run(await world.pod("lse", "LSE", "", "6-7"))
        late = await world.create(await world.pod("late", "LS"))
        for container, mems in ((ls, "0-1"), (own, "1")):
            world.cgroups.mems[container] = Mask.parse(mems)
        world.machine = blocks(world.machine, "0")
        await look(world)
        await world.sync.once()
        await world.quiet()
        assert {str(world.cgroups.mems[container]) for container in (ls, own)} == {"0"}
        assert world.executor.telemetry.value(metrics.MEMS_DRIFT) == 0, "no other program wrote it"
        (entry,) = world.executor.hotplug.hardware_losses.page()
        assert (entry["container"], entry["nodes"]) == ("ns/lse/c", "1")
        assert entry["what"] == "its memory of NUMA node 1 is gone: it has that of NUMA node 0"
        assert (await world.update(own, cpuset_mems="1")).cpuset_mems == "0", (
            "the kernel accepts no other node"
        )
        sent: list[tuple[str, str]] = []
        real = world.runtime.update_cpuset
        world.runtime.update_cpuset = lambda i, c, m, q=0: (sent.append((i, str(m))), real(i, c, m, q))
        await world.start(late)
        assert sent == [(late, "0")], "it would not start with the nodes of its create"
        world.machine = blocks(world.machine, "0-1")
        await look(world)
        await world.sync.once()
        await world.quiet()
        assert (str(world.cgroups.mems[ls]), str(world.cgroups.mems[own])) == ("0-1", "0-1"), (
            "its memory is on both nodes"
        )
        assert world.executor.hotplug.hardware_losses.page() == []
        world.check()

    run_scenario(scenario)


def test_the_status_shows_the_memory_nodes_that_are_enforced(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        def desired() -> dict[str, str]:
            return {row["ref"]: row["desired_mems"] for row in node_page(world.executor)["containers"]}

        world.machine = blocks(world.machine, "0-1")
        await look(world)
        await world.run(await world.pod("lse", "LSE", "", "6-7"))
        await world.run(await world.pod("ls", "LS"))
        assert desired() == {"ns/lse/c": "1", "ns/ls/c": "0-1"}
        world.machine = blocks(world.machine, "0")
        await look(world)
        assert desired() == {"ns/lse/c": "0", "ns/ls/c": "0"}, "NUMA node 1 has no memory any more"
        world.check()

    run_scenario(scenario)


class PlayedUevents:
    """Simulated events of the kernel: each byte is an event, and a broken source cannot be read."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        self.broken = self.closed = False

    def fileno(self) -> int:
        return self.out

    def read_changes(self) -> bool:
        if self.broken:
            raise OSError(5, "broken")
        return os.read(self.out, 100) != b"-"

    def close(self) -> None:
        self.closed = True
        os.close(self.out)


def test_the_machine_is_read_again_after_a_kernel_event(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        whole, uevents = world.machine, PlayedUevents()
        world.executor.hotplug.events = uevents
        world.executor.hotplug.start()
        world.machine = without(whole, "3")
        os.write(uevents.into, b"-")  # an event of another subsystem
        await world.quiet()
        assert "3" not in world.logged[-1]
        assert world.executor.telemetry.value(metrics.MACHINE_CHANGES) == 0
        os.write(uevents.into, b"xxx")
        await world.until(lambda: world.on(ls) == "0-2,4-15")
        assert world.executor.telemetry.value(metrics.MACHINE_EVENTS) == 1, "many events cause one read"
        world.machine = whole
        os.write(uevents.into, b"x")
        await world.until(lambda: world.on(ls) == "0-15")
        uevents.broken = True
        os.write(uevents.into, b"x")
        await world.until(lambda: uevents.closed)
        assert any("uevents" in problem["what"] for problem in world.executor.telemetry.problems())
        await world.sync.once()
        os.close(uevents.into)

    run_scenario(scenario)
