"""A hook engine, with a log and an updater that record their messages."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest

from proxy.hooks.answers import Update
from proxy.hooks.engine import HookEngine
from proxy.hooks.engine.stats import HookReport
from proxy.hooks.events import Point, PostCreateContainer, PreCreateContainer
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts
from proxy.hooks.hook import Hook, Outcome
from proxy.model.idset import CpuSet, Mask
from tests.testkit.captured_log import of_hooks
from tests.testkit.waiting import until

PATIENCE_S = 30.0
"""A time limit for each wait, long enough for any machine."""


def _facts() -> tuple[PodFacts, ContainerFacts, Decision]:
    decision = Decision(allowed=CpuSet([0, 1]), allowed_mems=Mask([0]))
    pod = PodFacts(namespace="ns", name="pod", labels={"app": "db"})
    return pod, ContainerFacts(name="main"), decision


class Setup:
    """One engine on one loop."""

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.updates: list[tuple[dict[str, Update], dict[str, str]]] = []
        self.now: float | None = None
        self.gate = threading.Event()
        self.engine = HookEngine(of_hooks(self.logged), self._updated, self._clock)

    def _updated(self, updates: Mapping[str, Update], owners: Mapping[str, str]) -> None:
        self.updates.append((dict(updates), dict(owners)))

    def _clock(self) -> float:
        return time.monotonic() if self.now is None else self.now

    @staticmethod
    def create() -> PreCreateContainer:
        return PreCreateContainer(*_facts())

    @staticmethod
    def created() -> PostCreateContainer:
        return PostCreateContainer(*_facts())

    def use(self, *hooks: Hook) -> None:
        self.engine.use(hooks)

    async def call(self, event: Point | None = None) -> Outcome:
        answers = self.engine.call_hooks(event or self.create())
        return await asyncio.wait_for(answers.wait(), PATIENCE_S)

    def report(self, name: str) -> HookReport:
        return next(report for report in self.engine.report() if report.name == name)

    def hang(self, event: Any) -> None:
        """A handler that hangs until the test is over."""
        self.gate.wait(PATIENCE_S)

    until = staticmethod(until)

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            try:
                await scenario()
            finally:
                self.gate.set()
                # The switch interval is global: a hook that still spins would change it for the next test.
                await until(lambda: sys.getswitchinterval() > 0.001)
                self.engine.close()

        asyncio.run(whole())


@pytest.fixture
def setup() -> Iterator[Setup]:
    """Provide a setup, and release its hanging handlers at the end."""
    engine_setup = Setup()
    yield engine_setup
    engine_setup.gate.set()
