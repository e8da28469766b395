"""Completed updates are read back together, unless a container must have other CPUs by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.model.idset import CpuSet

MANY = 12


def jobs_of(world: Any) -> list[list[str]]:
    """Record which containers are compared in each job of the kernel worker."""
    jobs: list[list[str]] = []
    enforce = world.executor.drift.write

    def noted(ids: Any) -> Any:
        jobs.append(list(ids))
        return enforce(jobs[-1])

    world.executor.writes.write_with(noted)
    return jobs


def test_updates_that_land_together_are_read_together(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ids = [await world.run(await world.pod(f"ls{number}", "LS")) for number in range(MANY)]
        await world.quiet()
        jobs = jobs_of(world)
        calls = [world.executor.inflight_calls.track(i, CpuSet.parse("0-15")) for i in ids]
        for call in calls:
            world.cgroups.sets[call.container_id] = CpuSet.parse("0-3")  # the runtime writes another set
            world.call_tracker.completed(call, call.carries)
        await world.until(lambda: {str(world.on(i)) for i in ids} == {"0-15"})
        await world.quiet()
        assert {i for job in jobs for i in job} == set(ids)
        assert len(jobs) <= 3, "not one job for each"

    run_scenario(scenario)


def test_a_container_with_a_newer_set_does_not_wait(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ids = [await world.run(await world.pod(f"ls{number}", "LS")) for number in range(2)]
        await world.quiet()
        jobs = jobs_of(world)
        world.executor.drift._is_comparing = (
            True  # as if one comparison were in progress, and the next far off
        )
        for carried in (CpuSet.parse("0-3"), None):
            call = world.executor.inflight_calls.track(ids[0], carried or CpuSet.parse("0-15"))
            world.cgroups.sets[ids[0]] = CpuSet.parse("0-3")
            world.call_tracker.completed(call, carried)
            await world.until(lambda: str(world.on(ids[0])) == "0-15")
        assert jobs == [[ids[0]]] * 2
        call = world.executor.inflight_calls.track(ids[1], CpuSet.parse("0-15"))
        world.call_tracker.completed(call, call.carries)
        await world.quiet()
        assert jobs == [[ids[0]]] * 2
        world.executor.drift._is_comparing = False
        world.executor.drift.compare_soon("unknown", ())
        await world.until(lambda: jobs[2:] == [[ids[1]]])

    run_scenario(scenario)
