"""The event loop gets turns while containers are adopted and compared."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proxy.executor.background import TimeSlices
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.idset import CpuSet

MANY = 1000
BOUND_S = 0.05
"""Of CPU time of the loop's thread between two turns; on an idle machine it is 5 to 6 ms."""


@pytest.fixture(autouse=True)
def nothing_of_other_tests_to_collect() -> Iterator[None]:
    """Keep the objects of other tests out of garbage collections, as the daemon does with its modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Probe:
    """Measures the CPU time between turns: other processes may keep the machine busy."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.turns = 0

    async def run(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            before, now = time.thread_time(), before
            self.longest, self.turns = max(self.longest, before - now), self.turns + 1


def populate(world: Any) -> None:
    for n in range(MANY):
        qos, cpus = ("LSE", str(2 + n)) if n < 4 else ("LS", "0-15")
        status = {"scheduling.koordinator.sh/resource-status": f'{{"cpuset":"{cpus}"}}'} if n < 4 else {}
        labels = {"koordinator.sh/qosClass": qos}
        world.runtime.pods[f"s{n}"] = RuntimePod(f"s{n}", f"u{n}", "ns", f"p{n}", 0, True, labels, status)
        world.runtime.containers[f"c{n}"] = RuntimeContainer(f"c{n}", f"s{n}", "c", 0, "RUNNING")
        world.runtime.details[f"c{n}"] = RuntimeDetail(f"/kubepods/burstable/podu{n}/c{n}", cpuset_cpus=cpus)
        world.cgroups.sets[f"c{n}"] = CpuSet.parse(cpus)


def test_a_first_reconcile_of_a_thousand_containers(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        populate(world)
        for again in (False, True):
            if again:
                await world.close()
                world.boot()
            probe = Probe()
            task = asyncio.create_task(probe.run())
            await world.sync.once()
            await world.quiet()
            task.cancel()
            assert len(world.executor.state.containers) == MANY
            assert probe.longest < BOUND_S
            world.check()

    run_scenario(scenario, reconciled=False)


def test_other_work_continues_while_containers_are_adopted(
    run_scenario: Callable[..., None], monkeypatch: Any
) -> None:
    """With an empty slice the loop gets a turn at each container, and changes meanwhile are seen."""

    async def scenario(world: Any) -> None:
        monkeypatch.setattr("proxy.executor.background.SLICE_S", 0.0)
        monkeypatch.setattr(TimeSlices.__init__, "__defaults__", (0.0, time.perf_counter))
        populate(world)
        probe, ended = Probe(), list[str]()

        async def end_some() -> None:
            """Containers that end before they are adopted must not be revived."""
            while len(world.executor.state.containers) < 20:
                await asyncio.sleep(0)
            for n in (990, 995, 0):
                world.executor.lifecycle.removed([f"c{n}"])
                world.cgroups.sets.pop(f"c{n}")
                ended.append(f"c{n}")

        task, other = asyncio.create_task(probe.run()), asyncio.create_task(end_some())
        await world.sync.once()
        await other
        task.cancel()
        assert probe.turns > MANY
        assert not world.executor.state.containers.keys() & set(ended)
        assert len(world.executor.state.containers) == MANY - len(ended)

    run_scenario(scenario, reconciled=False)


def test_the_loop_gets_a_turn_when_the_time_slice_is_used_up() -> None:
    now = 0.0

    async def whole() -> list[int]:
        nonlocal now
        turns, given, loops = TimeSlices(5.0, lambda: now), list[int](), 0

        async def count() -> None:
            nonlocal loops
            while True:
                loops += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count())
        for step in range(12):
            now = float(step)
            before = loops
            await turns.turn()
            if loops != before:
                given.append(step)
        task.cancel()
        return given

    assert asyncio.run(whole()) == [5, 10]
