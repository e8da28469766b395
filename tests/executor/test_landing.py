"""What a landed update brought is read back: together with others, unless something else is wanted by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.model.idset import CpuSet

MANY = 12


def jobs_of(w: Any) -> list[list[str]]:
    """Note which containers are compared in each job of the kernel's worker."""
    jobs: list[list[str]] = []
    enforce = w.executor.drift.enforce

    def noted(ids: Any) -> Any:
        jobs.append(list(ids))
        return enforce(jobs[-1])

    w.executor.writes.write_with(noted)
    return jobs


def test_updates_that_land_together_are_read_together(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ids = [await w.run(await w.pod(f"ls{number}", "LS")) for number in range(MANY)]
        await w.quiet()
        jobs = jobs_of(w)
        flights = [w.executor.calls.depart(i, CpuSet.parse("0-15")) for i in ids]
        for flight in flights:
            w.cgroups.sets[flight.container_id] = CpuSet.parse(
                "0-3"
            )  # the runtime makes something else of it
            w.start_update.landed(flight, flight.carries)
        await w.until(lambda: {str(w.on(i)) for i in ids} == {"0-15"})
        await w.quiet()
        assert {i for job in jobs for i in job} == set(ids)
        assert len(jobs) <= 3, "not one for each"

    live(day)


def test_a_container_with_a_newer_set_does_not_wait(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ids = [await w.run(await w.pod(f"ls{number}", "LS")) for number in range(2)]
        await w.quiet()
        jobs = jobs_of(w)
        w.executor.drift._looks = True  # as if one were under way, and the next far off
        for carried in (CpuSet.parse("0-3"), None):
            flight = w.executor.calls.depart(ids[0], carried or CpuSet.parse("0-15"))
            w.cgroups.sets[ids[0]] = CpuSet.parse("0-3")
            w.start_update.landed(flight, carried)
            await w.until(lambda: str(w.on(ids[0])) == "0-15")
        assert jobs == [[ids[0]]] * 2
        flight = w.executor.calls.depart(ids[1], CpuSet.parse("0-15"))
        w.start_update.landed(flight, flight.carries)
        await w.quiet()
        assert jobs == [[ids[0]]] * 2
        w.executor.drift._looks = False
        w.executor.drift.suspect("unknown", ())
        await w.until(lambda: jobs[2:] == [[ids[1]]])

    live(day)
