"""The first comparison after a start: no container is moved before all running ones are known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.idset import CpuSet


def widest(log: list[str], container: str) -> CpuSet:
    """Give all CPUs that were written to the kernel for a container."""
    sets = [CpuSet.parse(line.split()[2]) for line in log if line.startswith(f"kernel {container} ")]
    return CpuSet(cpu for cpus in sets for cpu in cpus)


async def restarted(w: Any, unknown: str) -> threading.Event:
    """Start again with a ledger that lacks an owner; the runtime returns details when the event is set."""
    await w.close()
    del w.ledger.entries[f"c/{unknown}"]
    w.runtime.details[unknown] = RuntimeDetail(f"/kubepods/podnew/{unknown}", cpuset_cpus="4-5")
    w.boot()
    w.log.clear()
    tell, detail = threading.Event(), w.runtime.detail

    def slow(container_id: str) -> RuntimeDetail:
        assert tell.wait(60)
        found: RuntimeDetail = detail(container_id)
        return found

    w.runtime.detail = slow
    return tell


def test_no_container_grows_before_unrecorded_owners_are_known(live: Callable[..., None]) -> None:
    """Its record could not be written, on a full disk say; and another owner is gone."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        old = await w.run(await w.pod("old", "LSE", cpus="2-3"))
        new = await w.run(await w.pod("new", "LSE", cpus="4-5"))
        assert w.on(ls) == "0-1,6-15"
        w.end(old)
        del w.runtime.containers[old]
        tell = await restarted(w, new)
        first = asyncio.create_task(w.sync.once())
        await w.until(lambda: old not in w.executor.state.containers)
        await w.quiet()
        assert w.on(ls) == "0-1,6-15"
        tell.set()
        await first
        await w.quiet()
        assert (w.on(ls), w.on(new)) == ("0-3,6-15", "4-5")
        assert not widest(w.log, ls) & CpuSet.parse("4-5")
        w.check()

    live(day)


def test_what_was_put_off_is_done(live: Callable[..., None]) -> None:
    """Also where the first comparison has looked already."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.executor.reconciled.clear()
        w.cgroups.sets[ls] = CpuSet.parse("0-3")
        w.executor.writes.later([ls, "gone"])
        await w.quiet()
        assert w.on(ls) == "0-3"
        w.executor.writes.in_step()
        await w.until(lambda: w.on(ls) == "0-15")

    live(day)
