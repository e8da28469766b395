"""Writes Events about pods: repetitions are counted, and the number of writes is limited."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from proxy.agent.node_status import timestamp
from proxy.agent.object_writer import ObjectWriter, WriteBudget
from proxy.agent.objects.node_page import NodePage
from proxy.agent.objects.pod_events import PodEvent, event_object, rejection_event
from proxy.agent.session import AgentSession

EVENT_BURST, EVENT_INTERVAL_S = 25, 2.0
"""How many Events may be written at once, and the seconds after which one more may be."""
EVENTS_KEPT = 1000
"""Events whose first time and count are remembered, for their repetitions."""


class EventWriter:
    """Writes the Events of one node."""

    def __init__(self, session: AgentSession, writer: ObjectWriter, wall_clock: Callable[[], float]) -> None:
        """Prepare to write; nothing is sent.

        Args:
            session: The node and the API server.
            writer: Writes the objects.
            wall_clock: Seconds since the epoch.
        """
        self._session = session
        self._writer = writer
        self._wall_clock = wall_clock
        self._budget = WriteBudget(1 / EVENT_INTERVAL_S, EVENT_BURST)
        self._occurrences: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._rejected: dict[tuple[str, str], tuple[int, str]] = {}

    def write_occurrence(self, event: PodEvent) -> None:
        """Write an Event about something that happens now; its repetitions are counted.

        As client-go's recorder does (tools/record/events_cache.go, eventObserve).
        """
        now = self._wall_clock()
        first, count = self._occurrences.pop(event.path, (now, 0))
        self._occurrences[event.path] = first, count + 1
        if len(self._occurrences) > EVENTS_KEPT:
            self._occurrences.popitem(last=False)
        self._write(event, first, now, count + 1)

    def write_rejections(self, page: NodePage) -> None:
        """Write an Event for each rejection that is new, has another reason, or is twice as frequent."""
        open_now: dict[tuple[str, str], tuple[int, str]] = {}
        for rejection in page.rejections:
            key = rejection.uid or rejection.pod, rejection.container
            state = rejection.count.bit_length(), rejection.message
            open_now[key] = state
            if self._rejected.get(key) != state:
                now = self._wall_clock()
                first, last = rejection.first or now, rejection.last or now
                self._write(rejection_event(rejection), first, last, rejection.count)
        self._rejected = open_now

    def _write(self, event: PodEvent, first: float, last: float, count: int) -> None:
        """Write an Event, unless there were too many."""
        if self._budget.seconds_until_token(self._wall_clock()):
            return
        self._budget.take_token()
        value = event_object(event, self._session.node, timestamp(first), timestamp(last), count)
        self._writer.want(
            event.path,
            (event, count, last),
            lambda: self._session.api.apply(event.path, value),
            delay_factor=math.inf,
            once=True,
            gives_up=True,
        )
