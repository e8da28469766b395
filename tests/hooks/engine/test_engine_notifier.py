"""Notifications of hooks: in order, each hook at its own pace, with a bounded queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxy.hooks.answers import Adjustment, Update
from proxy.hooks.engine import engine as engine_module
from proxy.hooks.engine import notifier
from proxy.hooks.events import Configure, PostCreateContainer, Shutdown, Synchronize
from proxy.hooks.hook import Hook, HookFailurePolicy

if TYPE_CHECKING:
    import pytest

POST = "post_create_container"


def hook(name: str, handler: Callable[..., Any], point: str = POST, **fields: Any) -> Hook:
    return Hook(name, f"/hooks/{name}.py", {point: handler}, **{"timeout": 30.0} | fields)


def numbered(setup: Any, number: int) -> PostCreateContainer:
    event = setup.created()
    event.container.labels["n"] = number
    return PostCreateContainer(event.pod, event.container, event.decision)


def of(event: Any) -> int:
    return int(event.container.labels["n"])


def shares(container: str, count: int) -> Adjustment:
    return Adjustment(updates={container: Update(cpu_shares=count)})


def test_hooks_are_notified_in_order_and_a_slow_one_delays_only_itself(setup: Any) -> None:
    quick: list[int] = []
    slow: list[int] = []

    def slowly(event: Any) -> None:
        setup.gate.wait(30)
        slow.append(of(event))

    async def coroutine(event: Any) -> None:
        await asyncio.sleep(0)
        quick.append(of(event))

    async def scenario() -> None:
        setup.use(hook("10-slow", slowly), hook("20-quick", coroutine))
        for number in range(50):
            setup.engine.notify(numbered(setup, number))
        await setup.until(lambda: len(quick) == 50)
        assert slow == []
        assert setup.report("10-slow").waiting == 49
        setup.gate.set()
        await setup.until(lambda: len(slow) == 50)
        assert slow == quick == list(range(50))

    setup.run(scenario)


def test_events_that_do_not_fit_are_dropped_counted_and_reported_once(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "MOST_WAITING", 5)
    reported: list[int] = []

    def slowly(event: Any) -> None:
        setup.gate.wait(30)
        reported.append(of(event))

    async def scenario() -> None:
        setup.use(hook("10-slow", slowly))
        for number in range(10):
            setup.engine.notify(numbered(setup, number))
        assert setup.report("10-slow").lost == 4
        assert setup.logged == ["hook 10-slow: 5 events wait for it: further events are dropped"]
        setup.gate.set()
        await setup.until(lambda: len(reported) == 6)
        assert reported == list(range(6))

    setup.run(scenario)


def test_updates_are_passed_on_with_their_owner(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", lambda _: shares("other", 7)))
        setup.engine.notify(setup.created())
        await setup.until(lambda: setup.updates)
        assert setup.updates == [({"other": Update(cpu_shares=7)}, {"updates[other].cpu_shares": "10-a"})]

    setup.run(scenario)


def test_two_updates_conflict_within_one_event_only(setup: Any) -> None:
    async def scenario() -> None:
        setup.use(hook("10-a", lambda _: shares("other", 7)), hook("20-b", lambda _: shares("other", 8)))
        setup.engine.notify(setup.created())
        await setup.until(lambda: setup.logged)
        assert len(setup.updates) == 1
        assert "cannot set updates[other].cpu_shares: hook" in setup.logged[0]
        assert setup.report("10-a").conflicts + setup.report("20-b").conflicts == 1
        setup.engine.notify(setup.created())
        await setup.until(lambda: len(setup.logged) == 2)
        assert len(setup.updates) == 2

    setup.run(scenario)


def test_a_failed_notification_refuses_nothing_and_the_next_is_sent(setup: Any) -> None:
    reported: list[int] = []

    def bad(event: Any) -> Adjustment:
        reported.append(of(event))
        if of(event) == 0:
            raise OSError("gone")
        return Adjustment(envs={"A": "1"})

    async def scenario() -> None:
        setup.use(hook("10-a", bad, policy=HookFailurePolicy.FAIL))
        for number in range(2):
            setup.engine.notify(numbered(setup, number))
        await setup.until(lambda: len(setup.logged) == 2)
        assert reported == [0, 1]
        assert "OSError: gone" in setup.logged[0]
        assert "cannot set envs" in setup.logged[1]
        assert setup.updates == []

    setup.run(scenario)


def test_a_hook_is_notified_alone_before_and_after_use(setup: Any) -> None:
    reported: list[str] = []

    def bad(event: Any) -> None:
        raise ValueError("no such key")

    async def goodbye(event: Shutdown) -> None:
        reported.append(event.reason)

    async def scenario() -> None:
        handlers: dict[str, Any] = {
            "configure": bad,
            "synchronize": lambda _: shares("x", 3),
            "shutdown": goodbye,
            POST: print,
        }
        new = Hook("10-a", "/hooks/10-a.py", handlers)
        error = await setup.engine.notify_one(new, Configure(None, "10-a"))
        assert error.startswith("ValueError: no such key (test_engine_notifier.py:")
        assert await setup.engine.notify_one(new, Synchronize(None, None)) is None  # type: ignore[arg-type]
        assert [owners for _, owners in setup.updates] == [{"updates[x].cpu_shares": "10-a"}]
        setup.use(new)
        assert setup.report("10-a").calls == 2
        setup.use()
        assert await setup.engine.notify_one(new, Shutdown("removed")) is None
        assert reported == ["removed"]
        silent = hook("20-b", print)
        assert await setup.engine.notify_one(silent, Configure()) is None

    setup.run(scenario)


def test_a_hook_gets_later_events_only_after_the_existing_state(setup: Any) -> None:
    reported: list[Any] = []

    def record(event: Any) -> None:
        setup.gate.wait(30)
        reported.append("all")

    async def scenario() -> None:
        handlers: dict[str, Any] = {
            "synchronize": record,
            POST: lambda event: reported.append(of(event)),
            "pre_create_container": lambda event: reported.append("called"),
        }
        new = Hook("10-a", "/hooks/10-a.py", handlers, timeout=30.0)
        setup.engine.notify(numbered(setup, 0))
        synchronized = setup.engine.notify_one(new, Synchronize(None, None))  # type: ignore[arg-type]
        hanging = Hook("20-b", "/hooks/20-b.py", {"synchronize": print}, timeout=30.0)
        setup.engine.notify_one(hanging, Synchronize(None, None))  # type: ignore[arg-type]
        assert setup.engine.points == {POST, "synchronize"}
        setup.engine.notify(numbered(setup, 1))
        await setup.call()
        setup.gate.set()
        assert await synchronized is None
        setup.engine.notify(numbered(setup, 2))
        setup.use(Hook("30-c", "/hooks/30-c.py", {"synchronize": print}, timeout=30.0))
        setup.engine.notify(Synchronize(None, None))  # type: ignore[arg-type]  # newly known labels
        setup.use(new)
        setup.engine.notify(numbered(setup, 3))
        await setup.until(lambda: len(reported) == 5)
        assert reported == ["all", 1, 2, "all", 3]
        assert setup.logged == []
        await setup.engine.notify_one(hanging, Shutdown("removed"))
        setup.use()
        assert setup.engine.points == frozenset()

    setup.run(scenario)


def test_a_hook_gets_the_state_that_is_known_before_it_is_in_use(setup: Any) -> None:
    reported: list[Any] = []

    async def scenario() -> None:
        handlers: dict[str, Any] = {"synchronize": reported.append}
        new = Hook("10-a", "/hooks/10-a.py", handlers, timeout=30.0)
        setup.engine.begin_notifying(new)
        setup.engine.notify(Synchronize(None, None))  # type: ignore[arg-type]
        setup.use(new)
        await setup.until(lambda: reported)
        assert setup.engine.points == {"synchronize"}
        setup.engine.begin_notifying(new)
        setup.engine.notify(Synchronize(None, None))  # type: ignore[arg-type]
        await setup.until(lambda: len(reported) == 2)
        await asyncio.sleep(0.05)
        assert len(reported) == 2, "a hook in use gets each event once"

    setup.run(scenario)


def test_a_hook_that_is_shut_down_before_use_gets_no_events(setup: Any) -> None:
    reported: list[Any] = []

    async def scenario() -> None:
        handlers: dict[str, Any] = {
            "synchronize": reported.append,
            POST: reported.append,
            "shutdown": reported.append,
        }
        new = Hook("10-a", "/hooks/10-a.py", handlers, timeout=30.0)
        await setup.engine.notify_one(new, Synchronize(None, None))  # type: ignore[arg-type]
        await setup.engine.notify_one(new, Shutdown("stop"))
        setup.engine.notify(numbered(setup, 1))
        assert setup.engine.points == frozenset()
        await asyncio.sleep(0.05)
        assert [each.NAME for each in reported] == ["synchronize", "shutdown"]

    setup.run(scenario)


def test_an_open_breaker_does_not_stop_single_notifications(setup: Any) -> None:
    def bad(event: Any) -> None:
        raise OSError

    async def scenario() -> None:
        setup.now = 1.0
        lone = Hook("10-a", "/hooks/10-a.py", {POST: bad, "configure": lambda _: None})
        setup.use(lone)
        for _ in range(3):
            setup.engine.notify(setup.created())
        await setup.until(lambda: setup.report("10-a").state == "open")
        assert await setup.engine.notify_one(lone, Configure()) is None
        assert setup.report("10-a").state == "open"

    setup.run(scenario)


def test_configuring_has_a_longer_deadline_than_an_answer(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LEAST_SETUP_S", 0.2)

    async def scenario() -> None:
        new = hook("10-a", setup.hang, "configure", timeout=0.01)
        error = await asyncio.wait_for(setup.engine.notify_one(new, Configure()), 30)
        assert error == "no answer within 200 ms at configure"

    setup.run(scenario)


def test_a_removed_hook_does_not_get_waiting_events(setup: Any) -> None:
    reported: list[str] = []

    def slowly(event: Any) -> None:
        setup.gate.wait(30)
        reported.append(event.NAME)

    async def scenario() -> None:
        old = Hook("10-a", "/hooks/10-a.py", {POST: slowly, "shutdown": slowly}, timeout=60.0)
        setup.use(old)
        for _ in range(5):
            setup.engine.notify(setup.created())
        setup.use()
        ended = setup.engine.notify_one(old, Shutdown("removed"))
        setup.gate.set()
        assert await asyncio.wait_for(ended, 30) is None
        assert reported == [POST, "shutdown"]

    setup.run(scenario)


def test_a_hook_is_shut_down_after_its_calls_or_a_limit(setup: Any) -> None:
    events: list[str] = []

    def on_create(event: Any) -> None:
        setup.gate.wait(30)
        events.append("answered")

    async def scenario() -> None:
        handlers: dict[str, Any] = {
            "pre_create_container": on_create,
            "shutdown": lambda event: events.append(event.reason),
        }
        patient = Hook("10-a", "/hooks/10-a.py", handlers, timeout=30.0)
        setup.use(patient)
        answers = setup.engine.call_hooks(setup.create())
        setup.use()
        ends = setup.engine.notify_one(patient, Shutdown("replaced"))
        await asyncio.sleep(0.1)
        assert events == []
        setup.gate.set()
        await ends
        await answers.wait()
        assert events == ["answered", "replaced"]
        setup.gate.clear()
        hasty = Hook("10-a", "/hooks/10-a.py", handlers, timeout=0.1)
        setup.use(hasty)
        setup.engine.call_hooks(setup.create())
        setup.use()
        await setup.engine.notify_one(hasty, Shutdown("removed"))
        assert events[2:] == ["removed"]

    setup.run(scenario)


def test_a_removed_hook_leaves_no_event_loop(setup: Any) -> None:
    async def goodbye(event: Any) -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(60))

    async def scenario() -> None:
        old = hook("10-a", goodbye, "shutdown", timeout=30.0)
        setup.use(old)
        setup.use()
        assert await setup.engine.notify_one(old, Shutdown("removed")) is None
        await setup.until(lambda: not [t for t in threading.enumerate() if t.name == "hooks-10-a"])
        assert setup.engine._notifiers == {}

    setup.run(scenario)


def test_a_task_left_by_a_coroutine_hook_runs_on_and_may_fail_loudly(setup: Any) -> None:
    tasks: list[Any] = []

    async def later() -> None:
        await asyncio.sleep(0.01)
        raise OSError("later")

    async def leaves(event: Any) -> None:
        tasks.append(asyncio.get_running_loop().create_task(later()))

    async def scenario() -> None:
        setup.use(hook("10-a", leaves))
        setup.engine.notify(setup.created())
        await setup.until(lambda: tasks and tasks[0].done())
        tasks.clear()
        setup.engine.notify(setup.created())
        await setup.until(lambda: setup.logged)
        assert setup.logged[0] == "hook 10-a: a task of it has failed: OSError"

    setup.run(scenario)


def test_a_task_that_exits_the_process_ends_alone_and_is_reported(setup: Any) -> None:
    async def exits() -> None:
        raise SystemExit

    tasks: list[Any] = []

    async def leaves(event: Any) -> None:
        tasks.append(asyncio.get_running_loop().create_task(exits()))

    async def scenario() -> None:
        setup.use(hook("10-a", leaves))
        for number in range(1, 3):
            setup.engine.notify(setup.created())
            await setup.until(lambda n=number: len(tasks) == n and tasks[-1].done())
        await setup.until(lambda: setup.logged)
        assert setup.logged[0] == "hook 10-a: a task of it has ended with SystemExit"

    setup.run(scenario)
