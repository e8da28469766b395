"""When a worker counts as stuck, what is reported, and when the watchdog gets no sign of life any more."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from msgspec import structs

from proxy.executor import context as context_module
from proxy.executor import kernel_comparison as comparison_module
from proxy.executor import worker_health as module
from proxy.executor.status_data import node_page
from proxy.executor.worker_health import RESTART_S, STEADY_S, Health
from tests.testkit.captured_log import telemetry


class Played:
    """A worker with a running time that a test sets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self.waiting = 3

    def running_s(self) -> float:
        return self.seconds


class Watch:
    def __init__(self) -> None:
        self.now = 1000.0
        self.logged: list[str] = []
        self.health = Health(telemetry(self.logged), lambda: None, lambda: self.now)
        self.kernel, self.fact_lookup = Played("kernel"), Played("fact-lookup")
        self.health.watch(self.kernel, 10, critical=True)
        self.health.watch(self.fact_lookup, 60)


def test_a_stuck_worker_is_reported_once_and_its_recovery_too() -> None:
    world = Watch()
    world.kernel.seconds = 9.9
    world.health.check()
    assert (world.logged, world.health.stuck()) == ([], {})
    for world.kernel.seconds in (10.0, 12.0, 14.0):
        world.health.check()
    assert world.logged == ["a worker thread is stuck in one job worker=kernel seconds=10"]
    assert world.health.stuck() == {"kernel": 14.0}
    assert world.health.page() == {
        "kernel": {"stuck_s": 14.0, "waiting": 3},
        "fact-lookup": {"stuck_s": 0.0, "waiting": 3},
    }
    world.kernel.seconds = 0.0
    world.health.check()
    world.health.check()
    assert world.logged[1:] == [
        'resolved problem="a worker thread is stuck in one job" worker=kernel seconds=10',
        "a worker thread continues worker=kernel seconds=14",
    ]
    assert world.health.stuck() == {}


def test_a_worker_that_is_not_vital_is_reported_and_leaves_the_node_ready() -> None:
    world = Watch()
    world.fact_lookup.seconds = 2 * RESTART_S
    world.now += 10 * RESTART_S
    world.health.check()
    assert world.logged == ["a worker thread is stuck in one job worker=fact-lookup seconds=60"]
    assert world.health.stuck() == {}
    assert not world.health.may_restart()


@pytest.mark.parametrize(
    ("worked", "stuck", "restart"),
    [
        (STEADY_S + 1, RESTART_S + 1, True),
        (STEADY_S + 1, RESTART_S - 1, False),
        (STEADY_S - 1, RESTART_S + 1, False),
        (STEADY_S - 1, 100 * RESTART_S, False),
    ],
)
def test_a_restart_is_requested_late_and_not_if_stuck_from_the_start(
    worked: float, stuck: float, restart: bool
) -> None:
    world = Watch()
    world.now += worked + stuck
    world.kernel.seconds = stuck
    assert world.health.may_restart() is restart


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (module, context_module, comparison_module):
        monkeypatch.setattr(place, "STUCK_S", 0.1)


def test_a_stuck_kernel_holds_up_owners_only_and_heals(run_scenario: Any, hasty: None) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        one, two = await world.pod("one", "LSE", "", "0-1"), await world.pod("two", "LSE", "", "2-3")
        gate, inside, write = threading.Event(), threading.Event(), world.cgroups.write

        def stuck(*args: Any, **more: Any) -> bool:
            inside.set()
            gate.wait(60)
            return bool(write(*args, **more))

        world.cgroups.write = stuck
        options = world.executor.options
        world.executor.options = structs.replace(options, call_timeout=0.3)
        refused = await world.begin(one)
        world.executor.options = options
        assert await asyncio.to_thread(inside.wait, 60)
        assert refused.refused is not None
        assert "in time" in refused.refused[1]
        world.wire.finished(refused, None)
        await world.until(world.executor.health.stuck)
        world.executor.health.check()
        page = node_page(world.executor)
        assert page["ready"] is False
        assert page["workers"]["kernel"]["stuck_s"] > 0
        assert any("a worker thread is stuck in one job worker=kernel" in p["what"] for p in page["problems"])
        more = await world.begin(await world.pod("more", "LS"))
        assert more.refused is None, "a container that only shares needs no kernel write"
        world.finish(more, "more")
        await world.executor.ledger_writer.flush()
        assert "c/more" in world.ledger.entries, "the ledger is not behind the kernel worker"
        await asyncio.wait_for(world.sync.once(), 60)  # nor is a reconcile

        world.cgroups.write = write
        gate.set()
        await world.until(lambda: not world.executor.health.stuck())
        world.executor.reconcile_requested.clear()
        world.executor.health.check()
        assert world.executor.reconcile_requested.is_set(), "what was written late may be outdated"
        await world.sync.once()
        await world.until(lambda: node_page(world.executor)["ready"])
        call = await world.begin(two)
        assert call.refused is None
        world.finish(call, "two")
        assert world.on(ls) == "0-1,4-15"
        world.check()

    run_scenario(scenario)


def test_a_first_reconcile_ends_although_the_kernel_does_not_answer(run_scenario: Any, hasty: None) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.executor.ledger_writer.flush()
        await world.close()
        world.boot()
        gate, read = threading.Event(), world.executor.cpuset_writer.write_all
        world.executor.cpuset_writer.write_all = lambda *args: gate.wait(60) and read(*args)
        await asyncio.wait_for(world.sync.once(), 60)
        assert world.executor.reconciled.is_set(), "creates wait for that"
        gate.set()
        await world.sync.once()
        assert world.on(ls) == "0-15"
        world.check()

    run_scenario(scenario)
