"""The objects that all parts of the agent share: the node, the daemon, the API server, and the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from proxy.agent.api_client import ApiClient, JsonObject
from proxy.agent.daemon_client import DaemonClient
from proxy.agent.watcher import Key, Watcher
from proxy.config.schema import Config
from proxy.executor.background import run_with_restarts
from proxy.telemetry.port import Telemetry

T = TypeVar("T")


@dataclass(slots=True)
class AgentSession:
    """One run of the agent.

    Attributes:
        config: The configuration in effect; the keys that need no restart may change (``config_file``).
        node: The name of the Node object.
        daemon: The daemon's admin socket.
        api: The API server.
        telemetry: The log, and the problems that are open.
    """

    config: Config
    node: str
    daemon: DaemonClient
    api: ApiClient
    telemetry: Telemetry
    _reloaded: asyncio.Event = field(default_factory=asyncio.Event)

    def use(self, config: Config) -> None:
        """Use another configuration from now on."""
        self.config = config
        self._reloaded.set()
        self._reloaded = asyncio.Event()

    async def until(self, condition: Callable[[Config], bool]) -> None:
        """Wait until the configuration satisfies a condition."""
        while not condition(self.config):
            await self._reloaded.wait()

    def watcher(
        self,
        path: str,
        digest: Callable[[JsonObject], T | None],
        *,
        selectors: Mapping[str, str] | None = None,
        changed: Callable[[Key, T | None], None] = lambda key, value: None,
        metadata_only: bool = False,
    ) -> Watcher[T]:
        """Return a watcher of a collection; ``Watcher.run`` follows it. See ``Watcher`` for the arguments."""
        return Watcher(
            self.api,
            path,
            digest,
            self.telemetry,
            selectors=selectors,
            changed=changed,
            metadata_only=metadata_only,
        )


Part = Callable[[AgentSession], Awaitable[None]]
"""A part of the agent: runs until it is cancelled, and is restarted after a fault."""


async def run_parts(session: AgentSession, parts: tuple[Part, ...], end: asyncio.Event) -> None:
    """Run parts concurrently until an event is set; then cancel them, and wait for their end.

    Args:
        session: The session that the parts share.
        parts: The parts.
        end: Set when the agent is to stop.
    """
    tasks = [
        asyncio.ensure_future(run_with_restarts(partial(part, session), session.telemetry.fault))
        for part in parts
    ]
    try:
        await end.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await session.api.close()
