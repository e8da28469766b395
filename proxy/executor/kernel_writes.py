"""Makes the kernel follow the state: which cpusets are written, when, and what follows from a write.

Writes run in the kernel worker's thread and use the newest state. Until all running containers are known
(``in_step``), writes are put off: CPUs that seem free may belong to a container that is not yet adopted. The
cpuset of a container with a call in flight is not written, as the call would undo it; it is written when the
call has landed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import ParamSpec

from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import Change, Follow, WriteCpusets
from proxy.executor.context import NodeContext
from proxy.executor.enforce import Enforced
from proxy.executor.observer import Observer
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

P = ParamSpec("P")

Write = Callable[[Iterable[str]], Enforced]
"""Writes the cpusets of some containers, in the kernel worker's thread."""


class KernelWrites(Observer):
    """Makes the kernel follow the state."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._write: Write = context.enforcer.enforce
        self._noted: list[Callable[[Enforced], None]] = []
        self._put_off = set[str]()
        context.store.perform_by(WriteCpusets, lambda effect: self.later(list(effect.ids)))

    def write_with(self, write: Write) -> None:
        """Write containers by a function that does more than the enforcer (``drift``)."""
        self._write = write

    def subscribe(self, noted: Callable[[Enforced], None]) -> None:
        """Notify a subscriber of what each enforcement did, from now on, on the event loop."""
        self._noted.append(noted)

    def changed(self, change: Change) -> None:
        """See ``Observer``."""
        if change.follow is Follow.ALL:
            self.later(list(change.after.containers))
        elif change.follow is Follow.MOVED and change.moved:
            self.later(change.moved)

    def later(self, ids: list[str]) -> None:
        """Write the cpusets of some containers soon; at a start, once all containers are known."""
        context = self._context
        if not applies_to(context.state, None):
            return
        if context.reconciled.is_set():
            context.spawn(self.follow(ids))
        else:
            self._put_off.update(ids)

    def in_step(self) -> None:
        """Note that all running containers are known: what was put off is written."""
        self._context.reconciled.set()
        ids, self._put_off = self._put_off, set()
        self.later([i for i in ids if i in self._context.state.containers])

    async def follow(self, ids: list[str]) -> None:
        """Write the cpusets of some containers now."""
        context, state = self._context, self._context.state
        there, inflight = state.containers, state.inflight
        ids = [i for i in ids if (c := there.get(i)) is not None and applies_to(state, c.pod)]
        ids = [i for i in ids if not inflight.is_awaited(i) or inflight.is_confined(i)]
        if not ids:
            return
        context.report_errors(await self.run(self._write, ids))

    async def run(self, job: Callable[P, Enforced], *args: P.args, **kwargs: P.kwargs) -> Enforced:
        """Run an enforcement, and process its result also where the caller has stopped waiting for it."""
        return await self._context.kernel.run_noted(self.moved, job, *args, **kwargs)

    async def clear_sandboxes(self) -> None:
        """Keep all sandboxes, also new ones, off owned CPUs."""
        await self.run(self._context.enforcer.enforce_sandboxes)

    async def widen_groups(self, container: Container) -> None:
        """Widen the cgroups above a container: on v1 no container can have CPUs that they lack.

        If they cannot be written in time, that is reported, and the container continues with what they hold.
        """
        context = self._context
        try:
            async with asyncio.timeout(context.options.call_timeout):
                await self.run(context.enforcer.enforce_groups)
        except TimeoutError:
            context.telemetry.problem(
                "cannot write the cgroups above a container in time", **subject(container)
            )

    def moved(self, done: Enforced, *, look_again: bool = True) -> None:
        """Process the result of an enforcement.

        Args:
            done: The result.
            look_again: Whether the runtime is queried about containers without a cgroup.
        """
        context = self._context
        context.telemetry.count(metrics.CPUSETS_WRITTEN, len(done.written))
        if done.written:
            context.telemetry.observe(metrics.KERNEL_WRITE_SECONDS, done.seconds)
        known = context.telemetry.value(metrics.SANDBOXES_WRITTEN)
        context.telemetry.count(metrics.SANDBOXES_WRITTEN, context.enforcer.sandboxes.written - known)
        for noted in self._noted:
            noted(done)
        for note in done.notes:
            context.telemetry.problem("cannot write a cgroup", reason=note)
        if done.written:
            context.settle_later(*done.written)
        there = (context.state.containers.get(container_id) for container_id in done.absent)
        if look_again and any(c is not None and c.phase is Phase.RUNNING for c in there):
            context.attention.set()  # a container that is only starting has no cgroup yet
