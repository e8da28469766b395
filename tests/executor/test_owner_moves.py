"""A running owner is moved to other CPUs, and nothing else changes."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from proxy.executor.runtime_sync import RuntimeSync
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


async def owner(world: Any) -> tuple[str, str, CpuSet, CpuSet]:
    """Run a container that shares and an owner; return their ids, the owner's CPUs and as many other CPUs."""
    ls = await world.run(await world.pod("ls", "LS"))
    own = await world.run(await world.pod("own"), **WHOLE)
    mine = world.executor.state.containers[own].placement.exclusive
    near = world.executor.state.node.machine.cpus_of(world.executor.state.node.machine.nodes_of(mine))
    target = CpuSet(list(world.executor.state.pools.shared & near)[-2:])
    await world.quiet()
    return ls, own, mine, target


def key(world: Any, own: str) -> str:
    return str(world.executor.state.containers[own].owner)


def kept(world: Any) -> dict[str, Any]:
    """Return all state that an aborted move must leave unchanged."""
    state = world.executor.state
    return {
        "owners": dict(state.owners),
        "pools": state.pools,
        "placements": {c.id: (c.placement, c.phase) for c in state.containers.values()},
        "holds": dict(state.reservation_cpus),
        "sets": dict(world.cgroups.sets),
        "ledger": {i: dict(entry) for i, entry in world.ledger.entries.items()},
        "specs": dict(world.runtime.specs),
    }


def refuse(world: Any, container_id: str, number: int, cpus: CpuSet, times: int = 1_000_000) -> list[CpuSet]:
    """Make the kernel refuse some CPUs to a container, a number of times."""
    refused: list[CpuSet] = []
    plain = world.cgroups.write

    def write(path: str, wanted: Any, mems: Any, *, adjust_below: bool = True) -> bool:
        if path == container_id and wanted is not None and wanted & cpus and len(refused) < times:
            refused.append(wanted)
            raise CgroupError(f"cannot write {path}: {errno.errorcode[number]}", number)
        return bool(plain(path, wanted, mems, adjust_below=adjust_below))

    world.cgroups.write = write
    return refused


def test_an_owner_is_moved(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        await world.clear_log()
        assert await world.executor.owner_moves.move(key(world, own), target) == ""
        await world.quiet()
        assert (world.on(own), world.on(ls)) == (str(target), str(ALL - target))
        kernel = [line for line in world.log if line.startswith("kernel")]
        assert kernel == [
            f"kernel {ls} {ALL - mine - target}",
            f"kernel {own} {target}",
            f"kernel {ls} {ALL - target}",
        ]
        ledger = [line for line in world.log if line.startswith("ledger")]
        assert world.log.index("ledger +m/") < world.log.index(kernel[0])
        assert world.log.index(kernel[1]) < world.log.index("ledger -m/") < world.log.index(kernel[2]), ledger
        container = world.executor.state.containers[own]
        assert container.placement.exclusive == target
        assert container.placement.reasons[-1] == f"moved from CPUs {mine} to {target}"
        assert world.ledger.entries[f"c/{own}"]["placement"]["own"] == str(target)
        assert not world.executor.state.reservation_cpus
        assert violations(world.executor.state) == []
        assert world.executor.telemetry.value(metrics.OWNERS_MOVED) == 1

    run_scenario(scenario)


def test_the_runtime_gets_the_new_cpus_afterwards(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, own, mine, target = await owner(world)
        runtime_sync = RuntimeSync(
            world.executor,
            world.call_tracker,
            world.executor.quotas,
            world.executor.mems,
            world.executor.unit_properties,
        )
        assert await world.executor.owner_moves.move(key(world, own), target) == ""
        assert world.runtime.specs[own] == str(mine)
        await runtime_sync.finish(10)
        runtime_sync.close()
        assert world.runtime.specs[own] == str(target)

    run_scenario(scenario)


def test_an_owner_is_moved_back_and_forth(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, own, mine, target = await owner(world)
        before = kept(world)
        for cpus in (target, mine, target, mine):
            assert await world.executor.owner_moves.move(key(world, own), cpus) == ""
        await world.quiet()
        assert kept(world)["sets"] == before["sets"]
        assert kept(world)["owners"] == before["owners"]

    run_scenario(scenario)


def test_a_move_to_cpus_that_overlap_the_old_ones(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        half = CpuSet([next(iter(mine)), next(iter(target))])
        assert await world.executor.owner_moves.move(key(world, own), half) == ""
        await world.quiet()
        assert (world.on(own), world.on(ls)) == (str(half), str(ALL - half))

    run_scenario(scenario)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY, errno.EROFS])
def test_a_move_to_a_target_that_cannot_be_freed_changes_nothing(
    run_scenario: Callable[..., None], number: int
) -> None:
    async def scenario(world: Any) -> None:
        ls, own, _, target = await owner(world)
        before = kept(world)
        refuse(world, ls, number, ALL)
        why = await world.executor.owner_moves.move(key(world, own), target)
        assert why == f"cannot write {ls}: {errno.errorcode[number]}"
        await world.quiet()
        assert kept(world) == before
        assert world.executor.telemetry.value(metrics.MOVES_ABORTED) == 1

    run_scenario(scenario)


def test_an_owner_that_cannot_be_written_returns_to_its_old_cpus(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, own, _, target = await owner(world)
        before = kept(world)
        refused = refuse(world, own, errno.EINVAL, target)
        why = await world.executor.owner_moves.move(key(world, own), target)
        assert why == f"cannot write {own}: EINVAL"
        await world.quiet()
        assert refused
        assert kept(world) == before

    run_scenario(scenario)


def test_an_owner_that_cannot_be_written_back_at_once_is_restored_later(
    run_scenario: Callable[..., None],
) -> None:
    """The read fails once the owner is on the target; writing the old set fails twice."""

    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        before = kept(world)
        reads = [0]
        plain = world.cgroups.read

        def read(path: str) -> Any:
            if path == own and world.cgroups.sets[own] == target:
                reads[0] += 1
                raise CgroupError("cannot read", errno.EIO)
            return plain(path)

        world.cgroups.read = read
        refused = refuse(world, own, errno.EBUSY, mine, times=2)
        moving = asyncio.create_task(world.executor.owner_moves.move(key(world, own), target))
        await world.until(lambda: len(refused) == 2)
        assert world.on(ls) == str(ALL - mine - target), "both sets are kept free"
        assert await moving == f"the kernel does not keep it on CPUs {target}"
        await world.quiet()
        assert reads[0]
        assert kept(world) == before

    run_scenario(scenario)


def test_without_a_durable_record_nothing_is_moved(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        from proxy.model.errors import CannotCreateError

        _, own, mine, target = await owner(world)
        plain = world.ledger.write

        def full(changes: Any) -> None:
            raise CannotCreateError("cannot write the ledger: no space left")

        world.ledger.write = full
        await world.clear_log()
        why = await world.executor.owner_moves.move(key(world, own), target)
        assert why == "cannot record the placement: the ledger cannot be written now"
        assert world.on(own) == str(mine)
        assert not [line for line in world.log if line.startswith(f"kernel {own}")]
        world.ledger.write = plain

    run_scenario(scenario)


def test_a_container_that_exits_during_a_move_releases_its_cpus(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        plain = world.cgroups.write
        gone = []

        def write(path: str, cpus: Any, mems: Any, *, adjust_below: bool = True) -> bool:
            if path == own and cpus == target and not gone:
                gone.append(path)
                world.cgroups.end(own)
                world._state(own, "EXITED")
            return bool(plain(path, cpus, mems, adjust_below=adjust_below))

        world.cgroups.write = write
        moving = asyncio.create_task(world.executor.owner_moves.move(key(world, own), target))
        await world.until(lambda: gone)
        await world.sync.once()
        assert await moving == "it has ended, or may no longer be moved"
        await world.quiet()
        assert world.on(ls) == str(ALL)
        assert not world.executor.state.owners
        assert not world.executor.state.reservation_cpus
        assert world.executor.state.containers[own].placement.exclusive == mine
        assert not [i for i in world.ledger.entries if i.startswith("m/")]

    run_scenario(scenario)


def test_a_call_that_carries_the_old_cpus_is_waited_for(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        update = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=own)
        )
        moving = asyncio.create_task(world.executor.owner_moves.move(key(world, own), target))
        await world.until(lambda: world.on(ls) == str(ALL - mine - target))
        await asyncio.sleep(0.05)
        assert world.on(own) == str(mine)
        world.cgroups.sets[own] = mine  # the set that the update carries
        world.wire.finished(update, 0)
        assert await moving == ""
        await world.quiet()
        assert (world.on(own), world.on(ls)) == (str(target), str(ALL - target))

    run_scenario(scenario)


def test_an_owner_is_not_moved_while_a_call_hangs(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, own, mine, target = await owner(world)
        before = kept(world)
        update = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=own)
        )
        world.limit_waits(world.executor.reservations, "_await_own_inflight", 0.1)
        why = await world.executor.owner_moves.move(key(world, own), target)
        assert "the runtime is still busy with the update of ns/own/c" in why
        assert world.on(own) == str(mine)
        world.wire.finished(update, 0)
        await world.quiet()
        assert kept(world)["sets"] == before["sets"]
        assert kept(world)["placements"] == before["placements"]

    run_scenario(scenario)


def test_a_target_cpu_that_goes_offline_is_replaced_afterwards(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        update = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=own)
        )
        moving = asyncio.create_task(world.executor.owner_moves.move(key(world, own), target))
        await world.until(lambda: world.executor.state.containers[own].placement.exclusive == target)
        gone = next(iter(target))
        world.machine = without(world.machine, str(gone))
        await world.sync.once()
        assert not world.executor.state.containers[own].placement.replacement, "its CPUs are being changed"
        world.cgroups.sets[own] = mine
        world.wire.finished(update, 0)
        assert await moving == ""
        await world.sync.once()
        await world.quiet()
        placement = world.executor.state.containers[own].placement
        assert placement.exclusive == target
        assert len(placement.replacement) == 1
        assert CpuSet.parse(world.on(own)) == target - CpuSet([gone]) | placement.replacement
        assert CpuSet.parse(world.on(ls)) == world.machine.online - target - placement.replacement
        assert violations(world.executor.state) == []

    run_scenario(scenario)


def test_old_cpus_that_go_offline_during_a_move_that_fails_are_replaced_afterwards(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        plain, tries = world.cgroups.write, list[CpuSet]()

        def write(path: str, cpus: Any, mems: Any, *, adjust_below: bool = True) -> bool:
            if path == own and cpus == target:
                world.machine = without(world.machine, str(mine))
            if path == own and (cpus == target or not cpus <= world.machine.online):
                tries.append(cpus)
                raise CgroupError(f"cannot write {path}: EINVAL", errno.EINVAL)
            return bool(plain(path, cpus, mems, adjust_below=adjust_below))

        world.cgroups.write = write
        moving = asyncio.create_task(world.executor.owner_moves.move(key(world, own), target))
        await world.until(lambda: mine in tries)
        await world.sync.once()
        assert await asyncio.wait_for(moving, 60) == f"cannot write {own}: EINVAL"
        assert not world.executor.state.reservation_cpus
        await world.sync.once()
        await world.quiet()
        assert not [i for i in world.ledger.entries if i.startswith("m/")]
        placement = world.executor.state.containers[own].placement
        assert (placement.exclusive, len(placement.replacement)) == (mine, len(mine))
        assert CpuSet.parse(world.on(own)) == placement.replacement
        assert CpuSet.parse(world.on(ls)) == world.machine.online - placement.replacement
        assert violations(world.executor.state) == []

    run_scenario(scenario)


def test_an_owner_is_moved_once_at_a_time(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, own, _, target = await owner(world)
        first = asyncio.create_task(world.executor.owner_moves.move(key(world, own), target))
        await asyncio.sleep(0)
        assert (
            await world.executor.owner_moves.move(key(world, own), target)
            == "its CPUs are being changed already"
        )
        assert await first == ""

    run_scenario(scenario)


def test_two_owners_move_at_the_same_time_and_a_third_is_created(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        ids = [await world.run(await world.pod(name), **WHOLE) for name in ("a", "b")]
        mine = [world.executor.state.containers[i].placement.exclusive for i in ids]
        machine = world.executor.state.node.machine
        free = [world.executor.state.pools.shared & machine.cpus_of(machine.nodes_of(cpus)) for cpus in mine]
        targets = [CpuSet(list(free[0])[-2:]), CpuSet(list(free[1])[:2])]
        moves = [
            world.executor.owner_moves.move(key(world, i), cpus) for i, cpus in zip(ids, targets, strict=True)
        ]
        create = world.begin(await world.pod("c"), **WHOLE)
        *reported, call = await asyncio.gather(*moves, create)
        assert reported == ["", ""]
        new = world.finish(call, "third")
        await world.quiet()
        state = world.executor.state
        assert [state.containers[i].placement.exclusive for i in ids] == targets
        third = state.containers[new].placement.exclusive
        assert third.isdisjoint(targets[0] | targets[1])
        assert CpuSet.parse(world.on(ls)) == ALL - targets[0] - targets[1] - third
        assert violations(state) == []

    run_scenario(scenario)


class Killed(BaseException):
    """The daemon is killed."""


async def killed_at(world: Any, own: str, target: CpuSet, at: int) -> bool:
    """Kill the daemon before an effect of a move; return False if the move has fewer effects."""
    reservations, count = world.executor.reservations, [0]
    left: list[Any] = []
    perform, performed = reservations._perform, reservations._performed

    def step() -> None:
        count[0] += 1
        if count[0] == at:
            left.append((dict(world.ledger.entries), dict(world.cgroups.sets), dict(world.runtime.specs)))
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
    moving = asyncio.ensure_future(world.executor.owner_moves.move(key(world, own), target))
    await asyncio.wait([moving])
    if not left:
        assert moving.result() == ""
        return False
    assert isinstance(moving.exception(), Killed)
    await world.close()
    entries, sets, specs = left[0]
    world.ledger.entries.clear()
    world.ledger.entries.update(entries)
    world.cgroups.sets.clear()
    world.cgroups.sets.update(sets)
    world.runtime.specs.clear()
    world.runtime.specs.update(specs)
    return True


def test_a_crash_at_every_step_ends_in_the_old_or_the_new_placement(
    run_scenario: Callable[..., None],
) -> None:
    ends = set[str]()

    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        plain, overlaps = world.cgroups.write, list[str]()

        def write(path: str, cpus: Any, mems: Any, *, adjust_below: bool = True) -> bool:
            done = bool(plain(path, cpus, mems, adjust_below=adjust_below))
            on = world.cgroups.sets
            if not on[ls].isdisjoint(on[own]):
                overlaps.append(f"{ls} on {on[ls]}, {own} on {on[own]}")
            return done

        world.cgroups.write = write
        at = 1
        while await killed_at(world, own, target, at):
            world.boot()
            assert violations(world.executor.state) == []
            await world.sync.once()
            world.now += 3
            await world.sync.once()
            await world.until(lambda: not world.executor.state.reservation_cpus)
            await world.quiet()
            assert overlaps == [], f"after a crash before effect {at}"
            on, state = CpuSet.parse(world.on(own)), world.executor.state
            ends.add(str(on))
            assert on in (mine, target)
            assert state.containers[own].placement.exclusive == on
            assert [held.cpus for held in state.owners.values()] == [on]
            assert CpuSet.parse(world.on(ls)) == ALL - on
            assert world.ledger.entries[f"c/{own}"]["placement"]["own"] == str(on)
            assert not [i for i in world.ledger.entries if i.startswith("m/")]
            assert violations(state) == []
            if on == target:
                assert await world.executor.owner_moves.move(key(world, own), mine) == ""
                await world.quiet()
            at += 1
        assert at > 15
        assert ends == {str(mine), str(target)}

    run_scenario(scenario)


def test_a_crash_at_every_step_after_which_the_old_cpus_are_offline(
    run_scenario: Callable[..., None],
) -> None:
    """The owner has replacements or the new CPUs, and no CPU stays reserved for the move."""
    ends = set[str]()

    async def scenario(world: Any) -> None:
        ls, own, mine, target = await owner(world)
        whole, at = world.machine, 1
        while await killed_at(world, own, target, at):
            world.machine = without(whole, str(mine))
            world.boot()
            await world.sync.once()
            world.now += 3
            await world.sync.once()
            await world.until(lambda: not world.executor.state.reservation_cpus)
            await world.sync.once()
            if world.executor.state.containers[own].placement.exclusive == mine:
                await world.until(lambda: world.executor.state.containers[own].placement.replacement)
            await world.quiet()
            placement = world.executor.state.containers[own].placement
            ends.add(str(placement.exclusive))
            on = target if placement.exclusive == target else placement.replacement
            assert len(on) == len(mine), f"after a crash before effect {at}"
            assert CpuSet.parse(world.on(own)) == on
            assert CpuSet.parse(world.on(ls)) == world.machine.online - on
            assert not [i for i in world.ledger.entries if i.startswith("m/")]
            assert violations(world.executor.state) == []
            world.machine = whole
            await world.sync.once()
            await world.quiet()
            assert CpuSet.parse(world.on(own)) == placement.exclusive
            if placement.exclusive == target:
                assert await world.executor.owner_moves.move(key(world, own), mine) == ""
                await world.quiet()
            at += 1
        assert ends == {str(mine), str(target)}

    run_scenario(scenario)
