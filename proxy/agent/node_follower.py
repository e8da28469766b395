"""Follows the daemon: reads its description of the node whenever the description has changed.

``GET /changes`` answers when something has changed; then ``GET /node`` is read, at most five times a second.
A daemon that does not answer leaves the last description in place. A daemon in mode passthrough has none: it
rejects both requests, and ``GET /status`` shows the mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.agent.daemon_client import DaemonClient
from proxy.agent.objects.node_page import NodePage, passthrough_page, read_node_page
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import InputError, TopoproxyError
from proxy.model.mode import NodeMode
from proxy.observe.json_access import as_list, as_map
from proxy.telemetry.port import Telemetry

SILENT_S = 15.0
"""Seconds without an answer after which the daemon counts as unreachable."""
CHANGES_WAIT_S = 10.0
"""Seconds that the daemon waits for a change before it answers that there is none."""
READ_INTERVAL_S = 0.2
"""Seconds between two readings."""
PASSTHROUGH = NodeMode.PASSTHROUGH.value
PASSTHROUGH_S = 5.0
"""Seconds between two readings while the daemon is in mode passthrough: only its restart ends that mode."""
PAUSES = Backoff(0.25, 2.0)


@dataclass(frozen=True, slots=True)
class DaemonNotice:
    """Something that has happened on the node; message and keys are those of the daemon's log."""

    message: str
    keys: Mapping[str, str]


PageHandler = Callable[[NodePage | None, NodePage, list[DaemonNotice]], None]
"""A function of the previous description, the newest one, and the notices since."""


class NodeFollower:
    """Follows the daemon.

    Attributes:
        page: The newest description; None before the first.
    """

    def __init__(
        self,
        daemon: DaemonClient,
        node: str,
        telemetry: Telemetry,
        changed: PageHandler,
        unreachable: Callable[[TopoproxyError], None],
    ) -> None:
        """Prepare to follow the daemon.

        Args:
            daemon: The daemon.
            node: The name of the Node object.
            telemetry: Reports that the daemon does not answer.
            changed: Called with each new description.
            unreachable: Called with the cause when the daemon has not answered for some time.
        """
        self._daemon = daemon
        self._node = node
        self._telemetry = telemetry
        self._changed = changed
        self._report_unreachable = unreachable
        self._since = ""
        self.page: NodePage | None = None

    async def run(self) -> None:
        """Follow the daemon until cancelled."""
        loop, pauses = asyncio.get_running_loop(), RetryDelays(PAUSES)
        answered: float | None = loop.time()
        while True:
            try:
                await self._read_next_change()
                answered = loop.time()
                pauses.reset()
                self._telemetry.resolved("cannot follow the daemon")
                await asyncio.sleep(PASSTHROUGH_S if self._since == PASSTHROUGH else READ_INTERVAL_S)
            except TopoproxyError as error:
                self._since = ""
                self._telemetry.problem("cannot follow the daemon", err=error)
                if answered is not None and loop.time() - answered > SILENT_S:
                    answered = None
                    self._report_unreachable(error)
                await asyncio.sleep(pauses.next())

    async def _read_next_change(self) -> None:
        """Wait for a change, and read the description if there is one."""
        requested = {"since": self._since, "wait": f"{CHANGES_WAIT_S:g}"}
        try:
            changes = as_map(await self._daemon.query("/changes", requested, timeout=SILENT_S))
        except InputError:
            if as_map(await self._daemon.query("/status")).get("mode") != PASSTHROUGH:
                raise
            if self._since != PASSTHROUGH:
                self._use_page(PASSTHROUGH, passthrough_page(self._node), [])
            return
        version = str(changes.get("version", ""))
        if version == self._since:
            return
        notices = [
            DaemonNotice(
                str(notice["message"]), {key: str(value) for key, value in as_map(notice["keys"]).items()}
            )
            for notice in map(as_map, as_list(changes.get("notices")))
        ]
        self._use_page(
            version, read_node_page(await self._daemon.query("/node", {"node": self._node})), notices
        )

    def _use_page(self, version: str, page: NodePage, notices: list[DaemonNotice]) -> None:
        self._since = version
        before, self.page = self.page, page
        self._changed(before, page, notices)
