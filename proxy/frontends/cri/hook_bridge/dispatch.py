"""Asking hooks in the way of one call, and doing what they answer: what all calls have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.engine.narrowing import Narrowing
from proxy.frontends.cri.call import HeldCall, Hold
from proxy.hooks.answers import CLEAR, LEAVE, Adjustment
from proxy.hooks.events import Point
from proxy.hooks.hook import AS_IT_IS, LONGEST_S, Answers, Outcome
from proxy.model.errors import HookError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.controller.controller import Keeper
    from proxy.frontends.cri.hook_bridge.updates import Updates
    from proxy.hooks.hook import Asking

_MARGIN_S = 5.0

Decided = Callable[[Outcome], None]
"""Goes on with a call when the hooks have answered."""


class HookDispatcher:
    """The way of a call through the hooks."""

    def __init__(
        self, keeper: Keeper, asking: Asking, updates: Updates, hold: Hold, *, owned_cpus: bool = False
    ) -> None:
        """Ask nobody yet.

        Args:
            keeper: Whose node it is.
            asking: Who asks.
            updates: Does what hooks want of other containers.
            hold: Holds a call while a coroutine decides on it.
            owned_cpus: Hooks may give CPUs that have owners.
        """
        self.asking = asking
        self._keeper = keeper
        self._updates = updates
        self._hold = hold
        self._owned_cpus = owned_cpus

    def answers(self, event: Point) -> Answers:
        """Ask hooks of something."""
        try:
            return self.asking.ask(event)
        except Exception as error:  # noqa: BLE001  a fault of ours costs the hooks, never the call
            self._keeper.broken(error)
            return _NONE

    async def outcome(self, answers: Answers) -> Outcome:
        """Wait for what hooks want; who asks them has the deadlines, and this is for its faults."""
        if answers.outcome is not None:
            return answers.outcome
        try:
            async with asyncio.timeout(LONGEST_S + _MARGIN_S):
                return await answers.wait()
        except TimeoutError as error:
            self._keeper.broken(error)
            return AS_IT_IS

    def ask(self, call: HeldCall, event: Point, go: Decided, over: Callable[[], None] = lambda: None) -> None:
        """Ask hooks in the way of a call.

        Args:
            call: It is held as long as they think.
            event: What they are told.
            go: Called with what they want, in this turn of the loop if they have answered.
            over: Called instead where the client has gone meanwhile.
        """
        answers = self.answers(event)
        if answers.outcome is not None:
            go(answers.outcome)
            return

        async def later() -> None:
            outcome = await self.outcome(answers)
            if call.done:
                over()
            else:
                go(outcome)

        self._hold(call, later())

    def refuses(self, call: HeldCall, outcome: Outcome) -> bool:
        """Refuse the call where hooks do; else have done what they want of others."""
        if outcome.refusal:
            self._keeper.telemetry.count(metrics.REFUSED_BY_HOOKS)
            self._keeper.telemetry.frequent("refused a call", method=call.method, reason=outcome.refusal)
            call.refuse(GrpcStatus.FAILED_PRECONDITION, outcome.refusal)
            return True
        self.update(outcome)
        return False

    def relays(self, call: HeldCall) -> bool:
        """Let a call go where the node was released while hooks thought: nothing is decided here any more."""
        if not self._keeper.store.mode.is_leaving:
            return False
        call.release()
        return True

    def update(self, outcome: Outcome) -> None:
        """Have done what hooks want of other containers."""
        if outcome.adjustment.updates:
            self._updates.take(outcome.adjustment.updates, outcome.owners)

    def written(
        self, call: HeldCall, adjusted: Callable[[bytes, Adjustment], bytes], outcome: Outcome
    ) -> tuple[Outcome, bytes]:
        """Write what hooks want into a call's message.

        Returns:
            What counts of the outcome, and the message. Where it cannot be written nothing of it counts, and
            the call is refused if a hook has said some of it that must not be missed.
        """
        if outcome.refusal:
            return outcome, call.body
        try:
            return outcome, adjusted(call.body, outcome.adjustment)
        except Exception as error:  # noqa: BLE001  of whatever kind: the hooks' part is lost, and that is said
            words = str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"
            self._keeper.telemetry.problem("cannot apply what hooks ask for", method=call.method, err=words)
            return (Outcome(refusal=words) if outcome.firm else AS_IT_IS), call.body

    def narrow(self, container_id: str, outcome: Outcome, offered: CpuSet) -> None:
        """Narrow a container as hooks want it; ``offered`` is what they had to choose from."""
        want, owners = outcome.adjustment, outcome.owners
        cpus, mems = want.cpus, want.mems
        if cpus is LEAVE and (mems is LEAVE or mems is CLEAR):
            return
        wish = Narrowing(
            None if cpus is LEAVE or cpus is CLEAR else cpus,
            None if mems is LEAVE or mems is CLEAR else mems,
            cpus is CLEAR,
            owners.get("cpus", ""),
            owners.get("mems", ""),
            self._owned_cpus,
        )
        if problem := self._keeper.overrides.narrow(container_id, wish, offered):
            self._keeper.telemetry.problem("cannot narrow a container as hooks ask", reason=problem)


class _NoDecision:
    """Answers where nobody could be asked."""

    outcome: Outcome | None = AS_IT_IS

    async def wait(self) -> Outcome:
        """Give that nobody wants anything."""
        return AS_IT_IS


_NONE = _NoDecision()
