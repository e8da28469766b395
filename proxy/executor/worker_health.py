"""The health of the workers: a worker that has been at the same job for too long is reported.

A job ends when the kernel, a disk or a peer answers. Calls to peers have deadlines, file operations do not: a
system call on a file system that does not answer cannot be interrupted from within the process. The event
loop continues, so its own watchdog ping does not show that a worker is stuck.

- After ``after`` seconds at one job a worker is *stuck*: a problem is reported, and it shows under
  ``workers`` in the status and in a metric. While the kernel worker or the ledger worker is stuck, the node
  is not ready: no owner of CPUs can be created.
- When the job ends, the queue continues by itself. Jobs of requesters that have gone away are dropped, and
  each remaining job reads the newest state. A reconcile is requested, since writes may have come late.
- A restart is the last resort. It helps if the fault is in this process or in its handle of a file (a
  stale NFS handle, a FUSE request that was lost). It does not help if the file system itself hangs: the next
  daemon gets stuck as well. So the watchdog ping is withheld only after ``RESTART_S``, and only if the worker
  had worked for ``STEADY_S`` since the start: a daemon that is stuck from the start is not restarted in a
  loop, and continues to relay calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proxy.telemetry.port import Telemetry

STUCK_S = 10.0
"""Seconds at one job after which a worker for files is stuck: twice the default ``callTimeout``."""
SLOW_STUCK_S = 60.0
"""The same for workers with jobs that query peers several times, each time with a deadline."""
RESTART_S = 300.0
STEADY_S = 60.0
PERIOD_S = 2.0
STUCK = "a worker thread is stuck in one job"


class WatchedWorker(Protocol):
    """What is watched; see ``proxy.executor.background.Worker``."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def waiting(self) -> int:
        """How many jobs wait."""

    def running_s(self) -> float:
        """Seconds that the oldest of the running jobs has been running."""


@dataclass(slots=True)
class _Watched:
    """A worker that is watched.

    Attributes:
        worker: The worker.
        after: Seconds at one job after which it is stuck.
        critical: Whether the node is not ready without it.
        stuck_s: How long it had been stuck at the last check; 0 while it is not.
    """

    worker: WatchedWorker
    after: float
    critical: bool
    stuck_s: float = 0.0

    def stuck_now(self) -> float:
        """Return how many seconds it has been at one job, once that is too long; otherwise 0."""
        seconds = self.worker.running_s()
        return seconds if seconds >= self.after else 0.0


class Health:
    """Watches workers."""

    def __init__(
        self,
        telemetry: Telemetry,
        recovered: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch nothing yet.

        Args:
            telemetry: Where to report.
            recovered: Called when a worker that was stuck continues.
            clock: A monotonic clock in seconds, the same as the workers'.
        """
        self._telemetry = telemetry
        self._recovered = recovered
        self._clock = clock
        self._began = clock()
        self._watched: list[_Watched] = []

    def watch(self, worker: WatchedWorker, after: float = SLOW_STUCK_S, *, critical: bool = False) -> None:
        """Watch one more worker.

        Args:
            worker: The worker.
            after: Seconds at one job after which it is stuck.
            critical: Whether the node is not ready without it.
        """
        self._watched.append(_Watched(worker, after, critical))

    async def run(self) -> None:
        """Check the workers periodically, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(PERIOD_S)

    def check(self) -> None:
        """Report workers that are newly stuck, or no longer stuck."""
        for watched in self._watched:
            name, before, seconds = watched.worker.name, watched.stuck_s, watched.stuck_now()
            watched.stuck_s = seconds
            if seconds and not before:
                self._telemetry.problem(STUCK, worker=name, seconds=watched.after)
            elif before and not seconds:
                self._telemetry.resolved(STUCK, worker=name)
                self._telemetry.warning("a worker thread continues", worker=name, seconds=round(before))
                self._recovered()

    def stuck(self) -> dict[str, float]:
        """Return the critical workers that are stuck now, with the seconds."""
        found = {watched.worker.name: watched.stuck_now() for watched in self._watched if watched.critical}
        return {name: seconds for name, seconds in found.items() if seconds}

    def may_restart(self) -> bool:
        """Return whether a restart of the process is the only remedy left that may help."""
        return any(
            seconds >= RESTART_S and self._clock() - seconds >= self._began + STEADY_S
            for seconds in self.stuck().values()
        )

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows."""
        return {
            watched.worker.name: {
                "stuck_s": round(watched.stuck_now(), 1),
                "waiting": watched.worker.waiting,
            }
            for watched in self._watched
        }
