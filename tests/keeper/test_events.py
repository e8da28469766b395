from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from proxy.keeper import events
from proxy.keeper.events import Watcher
from proxy.model.errors import UnavailableError


@dataclass
class Heard:
    container_id: str
    kind: str


def test_only_the_end_of_a_live_container_calls_for_attention(live) -> None:
    async def day(w) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        created = await w.create(await w.pod("late", "LS"))
        for event, wanted in (
            (Heard(ls, "started"), False),
            (Heard("unknown", "stopped"), False),
            (Heard(created, "stopped"), False),
            (Heard(ls, "stopped"), True),
            (Heard(ls, "deleted"), True),
        ):
            w.keeper.attention.clear()
            done = threading.Event()

            def watch(heard, stop, event=event, done=done) -> bool:
                if not done.is_set():
                    heard(event)
                    done.set()
                stop.wait(5)
                return True

            watcher = Watcher(w.keeper, watch)
            watcher.start()
            await asyncio.to_thread(done.wait, 5)
            await asyncio.sleep(0.01)
            assert w.keeper.attention.is_set() is wanted, event
            await asyncio.to_thread(watcher.close)

    live(day)


def test_a_runtime_that_goes_away_is_asked_again(live, monkeypatch) -> None:
    monkeypatch.setattr(events, "RETRY_S", 0.01)

    async def day(w) -> None:
        asked = threading.Semaphore(0)

        def watch(heard, stop) -> bool:
            asked.release()
            raise UnavailableError("cannot reach it")

        watcher = Watcher(w.keeper, watch)
        watcher.start()
        for _ in range(3):
            assert await asyncio.to_thread(asked.acquire, timeout=5)
        await asyncio.to_thread(watcher.close)
        assert w.keeper.problems.page() == []

    live(day)
