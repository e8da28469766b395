"""No task of the daemon's ends by a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.engine.call_events import SavedCpusLearned
from proxy.executor import tasks
from proxy.executor.tasks import run_with_restarts
from proxy.model.backoff import Backoff
from proxy.telemetry import metrics


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were made; none takes time."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def nap(seconds: float) -> None:
        found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(tasks.asyncio, "sleep", nap)
    return found


def run(faults: list[BaseException | None], reported: list[BaseException]) -> None:
    left = iter(faults)

    async def work() -> None:
        fault = next(left)
        if fault is not None:
            raise fault

    asyncio.run(run_with_restarts(work, reported.append))


def test_a_task_is_restarted_after_longer_and_longer_pauses(pauses: list[float]) -> None:
    reported: list[BaseException] = []
    run([ValueError("odd"), *[KeyError("x")] * 11, None], reported)
    assert len(reported) == 12
    assert isinstance(reported[0], ValueError)
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == tasks.PAUSES.longest


def test_a_steady_task_is_restarted_at_once(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PAUSES", Backoff(0.1, 60.0, steady=0.0))
    run([ValueError("odd")] * 3 + [None], [])
    assert pauses == [0.1] * 3


def test_what_it_waited_for_was_cancelled(pauses: list[float]) -> None:
    reported: list[BaseException] = []
    run([asyncio.CancelledError(), None], reported)
    assert len(reported) == 1


def test_a_cancelled_task_ends() -> None:
    async def scenario() -> None:
        reported: list[BaseException] = []
        task = asyncio.create_task(run_with_restarts(asyncio.Event().wait, reported.append))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not reported

    asyncio.run(scenario())


def test_settling_continues_after_an_internal_fault(run_scenario: Callable[..., None]) -> None:
    """One container that causes a fault must not keep the moves of others from being made lasting."""

    async def scenario(world: Any) -> None:
        odd, good = (
            await world.run(await world.pod("odd", "LS")),
            await world.run(await world.pod("good", "LS")),
        )
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        await world.quiet()
        carried = world.executor.quotas.carried

        def broken(container: Any) -> int:
            if container.id == odd:
                raise ZeroDivisionError("odd")
            return int(carried(container))

        world.executor.quotas.carried = broken
        for container_id in (odd, good):
            world.executor.store.handle(SavedCpusLearned(container_id, None))
            world.executor.settle_later(container_id)
        settler = world.make_settler()
        world.executor.tend(settler.run)
        await world.until(lambda: world.runtime.specs[good] == "4-15")
        assert world.executor.telemetry.value(metrics.TASKS_RESTARTED) == 1
        assert any("ZeroDivisionError" in problem["what"] for problem in world.executor.telemetry.problems())
        settler.close()

    run_scenario(scenario, settle_per_second=1000)
