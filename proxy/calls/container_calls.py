"""Handles calls about existing containers: start, update, stop, remove."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.calls.hook_gateway import NO_HOOKS, HookGateway
from proxy.calls.undecided_call import (
    CallContext,
    CallEndHandler,
    CallHandler,
    SpawnForCall,
    UndecidedCall,
    send,
)
from proxy.engine.call_answers import CallAnswer, Forward, ForwardStart, PrepareStart
from proxy.engine.call_events import StartRequested, UpdateRequested
from proxy.engine.enforcement import applies_to, is_applied_to_all
from proxy.engine.pod_fence import Fence
from proxy.engine.quotas import quota_record
from proxy.executor.node_executor import NodeExecutor
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import NO_ANSWER, GrpcStatus
from proxy.model.workload import Phase


class ContainerCalls:
    """StartContainer, UpdateContainerResources, StopContainer, RemoveContainer."""

    def __init__(self, executor: NodeExecutor, spawn: SpawnForCall) -> None:
        self.executor = executor
        self.hooks: HookGateway = NO_HOOKS
        self._spawn = spawn
        self.requests: Mapping[str, CallHandler] = {
            "StartContainer": self._start,
            "UpdateContainerResources": self._update,
        }
        self.finished: Mapping[str, CallEndHandler] = {
            "StartContainer": self._start_done,
            "UpdateContainerResources": self._update_done,
            "StopContainer": self._stopped,
            "RemoveContainer": self._removed,
        }

    def _start(self, call: UndecidedCall) -> None:
        self._after_hooks("pre_start_container", call, self._start_now)

    def _after_hooks(self, point: str, call: UndecidedCall, proceed: CallHandler) -> None:
        """Continue with a call after the hooks of a point, if hooks may change or refuse it."""
        if point in self.hooks.points and self._may_call_hooks(call.target()):
            self.hooks.before(point, call, call.target(), proceed)
        else:
            proceed(call)

    def _may_call_hooks(self, container_id: str) -> bool:
        """Return whether hooks may change or refuse a call; the calls of observed pods pass unchanged."""
        state = self.executor.state
        container = state.containers.get(container_id)
        return is_applied_to_all(state) if container is None else applies_to(state, container.pod)

    def _start_now(self, call: UndecidedCall) -> None:
        container_id = call.target()
        answer = self.executor.store.answer(StartRequested(container_id))
        if type(answer) is PrepareStart or self._needs_fence(container_id):
            self._spawn(call, self._start_later(call, container_id))
        else:
            self._send_start(call, container_id, answer, None)

    def _needs_fence(self, container_id: str) -> bool:
        """Return whether a call for a container may need a fence first; False if the container is unknown."""
        container = self.executor.state.containers.get(container_id)
        return container is not None and self.executor.unit_properties.fencing.needs_fence(container)

    async def _start_later(self, call: UndecidedCall, container_id: str) -> None:
        fence, obstacle, store = None, "", self.executor.store
        try:
            if await self._is_known(container_id):
                obstacle, fence = await self.executor.call_tracker.make_ready_fenced(container_id)
        except (UnavailableError, RuntimeCallError) as error:
            obstacle = str(error)
        if obstacle:
            self.executor.telemetry.problem(
                "cannot start a container", containerID=container_id, err=obstacle
            )
            send(call, store.answer(StartRequested(container_id, obstacle=obstacle)))
            return
        if not call.done:
            answer = store.answer(StartRequested(container_id, is_prepared=True))
            self._send_start(call, container_id, answer, fence)
        else:
            await self.executor.unit_properties.fencing.remove(fence)

    async def _is_known(self, container_id: str) -> bool:
        """Adopt a container that is about to be started, and return whether it is known then.

        Raises:
            UnavailableError: The runtime does not answer. With the cpuset that the runtime has saved, the
                container might run on CPUs that other containers own now.
        """
        state = self.executor.state
        if container_id in state.containers:
            return True
        return await self.executor.reconciler.adoption.adopt_one(
            container_id, strict=is_applied_to_all(state)
        )

    def _send_start(
        self, call: UndecidedCall, container_id: str, answer: CallAnswer, fence: Fence | None
    ) -> None:
        if type(answer) is ForwardStart:
            inflight_call = self.executor.call_tracker.start(container_id, answer.carries, fence)
            call.context = CallContext(container_id, inflight_call=inflight_call)
        else:
            self.executor.spawn(self.executor.unit_properties.fencing.remove(fence))
        send(call, answer)

    def relay_start(self, call: UndecidedCall) -> None:
        """Count a relayed start as in flight: it may hang until the release has been undone."""
        container_id, anywhere = call.target(), self.executor.state.node.machine.online
        inflight_call = self.executor.inflight_calls.track(
            container_id, anywhere, is_start=True, relayed=True
        )
        call.context = CallContext(container_id, inflight_call=inflight_call)

    def _start_done(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        if context.inflight_call is None:
            return
        if status is None:
            self.executor.call_tracker.mark_orphaned(context.inflight_call)
        else:
            self.executor.call_tracker.started(context.inflight_call, ok=status == GrpcStatus.OK)

    def _update(self, call: UndecidedCall) -> None:
        self._after_hooks("pre_update_container_resources", call, self._update_now)

    def _update_now(self, call: UndecidedCall) -> None:
        requested = call.resource_update()
        is_known = requested.container_id in self.executor.state.containers
        if is_known and not self._needs_fence(requested.container_id):
            self._send_update(call, requested, None)
        else:
            self._spawn(call, self._update_later(call, requested))

    async def _update_later(self, call: UndecidedCall, request: UpdateRequested) -> None:
        containers, fencing, container_id = (
            self.executor.reconciler.adoption,
            self.executor.unit_properties.fencing,
            request.container_id,
        )
        known = container_id in self.executor.state.containers or await containers.adopt_one(container_id)
        fence = await fencing.fitting(container_id) if known else None
        if call.done:
            await fencing.remove(fence)
        elif container_id in self.executor.state.containers:
            self._send_update(call, request, fence)
        else:
            call.release()
            await fencing.remove(fence)

    def _send_update(self, call: UndecidedCall, request: UpdateRequested, fence: Fence | None) -> None:
        executor, container_id = self.executor, request.container_id
        fencing = executor.unit_properties.fencing
        former_quota = quota_record(executor.state, container_id)
        answer = executor.store.answer(request)
        if type(answer) is Forward:
            inflight_call = executor.inflight_calls.track(container_id, answer.planned_cpus)
            fencing.bind(inflight_call, fence)
            call.context = CallContext(
                container_id,
                sent_cpus=answer.planned_cpus,
                inflight_call=inflight_call,
                requested=request,
                quota_update=executor.quotas.update_sent(container_id, request.cpu_quota, former_quota),
            )
        else:
            executor.spawn(fencing.remove(fence))
            if container_id in executor.state.containers:
                # The update carries the CPUs that the client names, or those that the runtime has saved.
                inflight_call = executor.inflight_calls.track(
                    container_id, executor.state.node.machine.online
                )
                call.context = CallContext(container_id, inflight_call=inflight_call, requested=request)
        send(call, answer)

    def _update_done(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        if context.inflight_call is None:
            return
        self.executor.drift.hint("kubelet", (context.inflight_call.container_id,))
        is_refused = status not in (None, GrpcStatus.OK, *NO_ANSWER)
        self.executor.quotas.update_ended(context.quota_update, refused=is_refused)
        if status is None:
            self.executor.call_tracker.mark_orphaned(context.inflight_call)
        else:
            requested = context.requested
            if status == GrpcStatus.OK and requested is not None:
                self.executor.call_tracker.accepted(requested)
            self.executor.call_tracker.completed(
                context.inflight_call, context.sent_cpus if status == GrpcStatus.OK else None
            )
            if status in NO_ANSWER and requested is not None and requested.memory_limit:
                self.executor.spawn(self.executor.call_tracker.read_memory_limit(requested.container_id))
            if status == GrpcStatus.OK and self.hooks.active:
                self.hooks.updated(context.target, call)

    def _stopped(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        if status in (GrpcStatus.OK, GrpcStatus.NOT_FOUND):
            self.executor.lifecycle.phase(context.target, Phase.EXITED)
        else:
            self.executor.reconcile_requested.set()

    def _removed(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        if status in (GrpcStatus.OK, GrpcStatus.NOT_FOUND):
            self.executor.lifecycle.removed([context.target])
        else:
            self.executor.reconcile_requested.set()
