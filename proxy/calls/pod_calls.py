"""Handles calls about pod sandboxes.

They pass unchanged, except for the changes of hooks. With scope ``pod``, RunPodSandbox may be refused. It
waits for hooks and for the facts that its decision needs; the other calls wait only for hooks.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from proxy.calls.hook_gateway import NO_HOOKS, HookGateway
from proxy.calls.undecided_call import (
    CallContext,
    CallEndHandler,
    CallHandler,
    SpawnForCall,
    UndecidedCall,
    send,
)
from proxy.engine.call_answers import RecordFirst, Refuse
from proxy.engine.enforcement import applies_to, is_applied_to_all
from proxy.engine.node_effects import PodDecided
from proxy.engine.pod_admission import decides_pod
from proxy.executor.node_executor import NodeExecutor
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Pod


class PodCalls:
    """RunPodSandbox, StopPodSandbox, RemovePodSandbox."""

    def __init__(self, executor: NodeExecutor, spawn: SpawnForCall) -> None:
        self.executor = executor
        self.hooks: HookGateway = NO_HOOKS
        self._spawn = spawn
        self.requests: Mapping[str, CallHandler] = {"RunPodSandbox": self._run_pod}
        self.finished: Mapping[str, CallEndHandler] = {
            "RunPodSandbox": self._run_pod_done,
            "StopPodSandbox": self._pod_stopped,
            "RemovePodSandbox": self._pod_removed,
        }

    def _run_pod(self, call: UndecidedCall) -> None:
        state = self.executor.state
        asks_hooks = "pre_run_pod_sandbox" in self.hooks.points
        if asks_hooks and is_applied_to_all(state):
            self.hooks.run_pod(call, self._continue_run_pod)
            return
        pod = call.sandbox(state.node.machine.bounds)
        if asks_hooks and applies_to(state, pod):
            self.hooks.run_pod(call, self._continue_run_pod)
        else:
            self._continue_run_pod(call, pod)

    def _continue_run_pod(self, call: UndecidedCall, pod: Pod, *, is_changed: bool = False) -> None:
        executor, state = self.executor, self.executor.state
        if decides_pod(state.node, pod) or executor.fact_lookup.needs_pod_requests(state, pod):
            self._spawn(call, self._admit(call, pod, is_changed=is_changed))
        else:
            self._release(call, pod, is_changed=is_changed)

    def _release(self, call: UndecidedCall, pod: Pod, *, is_changed: bool) -> None:
        """Forward the call for a pod for which nothing is reserved."""
        if is_changed:
            pod = self.executor.sandboxes.record_hook_change(pod)
        call.context = CallContext(pod=pod, token=pod.sandbox_id)
        call.release()

    async def _admit(self, call: UndecidedCall, pod: Pod, *, is_changed: bool) -> None:
        """Read the facts that the call lacks, then decide about the pod as a whole."""
        executor, node, total = self.executor, self.executor.state.node, call.sandbox_total()
        if executor.fact_lookup.needs_pod_requests(executor.state, pod):
            pod = await executor.fact_lookup.pod(pod)
        if decides_pod(node, pod):
            total = await executor.fact_lookup.pod_devices(pod, total)
            await executor.kubelet_cpus.reread()
        if call.done:
            return
        if not decides_pod(node, pod):
            self._release(call, pod, is_changed=is_changed)
            return
        if (
            executor.device_grants is not None
            and pod.requests is not None
            and applies_to(executor.state, pod)
        ):
            decided = await executor.device_grants.admit(pod, total)
        else:
            decided = executor.sandboxes.admit(pod, total)
        await self._admitted(call, decided, is_changed=is_changed)

    async def _admitted(self, call: UndecidedCall, decided: PodDecided, *, is_changed: bool) -> None:
        """Continue with a decided pod; its client may have disconnected while plugins were queried."""
        executor = self.executor
        if type(decided.answer) is not Refuse:
            pod = decided.admission.pod
            if call.done:
                executor.sandboxes.failed(pod.sandbox_id)
                return
            # From here on the end of the call frees the reservation, or gives it to the sandbox.
            call.context = CallContext(pod=pod, token=pod.sandbox_id)
            if is_changed:
                executor.sandboxes.record_hook_change(pod)
        if type(decided.answer) is RecordFirst:
            await executor.ledger_writer.flush()
        if not call.done:
            send(call, decided.answer)

    def answered(self, context: CallContext, sandbox_id: str) -> None:
        """The runtime has named the sandbox."""
        context.target = sandbox_id

    def _run_pod_done(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        # A runtime that has named the sandbox has created it, even if the end of its answer was lost.
        if status in (None, GrpcStatus.OK) and context.target and context.pod is not None:
            pod = structs.replace(context.pod, sandbox_id=context.target)
            self.executor.sandboxes.running(pod, context.token)
            if self.hooks.active:
                self.hooks.pod_created(pod, call)
        elif context.token:
            self.executor.sandboxes.failed(context.token)
            if status is None:  # the sandbox may have been created
                self.executor.reconcile_requested.set()

    def _pod_stopped(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        if status in (GrpcStatus.OK, GrpcStatus.NOT_FOUND):
            self.executor.sandboxes.stopped(context.target)
        else:  # the runtime may have done it nevertheless
            self.executor.reconcile_requested.set()

    def _pod_removed(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        if status in (GrpcStatus.OK, GrpcStatus.NOT_FOUND):
            self.executor.sandboxes.removed(context.target)
        else:  # the runtime may have done it nevertheless
            self.executor.reconcile_requested.set()
