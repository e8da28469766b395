"""Writing the state behind the loop's back.

Records of containers that own nothing may reach the ledger a moment late: the runtime knows them, and a
restart rebuilds them from its list. They are collected and written in one batch by the worker. A record that
gives CPUs away is written before anybody moves, and waited for (``flush``).
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

    Keys: ``p/`` sandbox, ``c/`` container, ``i/`` create in flight, ``b/`` what was written to groups above
    pods (plain data).
    """

    def __init__(self, ledger: Ledger | None, worker: Worker, problem: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._worker = worker
        self._problem = problem
        self._waiting: dict[str, Record | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, key: str, value: Record | None) -> None:
        """Store a record soon (None: delete it)."""
        if self._ledger is None:
            return
        self._waiting[key] = value
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._waiting:
            self._worker.start(self._write, self._take())

    def _take(self) -> Mapping[str, Record | None]:
        batch, self._waiting = self._waiting, {}
        return batch

    async def flush(self) -> None:
        """Write everything that waits, and wait for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            await self._worker.run(self._write, self._take())

    def _write(self, batch: Mapping[str, Record | None]) -> None:
        """Runs in the worker. A ledger that cannot be written is told, and does not stop the node."""
        assert self._ledger is not None
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
            self._problem(str(error))
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._again, batch)

    def _again(self, batch: Mapping[str, Record | None]) -> None:
        """Try what could not be written once more, later; what is newer meanwhile counts."""
        self._waiting = {**batch, **self._waiting}
        if self._timer is None:
            self._timer = self._loop.call_later(RETRY_S, self._start)
