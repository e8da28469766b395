"""The first reconcile after a start: no container is moved before all running ones are known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from msgspec import structs

from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.idset import CpuSet


def widest(log: list[str], container: str) -> CpuSet:
    """Return all CPUs that were written to the kernel for a container."""
    sets = [CpuSet.parse(line.split()[2]) for line in log if line.startswith(f"kernel {container} ")]
    return CpuSet(cpu for cpus in sets for cpu in cpus)


async def restarted(world: Any, unknown: str, **stale: Any) -> threading.Event:
    """Restart with a ledger that lacks an owner; the runtime returns details when the event is set.

    Args:
        world: The node.
        unknown: The container that the ledger lacks.
        stale: Records that the ledger still has.
    """
    await world.close()
    del world.ledger.entries[f"c/{unknown}"]
    world.ledger.entries.update(stale)
    world.runtime.details[unknown] = RuntimeDetail(f"/kubepods/podnew/{unknown}", cpuset_cpus="4-5")
    world.boot()
    await world.clear_log()
    report, detail = threading.Event(), world.runtime.detail

    def slow(container_id: str) -> RuntimeDetail:
        assert report.wait(60)
        found: RuntimeDetail = detail(container_id)
        return found

    world.runtime.detail = slow
    return report


def test_no_container_grows_before_unrecorded_owners_are_known(run_scenario: Callable[..., None]) -> None:
    """The record of one owner could not be written (say, on a full disk), and another owner is gone."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        old = await world.run(await world.pod("old", "LSE", cpus="2-3"))
        new = await world.run(await world.pod("new", "LSE", cpus="4-5"))
        assert world.on(ls) == "0-1,6-15"
        world.end(old)
        del world.runtime.containers[old]
        report = await restarted(world, new)
        first = asyncio.create_task(world.sync.once())
        await world.until(lambda: old not in world.executor.state.containers)
        await world.quiet()
        assert world.on(ls) == "0-1,6-15"
        report.set()
        await first
        await world.quiet()
        assert (world.on(ls), world.on(new)) == ("0-3,6-15", "4-5")
        assert not widest(world.log, ls) & CpuSet.parse("4-5")
        world.check()

    run_scenario(scenario)


def test_a_container_is_adopted_although_a_create_of_an_earlier_attempt_was_lost(
    run_scenario: Callable[..., None],
) -> None:
    """The ledger could not be written since the earlier create was in flight."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        sandbox = await world.pod("new", "LSE", cpus="4-5")
        call = await world.begin(sandbox)
        lost = {key: record for key, record in world.ledger.entries.items() if key.startswith("i/")}
        assert lost
        world.wire.finished(call, 2)
        new = await world.run(sandbox)
        world.runtime.containers[new] = structs.replace(world.runtime.containers[new], attempt=1)
        (await restarted(world, new, **lost)).set()
        await world.sync.once()
        await world.quiet()
        assert new in world.executor.state.containers
        assert (world.on(ls), world.on(new)) == ("0-3,6-15", "4-5")

    run_scenario(scenario)


def test_postponed_writes_are_done_after_the_first_reconcile(run_scenario: Callable[..., None]) -> None:
    """The first reconcile may have handled the container already."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.executor.reconciled.clear()
        world.cgroups.sets[ls] = CpuSet.parse("0-3")
        world.executor.writes.write_soon([ls, "gone"])
        await world.quiet()
        assert world.on(ls) == "0-3"
        world.executor.writes.mark_reconciled()
        await world.until(lambda: world.on(ls) == "0-15")

    run_scenario(scenario)
