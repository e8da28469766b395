"""A feed of changes for a follower of the node, such as the cluster agent: "has anything changed since N?".

Theory of operation. Each change of the node that a follower may need increments a number; a follower waits
until the number differs from the one that it knows, and then reads the page that it needs. So a burst of
changes costs one wake-up, a follower that is slow misses no state, and one that is idle costs nothing. An
event that is over when the state is read (a repaired cpuset, a failed hook) is kept as a numbered notice; the
oldest notices are forgotten first.

The number starts again with the daemon; ``version`` also holds a random word, so that a follower notices
a restart. The feed subscribes to nothing before the first request of a follower: a node without followers
pays nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from proxy.engine.node_effects import Change
from proxy.executor.observer import Observer
from proxy.executor.store import NodeStore
from proxy.model import schema_ids
from proxy.model.workload import Container, Phase
from proxy.telemetry.port import HOOK_FAILED, Telemetry

LONGEST_WAIT_S = 25.0
RULES_S = 1.0
KEPT = 256
"""How many notices are kept."""
NOTABLE = frozenset(
    {
        HOOK_FAILED,
        "another program keeps writing the cpuset of a container",
        "drift: another program wrote a cpuset: put back",
        "rejected a container",
        "rejected a pod",
        "would reject a container",
        "would reject a pod",
    }
)
"""The messages of the log that become notices."""


class FeedNotice(Struct, frozen=True):
    """Something that happened.

    Attributes:
        number: The number of the change with which it came.
        at: The time, in seconds since the epoch.
        message, keys: As in the log.
    """

    number: int
    at: float
    message: str
    keys: dict[str, str]


class ChangeFeed(Observer):
    """Counts changes, and wakes the followers that wait for the next one. For the event loop."""

    def __init__(self, store: NodeStore, telemetry: Telemetry) -> None:
        """Prepare a feed; nothing is counted before the first follower.

        Args:
            store: The node.
            telemetry: Where notices come from.
        """
        self._store = store
        self._telemetry = telemetry
        self._run = secrets.token_hex(4)
        self._number = 0
        self._notices: deque[FeedNotice] = deque(maxlen=KEPT)
        self._changed = asyncio.Event()
        self._followed = False
        state = store.state
        self._rules: tuple[object, ...] = (state.mode, state.node, state.enforcement)

    @property
    def version(self) -> str:
        """The number of the newest change, after the word of this run."""
        return f"{self._run}.{self._number}"

    async def page(self, since: str, wait: float) -> dict[str, object]:
        """Wait for a change, and return the version and the new notices.

        Args:
            since: The version that the follower knows; empty at first.
            wait: The longest time in seconds.
        """
        if not self._followed:
            self._follow()
        run, _, number = since.partition(".")
        known = int(number) if run == self._run and number.isdigit() else -1
        self._count_rules()
        if known == self._number:
            self._changed.clear()
            await self._wait(min(wait, LONGEST_WAIT_S))
        return {
            "schema": schema_ids.CHANGES,
            "version": self.version,
            "notices": [
                {"at": round(each.at, 3), "message": each.message, "keys": each.keys}
                for each in self._notices
                if each.number > known >= 0
            ],
        }

    async def _wait(self, seconds: float) -> None:
        """Wait for a change; a change of mode or rules sends no notice, and is detected within a second."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._changed.is_set() and (remaining_s := end - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(remaining_s, RULES_S)):
                    await self._changed.wait()
            except TimeoutError:
                self._count_rules()

    def _count_rules(self) -> None:
        """Count a change of what operators decide: the mode, the rules, and the pods to which they apply."""
        state = self._store.state
        rules = state.mode, state.node, state.enforcement
        if any(now is not before for now, before in zip(rules, self._rules, strict=True)):
            self._rules = rules
            self._count()

    def _follow(self) -> None:
        self._followed = True
        loop = asyncio.get_running_loop()

        def listen(message: str, keys: Mapping[str, object]) -> None:
            if message in NOTABLE:
                loop.call_soon_threadsafe(
                    self._note, message, {key: str(value) for key, value in keys.items()}
                )

        self._telemetry.set_listener(listen)
        self._store.subscribe(self)

    def _note(self, message: str, keys: dict[str, str]) -> None:
        self._count()
        self._notices.append(FeedNotice(self._number, time.time(), message, keys))

    def _count(self) -> None:
        self._number += 1
        self._changed.set()

    # -- what counts --------------------------------------------------------------------------------------

    def changed(self, change: Change) -> None:
        """See ``Observer``."""
        self._count()

    def created(self, token: str, container: Container) -> None:
        """See ``Observer``."""
        self._count()

    def entered(self, container: Container, phase: Phase) -> None:
        """See ``Observer``."""
        if phase is Phase.EXITED:
            self._count()

    def cpus_assigned(self, container: Container) -> None:
        """See ``Observer``."""
        self._count()

    def removed(self, container: Container) -> None:
        """See ``Observer``."""
        self._count()

    def pod_removed(self, sandbox_id: str) -> None:
        """See ``Observer``."""
        self._count()
