"""Having the kernel follow the state: which containers are written, when, and what follows from a write.

Writes run in the kernel worker's thread and use the newest state. Until all running containers are known
(``in_step``), what is to be written is put off: CPUs that seem free may belong to a container that is not yet
adopted. A container with a call at the runtime is not written, as the call would undo it; it is written when
the call has landed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proxy.keeper.context import NodeContext
from proxy.keeper.enforce import Enforced
from proxy.keeper.onlooker import Onlooker
from proxy.keeper.store import Change, Follow
from proxy.model.workload import Phase
from proxy.telemetry import metrics

Write = Callable[[Iterable[str]], Enforced]
"""Writes the sets of some containers, in the kernel worker's thread."""


class KernelWrites(Onlooker):
    """Has the kernel follow the state."""

    def __init__(self, keeper: NodeContext) -> None:
        self._keeper = keeper
        self._write: Write = keeper.enforcer.enforce
        self._noted: list[Callable[[Enforced], None]] = []
        self._put_off = set[str]()

    def write_with(self, write: Write) -> None:
        """Have containers written by a function that does more than the enforcer (``drift``)."""
        self._write = write

    def subscribe(self, noted: Callable[[Enforced], None]) -> None:
        """Notify a part of what each enforcement did, from now on, on the event loop."""
        self._noted.append(noted)

    def changed(self, change: Change) -> None:
        """See ``Onlooker``."""
        if change.follow is Follow.ALL:
            self.later(list(change.after.containers))
        elif change.follow is Follow.MOVED and change.moved:
            self.later(change.moved)

    def later(self, ids: list[str]) -> None:
        """Have the kernel follow the state for some containers, soon; at a start, once it is complete."""
        keeper = self._keeper
        if not keeper.store.mode.enforces:
            return
        if keeper.synced.is_set():
            keeper.spawn(self.follow(ids))
        else:
            self._put_off.update(ids)

    def in_step(self) -> None:
        """All running containers are known: what was put off is written."""
        self._keeper.synced.set()
        ids, self._put_off = self._put_off, set()
        self.later([i for i in ids if i in self._keeper.state.containers])

    async def follow(self, ids: list[str]) -> None:
        """Have the kernel follow the state for some containers, now."""
        keeper, flights = self._keeper, self._keeper.flights
        ids = [i for i in ids if not flights.awaited(i) or flights.is_confined(i)]
        if not ids:
            return
        done = await keeper.kernel.run(self._write, ids)
        self.moved(done)
        keeper.report_errors(done)

    async def clear_sandboxes(self) -> None:
        """Have sandboxes, a new one among them, leave CPUs that are owned."""
        self.moved(await self._keeper.kernel.run(self._keeper.enforcer.enforce_sandboxes))

    def moved(self, done: Enforced, *, look_again: bool = True) -> None:
        """Take note of what an enforcement did.

        Args:
            done: What it did.
            look_again: Whether the runtime is asked about containers without a cgroup.
        """
        keeper = self._keeper
        keeper.telemetry.count(metrics.CPUSETS_WRITTEN, len(done.written))
        if done.written:
            keeper.telemetry.observe(metrics.KERNEL_WRITE_SECONDS, done.seconds)
        known = keeper.telemetry.value(metrics.SANDBOXES_WRITTEN)
        keeper.telemetry.count(metrics.SANDBOXES_WRITTEN, keeper.enforcer.pauses.written - known)
        for noted in self._noted:
            noted(done)
        for note in done.notes:
            keeper.telemetry.problem("cannot write a cgroup", reason=note)
        for container_id in done.written:
            keeper.settle_later(container_id)
        there = (keeper.state.containers.get(container_id) for container_id in done.absent)
        if look_again and any(c is not None and c.phase is Phase.RUNNING for c in there):
            keeper.attention.set()  # a container that is only starting has no cgroup yet
