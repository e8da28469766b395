"""Hooks made of functions, asked by the real engine in the played world."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from proxy.frontends.hook_bridge.calls import HookBridge
from proxy.frontends.hook_bridge.dispatch import HookDispatcher
from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
from proxy.frontends.hook_bridge.updates import Updates
from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.events import POINTS
from proxy.hooks.hook import Hook, HookFailurePolicy


class Hooks:
    """The hooks of a world, and the notifications that they received."""

    def __init__(self, world: Any, *, owned_cpus: bool = False) -> None:
        self.world = world
        executor = world.executor
        self.updates = Updates(executor, world.start_update, owned_cpus=owned_cpus)
        self.engine = HookEngine(executor.telemetry.problem, self.updates.take)
        self.resumed = 0
        self.lacked = 0
        self.following = LifecycleEvents(
            executor, self.engine, self._resumed, self._lacks, owned_cpus=owned_cpus
        )
        self.way = HookDispatcher(
            executor,
            self.engine,
            self.updates,
            self.following,
            world.wire.spawn,
            world.sync.adoption.adopt_one,
            self._learn,
            owned_cpus=owned_cpus,
        )
        self.hooked = HookBridge(self.way)
        executor.store.subscribe(self.following)
        world.wire.hook(self.hooked)
        self.notified: list[Any] = []
        self._hooks: list[Hook] = []

    def _resumed(self) -> None:
        self.resumed += 1

    def _lacks(self) -> None:
        self.lacked += 1

    async def _learn(self, _target: str) -> None:
        """The runtime does not answer in time."""

    def add(
        self,
        name: str = "10-x",
        *,
        policy: HookFailurePolicy = HookFailurePolicy.IGNORE,
        timeout: float = 30,
        **handlers: Any,
    ) -> None:
        """Have one more hook, made of functions or of what they would answer."""
        made = {point: each if callable(each) else _always(each) for point, each in handlers.items()}
        self._hooks.append(Hook(name, f"played {name}", made, policy, timeout))
        self.engine.use(self._hooks)

    def listen(self, *points: str) -> None:
        """Add a hook that only listens; to all ``post`` points if none is named."""
        names = points or [name for name in POINTS if name.startswith("post")]
        self.add("90-ear", **dict.fromkeys(names, self.notified.append))

    @property
    def received(self) -> list[str]:
        """The points of the notifications, each with the container or sandbox that it is about."""
        return [
            f"{each.NAME} {each.container.id if hasattr(each, 'container') else each.pod.sandbox_id}"
            for each in self.notified
        ]

    async def hears(self, *expected: str) -> None:
        """Wait for these notifications since the last time, in this order for each container or sandbox."""
        await self.world.until(lambda: len(self.notified) >= len(expected))
        await self.world.quiet()
        assert sorted(self.received, key=_who) == sorted(expected, key=_who)
        self.notified.clear()

    def remembers(self) -> int:
        """How many pods, containers and requests are remembered."""
        f, memory = self.following, self.following.memory
        return len(memory._pods) + len(memory._containers) + len(f.stopped) + len(f.sent)

    def close(self) -> None:
        self.engine.close()
        self.updates.close()


def _always(answer: object) -> Callable[[object], object]:
    return lambda event: answer


def _who(line: str) -> str:
    return line.partition(" ")[2]


@contextlib.asynccontextmanager
async def hooks(world: Any, *, owned_cpus: bool = False) -> AsyncIterator[Hooks]:
    """Have hooks in a world."""
    made = Hooks(world, owned_cpus=owned_cpus)
    try:
        yield made
    finally:
        made.close()
