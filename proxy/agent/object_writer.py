"""Write wanted objects to the API server: each change soon, but at most one write a second for the node.

Theory of operation. For each object the writer holds the wanted content and the content written last. If the
two differ, and the last write was at least a second ago, it writes. Changes until then replace the wanted
content, so a burst costs one write, and an object that does not change costs none. A change that is not
urgent waits a moment for an urgent one: a new sandbox usually has a container soon. A write that fails is
repeated with back-off, with the content that is wanted at that time. Nothing is queued: memory is bounded by
the number of objects.

All writes share a budget (``WriteBudget``): a few at once, and one a second. If more are due, the object that
has waited longest is next. An object with a delay factor, such as the annotation of a pod, lets objects of
the node go first; an Event leaves a write of the budget to them.

Writes are server-side applies of the field owner ``topoproxy``, which take the fields from other owners. If
another program writes them repeatedly, the objects are repaired at growing intervals: a watch of their
metadata shows each version that is not ours (``observed``). The watch may bring a version while the answer of
a write is outstanding: then the answer decides whether that version is newer than ours (KEP-5504).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from proxy.agent.api_client import ApiServerError, ApiUnreachableError, JsonObject, retry_after
from proxy.model.backoff import Backoff
from proxy.model.errors import TopoproxyError
from proxy.telemetry.port import Telemetry

WRITE_INTERVAL_S = 1.0
"""The fewest seconds between two writes of one object."""
WRITES_PER_SECOND, WRITE_BURST = 1.0, 5
"""Writes a second, of all objects together, and how many at once."""
FAILED_BACKOFF = Backoff(1.0, 4.0)
"""Seconds after a write that failed."""
REFUSED_BACKOFF = Backoff(2.0, 30.0)
"""Seconds after a write that the API server refused: a change of permissions or of the CRD would help."""
OVERWRITTEN_BACKOFF = Backoff(1.0, 60.0, steady=600.0, tolerated=2, least=1.0)
"""Seconds before fields are taken back from another program."""
ONCE_LIMIT = 100
ONCE_REFUSALS = 3
"""Refusals in a row after which an object with ``gives_up`` is forgotten: its namespace may be gone."""
CANNOT_WRITE = "cannot write an object of the cluster"
KEEPS_WRITING = "another program keeps writing an object of this agent"
_TEMPORARY_STATUSES = (401, 408, 409, 429)

Write = Callable[[], Awaitable[JsonObject | None]]
"""A function that writes an object, or deletes it; returns the object afterwards."""


@dataclass(slots=True)
class _ManagedObject:
    """An object that the agent writes.

    Attributes:
        wanted: The wanted content, in a form that can be compared; None: the object must be deleted.
        write: Writes the wanted content.
        delay_factor: It may wait this many times longer than an object of the node; infinity: until none
            waits.
        since: The time since which it differs from the wanted content.
        delayed_until: The time until which a change that is not urgent waits for another one.
        written: The content written last; before the first write, a value that equals nothing.
        due: The earliest time of the next write.
        refused_until: The time before which the API server wants no further attempt (``Retry-After``).
        failures: Failed writes in a row.
        refusals: Writes in a row that the API server has refused.
        overwritten: How often in a row another program has written it.
        repaired: When the fields were last taken back.
        versions: The resource versions of our own last writes.
        once: It is forgotten as soon as it is written.
        gives_up: It is forgotten after some refusals.
        is_being_written: A write is in flight.
        version_during_write: The last version that the watch has brought during that write; empty for none,
            and None if the object was deleted.
    """

    wanted: object
    write: Write
    delay_factor: float
    since: float
    delayed_until: float = 0.0
    written: object = field(default_factory=object)
    due: float = 0.0
    refused_until: float = 0.0
    failures: int = 0
    refusals: int = 0
    overwritten: int = 0
    repaired: float = 0.0
    versions: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    once: bool = False
    gives_up: bool = False
    is_being_written: bool = False
    version_during_write: str | None = ""

    def waited(self, now: float) -> float:
        """Return how long it has been due, divided by its delay factor."""
        return (now - max(self.since, self.due)) / self.delay_factor


class ObjectWriter:
    """Writes objects. For one event loop."""

    def __init__(self, telemetry: Telemetry) -> None:
        """Start with nothing to write.

        Args:
            telemetry: Reports that an object cannot be written.
        """
        self._telemetry = telemetry
        self._objects: dict[str, _ManagedObject] = {}
        self._budget = WriteBudget(WRITES_PER_SECOND, WRITE_BURST)
        self._wake = asyncio.Event()

    def want(
        self,
        path: str,
        wanted: object,
        write: Write,
        *,
        delay_factor: float = 1.0,
        delay_s: float = 0.0,
        once: bool = False,
        gives_up: bool = False,
    ) -> None:
        """Write an object as soon as permitted, unless it was written with this content already.

        Args:
            path: Of the object.
            wanted: The content to compare with the one written last.
            write: Writes the object.
            delay_factor: It may wait this many times longer than an object of the node; infinity: until none
                waits.
            delay_s: How many seconds this change waits for an urgent one; the first change of an object never
                waits.
            once: Forget it as soon as it is written. If more than ``ONCE_LIMIT`` such objects wait until no
                other waits, the oldest are forgotten unwritten.
            gives_up: Forget it after ``ONCE_REFUSALS`` refusals in a row too.
        """
        managed = self._objects.get(path)
        if managed is None:
            self._objects[path] = _ManagedObject(
                wanted, write, delay_factor, self._now(), once=once, gives_up=gives_up
            )
            if once:
                self._forget_oldest_once()
        elif managed.wanted == wanted:
            return
        else:
            if managed.written == managed.wanted:
                managed.since, managed.delayed_until = self._now(), self._now() + delay_s
            elif not delay_s:
                managed.delayed_until = 0.0
            managed.wanted, managed.write = wanted, write
            if managed.failures:  # something new may be accepted
                soon = max(self._now() + WRITE_INTERVAL_S, managed.refused_until)
                managed.failures, managed.due = 0, min(managed.due, soon)
        self._wake.set()

    def withdraw(self, path: str, remove: Write) -> None:
        """Delete an object, and then forget it; an object that was never wanted is left alone."""
        if path in self._objects:
            self.want(path, None, remove)

    @property
    def paths(self) -> tuple[str, ...]:
        """The objects that are wanted."""
        return tuple(path for path, managed in self._objects.items() if managed.wanted is not None)

    def forget(self, path: str) -> None:
        """Neither write nor remove an object any more."""
        managed = self._objects.pop(path, None)
        if managed is not None:
            self._telemetry.forget(CANNOT_WRITE, path=_reported(path, managed))
            self._telemetry.forget(KEEPS_WRITING, path=path)

    def observed(self, path: str, version: str | None) -> None:
        """Handle a new version of an object; None: it was deleted. Foreign versions are overwritten."""
        managed = self._objects.get(path)
        if managed is None:
            return
        if managed.is_being_written:
            managed.version_during_write = version
            return
        if managed.wanted is None or managed.written != managed.wanted or version in managed.versions:
            return
        now = self._now()
        if now - managed.repaired > OVERWRITTEN_BACKOFF.steady:
            managed.overwritten = 0
            self._telemetry.resolved(KEEPS_WRITING, path=path)
        managed.overwritten += 1
        managed.repaired = now
        managed.due = max(managed.due, now + OVERWRITTEN_BACKOFF.delay(managed.overwritten))
        managed.written = object()
        if managed.overwritten > OVERWRITTEN_BACKOFF.tolerated:
            self._telemetry.problem(KEEPS_WRITING, path=path)
        self._wake.set()

    async def run(self) -> None:
        """Write the wanted contents until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                now = self._now()
                behind = [
                    (path, managed)
                    for path, managed in self._objects.items()
                    if managed.written != managed.wanted and not managed.is_being_written
                ]
                behind.sort(key=lambda entry: entry[1].waited(now), reverse=True)
                pause = math.inf
                for path, managed in behind:
                    wait = max(managed.due, managed.delayed_until) - now
                    if wait <= 0:
                        wait = self._budget.seconds_until_token(now, spare=managed.delay_factor == math.inf)
                    if wait > 0:
                        pause = min(pause, wait)
                        continue
                    self._budget.take_token()
                    managed.is_being_written, managed.version_during_write = (
                        True,
                        "",
                    )  # a slow write must not delay the others
                    tasks.create_task(self._write_object(path, managed))
                try:
                    async with asyncio.timeout(pause if pause < math.inf else None):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _write_object(self, path: str, managed: _ManagedObject) -> None:
        wanted, began = managed.wanted, self._now()
        try:
            answer = await managed.write()
        except TopoproxyError as error:
            self._failed(path, managed, error)
            return
        finally:
            managed.is_being_written = False
            self._wake.set()
        managed.failures, managed.written, managed.due = 0, wanted, began + WRITE_INTERVAL_S
        self._telemetry.resolved(CANNOT_WRITE, path=_reported(path, managed))
        if self._objects.get(path) is not managed:
            return
        if wanted == managed.wanted and (wanted is None or managed.once):
            self.forget(path)
            return
        version = str(((answer or {}).get("metadata") or {}).get("resourceVersion") or "")
        if version:
            managed.versions.append(version)
        if managed.version_during_write is None or _is_newer(managed.version_during_write, version):
            self.observed(path, managed.version_during_write)

    def _forget_oldest_once(self) -> None:
        single = [
            path
            for path, managed in self._objects.items()
            if managed.once and managed.delay_factor == math.inf
        ]
        for path in single[:-ONCE_LIMIT]:
            del self._objects[path]

    def _failed(self, path: str, managed: _ManagedObject, error: TopoproxyError) -> None:
        refused = (
            isinstance(error, ApiServerError)
            and error.status < 500
            and error.status not in _TEMPORARY_STATUSES
        )
        if isinstance(error, ApiUnreachableError):
            self._budget.return_token()
        if self._objects.get(path) is not managed:
            return  # it was forgotten during the write
        managed.failures += 1
        managed.written = object()  # even a write without an answer may have taken effect
        managed.refusals = managed.refusals + 1 if refused else 0
        # A starting API server refuses for a moment: attempts during the outage before it do not count.
        pause = REFUSED_BACKOFF.delay(managed.refusals) if refused else FAILED_BACKOFF.delay(managed.failures)
        managed.refused_until = self._now() + retry_after(error)
        managed.due = max(self._now() + pause, managed.refused_until)
        reported = _reported(path, managed)
        self._telemetry.problem(CANNOT_WRITE, path=reported, err=str(error).replace(path, reported))
        if managed.gives_up and managed.refusals >= ONCE_REFUSALS:
            self.forget(path)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _is_newer(version: str, own: str) -> bool:
    """Return whether a version is newer than the one of our own write."""
    if version.isdecimal() and own.isdecimal():
        return int(version) > int(own)
    return version not in ("", own)


def _reported(path: str, managed: _ManagedObject) -> str:
    """Return the path for reports: many Events that cannot be written are reported as one problem."""
    return path.rpartition("/")[0] if managed.once else path


_ROUNDING = 1e-6


class WriteBudget:
    """A token bucket that starts full; a write takes a token."""

    __slots__ = ("_burst", "_filled", "_per_second", "_tokens")

    def __init__(self, per_second: float, burst: int) -> None:
        """Start with a full bucket.

        Args:
            per_second: Tokens that are added in a second.
            burst: The most tokens that the bucket holds.
        """
        self._per_second, self._burst = per_second, burst
        self._tokens, self._filled = float(burst), 0.0

    def seconds_until_token(self, now: float, spare: int = 0) -> float:
        """Return the seconds until a write may begin; 0: now.

        Args:
            now: Seconds that only grow.
            spare: How many tokens must be left after the write.
        """
        grown = max(0.0, now - self._filled) * self._per_second
        self._tokens, self._filled = min(self._burst, self._tokens + grown), now
        lacking = 1 + spare - self._tokens
        return lacking / self._per_second if lacking > _ROUNDING else 0.0

    def take_token(self) -> None:
        """Count a write that begins without a wait."""
        self._tokens -= 1

    def return_token(self) -> None:
        """A write has not reached the API server."""
        self._tokens = min(self._burst, self._tokens + 1)
