"""Writes the state to the ledger, off the event loop.

Records of containers that own nothing may reach the ledger a moment late: the runtime knows them, and a
restart rebuilds them from its list. They are collected and written in one batch by the worker. A record that
gives CPUs to an owner is written, and waited for, before any container moves (``append``, ``flush``). So is a
record of what hooks have named for a container that is about to be created, because no other source knows it.

A record that cannot be written stays with the worker and is part of its next batch: batches are written in
the order in which they were taken, so that a record is never overwritten by an older one. A record that
cannot be stored because of its content is dropped alone, counted and reported. No message repeats the content
of a record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from msgspec import Struct

from proxy.engine.node_effects import Record
from proxy.engine.reservation_events import LedgerLate, LedgerRejected, LedgerWritten
from proxy.executor.background import Worker
from proxy.executor.ledger_codec import dump
from proxy.executor.ports import Ledger
from proxy.model.errors import RecordError, TopoproxyError
from proxy.model.workload import Container, Pod
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

DELAY_S = 0.01
RETRY_S = 5.0
LIMIT_S = 5.0
CANNOT_WRITE = "cannot write the ledger"
CANNOT_COMPACT = "cannot compact the ledger"
LATE = "the ledger is not written in time"
UNWRITTEN = "the ledger cannot be written now"

Plain = dict[str, Mapping[str, object] | None]


class BatchResult(Struct, frozen=True):
    """The result of writing a batch.

    Attributes:
        rejected: The records that can never be stored, by key, with the reason.
        unwritten: The keys of the records that could not be written now.
    """

    rejected: Mapping[str, str] = {}
    unwritten: frozenset[str] = frozenset()


class LedgerWriter:
    """Collects changes, and has them written to the ledger.

    Keys: ``p/`` sandbox, ``c/`` container, ``i/`` create in flight; and as plain data ``q/`` and ``qc/`` CFS
    quotas that are off, ``b/`` what was written to groups above pods, ``r/`` a release, ``t/`` a takeover,
    ``x/`` partitions, ``m/`` an unfinished move of an owner (``reservation_records``), ``d/`` and ``dr/`` the
    devices of a pod and the resources of device plugins (``proxy.engine.held_devices``), ``e/`` to which
    pods the plan is applied (``proxy.engine.enforcement_state``).

    Attributes:
        limit: Seconds to wait for a write.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        worker: Worker,
        telemetry: Telemetry,
        limit: float = LIMIT_S,
    ) -> None:
        """Start empty, on the running event loop.

        Args:
            ledger: Where records are kept; None to keep none.
            worker: Its one thread writes.
            telemetry: Where to report and count.
            limit: Seconds to wait for a write.
        """
        self._ledger = ledger
        self._worker = worker
        self._telemetry = telemetry
        self.limit = limit
        self._latest: Future[BatchResult] | None = None
        self._waiting: dict[str, Record | None] = {}
        self._unwritten: dict[str, Record | None] = {}  # the worker's
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, key: str, value: Record | None) -> None:
        """Store a record soon (None: delete it)."""
        if self._ledger is None:
            return
        self._waiting[key] = value
        self._start_in(DELAY_S)

    def _start_in(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(seconds, self._start)

    def _start(self) -> None:
        """Queue everything that waits for the worker."""
        self._cancel_timer()
        batch, self._waiting = self._waiting, {}
        self._latest = self._worker.start(self._write, batch)

    async def append(
        self, records: Mapping[str, Record | None], *, durable: bool = False
    ) -> LedgerWritten | LedgerLate | LedgerRejected:
        """Store records now, in one step, with everything that waits.

        Args:
            records: By key; None deletes.
            durable: Whether records that are only kept until the file can be written count as late.
        """
        for key, value in records.items():
            self.put(key, value)
        result = await self._flushed()
        if result is None:
            return LedgerLate(LATE)
        for key in records:
            if key in result.rejected:
                return LedgerRejected(f"its record cannot be stored: {result.rejected[key]}")
        if durable and not result.unwritten.isdisjoint(records):
            return LedgerLate(UNWRITTEN)
        return LedgerWritten()

    async def flush(self) -> None:
        """Write everything that was put, and wait for that no longer than the limit.

        The records are written even if the wait is cancelled or takes too long.
        """
        if await self._flushed() is None:
            self._telemetry.problem(LATE, seconds=self.limit)

    async def _flushed(self) -> BatchResult | None:
        """Wait until all is written; returns the result of the last batch, or None on a timeout."""
        if self._waiting:
            self._start()
        latest = self._latest
        if latest is None:
            return BatchResult()
        if not latest.done():  # an earlier batch may still wait for the worker
            await asyncio.wait((asyncio.wrap_future(latest),), timeout=self.limit)
        return latest.result() if latest.done() and not latest.cancelled() else None

    async def close(self) -> None:
        """Write everything, including what the worker has not reached yet."""
        self._cancel_timer()
        if self._ledger is not None:
            self._start()
            await self.flush()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- in the worker ------------------------------------------------------------------------------------

    def _write(self, batch: Mapping[str, Record | None]) -> BatchResult:
        """Write a batch, and what could not be written before. A ledger that fails does not stop the node."""
        batch, self._unwritten = {**self._unwritten, **batch}, {}
        changes: Plain = {}
        rejected: dict[str, str] = {}
        try:
            changes = self._plain(batch, rejected)
            if changes:
                self._write_changes(changes, rejected)
                self._telemetry.resolved(CANNOT_WRITE)
                self._report_compaction()
        except Exception as error:  # noqa: BLE001  no fault may lose a record
            self._unwritten = {key: batch[key] for key in (changes or batch)}
            known = isinstance(error, TopoproxyError)
            self._telemetry.problem(CANNOT_WRITE, err=error if known else type(error).__name__)
            self._on_loop(self._start_in, RETRY_S)
        if rejected:
            self._telemetry.count(metrics.RECORDS_REJECTED, len(rejected))
            for key, why in rejected.items():
                self._telemetry.problem("cannot store a record in the ledger", record=key, err=why)
        # The next batch may have begun before the event loop looks: so the result names the unwritten keys.
        return BatchResult(rejected, frozenset(self._unwritten))

    def _report_compaction(self) -> None:
        assert self._ledger is not None
        if self._ledger.problem:
            self._telemetry.problem(CANNOT_COMPACT, err=self._ledger.problem)
        else:
            self._telemetry.resolved(CANNOT_COMPACT)

    def _plain(self, batch: Mapping[str, Record | None], rejected: dict[str, str]) -> Plain:
        """Return a batch as plain data, without deletions of records that the ledger does not have."""
        assert self._ledger is not None
        entries, changes = self._ledger.entries, Plain()
        for key, value in batch.items():
            plain: Mapping[str, object] | None = None
            try:
                plain = dump(value) if isinstance(value, Pod | Container) else value
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  one odd record must not cost the others
                rejected[key] = type(error).__name__
            if plain is not None or key in entries:
                changes[key] = plain
        return changes

    def _write_changes(self, changes: Plain, rejected: dict[str, str]) -> None:
        """Write changes in one step; after an unforeseen fault one by one.

        Raises:
            Exception: They cannot be written now. The changes that are left in ``changes`` are not written.
        """
        assert self._ledger is not None
        try:
            self._ledger.write(changes)
        except RecordError as error:
            rejected.update(error.rejected)
        except (TopoproxyError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  see above
            self._one_by_one(changes, rejected)

    def _one_by_one(self, changes: Plain, rejected: dict[str, str]) -> None:
        assert self._ledger is not None
        for key in list(changes):
            try:
                self._ledger.write({key: changes[key]})
            except RecordError as error:
                rejected.update(error.rejected)
            except (TopoproxyError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001  the record that must not cost the others
                rejected[key] = type(error).__name__
            del changes[key]

    def _on_loop(self, work: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, *args)
