"""Decides the calls of all front ends: undecided calls in, decisions out, answers recorded.

Calls that need not wait are decided and forwarded before the loop's next turn: a container that goes to a
pool costs a decode, a lookup and an append. The other calls become tasks, and their streams are held until
the tasks have decided.

No fault in this module may make the node worse than without a proxy: after an internal error the call passes
unchanged and the node is reconciled with the runtime soon, unless the pod must not run unplaced (LSE
(latency-sensitive exclusive), LSR (latency-sensitive reserved), or a pod that holds devices).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable

from proxy.calls.container_calls import ContainerCalls
from proxy.calls.create_calls import CreateCalls
from proxy.calls.hook_gateway import END_POINTS, NO_HOOKS, HookGateway, forward_end_call
from proxy.calls.pod_calls import PodCalls
from proxy.calls.undecided_call import CallContext, UndecidedCall
from proxy.engine.call_events import SavedCpusLearned
from proxy.engine.enforcement import applies_to, is_applied_to_all
from proxy.executor.former_calls import RelayedCall
from proxy.executor.node_executor import NodeExecutor
from proxy.model.grpc_status import GrpcStatus
from proxy.telemetry import metrics

REPLACED = "topoproxy was replaced by another process: connect again"
UNSYNCED = "forwarded a call without a decision: the initial reconcile with the runtime is not done"


class CallFlow:
    """Decides calls.

    Attributes:
        replaced: Another process decides: nothing is decided or recorded here any more.
        hooks_ready: Set when the hooks that exist at a start are in use; calls wait for it after the first
            reconcile. None if there is nothing to wait for.
    """

    def __init__(self, executor: NodeExecutor) -> None:
        """Prepare to decide.

        Args:
            executor: The node.
        """
        self.executor = executor
        self.replaced = False
        self._relayed: dict[UndecidedCall, str] = {}
        self._on_relayed_end: Callable[[str], None] = lambda name: None
        self.hooks_ready: asyncio.Event | None = None
        pods, creates = PodCalls(executor, self.spawn), CreateCalls(executor, self.spawn)
        containers = ContainerCalls(executor, self.spawn)
        self._parts = (pods, creates, containers)
        self._relay_start = containers.relay_start
        self._hooks: HookGateway = NO_HOOKS
        ends = dict.fromkeys(END_POINTS, self._end)
        self._requests = {**pods.requests, **creates.requests, **containers.requests, **ends}
        self._finished = {**pods.finished, **creates.finished, **containers.finished}
        self._answered = {"CreateContainer": creates.answered, "RunPodSandbox": pods.answered}
        self._tasks: set[asyncio.Task[None]] = set()

    def set_hooks(self, hooks: HookGateway) -> None:
        """Call hooks from now on; calls in progress continue as they began."""
        self._hooks = hooks
        for part in self._parts:
            part.hooks = hooks

    def hand_over(
        self,
        refuse_undecided: Callable[[int, str], None],
        forwarded: Callable[[], Iterable[UndecidedCall]],
        on_relayed_end: Callable[[str], None],
    ) -> list[RelayedCall]:
        """Decide nothing any more: another process continues.

        A call that is still held is refused, because otherwise it would be forwarded later, without a
        decision or with an outdated one. A forwarded call continues, and the runtime may perform it at any
        time. A call that stops or removes a container or sandbox has no decision: it waits only for hooks,
        so it is forwarded at once.

        Args:
            refuse_undecided: Refuses all calls that are held, with a gRPC status and its text.
            forwarded: Returns the calls that are open then.
            on_relayed_end: Called with the name of each relayed call that is over.

        Returns:
            The calls that may still change a container, or create a container or a sandbox.
        """
        self.replaced = True
        for call in forwarded():
            if call.method in END_POINTS and not call.decided:
                call.release()
        refuse_undecided(GrpcStatus.UNAVAILABLE, REPLACED)
        for task in self._tasks:  # otherwise they would still decide these calls
            task.cancel()
        self._on_relayed_end = on_relayed_end
        found = list[RelayedCall]()
        for call in forwarded():
            context = call.context
            if not isinstance(context, CallContext):
                continue
            name, inflight_call = self.executor.token("call"), context.inflight_call
            if inflight_call is not None:
                if context.requested is not None:  # this process will not be able to record the answer
                    self.executor.call_tracker.accepted(context.requested)
                carries = str(inflight_call.carries)
                found.append(RelayedCall(name, call.method, context.target, carries, inflight_call.relayed))
            elif call.method == "CreateContainer":
                found.append(RelayedCall(name, call.method, context.target))
            elif call.method == "RunPodSandbox" and context.token:
                found.append(RelayedCall(name, call.method, context.token))
            else:
                continue
            self._relayed[call] = name
        return found

    # -- front ends call these ----------------------------------------------------------------------------

    def request(self, call: UndecidedCall) -> None:
        """Decide a held call, and forward it now or later."""
        if self.replaced and call.method in END_POINTS:
            call.release()
        elif self.replaced:  # the call comes from a client that ignores GOAWAY
            call.refuse(GrpcStatus.UNAVAILABLE, REPLACED)
        elif self.executor.store.mode.in_release:
            self._relay(call)
        elif self.hooks_ready is None and self.executor.reconciled.is_set():
            self._handle(call)
        else:
            self.spawn(call, self._when_reconciled(call))

    def needs_created_id(self, call: UndecidedCall) -> bool:
        """Return whether the answer to a call names a created container or sandbox that must be recorded."""
        return call.method in self._answered and isinstance(call.context, CallContext) and not self.replaced

    def answered(self, call: UndecidedCall, created: str) -> None:
        """The runtime has named the container or sandbox that a call created; empty if it cannot be read."""
        context = call.context
        if isinstance(context, CallContext):
            try:
                self._answered[call.method](context, created)
            except Exception as error:  # noqa: BLE001  the runtime's list will show what was created
                self._on_unrecorded_answer(error)

    def finished(self, call: UndecidedCall, status: int | None) -> None:
        """The call is over.

        Args:
            call: The call.
            status: grpc-status of the runtime, or None if none came (refused by us, cancelled, connection
                lost, outcome unknown).
        """
        context = call.context
        call.context = None
        if (name := self._relayed.pop(call, None)) is not None:
            self._on_relayed_end(name)
        if not isinstance(context, CallContext) or self.replaced:
            return
        try:
            self._finished[call.method](call, context, status)
        except Exception as error:  # noqa: BLE001  as in ``answered``
            self._on_unrecorded_answer(error)

    def _on_unrecorded_answer(self, error: Exception) -> None:
        """An answer could not be recorded: reconcile the node with the runtime soon."""
        self.executor.reconcile_requested.set()
        self.executor.report_internal_error(error)

    def spawn(self, call: UndecidedCall, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine that decides a call, which waits; an exception in it is handled by ``_fault``."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  as in _handle
                self._fault(call, error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # needed if the task was cancelled before it began

    # -- deciding -----------------------------------------------------------------------------------------

    def _handle(self, call: UndecidedCall) -> None:
        try:
            self._requests[call.method](call)
        except call.decode_errors as error:
            self._undecodable(call, error)
        except Exception as error:  # noqa: BLE001  an internal error must not affect the node
            self._fault(call, error)

    def _end(self, call: UndecidedCall) -> None:
        forward_end_call(call, self._hooks)

    def _relay(self, call: UndecidedCall) -> None:
        """Forward a call unchanged, because the node is released."""
        if call.method == "StartContainer":
            with contextlib.suppress(*call.decode_errors):
                self._relay_start(call)
        call.release()

    def _undecodable(self, call: UndecidedCall, error: Exception) -> None:
        """Forward or refuse a request that cannot be decoded.

        A runtime may decode more than we can, so the node is reconciled with it at once. If the pod may be
        one that must not run unplaced, the runtime does not get the request.
        """
        executor = self.executor
        executor.telemetry.count(metrics.REQUESTS_UNDECODABLE)
        executor.telemetry.problem("cannot decode a request", method=call.method, err=str(error))
        executor.reconcile_requested.set()
        if call.method in self._answered and self._must_be_placed(call):
            call.refuse(
                GrpcStatus.INTERNAL,
                f"cannot apply the plan to {call.method}: the request cannot be decoded",
            )
        else:
            call.release()

    def _fault(self, call: UndecidedCall, error: BaseException) -> None:
        executor = self.executor
        executor.report_internal_error(error)
        executor.reconcile_requested.set()
        if isinstance(call.context, CallContext):
            # The request may pass without its cpuset, so the cpuset that the runtime saves is unknown.
            executor.store.handle(SavedCpusLearned(call.context.target, None))
            call.context.sent_cpus = None
        always = executor.options.refuse_on_error
        if call.method == "CreateContainer" and self._must_be_placed(call, always=always):
            message = f"cannot place the container: internal error: {type(error).__name__}: {error}"
            if isinstance(call.context, CallContext) and not call.decided:
                executor.lifecycle.withdrawn(call.context.target)
            call.refuse(GrpcStatus.INTERNAL, message)
        else:
            call.release()

    async def _when_reconciled(self, call: UndecidedCall) -> None:
        executor = self.executor
        try:
            async with asyncio.timeout(executor.options.call_timeout):
                await executor.reconciled.wait()
        except TimeoutError:
            executor.telemetry.problem(UNSYNCED, method=call.method)
            executor.reconcile_requested.set()
            if call.method == "CreateContainer" and self._must_be_placed(call):
                call.refuse(
                    GrpcStatus.UNAVAILABLE,
                    "cannot place the container: the node is not reconciled with the runtime yet",
                )
                return
            call.release()
            return
        if self.hooks_ready is not None:
            await self.hooks_ready.wait()
        if not call.done:
            self._handle(call)

    def _must_be_placed(self, call: UndecidedCall, *, always: bool = False) -> bool:
        """Return whether a call's pod must not run unplaced, or may be such a pod.

        A container of a pod that holds devices would run without them.

        Args:
            call: The call.
            always: Whether no pod to which the plan is applied may run unplaced.
        """
        state = self.executor.state
        if not applies_to(state, None):
            return False
        pod = call.pod_of(state.pods, state.node.machine.bounds)
        if pod is None:
            return is_applied_to_all(state)  # otherwise it may be an observed pod
        must = always or pod.key in state.devices.held or state.node.refuses_unplaced(pod)
        return must and applies_to(state, pod)
