"""Keep the UpdateContainerResources calls of one container in order while hooks are called for them.

Without hooks, updates go to the runtime as they come. A hook that takes longer for the first update than for
the second must not reverse them: the last request must be in effect. So if hooks do not answer at once, later
updates of the container wait in a queue, each until the previous one has been forwarded or has ended. They
wait at most as long as hooks may take, and no call of another container waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from msgspec import Struct

from proxy.calls.undecided_call import CallHandler, UndecidedCall
from proxy.frontends.hook_bridge.held_call_hooks import HeldCallHooks, OnOutcome
from proxy.hooks.events import PreUpdateContainerResources
from proxy.hooks.hook import Outcome, PendingOutcome
from proxy.model.workload import Phase


class _CalledHooks(Struct, frozen=True):
    """Hooks that have not answered yet, and the function to call with their outcome."""

    pending: PendingOutcome
    on_outcome: OnOutcome


class UpdateQueue:
    """Updates that go through the hooks."""

    def __init__(self, hooks: HeldCallHooks) -> None:
        """Begin without any update."""
        self._hooks = hooks
        self._executor = hooks.executor
        self._last: dict[str, asyncio.Future[None]] = {}
        """The last update in the queue of each container that has a queue."""

    def update(self, call: UndecidedCall, container_id: str, proceed: CallHandler) -> None:
        """Call hooks for an update when its turn comes."""
        called = None
        if container_id not in self._last and self._hooks.knows(container_id):
            called = self._call_hooks(call, container_id, proceed)
            if called is None:
                return
        self._hooks.spawn(call, self._enter_queue(call, container_id, proceed, called))

    def _enter_queue(
        self, call: UndecidedCall, container_id: str, proceed: CallHandler, called: _CalledHooks | None
    ) -> Coroutine[object, object, None]:
        """Enter the queue now; return the coroutine to await."""
        before, finished = self._last.get(container_id), asyncio.get_running_loop().create_future()
        self._last[container_id] = finished

        async def wait_and_proceed() -> None:
            try:
                if before is not None:
                    await asyncio.wait((before,))
                await self._hooks.look_up(container_id)
                hooks = called
                if hooks is None and not call.done:
                    hooks = self._call_hooks(call, container_id, proceed)
                if hooks is not None:
                    outcome = await self._hooks.await_outcome(hooks.pending)
                    if not call.done:
                        hooks.on_outcome(outcome)
            finally:
                finished.set_result(None)
                if self._last.get(container_id) is finished:
                    del self._last[container_id]

        return wait_and_proceed()

    def _call_hooks(
        self, call: UndecidedCall, container_id: str, proceed: CallHandler
    ) -> _CalledHooks | None:
        """Call hooks for an update; return those to wait for, or None if the call has continued."""
        container = self._executor.state.containers.get(container_id)
        if container is None or container.phase is Phase.EXITED:
            proceed(call)
            return None
        lifecycle_events, offered = (
            self._hooks.lifecycle_events,
            self._executor.state.cpus_without_hooks(container),
        )

        def decided(outcome: Outcome) -> None:
            applied = self._hooks.apply(call, outcome)
            if applied is not None and not self._hooks.forward_if_released(call):
                self._hooks.narrow(container_id, applied, offered)
                proceed(call)

        pending = self._hooks.start_hooks(
            PreUpdateContainerResources(
                *lifecycle_events.facts(container),
                lifecycle_events.decision(container),
                *call.hook_view().update(),
            )
        )
        if pending.outcome is None:
            return _CalledHooks(pending, decided)
        decided(pending.outcome)
        return None
