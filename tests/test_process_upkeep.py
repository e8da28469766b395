"""Watchdog notifications stop while workers are stuck, and unused memory is released."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from proxy import memory_trim, process_upkeep
from proxy.process_upkeep import GROWN_BYTES, keep_memory_small, ping_watchdog
from proxy.telemetry.metrics import RECONCILES
from tests.testkit.captured_log import telemetry
from tests.testkit.waiting import until

if TYPE_CHECKING:
    import pytest


class Notified:
    """The side of systemd; it removes the interval after some rounds, which ends the loop."""

    def __init__(self, health: Stuck, rounds: int) -> None:
        self.health, self.rounds = health, rounds
        self.sent: list[str] = []

    @property
    def ping_interval_s(self) -> float | None:
        self.rounds -= 1
        return 0.0 if self.rounds >= 0 else None

    def ping(self) -> None:
        self.sent.append("ping")

    def status(self, text: str) -> None:
        self.sent.append(text)


class Stuck:
    """Workers that are stuck in some rounds: for how many seconds, and whether a restart is due."""

    def __init__(self, *rounds: tuple[float, bool]) -> None:
        self.rounds, self.at = rounds, -1

    def stuck(self) -> dict[str, float]:
        self.at += 1
        seconds = self.rounds[min(self.at, len(self.rounds) - 1)][0]
        return {"kernel": seconds} if seconds else {}

    def may_restart(self) -> bool:
        return self.rounds[min(self.at, len(self.rounds) - 1)][1]


def sent(*rounds: tuple[float, bool]) -> list[str]:
    health: Any = Stuck(*rounds)
    notified: Any = Notified(health, 2 * len(rounds))
    asyncio.run(asyncio.wait_for(ping_watchdog(notified, health, lambda: "well"), 60))
    found: list[str] = notified.sent
    return found


def test_a_stuck_worker_and_its_recovery_are_reported() -> None:
    stuck = "the kernel worker has been stuck for 9 s"
    assert sent((0, False), (9, False), (0, False)) == ["ping", "ping", stuck, "ping", "well"]


def test_no_watchdog_notification_is_sent_when_a_restart_is_due() -> None:
    assert sent((0, False), (400, True), (0, False)) == [
        "ping",
        "the kernel worker has been stuck for 400 s",
        "ping",
        "well",
    ]


def test_memory_is_released_after_a_reconcile_and_after_growth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed: list[str] = []
    monkeypatch.setattr(memory_trim, "collect_and_freeze", lambda: trimmed.append("freeze"))
    monkeypatch.setattr(memory_trim, "trim", lambda: trimmed.append("trim"))
    monkeypatch.setattr(memory_trim, "drop_clean_pages", lambda: trimmed.append("pages"))
    for name in ("SETTLED_S", "EARLY_CHECK_S", "CHECK_S"):
        monkeypatch.setattr(process_upkeep, name, 0.0)

    resident = 36 << 20
    monkeypatch.setattr(memory_trim, "resident_bytes", lambda: resident)

    async def scenario() -> None:
        nonlocal resident
        port, reconciled = telemetry(), asyncio.Event()
        executor: Any = SimpleNamespace(reconciled=reconciled, telemetry=port)
        task = asyncio.create_task(keep_memory_small(executor))
        await asyncio.sleep(0.05)
        assert trimmed == [], "the first comparison is not done"
        reconciled.set()
        await until(lambda: len(trimmed) >= 3)
        assert trimmed == ["freeze", "trim", "pages"]
        port.count(RECONCILES)
        await until(lambda: len(trimmed) >= 5)
        assert trimmed == ["freeze", "trim", "pages", "trim", "pages"]
        resident += GROWN_BYTES
        await asyncio.sleep(0.2)
        assert len(trimmed) == 5, "the growth is small"
        resident += 1
        await until(lambda: len(trimmed) >= 9)
        await asyncio.sleep(0.2)
        task.cancel()

    asyncio.run(scenario())
    assert trimmed == ["freeze", *["trim", "pages"] * 4], "memory that cannot be released is tried only twice"
