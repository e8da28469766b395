"""A reload by itself: one at a time, and all steps or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.config.origin import Origin
from proxy.config.schema import Config, LogConfig
from proxy.model.errors import ConfigError
from proxy.notify import SystemdNotifier
from proxy.reload.service import Commit, LiveStep, Reload
from proxy.telemetry.port import Telemetry
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(1, 1, 4, 1)


class NoLog:
    """A log that discards everything."""

    def write(self, level: str, message: str, keys: Mapping[str, object], above: int) -> None: ...

    def enabled(self, level: str) -> bool:
        return False


class Notified(SystemdNotifier):
    """Keeps the notifications to systemd."""

    def __init__(self) -> None:
        super().__init__({})
        self.sent: list[str] = []

    def reloading(self) -> None:
        self.sent.append("reloading")

    def ready(self, status: str = "") -> None:
        self.sent.append("ready")


def reload_of(
    steps: Sequence[LiveStep], read: Callable[[Origin], Awaitable[Config]], notified: Notified | None = None
) -> Reload:
    config = Config(origin=Origin())
    telemetry = Telemetry(NoLog(), lambda: 0.0)
    return Reload(config, steps, lambda: MACHINE, telemetry, notified or Notified(), read, lambda: 7.0)


async def other(origin: Origin) -> Config:
    return replace(Config(), call_timeout=3.0, explain_history=9, log=LogConfig(level="error"), origin=origin)


def test_steps_prepare_first_and_a_refusal_of_the_last_applies_none() -> None:
    done: list[str] = []

    def prepare(before: Config, after: Config) -> Commit:
        done.append("prepared")
        return lambda: done.append("applied")

    def refuse(before: Config, after: Config) -> Commit:
        raise ConfigError("not now")

    async def scenario() -> None:
        reload = reload_of([LiveStep(("callTimeout",), prepare), LiveStep(("log",), refuse)], other)
        outcome = await reload.run("admin")
        assert (outcome.result, outcome.reason, outcome.at) == ("refused", "not now", 7.0)
        assert done == ["prepared"]
        assert reload.config.call_timeout == 5

    asyncio.run(scenario())


def test_a_fault_reverts_the_applied_steps_in_reverse_order() -> None:
    values: list[Any] = []

    def step(name: str, value: Callable[[Config], Any]) -> LiveStep:
        def prepare(before: Config, after: Config) -> Commit:
            def change() -> None:
                values.append((name, value(after)))
                if value(after) == "error":
                    raise RuntimeError(name)

            return change

        return LiveStep((name,), prepare)

    async def scenario() -> None:
        steps = [
            step("callTimeout", lambda config: config.call_timeout),
            step("log", lambda config: str(config.log.level)),
            step("explainHistory", lambda config: config.explain_history),
        ]
        reload = reload_of(steps, other)
        outcome = await reload.run("SIGHUP")
        assert outcome.reason == "internal error: RuntimeError('log')"
        assert values == [("callTimeout", 3), ("log", "error"), ("log", "info"), ("callTimeout", 5)]
        assert reload.config == Config()

    asyncio.run(scenario())


def test_steps_without_a_changed_key_are_not_called() -> None:
    def never(before: Config, after: Config) -> Commit:
        raise AssertionError

    async def scenario() -> None:
        reload = reload_of([LiveStep(("koordinator", "callTimeouts"), never)], other)
        assert (await reload.run("admin")).result == "applied"
        assert (await reload.run("admin")).result == "unchanged"

    asyncio.run(scenario())


def test_reloads_run_one_at_a_time_and_systemd_is_notified_of_each() -> None:
    running, most = 0, 0
    notified = Notified()

    async def read(origin: Origin) -> Config:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if len(notified.sent) > 4:
            raise ConfigError("bad")
        return await other(origin)

    async def scenario() -> None:
        reload = reload_of([], read, notified)
        outcomes = await asyncio.gather(*(reload.run("admin") for _ in range(3)))
        assert [outcome.result for outcome in outcomes] == ["applied", "unchanged", "refused"]
        assert most == 1
        assert notified.sent == ["reloading", "ready"] * 3

    asyncio.run(scenario())


def test_a_reload_that_is_cancelled_lets_the_next_one_run() -> None:
    notified = Notified()

    async def read(origin: Origin) -> Config:
        await asyncio.sleep(60 if len(notified.sent) < 2 else 0)
        return await other(origin)

    async def scenario() -> None:
        reload = reload_of([], read, notified)
        first = asyncio.create_task(reload.run("SIGHUP"))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await reload.run("SIGHUP")).result == "applied"

    asyncio.run(scenario())
