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

from proxy.calls.undecided_call import Handle, UndecidedCall
from proxy.frontends.hook_bridge.dispatch import Decided, HookDispatcher
from proxy.hooks.events import PreUpdateContainerResources
from proxy.hooks.hook import Outcome, PendingOutcome
from proxy.model.workload import Phase


class _Waiting(Struct, frozen=True):
    """Hooks that have not answered yet, and the function to call when they have."""

    answers: PendingOutcome
    go: Decided


class UpdateQueue:
    """Updates that go through the hooks."""

    def __init__(self, dispatcher: HookDispatcher) -> None:
        """Begin without any update."""
        self._dispatcher = dispatcher
        self._executor = dispatcher.executor
        self._last: dict[str, asyncio.Future[None]] = {}
        """The last update in the queue of each container that has a queue."""

    def update(self, call: UndecidedCall, container_id: str, go: Handle) -> None:
        """Call hooks for an update when its turn comes."""
        answers = None
        if container_id not in self._last and self._dispatcher.knows(container_id):
            answers = self._call_hooks(call, container_id, go)
            if answers is None:
                return
        self._dispatcher.spawn(call, self._in_line(call, container_id, go, answers))

    def _in_line(
        self, call: UndecidedCall, container_id: str, go: Handle, answers: _Waiting | None
    ) -> Coroutine[object, object, None]:
        """Enter the queue now; return the coroutine to await."""
        before, finished = self._last.get(container_id), asyncio.get_running_loop().create_future()
        self._last[container_id] = finished

        async def waiting() -> None:
            try:
                if before is not None:
                    await asyncio.wait((before,))
                await self._dispatcher.look_up(container_id)
                late = answers
                if late is None and not call.done:
                    late = self._call_hooks(call, container_id, go)
                if late is not None:
                    outcome = await self._dispatcher.outcome(late.answers)
                    if not call.done:
                        late.go(outcome)
            finally:
                finished.set_result(None)
                if self._last.get(container_id) is finished:
                    del self._last[container_id]

        return waiting()

    def _call_hooks(self, call: UndecidedCall, container_id: str, go: Handle) -> _Waiting | None:
        """Call hooks for an update; return the answers to wait for, or None if the call has continued."""
        container = self._executor.state.containers.get(container_id)
        if container is None or container.phase is Phase.EXITED:
            go(call)
            return None
        lifecycle_events, offered = (
            self._dispatcher.lifecycle_events,
            self._executor.state.cpus_without_hooks(container),
        )

        def decided(outcome: Outcome) -> None:
            applied = self._dispatcher.apply(call, outcome)
            if applied is not None and not self._dispatcher.relays(call):
                self._dispatcher.narrow(container_id, applied, offered)
                go(call)

        answers = self._dispatcher.answers(
            PreUpdateContainerResources(
                *lifecycle_events.facts(container),
                lifecycle_events.decision(container),
                *call.hook_view().update(),
            )
        )
        if answers.outcome is None:
            return _Waiting(answers, decided)
        decided(answers.outcome)
        return None
