"""CPUs and memory that come and go."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from proxy.executor.node_executor import Ports
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, TopologyPolicy
from proxy.observe.explain_answer import history_page
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import TWO_CPUS, cpu_request


def without(machine: Machine, text: str) -> Machine:
    gone = CpuSet.parse(text)
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in machine.nodes)
    return changed_copy(machine, cpus=tuple(c for c in machine.cpus if c.id not in gone), nodes=nodes)


async def look(w: Any) -> None:
    """The kernel has reported a change, and all that follows is done."""
    await w.executor.hotplug.look()
    await w.quiet()
    await w.executor.hotplug.mend()
    await w.quiet()


async def sharer_and_owner(w: Any) -> tuple[str, str, CpuSet]:
    """Start an LS container and one that owns two CPUs; returns their ids and these CPUs."""
    ls = await w.run(await w.pod("ls", "LS"))
    own = await w.run(await w.pod("g"), **TWO_CPUS)
    await w.quiet()
    return ls, own, w.executor.state.containers[own].placement.exclusive


def explained(w: Any, query: str) -> tuple[list[str], str]:
    """What ``topoproxy explain`` says of a container: the reasons, and what holds now."""
    shortage = w.executor.hotplug.shortage
    page = history_page(
        w.executor.history, {"query": query}, lambda one: shortage.explained(one.container_id)
    )
    (record,) = page["records"]
    return record["decision"]["reasons"], record.get("now", "")


def test_every_container_leaves_an_offline_cpu_and_returns_to_it(live) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        w.machine = without(whole, "3,15")
        await w.sync.once()
        await w.quiet()
        assert (w.on(ls), w.on(lse)) == ("0-1,4-14", "2")
        call = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        got = pb.UpdateContainerResourcesRequest.FromString(call.sent)
        assert got.linux.cpuset_cpus == "0-1,4-14", "the runtime would fail with a CPU that is not there"
        w.wire.finished(call, 0)
        clash = await w.begin(await w.pod("other", "LSE", "", "3"))
        assert clash.refused[0] == 3
        w.machine = whole
        await w.sync.once()
        await w.quiet()
        assert (w.on(ls), w.on(lse)) == ("0-1,4-15", "2-3")
        assert any("the machine changed what=CPUs now=0-15 before=0-2,4-14" in line for line in w.logged)
        w.check()

    live(day)


def test_the_runtime_is_told_of_cpus_that_the_kernel_itself_has_taken(live) -> None:
    """On v1 nothing is left to write, and an update with a CPU that is not there would fail."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.machine = without(w.machine, "3")
        w.cgroups.sets[ls] = w.cgroups.sets[ls] & w.machine.online
        await look(w)
        settler = w.make_settler()
        await settler.finish(5)
        assert (w.on(ls), w.runtime.specs[ls]) == ("0-2,4-15", "0-2,4-15")
        settler.close()

    live(day)


class BroughtBack:
    """Remembers for which groups processes were to be brought back."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def bring_back(self, path: str) -> int:
        self.paths.add(path)
        return 0


def test_processes_that_were_moved_away_while_no_daemon_ran_are_looked_for(live, monkeypatch) -> None:
    async def day(w: Any) -> None:
        own = await w.run(await w.pod("lse", "LSE", "", "3"))
        w.machine, displaced = without(w.machine, "3"), BroughtBack()
        ports = functools.partial(Ports, displaced=displaced)
        monkeypatch.setitem(type(w).boot.__globals__, "Ports", ports)
        w.boot()  # the machine that it finds first is the one without the CPU
        for _ in range(2):
            await w.sync.once()
            await w.quiet()
        assert own in displaced.paths

    live(day)


def test_a_restart_while_a_cpu_is_offline_keeps_its_owner(live) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        own = await w.run(await w.pod("g"), **TWO_CPUS)
        had = w.on(own)
        w.runtime.details[own] = RuntimeDetail(f"/kubepods/podg/{own}", 2048, 200_000, 100_000, 0, had)
        await w.quiet()
        w.machine = without(whole, "3")
        for entries in (dict(w.ledger.entries), {}):  # with its ledger, and from the runtime alone
            w.ledger.entries = entries
            w.boot()
            await w.sync.once()
            await w.quiet()
            assert (w.on(ls), w.on(lse)) == ("1,4-7,9-15", "2")
        w.machine = whole
        await w.sync.once()
        await w.quiet()
        assert (w.on(lse), w.on(own)) == ("2-3", had)
        w.check()

    live(day)


def test_a_machine_that_leaves_nothing_to_share_is_not_followed(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.machine = without(w.machine, "4-15")
        await w.sync.once()
        await w.quiet()
        assert w.on(ls) == "4-15"
        assert any("the shared pool would be empty" in p["what"] for p in w.executor.telemetry.problems())

    live(day)


def test_an_owner_gets_another_cpu_until_its_own_returns(live) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        ls, own, had = await sharer_and_owner(w)
        gone = max(had)
        w.machine = without(whole, str(gone))
        w.log.clear()
        await look(w)
        now = CpuSet.parse(w.on(own))
        (other,) = now - had
        assert len(now) == 2
        assert now & had == had - CpuSet([gone])
        assert w.machine.nodes_of(now) == whole.nodes_of(had), "on its NUMA node"
        assert CpuSet.parse(w.on(ls)) == w.machine.online - now
        moves = [line for line in w.log if line.startswith("kernel")]
        last_ls = max(i for i, line in enumerate(moves) if ls in line)
        assert moves.index(f"kernel {own} {now}") > last_ls, "the others had left it before"
        (entry,) = w.executor.hotplug.shortage.page()
        assert (entry["away"], entry["instead"], entry["missing"]) == (str(gone), str(other), 0)
        words = f"its CPU {gone} is offline: it runs on {now}, with CPU {other} in its place"
        reasons, said = explained(w, "g")
        assert said == words
        assert reasons[-1].endswith(words)
        assert any(
            line.startswith("a container has less") and f'reason="{words}"' in line for line in w.logged
        )
        assert violations(w.executor.state) == []

        for entries in (None, dict(w.ledger.entries)):  # by itself, and over a restart meanwhile
            if entries is not None:
                w.machine = without(whole, str(gone))
                await look(w)
                w.boot()
                await w.sync.once()
                w.now += 3
                await w.sync.once()  # calls of before the restart are over
                await w.quiet()
                assert CpuSet.parse(w.on(own)) == now, "replacements that are there stay"
            w.log.clear()
            w.machine = whole
            await look(w)
            assert w.on(own) == str(had)
            assert CpuSet.parse(w.on(ls)) == whole.online - had
            moves = [line for line in w.log if line.startswith("kernel")]
            assert moves.index(f"kernel {own} {had}") < moves.index(f"kernel {ls} {w.on(ls)}")
            assert w.executor.hotplug.shortage.page() == []
            assert any("a container has all that was promised again pod=ns/g" in line for line in w.logged)
            assert "at 1970" in explained(w, "g")[0][-1]
        w.check()

    live(day)


def test_replacements_are_given_back_once_a_call_in_flight_is_over(live) -> None:
    """No comparison is needed: the next one may be far away."""

    async def day(w: Any) -> None:
        whole = w.machine
        ls, own, had = await sharer_and_owner(w)
        w.machine = without(whole, str(max(had)))
        await look(w)
        replaced = CpuSet.parse(w.on(own))
        flight = w.executor.calls.depart(own, replaced)
        w.machine = whole
        await look(w)
        await look(w)
        assert w.on(own) == str(had)
        assert CpuSet.parse(w.on(ls)) == whole.online - had - replaced, "the call may bring the owner back"
        w.cgroups.sets[own] = replaced
        w.start_update.landed(flight, replaced)
        await w.quiet()
        assert w.on(own) == str(had)
        assert CpuSet.parse(w.on(ls)) == whole.online - had
        w.check()

    live(day)


def test_cpus_named_by_a_scheduler_are_not_replaced_but_reported(live) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        w.machine = without(w.machine, "3")
        for _ in range(2):
            await look(w)
        assert w.on(lse) == "2"
        (entry,) = w.executor.hotplug.shortage.page()
        assert (entry["away"], entry["instead"], entry["missing"]) == ("3", "", 1)
        assert entry["what"] == "its CPU 3 is offline: it runs on 2, 1 fewer than it was promised"
        assert sum(f'reason="{entry["what"]}"' in line for line in w.logged) == 1, "once"
        assert w.executor.telemetry.value(metrics.EXCLUSIVE_CPU_SHORTFALLS) == 1
        await w.remove(lse)
        await look(w)
        assert w.executor.hotplug.shortage.page() == []
        assert not any("again" in line for line in w.logged), "a container that is gone has nothing again"
        w.check()

    live(day)


@pytest.mark.parametrize(
    ("full", "policy"), [(True, TopologyPolicy.NONE), (False, TopologyPolicy.SINGLE_NUMA_NODE)]
)
def test_smt_switched_off_leaves_one_thread_of_each_core(live, full: bool, policy: TopologyPolicy) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        ls, be = await w.run(await w.pod("ls", "LS")), await w.run(await w.pod("be", "BE", "besteffort"))
        own = await w.run(await w.pod("g"), **TWO_CPUS)
        had = w.executor.state.containers[own].placement.exclusive
        assert len({whole.by_id[cpu].core for cpu in had}) == 1, "both threads of a core"
        second = CpuSet.from_bits(sum(1 << max(core) for core in whole.cores.values()))
        w.machine = without(whole, str(second))
        await look(w)
        now = CpuSet.parse(w.on(own))
        assert len(now) == 2, "two cores of one thread"
        assert now <= w.machine.online
        assert len(w.machine.nodes_of(now)) == 1
        for sharer in (ls, be):
            assert CpuSet.parse(w.on(sharer)) == w.machine.online - now
        late = await w.run(await w.pod("late"), **TWO_CPUS)
        assert len(CpuSet.parse(w.on(late))) == 2, "a whole core is one CPU now"
        w.check()
        w.machine = whole
        await look(w)
        assert w.on(own) == str(had)
        assert len(CpuSet.parse(w.on(late))) == 2
        w.check()

    live(day, rules={"options": CpuOptions(full_pcpus_only=full), "policy": policy})


def test_half_a_core_is_no_replacement_for_whole_cores(live) -> None:
    async def day(w: Any) -> None:
        own = await w.run(await w.pod("g"), **TWO_CPUS)
        had = w.executor.state.containers[own].placement.exclusive
        w.machine = without(w.machine, str(max(had)))
        await look(w)
        assert CpuSet.parse(w.on(own)) == had - CpuSet([max(had)])
        assert w.executor.hotplug.shortage.page()[0]["missing"] == 1
        w.check()

    live(day, rules={"options": CpuOptions(full_pcpus_only=True)})


def test_cpus_that_cannot_be_freed_are_no_replacement(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        own = await w.run(await w.pod("g"), **TWO_CPUS)
        had = w.executor.state.containers[own].placement.exclusive
        w.machine = without(w.machine, str(max(had)))
        w.cgroups.broken.add(ls)
        await look(w)
        assert w.on(own) == str(min(had))
        assert any(
            "cannot replace offline CPUs" in problem["what"] for problem in w.executor.telemetry.problems()
        )
        assert {c.id for c in w.executor.state.containers.values()} == {ls, own}, "nothing is left of the try"
        w.cgroups.broken.clear()
        await w.sync.once()
        await w.until(lambda: len(CpuSet.parse(w.on(own))) == 2)
        await w.quiet()
        w.check()

    live(day)


def test_a_container_of_a_pod_that_owns_starts_again_while_a_cpu_is_away(live) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        pod = await w.pod("lse", "LSE", "", "2-3")
        first = await w.run(pod)
        w.machine = without(whole, "3")
        await look(w)
        await w.stop(first)
        second = await w.run(pod)
        assert w.on(second) == "2"
        w.machine = whole
        await look(w)
        assert w.on(second) == "2-3"
        w.check()

    live(day)


def test_an_owner_without_cpus_leaves_those_of_a_new_owner(live) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        lost = await w.run(await w.pod("lost", "LSE", "", "3"))
        w.machine = without(whole, "3")
        await look(w)
        assert w.on(lost) == "0-2,4-15"
        w.log.clear()
        await w.begin(await w.pod("new", "LSE", "", "4-5"))
        assert w.log.index(f"kernel {lost} 0-2,6-15") < w.log.index("forward CreateContainer")
        w.cgroups.broken.add(lost)
        call = await w.begin(await w.pod("other", "LSE", "", "6"))
        assert call.refused, "no other container may be left on its CPUs"
        w.cgroups.broken.clear()
        w.machine = whole
        await look(w)
        assert w.on(lost) == "3"
        w.check()

    live(day)


@pytest.mark.parametrize("named", [True, False])
def test_an_owner_that_shared_is_off_the_cpus_of_the_next_one_despite_an_update_in_flight(
    live, named: bool
) -> None:
    """The update carries shared CPUs, and its container has its own, or others in their place, by now."""

    async def day(w: Any) -> None:
        whole = w.machine
        sandbox = await w.pod("lost", "LSE" if named else "", "", "3" if named else "")
        lost = await w.run(sandbox, **({} if named else cpu_request(1)))
        own = w.executor.state.containers[lost].placement.exclusive
        w.machine = without(whole, str(own))
        await look(w)
        w.machine = whole if named else w.machine
        await look(w)
        has = w.executor.state.wanted(w.executor.state.containers[lost])
        assert len(has) == 1, "it does not share any more"
        flight = w.executor.calls.depart(lost, whole.online - own)  # before that
        create = pb.CreateContainerRequest(pod_sandbox_id=await w.pod("new", "LSE", "", "6-7"))
        create.config.metadata.name = "c"
        call = w.played("CreateContainer", create)
        w.wire.request(call)
        await w.quiet()
        assert not call.over.is_set(), "the update may still give its container these CPUs"
        w.cgroups.sets[lost] = flight.carries & w.machine.online
        w.start_update.landed(flight, flight.carries)
        await asyncio.wait_for(call.over.wait(), 60)
        assert call.refused is None
        assert CpuSet.parse(w.on(lost)) == has

    live(day)


@pytest.mark.parametrize("named", [True, False])
def test_an_owner_that_shared_and_was_not_written_is_moved_before_the_next_one(live, named: bool) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        sandbox = await w.pod("lost", "LSE" if named else "", "", "3" if named else "")
        lost = await w.run(sandbox, **({} if named else cpu_request(1)))
        own = w.executor.state.containers[lost].placement.exclusive
        flight = w.executor.calls.depart(lost, own)
        w.machine = without(whole, str(own))
        await look(w)
        w.machine = whole if named else w.machine
        await look(w)
        has = w.executor.state.wanted(w.executor.state.containers[lost])
        w.cgroups.sets[lost] = w.machine.online - own
        call = await w.begin(await w.pod("new", "LSE", "", "6-7"))
        assert call.refused is None
        assert CpuSet.parse(w.on(lost)) == has
        w.start_update.landed(flight, own)

    live(day)


def blocks(machine: Machine, nodes: str) -> Machine:
    """The machine while only some nodes have memory."""
    there = Mask.parse(nodes)
    held = (changed_copy(n, mem_bytes=(8 << 30) if n.id in there else 0) for n in machine.nodes)
    return changed_copy(machine, nodes=tuple(held))


def test_memory_of_a_node_that_goes(live) -> None:
    async def day(w: Any) -> None:
        w.machine = blocks(w.machine, "0-1")
        await look(w)
        ls = await w.run(await w.pod("ls", "LS"))
        own = await w.run(await w.pod("lse", "LSE", "", "6-7"))
        late = await w.create(await w.pod("late", "LS"))
        for container, mems in ((ls, "0-1"), (own, "1")):
            w.cgroups.mems[container] = Mask.parse(mems)
        w.machine = blocks(w.machine, "0")
        await look(w)
        await w.sync.once()
        await w.quiet()
        assert {str(w.cgroups.mems[container]) for container in (ls, own)} == {"0"}
        assert w.executor.telemetry.value(metrics.MEMS_DRIFT) == 0, "no other program wrote it"
        (entry,) = w.executor.hotplug.shortage.page()
        assert (entry["container"], entry["nodes"]) == ("ns/lse/c", "1")
        assert entry["what"] == "its memory of NUMA node 1 is gone: it has that of NUMA node 0"
        assert (await w.update(own, cpuset_mems="1")).cpuset_mems == "0", "the kernel takes no other"
        sent: list[tuple[str, str]] = []
        real = w.runtime.update_cpuset
        w.runtime.update_cpuset = lambda i, c, m, q=0: (sent.append((i, str(m))), real(i, c, m, q))
        await w.start(late)
        assert sent == [(late, "0")], "it would not start with the nodes of its create"
        w.machine = blocks(w.machine, "0-1")
        await look(w)
        await w.sync.once()
        await w.quiet()
        assert (str(w.cgroups.mems[ls]), str(w.cgroups.mems[own])) == ("0-1", "0-1"), "its memory is on both"
        assert w.executor.hotplug.shortage.page() == []
        w.check()

    live(day)


class PlayedUevents:
    """The kernel's word, played: a byte is an event, and a broken one cannot be heard."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        self.broken = self.closed = False

    def fileno(self) -> int:
        return self.out

    def changed(self) -> bool:
        if self.broken:
            raise OSError(5, "broken")
        return os.read(self.out, 100) != b"-"

    def close(self) -> None:
        self.closed = True
        os.close(self.out)


def test_the_kernel_reports_and_the_machine_is_read(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        whole, uevents = w.machine, PlayedUevents()
        w.executor.hotplug.events = uevents
        w.executor.hotplug.start()
        w.machine = without(whole, "3")
        os.write(uevents.into, b"-")  # about something else
        await w.quiet()
        assert "3" not in w.logged[-1]
        assert w.executor.telemetry.value(metrics.MACHINE_CHANGES) == 0
        os.write(uevents.into, b"xxx")
        await w.until(lambda: w.on(ls) == "0-2,4-15")
        assert w.executor.telemetry.value(metrics.MACHINE_EVENTS) == 1, "many events are one look"
        w.machine = whole
        os.write(uevents.into, b"x")
        await w.until(lambda: w.on(ls) == "0-15")
        uevents.broken = True
        os.write(uevents.into, b"x")
        await w.until(lambda: uevents.closed)
        assert any("uevents" in problem["what"] for problem in w.executor.telemetry.problems())
        await w.sync.once()
        os.close(uevents.into)

    live(day)
