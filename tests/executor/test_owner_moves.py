"""A running owner is moved to other CPUs, and nothing else changes."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from proxy.executor.runtime_sync import Settler
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy

WHOLE = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
ALL = CpuSet.parse("0-15")


def without(machine: Machine, text: str) -> Machine:
    gone = CpuSet.parse(text)
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in machine.nodes)
    return changed_copy(machine, cpus=tuple(c for c in machine.cpus if c.id not in gone), nodes=nodes)


async def owner(w: Any) -> tuple[str, str, CpuSet, CpuSet]:
    """Run a container that shares and an owner; gives their ids, the owner's CPUs and as many others."""
    ls = await w.run(await w.pod("ls", "LS"))
    own = await w.run(await w.pod("own"), **WHOLE)
    mine = w.executor.state.containers[own].placement.exclusive
    near = w.executor.state.node.machine.cpus_of(w.executor.state.node.machine.nodes_of(mine))
    target = CpuSet(list(w.executor.state.pools.shared & near)[-2:])
    await w.quiet()
    return ls, own, mine, target


def key(w: Any, own: str) -> str:
    return str(w.executor.state.containers[own].owner)


def kept(w: Any) -> dict[str, Any]:
    """All that a move that is aborted must leave as it was."""
    state = w.executor.state
    return {
        "owners": dict(state.owners),
        "pools": state.pools,
        "placements": {c.id: (c.placement, c.phase) for c in state.containers.values()},
        "holds": dict(state.holds),
        "sets": dict(w.cgroups.sets),
        "ledger": {i: dict(entry) for i, entry in w.ledger.entries.items()},
        "specs": dict(w.runtime.specs),
    }


def refuse(w: Any, container_id: str, number: int, cpus: CpuSet, times: int = 1_000_000) -> list[CpuSet]:
    """Have the kernel refuse some CPUs to a container, so often."""
    refused: list[CpuSet] = []
    plain = w.cgroups.write

    def write(path: str, wanted: Any, mems: Any, *, inner: bool = True) -> bool:
        if path == container_id and wanted is not None and wanted & cpus and len(refused) < times:
            refused.append(wanted)
            raise CgroupError(f"cannot write {path}: {errno.errorcode[number]}", number)
        return bool(plain(path, wanted, mems, inner=inner))

    w.cgroups.write = write
    return refused


def test_an_owner_is_moved(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        w.log.clear()
        assert await w.executor.owner_moves.move(key(w, own), target) == ""
        await w.quiet()
        assert (w.on(own), w.on(ls)) == (str(target), str(ALL - target))
        kernel = [line for line in w.log if line.startswith("kernel")]
        assert kernel == [
            f"kernel {ls} {ALL - mine - target}",
            f"kernel {own} {target}",
            f"kernel {ls} {ALL - target}",
        ]
        ledger = [line for line in w.log if line.startswith("ledger")]
        assert w.log.index("ledger +m/") < w.log.index(kernel[0])
        assert w.log.index(kernel[1]) < w.log.index("ledger -m/") < w.log.index(kernel[2]), ledger
        container = w.executor.state.containers[own]
        assert container.placement.exclusive == target
        assert container.placement.reasons[-1] == f"moved from CPUs {mine} to {target}"
        assert w.ledger.entries[f"c/{own}"]["placement"]["own"] == str(target)
        assert not w.executor.state.holds
        assert violations(w.executor.state) == []
        assert w.executor.telemetry.value(metrics.OWNERS_MOVED) == 1

    live(day)


def test_the_runtime_gets_the_new_cpus_afterwards(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, own, mine, target = await owner(w)
        settler = Settler(
            w.executor, w.start_update, w.executor.quotas, w.executor.mems, w.executor.unit_properties
        )
        assert await w.executor.owner_moves.move(key(w, own), target) == ""
        assert w.runtime.specs[own] == str(mine)
        await settler.finish(10)
        settler.close()
        assert w.runtime.specs[own] == str(target)

    live(day)


def test_an_owner_is_moved_back_and_forth(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, own, mine, target = await owner(w)
        before = kept(w)
        for cpus in (target, mine, target, mine):
            assert await w.executor.owner_moves.move(key(w, own), cpus) == ""
        await w.quiet()
        assert kept(w)["sets"] == before["sets"]
        assert kept(w)["owners"] == before["owners"]

    live(day)


def test_a_move_to_cpus_that_overlap_the_old_ones(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        half = CpuSet([next(iter(mine)), next(iter(target))])
        assert await w.executor.owner_moves.move(key(w, own), half) == ""
        await w.quiet()
        assert (w.on(own), w.on(ls)) == (str(half), str(ALL - half))

    live(day)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY, errno.EROFS])
def test_a_target_that_cannot_be_freed_leaves_everything_as_it_was(
    live: Callable[..., None], number: int
) -> None:
    async def day(w: Any) -> None:
        ls, own, _, target = await owner(w)
        before = kept(w)
        refuse(w, ls, number, ALL)
        why = await w.executor.owner_moves.move(key(w, own), target)
        assert why == f"cannot write {ls}: {errno.errorcode[number]}"
        await w.quiet()
        assert kept(w) == before
        assert w.executor.telemetry.value(metrics.MOVES_ABORTED) == 1

    live(day)


def test_an_owner_that_cannot_be_written_goes_back(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, own, _, target = await owner(w)
        before = kept(w)
        refused = refuse(w, own, errno.EINVAL, target)
        why = await w.executor.owner_moves.move(key(w, own), target)
        assert why == f"cannot write {own}: EINVAL"
        await w.quiet()
        assert refused
        assert kept(w) == before

    live(day)


def test_an_owner_that_cannot_be_written_back_at_once_is_in_time(live: Callable[..., None]) -> None:
    """The read fails once the owner is on the target; writes back fail twice."""

    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        before = kept(w)
        reads = [0]
        plain = w.cgroups.read

        def read(path: str) -> Any:
            if path == own and w.cgroups.sets[own] == target:
                reads[0] += 1
                raise CgroupError("cannot read", errno.EIO)
            return plain(path)

        w.cgroups.read = read
        refused = refuse(w, own, errno.EBUSY, mine, times=2)
        moving = asyncio.create_task(w.executor.owner_moves.move(key(w, own), target))
        await w.until(lambda: len(refused) == 2)
        assert w.on(ls) == str(ALL - mine - target), "both sets are kept free"
        assert await moving == f"the kernel does not keep it on CPUs {target}"
        await w.quiet()
        assert reads[0]
        assert kept(w) == before

    live(day)


def test_without_a_durable_record_nothing_is_moved(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        from proxy.model.errors import CannotCreateError

        _, own, mine, target = await owner(w)
        plain = w.ledger.write

        def full(changes: Any) -> None:
            raise CannotCreateError("cannot write the ledger: no space left")

        w.ledger.write = full
        w.log.clear()
        why = await w.executor.owner_moves.move(key(w, own), target)
        assert why == "cannot record the placement: the ledger cannot be written now"
        assert w.on(own) == str(mine)
        assert not [line for line in w.log if line.startswith(f"kernel {own}")]
        w.ledger.write = plain

    live(day)


def test_a_container_that_exits_meanwhile_gives_its_cpus_back(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        plain = w.cgroups.write
        gone = []

        def write(path: str, cpus: Any, mems: Any, *, inner: bool = True) -> bool:
            if path == own and cpus == target and not gone:
                gone.append(path)
                w.cgroups.end(own)
                w._state(own, "EXITED")
            return bool(plain(path, cpus, mems, inner=inner))

        w.cgroups.write = write
        moving = asyncio.create_task(w.executor.owner_moves.move(key(w, own), target))
        await w.until(lambda: gone)
        await w.sync.once()
        assert await moving == "it has ended, or may no longer be moved"
        await w.quiet()
        assert w.on(ls) == str(ALL)
        assert not w.executor.state.owners
        assert not w.executor.state.holds
        assert w.executor.state.containers[own].placement.exclusive == mine
        assert not [i for i in w.ledger.entries if i.startswith("m/")]

    live(day)


def test_a_call_that_carries_the_old_cpus_is_waited_for(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        update = await w.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=own)
        )
        moving = asyncio.create_task(w.executor.owner_moves.move(key(w, own), target))
        await w.until(lambda: w.on(ls) == str(ALL - mine - target))
        await asyncio.sleep(0.05)
        assert w.on(own) == str(mine)
        w.cgroups.sets[own] = mine  # what the update carries
        w.wire.finished(update, 0)
        assert await moving == ""
        await w.quiet()
        assert (w.on(own), w.on(ls)) == (str(target), str(ALL - target))

    live(day)


def test_a_call_that_hangs_has_the_owner_stay(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, own, mine, target = await owner(w)
        before = kept(w)
        update = await w.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=own)
        )
        why = await w.executor.owner_moves.move(key(w, own), target)
        assert "the runtime is still busy with the update of ns/own/c" in why
        assert w.on(own) == str(mine)
        w.wire.finished(update, 0)
        await w.quiet()
        assert kept(w)["sets"] == before["sets"]
        assert kept(w)["placements"] == before["placements"]

    live(day, call_timeout=0.1)


def test_a_target_cpu_that_goes_offline_is_replaced_afterwards(
    live: Callable[..., None],
) -> None:
    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        update = await w.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=own)
        )
        moving = asyncio.create_task(w.executor.owner_moves.move(key(w, own), target))
        await w.until(lambda: w.executor.state.containers[own].placement.exclusive == target)
        gone = next(iter(target))
        w.machine = without(w.machine, str(gone))
        await w.sync.once()
        assert not w.executor.state.containers[own].placement.replacement, "its CPUs are being changed"
        w.cgroups.sets[own] = mine
        w.wire.finished(update, 0)
        assert await moving == ""
        await w.sync.once()
        await w.quiet()
        placement = w.executor.state.containers[own].placement
        assert placement.exclusive == target
        assert len(placement.replacement) == 1
        assert CpuSet.parse(w.on(own)) == target - CpuSet([gone]) | placement.replacement
        assert CpuSet.parse(w.on(ls)) == w.machine.online - target - placement.replacement
        assert violations(w.executor.state) == []

    live(day)


def test_old_cpus_that_go_offline_during_a_move_that_fails_are_replaced_afterwards(
    live: Callable[..., None],
) -> None:
    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        plain, tries = w.cgroups.write, list[CpuSet]()

        def write(path: str, cpus: Any, mems: Any, *, inner: bool = True) -> bool:
            if path == own and cpus == target:
                w.machine = without(w.machine, str(mine))
            if path == own and (cpus == target or not cpus <= w.machine.online):
                tries.append(cpus)
                raise CgroupError(f"cannot write {path}: EINVAL", errno.EINVAL)
            return bool(plain(path, cpus, mems, inner=inner))

        w.cgroups.write = write
        moving = asyncio.create_task(w.executor.owner_moves.move(key(w, own), target))
        await w.until(lambda: mine in tries)
        await w.sync.once()
        assert await asyncio.wait_for(moving, 10) == f"cannot write {own}: EINVAL"
        assert not w.executor.state.holds
        await w.sync.once()
        await w.quiet()
        assert not [i for i in w.ledger.entries if i.startswith("m/")]
        placement = w.executor.state.containers[own].placement
        assert (placement.exclusive, len(placement.replacement)) == (mine, len(mine))
        assert CpuSet.parse(w.on(own)) == placement.replacement
        assert CpuSet.parse(w.on(ls)) == w.machine.online - placement.replacement
        assert violations(w.executor.state) == []

    live(day)


def test_an_owner_is_moved_once_at_a_time(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, own, _, target = await owner(w)
        first = asyncio.create_task(w.executor.owner_moves.move(key(w, own), target))
        await asyncio.sleep(0)
        assert await w.executor.owner_moves.move(key(w, own), target) == "its CPUs are being changed already"
        assert await first == ""

    live(day)


def test_two_owners_move_at_the_same_time_and_a_third_is_created(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        ids = [await w.run(await w.pod(name), **WHOLE) for name in ("a", "b")]
        mine = [w.executor.state.containers[i].placement.exclusive for i in ids]
        machine = w.executor.state.node.machine
        free = [w.executor.state.pools.shared & machine.cpus_of(machine.nodes_of(cpus)) for cpus in mine]
        targets = [CpuSet(list(free[0])[-2:]), CpuSet(list(free[1])[:2])]
        moves = [w.executor.owner_moves.move(key(w, i), cpus) for i, cpus in zip(ids, targets, strict=True)]
        create = w.begin(await w.pod("c"), **WHOLE)
        *said, call = await asyncio.gather(*moves, create)
        assert said == ["", ""]
        new = w.finish(call, "third")
        await w.quiet()
        state = w.executor.state
        assert [state.containers[i].placement.exclusive for i in ids] == targets
        third = state.containers[new].placement.exclusive
        assert third.isdisjoint(targets[0] | targets[1])
        assert CpuSet.parse(w.on(ls)) == ALL - targets[0] - targets[1] - third
        assert violations(state) == []

    live(day)


class Killed(BaseException):
    """The daemon is killed."""


async def killed_at(w: Any, own: str, target: CpuSet, at: int) -> bool:
    """Kill the daemon before an effect of a move; False where it has no so many."""
    reservations, count = w.executor.reservations, [0]
    left: list[Any] = []
    perform, performed = reservations._perform, reservations._performed

    def step() -> None:
        count[0] += 1
        if count[0] == at:
            left.append((dict(w.ledger.entries), dict(w.cgroups.sets), dict(w.runtime.specs)))
            raise Killed

    def at_once(*args: Any) -> None:
        if not left:
            step()
            perform(*args)

    async def waited_for(*args: Any) -> Any:
        step()
        result = await performed(*args)
        step()
        return result

    reservations._perform, reservations._performed = at_once, waited_for
    moving = asyncio.ensure_future(w.executor.owner_moves.move(key(w, own), target))
    await asyncio.wait([moving])
    if not left:
        assert moving.result() == ""
        return False
    assert isinstance(moving.exception(), Killed)
    await w.close()
    entries, sets, specs = left[0]
    w.ledger.entries.clear()
    w.ledger.entries.update(entries)
    w.cgroups.sets.clear()
    w.cgroups.sets.update(sets)
    w.runtime.specs.clear()
    w.runtime.specs.update(specs)
    return True


def test_a_crash_at_every_step_ends_in_the_old_or_the_new_placement(live: Callable[..., None]) -> None:
    ends = set[str]()

    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        plain, overlaps = w.cgroups.write, list[str]()

        def write(path: str, cpus: Any, mems: Any, *, inner: bool = True) -> bool:
            done = bool(plain(path, cpus, mems, inner=inner))
            on = w.cgroups.sets
            if not on[ls].isdisjoint(on[own]):
                overlaps.append(f"{ls} on {on[ls]}, {own} on {on[own]}")
            return done

        w.cgroups.write = write
        at = 1
        while await killed_at(w, own, target, at):
            w.boot()
            assert violations(w.executor.state) == []
            await w.sync.once()
            w.now += 3
            await w.sync.once()
            await w.until(lambda: not w.executor.state.holds)
            await w.quiet()
            assert overlaps == [], f"after a crash before effect {at}"
            on, state = CpuSet.parse(w.on(own)), w.executor.state
            ends.add(str(on))
            assert on in (mine, target)
            assert state.containers[own].placement.exclusive == on
            assert [held.cpus for held in state.owners.values()] == [on]
            assert CpuSet.parse(w.on(ls)) == ALL - on
            assert w.ledger.entries[f"c/{own}"]["placement"]["own"] == str(on)
            assert not [i for i in w.ledger.entries if i.startswith("m/")]
            assert violations(state) == []
            if on == target:
                assert await w.executor.owner_moves.move(key(w, own), mine) == ""
                await w.quiet()
            at += 1
        assert at > 15
        assert ends == {str(mine), str(target)}

    live(day)


def test_a_crash_at_every_step_after_which_the_old_cpus_are_offline(live: Callable[..., None]) -> None:
    """The owner has others in their place, or the new CPUs, and nothing is held for the move."""
    ends = set[str]()

    async def day(w: Any) -> None:
        ls, own, mine, target = await owner(w)
        whole, at = w.machine, 1
        while await killed_at(w, own, target, at):
            w.machine = without(whole, str(mine))
            w.boot()
            await w.sync.once()
            w.now += 3
            await w.sync.once()
            await w.until(lambda: not w.executor.state.holds)
            await w.sync.once()
            await w.quiet()
            placement = w.executor.state.containers[own].placement
            ends.add(str(placement.exclusive))
            on = target if placement.exclusive == target else placement.replacement
            assert len(on) == len(mine), f"after a crash before effect {at}"
            assert CpuSet.parse(w.on(own)) == on
            assert CpuSet.parse(w.on(ls)) == w.machine.online - on
            assert not [i for i in w.ledger.entries if i.startswith("m/")]
            assert violations(w.executor.state) == []
            w.machine = whole
            await w.sync.once()
            await w.quiet()
            assert CpuSet.parse(w.on(own)) == placement.exclusive
            if placement.exclusive == target:
                assert await w.executor.owner_moves.move(key(w, own), mine) == ""
                await w.quiet()
            at += 1
        assert ends == {str(mine), str(target)}

    live(day)
