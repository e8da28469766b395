"""Writing the state behind the loop's back.

Records of containers that own nothing may reach the ledger a moment late: the runtime knows them, and a
restart rebuilds them from its list. They are collected and written in one batch by the worker. A record that
gives CPUs away is written before anybody moves, and waited for (``flush``); so is one that says what hooks
have named for a container that is to be made, which nobody else knows.

What cannot be written stays with the worker, and goes with its next batch: batches are written in the order
in which they were taken, so that a record never comes back after a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from proxy.keeper.codec import dump
from proxy.keeper.ports import Ledger
from proxy.keeper.worker import Worker
from proxy.model.errors import TopoproxyError
from proxy.model.workload import Container, Pod

DELAY_S = 0.01
RETRY_S = 5.0

Record = Pod | Container | Mapping[str, object]


class Journal:
    """Collects changes and has them written.

    Keys: ``p/`` sandbox, ``c/`` container, ``i/`` create in flight; and as plain data ``q/`` and ``qc/`` CFS
    quotas that are off, ``b/`` what was written to groups above pods, ``r/`` a release, ``t/`` a takeover,
    ``x/`` partitions.
    """

    def __init__(self, ledger: Ledger | None, worker: Worker, problem: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._worker = worker
        self._problem = problem
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
        self._timer = None
        self._worker.start(self._write, self._take())

    def _take(self) -> Mapping[str, Record | None]:
        batch, self._waiting = self._waiting, {}
        return batch

    async def flush(self) -> None:
        """Write everything that waits, and wait for it. It is written too where the wait is cancelled."""
        if self._waiting:
            self._still()
            await asyncio.shield(self._worker.run(self._write, self._take()))

    async def close(self) -> None:
        """Write everything, also what the worker has not come to yet."""
        self._still()
        if self._ledger is not None:
            await self._worker.run(self._write, self._take())

    def _still(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self, batch: Mapping[str, Record | None]) -> None:
        """Runs in the worker. A ledger that cannot be written is told, and does not stop the node."""
        assert self._ledger is not None
        batch, self._unwritten = {**self._unwritten, **batch}, {}
        there = self._ledger.entries
        changes = {
            key: dump(value) if isinstance(value, Pod | Container) else value
            for key, value in batch.items()
            if value is not None or key in there
        }
        if not changes:
            return
        try:
            self._ledger.write(changes)
        except TopoproxyError as error:
            self._unwritten = {key: batch[key] for key in changes}
            self._problem(str(error))
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._start_in, RETRY_S)
