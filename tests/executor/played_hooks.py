"""Hooks made of functions, called by the real engine on a simulated node."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from proxy.frontends.hook_bridge.bridge import HookBridge
from proxy.frontends.hook_bridge.held_call_hooks import HeldCallHooks
from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
from proxy.frontends.hook_bridge.updates import HookUpdates
from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.events import POINTS
from proxy.hooks.hook import Hook, HookFailurePolicy


class Hooks:
    """The hooks of a world, and the notifications that they received."""

    def __init__(self, world: Any, *, owned_cpus: bool = False) -> None:
        self.world = world
        executor = world.executor
        self.updates = HookUpdates(executor, owned_cpus=owned_cpus)
        self.engine = HookEngine(executor.telemetry.problem, self.updates.queue)
        self.resumed = 0
        self.incomplete = 0
        self.lifecycle = LifecycleEvents(
            executor, self.engine, self._resumed, self._found_incomplete, owned_cpus=owned_cpus
        )
        self.held_call_hooks = HeldCallHooks(
            executor,
            self.engine,
            self.updates,
            self.lifecycle,
            world.wire.spawn,
            self._look_up,
            owned_cpus=owned_cpus,
        )
        self.bridge = HookBridge(self.held_call_hooks)
        executor.store.subscribe(self.lifecycle)
        world.wire.set_hooks(self.bridge)
        self.notified: list[Any] = []
        self._hooks: list[Hook] = []

    def _resumed(self) -> None:
        self.resumed += 1

    def _found_incomplete(self) -> None:
        self.incomplete += 1

    async def _look_up(self, _target: str) -> None:
        """The runtime does not answer in time."""

    def add(
        self,
        name: str = "10-x",
        *,
        policy: HookFailurePolicy = HookFailurePolicy.IGNORE,
        timeout: float = 30,
        **handlers: Any,
    ) -> None:
        """Add a hook, made of functions or of the values that they return."""
        made = {point: each if callable(each) else _always(each) for point, each in handlers.items()}
        self._hooks.append(Hook(name, f"played {name}", made, policy, timeout))
        self.engine.use(self._hooks)

    def listen(self, *points: str) -> None:
        """Add a hook that only listens; to all ``post`` points if none is named."""
        names = points or [name for name in POINTS if name.startswith("post")]
        self.add("90-ear", **dict.fromkeys(names, self.notified.append))

    @property
    def received(self) -> list[str]:
        """The points of the notifications, each with the id of its container or sandbox."""
        return [
            f"{each.NAME} {each.container.id if hasattr(each, 'container') else each.pod.sandbox_id}"
            for each in self.notified
        ]

    async def expect(self, *expected: str) -> None:
        """Wait for these notifications since the last call, in this order for each container or sandbox."""
        await self.world.until(lambda: len(self.notified) >= len(expected))
        await self.world.quiet()
        assert sorted(self.received, key=_subject) == sorted(expected, key=_subject)
        self.notified.clear()

    def remembers(self) -> int:
        """Return how many pods, containers and requests are remembered."""
        f, cache = self.lifecycle, self.lifecycle.object_cache
        return len(cache._pods) + len(cache._containers) + len(f.stopped) + len(f.sent)

    def read_lists(self) -> None:
        """Read the facts of existing containers from the runtime's lists."""
        since = self.world.executor.state.runtime.changes.number
        self.lifecycle.read_lists(*self.world.runtime.raw_lists(), since)

    def close(self) -> None:
        self.engine.close()
        self.updates.close()


def _always(answer: object) -> Callable[[object], object]:
    return lambda event: answer


def _subject(line: str) -> str:
    return line.partition(" ")[2]


@contextlib.asynccontextmanager
async def hooks(world: Any, *, owned_cpus: bool = False) -> AsyncIterator[Hooks]:
    """Use hooks in a world until the block ends."""
    made = Hooks(world, owned_cpus=owned_cpus)
    try:
        yield made
    finally:
        made.close()
