"""Call hooks for held calls, and apply their answers: what all methods have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from proxy.calls.undecided_call import SpawnForCall, UndecidedCall
from proxy.engine.hook_narrowing import Narrowing
from proxy.hooks.answers import CLEAR, LEAVE
from proxy.hooks.events import Point
from proxy.hooks.hook import LONGEST_TIMEOUT_S, NO_CHANGE, NO_HOOKS_CALLED, Outcome, PendingOutcome
from proxy.model.errors import HookError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.node_executor import NodeExecutor
    from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
    from proxy.frontends.hook_bridge.updates import HookUpdates
    from proxy.hooks.hook import HookCaller

_MARGIN_S = 5.0
_REJECTIONS = ("RunPodSandbox", "CreateContainer")
"""Methods whose rejections are reported as those of their pod or container."""

OnOutcome = Callable[[Outcome], None]
"""Continues with a call when the hooks have answered."""
LookUp = Callable[[str], Awaitable[object]]


class HeldCallHooks:
    """Calls hooks for held calls, and applies their answers."""

    def __init__(
        self,
        executor: NodeExecutor,
        hook_caller: HookCaller,
        updates: HookUpdates,
        lifecycle_events: LifecycleEvents,
        spawn: SpawnForCall,
        look_up: LookUp,
        *,
        owned_cpus: bool = False,
    ) -> None:
        """Prepare; no hook is called yet.

        Args:
            executor: The node.
            hook_caller: Calls the hooks.
            updates: Applies the updates that hooks request for other containers.
            lifecycle_events: Has the facts that hooks are called with.
            spawn: Runs a coroutine that decides a call.
            look_up: Looks up the missing facts of a container or sandbox.
            owned_cpus: Hooks may assign CPUs that have owners.
        """
        self.hook_caller = hook_caller
        self.executor = executor
        self.lifecycle_events = lifecycle_events
        self.spawn = spawn
        self._updates = updates
        self._look_up = look_up
        self._owned_cpus = owned_cpus

    def knows(self, container_id: str) -> bool:
        """Return whether a container and its facts are known."""
        return container_id in self.executor.state.containers and not self.lifecycle_events.lacks_facts(
            container_id
        )

    async def look_up(self, target: str, *, adopt: bool = True) -> None:
        """Look up the facts of a container or a sandbox, if possible; a sandbox is never adopted."""
        if adopt and target not in self.executor.state.containers:
            await self.executor.reconciler.adoption.adopt_one(target)
        if self.lifecycle_events.lacks_facts(target):
            await self._look_up(target)

    def start_hooks(self, event: Point) -> PendingOutcome:
        """Call the hooks of an event's point."""
        try:
            return self.hook_caller.call_hooks(event)
        except Exception as error:  # noqa: BLE001  an internal error costs the hooks, never the call
            self.executor.report_internal_error(error)
            return NO_HOOKS_CALLED

    async def await_outcome(self, pending: PendingOutcome) -> Outcome:
        """Wait for the outcome. The hook engine has the deadlines; the one here is for its faults."""
        if pending.outcome is not None:
            return pending.outcome
        try:
            async with asyncio.timeout(LONGEST_TIMEOUT_S + _MARGIN_S):
                return await pending.wait()
        except TimeoutError as error:
            self.executor.report_internal_error(error)
            return NO_CHANGE

    def call_hooks(
        self,
        call: UndecidedCall,
        event: Point,
        on_outcome: OnOutcome,
        on_disconnect: Callable[[], None] = lambda: None,
    ) -> None:
        """Call hooks for a held call.

        Args:
            call: It is held until they have answered.
            event: The event that they receive.
            on_outcome: Called with the outcome, in this turn of the loop if they have answered.
            on_disconnect: Called instead if the client has disconnected in the meantime.
        """
        pending = self.start_hooks(event)
        if pending.outcome is not None:
            on_outcome(pending.outcome)
            return

        async def later() -> None:
            outcome = await self.await_outcome(pending)
            if call.done:
                on_disconnect()
            else:
                on_outcome(outcome)

        self.spawn(call, later())

    def refuse_or_update(self, call: UndecidedCall, outcome: Outcome) -> bool:
        """Refuse the call if hooks do; otherwise start the updates of other containers that they request."""
        if outcome.refusal:
            self.executor.telemetry.count(metrics.REFUSED_BY_HOOKS)
            if call.method not in _REJECTIONS:
                self.executor.telemetry.frequent("refused a call", method=call.method, reason=outcome.refusal)
            call.refuse(GrpcStatus.FAILED_PRECONDITION, outcome.refusal)
            return True
        if outcome.adjustment.updates:
            self.start_updates(outcome)
        return False

    def forward_if_released(self, call: UndecidedCall) -> bool:
        """Forward a call if the node was released in the meantime: then nothing is decided here any more."""
        if not self.executor.store.mode.in_release:
            return False
        call.release()
        return True

    def start_updates(self, outcome: Outcome) -> None:
        """Start the updates of other containers that hooks request."""
        if outcome.adjustment.updates:
            self._updates.queue(outcome.adjustment.updates, outcome.owners)

    def apply(
        self, call: UndecidedCall, outcome: Outcome, refused: Callable[[str], None] = lambda reason: None
    ) -> Outcome | None:
        """Adjust the message of a call as hooks request.

        Args:
            call: The call.
            outcome: The outcome of the hooks.
            refused: Called with the reason before the call is refused.

        Returns:
            The part of the outcome that counts; None if the call is refused.
        """
        outcome, body = self._adjusted_body(call, outcome)
        if outcome.refusal:
            refused(outcome.refusal)
        if self.refuse_or_update(call, outcome):
            return None
        if body is not call.body:
            call.replace_body(body)
        return outcome

    def _adjusted_body(self, call: UndecidedCall, outcome: Outcome) -> tuple[Outcome, Any]:
        """Write the changes of hooks into a call's message.

        Returns:
            The part of the outcome that counts, and the message. If the changes cannot be written, none of
            them counts, and the call is refused if a hook with policy Fail has set one of the fields.
        """
        if outcome.refusal:
            return outcome, call.body
        try:
            return outcome, call.hook_view().adjusted(outcome.adjustment)
        except Exception as error:  # noqa: BLE001  whatever it is: the changes are lost, and that is reported
            message = str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"
            self.executor.telemetry.problem(
                "cannot apply what hooks request", method=call.method, err=message
            )
            return (Outcome(refusal=message) if outcome.firm else NO_CHANGE), call.body

    def narrow(self, container_id: str, outcome: Outcome, offered: CpuSet) -> None:
        """Narrow a container as hooks request; ``offered`` are the CPUs from which they could choose."""
        want, owners = outcome.adjustment, outcome.owners
        cpus, mems = want.cpus, want.mems
        if cpus is LEAVE and (mems is LEAVE or mems is CLEAR):
            return
        narrowing = Narrowing(
            None if cpus is LEAVE or cpus is CLEAR else cpus,
            None if mems is LEAVE or mems is CLEAR else mems,
            cpus is CLEAR,
            owners.get("cpus", ""),
            owners.get("mems", ""),
            self._owned_cpus,
        )
        if problem := self.executor.overrides.narrow(container_id, narrowing, offered):
            self.executor.telemetry.problem("cannot narrow a container as hooks request", reason=problem)
