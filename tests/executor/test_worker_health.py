"""When a worker counts as stuck, what is reported, and when the watchdog gets no sign of life any more."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy.executor import context as context_module
from proxy.executor import reconciler as sync_module
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
        self.kernel, self.fact_lookup = Played("kernel"), Played("scout")
        self.health.watch(self.kernel, 10, vital=True)
        self.health.watch(self.fact_lookup, 60)


def test_a_stuck_worker_is_reported_once_and_its_recovery_too() -> None:
    w = Watch()
    w.kernel.seconds = 9.9
    w.health.look()
    assert (w.logged, w.health.stuck()) == ([], {})
    for w.kernel.seconds in (10.0, 12.0, 14.0):
        w.health.look()
    assert w.logged == ["a worker thread is stuck in one job worker=kernel seconds=10"]
    assert w.health.stuck() == {"kernel": 14.0}
    assert w.health.page() == {
        "kernel": {"stuck_s": 14.0, "waiting": 3},
        "scout": {"stuck_s": 0.0, "waiting": 3},
    }
    w.kernel.seconds = 0.0
    w.health.look()
    w.health.look()
    assert w.logged[1:] == [
        'resolved problem="a worker thread is stuck in one job" worker=kernel seconds=10',
        "a worker thread continues worker=kernel seconds=14",
    ]
    assert w.health.stuck() == {}


def test_a_worker_that_is_not_vital_is_reported_and_leaves_the_node_ready() -> None:
    w = Watch()
    w.fact_lookup.seconds = 2 * RESTART_S
    w.now += 10 * RESTART_S
    w.health.look()
    assert w.logged == ["a worker thread is stuck in one job worker=scout seconds=60"]
    assert w.health.stuck() == {}
    assert not w.health.may_restart()


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
    w = Watch()
    w.now += worked + stuck
    w.kernel.seconds = stuck
    assert w.health.may_restart() is restart


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (module, context_module, sync_module):
        monkeypatch.setattr(place, "STUCK_S", 0.1)


def test_a_stuck_kernel_holds_up_owners_only_and_heals(live: Any, hasty: None) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        one, two = await w.pod("one", "LSE", "", "0-1"), await w.pod("two", "LSE", "", "2-3")
        gate, inside, write = threading.Event(), threading.Event(), w.cgroups.write

        def stuck(*args: Any, **more: Any) -> bool:
            inside.set()
            gate.wait(60)
            return bool(write(*args, **more))

        w.cgroups.write = stuck
        refused = await w.begin(one)
        assert inside.is_set()
        assert refused.refused is not None
        assert "in time" in refused.refused[1]
        w.wire.finished(refused, None)
        await w.until(w.executor.health.stuck)
        w.executor.health.look()
        page = node_page(w.executor)
        assert page["ready"] is False
        assert page["workers"]["kernel"]["stuck_s"] > 0
        assert any("a worker thread is stuck in one job worker=kernel" in p["what"] for p in page["problems"])
        more = await w.begin(await w.pod("more", "LS"))
        assert more.refused is None, "a container that only shares needs no kernel write"
        w.finish(more, "more")
        await w.executor.journal.flush()
        assert "c/more" in w.ledger.entries, "the ledger is not behind the kernel worker"
        await asyncio.wait_for(w.sync.once(), 60)  # nor is a comparison with the runtime

        w.cgroups.write = write
        gate.set()
        await w.until(lambda: not w.executor.health.stuck())
        w.executor.attention.clear()
        w.executor.health.look()
        assert w.executor.attention.is_set(), "what was written late may be outdated"
        await w.sync.once()
        assert node_page(w.executor)["ready"] is True
        call = await w.begin(two)
        assert call.refused is None
        w.finish(call, "two")
        assert w.on(ls) == "0-1,4-15"
        w.check()

    live(day, call_timeout=0.3)


def test_a_first_reconcile_ends_although_the_kernel_does_not_answer(live: Any, hasty: None) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.executor.journal.flush()
        await w.close()
        w.boot()
        gate, read = threading.Event(), w.executor.enforcer.enforce_all
        w.executor.enforcer.enforce_all = lambda *args: gate.wait(60) and read(*args)
        await asyncio.wait_for(w.sync.once(), 60)
        assert w.executor.reconciled.is_set(), "creates wait for that"
        gate.set()
        await w.sync.once()
        assert w.on(ls) == "0-15"
        w.check()

    live(day)
