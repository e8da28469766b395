"""UpdateContainerResources past the hooks: of one container in the order in which they came.

Without hooks, updates go to the runtime as they come. A hook that thinks longer about the first than about
the second must not turn them round: what was asked for last is to hold. So where hooks do not answer at
once, the updates of the container that come next stand in line behind it, each until the one before has
gone on or is over. That is as long as hooks may take, and no call of another container waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.call import HeldCall, Hold
from proxy.frontends.cri.hook_bridge.adjust import adjusted_update
from proxy.frontends.cri.hook_bridge.dispatch import Decided, HookDispatcher
from proxy.frontends.cri.hook_bridge.facts import resources_of
from proxy.frontends.cri.hook_bridge.lazy import LazyMap
from proxy.frontends.cri.hook_bridge.lenient import read
from proxy.frontends.cri.hook_gateway import Go
from proxy.hooks.events import PreUpdateContainerResources
from proxy.hooks.hook import Answers, Outcome
from proxy.model.workload import Phase

if TYPE_CHECKING:
    from proxy.controller.context import NodeContext
    from proxy.frontends.cri.hook_bridge.lifecycle_events import LifecycleEvents


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Hooks that have not answered yet, and what is done when they have."""

    answers: Answers
    go: Decided


class UpdateQueue:
    """Updates on their way through the hooks."""

    def __init__(
        self,
        keeper: NodeContext,
        way: HookDispatcher,
        following: LifecycleEvents,
        adopt: Callable[[str], Awaitable[bool]],
        hold: Hold,
        learn: Callable[[str], Awaitable[None]],
    ) -> None:
        """Nobody is in line.

        Args:
            keeper: Whose node it is.
            way: Asks hooks.
            following: Knows what hooks are told.
            adopt: Takes in a container that a call names and nobody knows.
            hold: Holds a call while a coroutine decides on it.
            learn: Learns what hooks lack of a container.
        """
        self._keeper = keeper
        self._way = way
        self._following = following
        self._adopt = adopt
        self._hold = hold
        self._learn = learn
        self._last: dict[str, asyncio.Future[None]] = {}
        """The last in line of each container that has a line."""

    def update(self, call: HeldCall, container_id: str, go: Go) -> None:
        """Have hooks asked about an update, when it is its turn."""
        answers = None
        known = container_id in self._keeper.state.containers and not self._following.lacks(container_id)
        if known and container_id not in self._last:
            answers = self._ask(call, container_id, go)
            if answers is None:
                return
        self._hold(call, self._in_line(call, container_id, go, answers))

    def _in_line(
        self, call: HeldCall, container_id: str, go: Go, answers: _Waiting | None
    ) -> Coroutine[object, object, None]:
        """Take a place in line, now; gives what is to be awaited."""
        before, mine = self._last.get(container_id), asyncio.get_running_loop().create_future()
        self._last[container_id] = mine

        async def waiting() -> None:
            try:
                if before is not None:
                    await asyncio.wait((before,))
                if container_id not in self._keeper.state.containers:
                    await self._adopt(container_id)
                if self._following.lacks(container_id):
                    await self._learn(container_id)
                late = answers
                if late is None and not call.done:
                    late = self._ask(call, container_id, go)
                if late is not None:
                    outcome = await self._way.outcome(late.answers)
                    if not call.done:
                        late.go(outcome)
            finally:
                mine.set_result(None)
                if self._last.get(container_id) is mine:
                    del self._last[container_id]

        return waiting()

    def _ask(self, call: HeldCall, container_id: str, go: Go) -> _Waiting | None:
        """Ask about an update; gives what is to be waited for, None where it has gone on."""
        container = self._keeper.state.containers.get(container_id)
        if container is None or container.phase is Phase.EXITED:
            go(call)
            return None
        request, following = read(pb.UpdateContainerResourcesRequest, call.body), self._following
        offered = self._keeper.state.offered(container)

        def decided(outcome: Outcome) -> None:
            outcome, body = self._way.written(call, adjusted_update, outcome)
            if self._way.refuses(call, outcome):
                return
            if body is not call.body:
                call.change(body)
            if not self._way.relays(call):
                self._way.narrow(container_id, outcome, offered)
                go(call)

        answers = self._way.answers(
            PreUpdateContainerResources(
                *following.facts(container),
                following.decision(container),
                resources_of(request.linux),
                LazyMap(_annotations, request),
            )
        )
        if answers.outcome is None:
            return _Waiting(answers, decided)
        decided(answers.outcome)
        return None


def _annotations(request: pb.UpdateContainerResourcesRequest) -> dict[str, str]:
    return dict(request.annotations)
