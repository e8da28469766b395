"""The seven requests of Koordinator's protocol, answered on the event loop.

The requests before a call are decided by the same code as calls that pass through us (``CallFlow``), and may
be refused. The requests after a call only make us query the runtime, because the peer also sends them after
failed calls (Koordinator v1.8.0 pkg/runtimeproxy/server/cri/criserver.go, InterceptRuntimeRequest).
"""

from __future__ import annotations

import asyncio

from proxy.api.koordinator import hook_pb2 as pb
from proxy.calls.call_flow import CallFlow
from proxy.calls.undecided_call import CallContext
from proxy.engine.call_events import SavedCpusLearned
from proxy.engine.container_events import CreateDelegated
from proxy.engine.enforcement import applies_to
from proxy.engine.quotas import CONTAINER_QUOTA
from proxy.engine.runtime_knowledge import CreateKey
from proxy.executor.node_executor import NodeExecutor
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.frontends.hookserver.foreign_call import ContainerCall, HookCallRefusedError, SandboxCall
from proxy.frontends.hookserver.messages import (
    ContainerReply,
    SandboxReply,
    container_echo,
    container_reply,
    pod_echo,
    pod_of,
    update_reply,
)
from proxy.frontends.hookserver.pending_calls import PendingCalls
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase

ContainerRequest = pb.ContainerResourceHookRequest
ContainerAnswer = pb.ContainerResourceHookResponse

RETRY_PAUSES, ATTEMPTS = Backoff(0.1, 0.4), 4
"""The pauses in seconds, and the number of attempts, to find a sandbox that is not listed yet."""


class RuntimeLookup:
    """Queries the runtime for facts that a request lacks."""

    def __init__(self, executor: NodeExecutor, pending: PendingCalls) -> None:
        self._executor = executor
        self._pending = pending

    def sandboxes(self, uid: str) -> list[str]:
        """Return the ids of a pod's known sandboxes."""
        executor = self._executor
        arriving = executor.state.runtime.arriving_sandboxes
        return [i for i, pod in executor.state.pods.items() if pod.uid == uid != "" and i not in arriving]

    async def sandbox(self, meta: pb.PodSandboxMetadata) -> tuple[str, int] | None:
        """Find the sandbox that a container is about to be created in: the pod's newest one that is ready.

        Returns:
            Its id and attempt; None if there is none.

        Raises:
            UnavailableError, RuntimeCallError: The runtime does not answer.
        """
        executor, new = self._executor, meta.uid in self._pending.pods
        known = self.sandboxes(meta.uid)
        if len(known) == 1 and not new:
            return known[0], executor.state.pods[known[0]].attempt
        name = (meta.uid, meta.namespace, meta.name)
        pauses = RetryDelays(RETRY_PAUSES)
        for last in range(ATTEMPTS - 1, -1, -1):
            listed = await executor.call_tracker.lookups.run(executor.runtime.list_pods)
            existing = [pod for pod in listed if pod.ready and (pod.uid, pod.namespace, pod.name) == name]
            if existing:
                newest = max(existing, key=lambda pod: pod.attempt)
                self._pending.handle_listed_pod(newest)
                return newest.id, newest.attempt
            if last:
                await asyncio.sleep(pauses.next())
        return None

    async def identify_container(self, container_id: str) -> None:
        """Identify the container that the peer names, if it was created after an answer of topoproxy.

        The peer's own data show the cpuset that the runtime has saved for it.
        """
        executor = self._executor
        if container_id not in executor.state.containers and self._pending.creates:
            for found in await self.list_container(container_id) or ():
                self._pending.handle_listed_container(found)
        container = executor.state.containers.get(container_id)
        if container is None or container.phase is not Phase.CREATED:
            return
        if container_id in executor.state.runtime.saved:
            return
        try:
            detail = await executor.call_tracker.lookups.run(executor.runtime.detail, container_id)
            saved = CpuSet.parse(detail.cpuset_cpus)
        except (UnavailableError, RuntimeCallError, ValueError):
            return  # the runtime gets the current set in any case
        executor.store.handle(SavedCpusLearned(container_id, saved))
        if detail.cpu_quota > 0 > executor.quotas.carried(container):
            executor.quotas.mark_unsent((container_id,))

    async def list_container(self, container_id: str) -> list[RuntimeContainer] | None:
        """Query the runtime for one container: a list of one or none; None if the runtime does not answer."""
        executor = self._executor
        try:
            return list(
                await executor.call_tracker.lookups.run(executor.runtime.list_containers, container_id)
            )
        except (UnavailableError, RuntimeCallError) as error:
            self.reconcile_later(error)
            return None

    def reconcile_later(self, error: Exception) -> None:
        """The runtime does not answer: report it, and reconcile with it soon."""
        self._executor.telemetry.problem("cannot list what the runtime has", err=error)
        self._executor.reconcile_requested.set()


class Servicer:
    """Answers the requests; all methods on the loop."""

    def __init__(self, executor: NodeExecutor, flow: CallFlow) -> None:
        """Prepare to answer.

        Args:
            executor: The node.
            flow: Decides calls.
        """
        self._executor = executor
        self._flow = flow
        self.pending = PendingCalls(executor)
        self._lookup = RuntimeLookup(executor, self.pending)

    # -- sandboxes ----------------------------------------------------------------------------------------

    async def pre_run_pod_sandbox(self, request: pb.PodSandboxHookRequest) -> pb.PodSandboxHookResponse:
        """A sandbox is about to be created.

        Raises:
            HookCallRefusedError: It must not be created.
        """
        call = SandboxCall(self._flow, "RunPodSandbox", SandboxReply(request, pod_echo(request)))
        reply: SandboxReply = await call.decide()
        with call.or_lost():
            if request.pod_meta.uid and call.context is not None:
                self.pending.add_pod(request.pod_meta.uid, call)
            else:
                call.lost()
        if reply.unsupported:
            self._executor.telemetry.problem(
                "cannot change a sandbox: Koordinator's hook protocol has no fields for it",
                pod=f"{request.pod_meta.namespace}/{request.pod_meta.name}",
                fields=", ".join(reply.unsupported),
            )
        return reply.answer

    async def post_stop_pod_sandbox(self, request: pb.PodSandboxHookRequest) -> pb.PodSandboxHookResponse:
        """A stop of a sandbox has ended, perhaps with an error: query the runtime."""
        executor = self._executor
        known_ids = self._lookup.sandboxes(request.pod_meta.uid)
        if known_ids:
            try:
                listed = await executor.call_tracker.lookups.run(executor.runtime.list_pods)
                ready = {pod.id for pod in listed if pod.ready}
                for sandbox_id in known_ids:
                    if sandbox_id not in ready:
                        executor.sandboxes.stopped(sandbox_id)
            except (UnavailableError, RuntimeCallError) as error:
                self._lookup.reconcile_later(error)
        return pod_echo(request)

    # -- containers ---------------------------------------------------------------------------------------

    async def pre_create_container(self, request: ContainerRequest) -> ContainerAnswer:
        """A container is about to be created: it gets its CPUs, which are free when this returns.

        Raises:
            HookCallRefusedError: It must not be created.
        """
        if self._executor.store.mode.in_release:
            return container_echo(request)  # the node is released
        try:
            await self.pending.check_creates()  # the container may run already: others leave its CPUs
            found = await self._lookup.sandbox(request.pod_meta)
        except (UnavailableError, RuntimeCallError) as error:
            return self._undecided(request, str(error))
        if found is None:
            return self._undecided(request, "the runtime does not know its sandbox")
        call = ContainerCall(self._flow, "CreateContainer", container_reply(request), found)
        reply: ContainerReply = await call.decide()
        with call.or_lost():
            self._delegate(call, reply.answer)
        self._report_unsupported(request, reply)
        return reply.answer

    def _report_unsupported(self, request: ContainerRequest, reply: ContainerReply) -> None:
        """Report the changes of hooks that the answer cannot carry."""
        if reply.unsupported:
            self._executor.telemetry.problem(
                "cannot change a container: Koordinator's hook protocol has no fields for it",
                pod=f"{request.pod_meta.namespace}/{request.pod_meta.name}",
                container=request.container_meta.name,
                fields=", ".join(reply.unsupported),
            )

    def _delegate(self, call: ContainerCall, answer: ContainerAnswer) -> None:
        """Hand the create over to the peer, which makes it now."""
        if isinstance(call.context, CallContext):
            sent = answer.container_resources
            self._executor.store.handle(
                CreateDelegated(call.context.target, sent.cpuset_cpus, sent.cpuset_mems, sent.cpu_quota)
            )
            self.pending.creates.add(CreateKey(call.sandbox_id, call.name, call.attempt), call)
            self.pending.wake()
        else:
            call.lost()

    async def pre_start_container(self, request: ContainerRequest) -> ContainerAnswer:
        """A container is about to be started: the runtime has its current cpuset when this returns.

        Raises:
            HookCallRefusedError: It must not be started.
        """
        container_id = request.container_meta.id
        if container_id:
            await self._lookup.identify_container(container_id)
            call = ContainerCall(self._flow, "StartContainer", container_reply(request))
            await call.decide()
            if call.context is not None:
                self.pending.starts.add(container_id, call)
                self.pending.wake()
            else:
                call.lost()
        return container_echo(request)

    async def post_start_container(self, request: ContainerRequest) -> ContainerAnswer:
        """A start of a container has ended, perhaps with an error: query the runtime."""
        container_id = request.container_meta.id
        if container_id in self.pending.starts or container_id in self._executor.state.containers:
            seen = await self._lookup.list_container(container_id)
            call = self.pending.starts.take(container_id)
            if call is None:
                self._executor.reconcile_requested.set()
            elif seen is None:
                call.lost()
            else:
                call.ended(
                    0
                    if any(container.phase is not Phase.CREATED for container in seen)
                    else GrpcStatus.UNKNOWN
                )
        return container_echo(request)

    async def pre_update_container_resources(self, request: ContainerRequest) -> ContainerAnswer:
        """A container's resources are about to be changed; its CPUs are decided here.

        Raises:
            HookCallRefusedError: They must not be changed.
        """
        container_id = request.container_meta.id
        if not container_id:
            return container_echo(request)
        await self._lookup.identify_container(container_id)
        quotas, container = self._executor.quotas, self._executor.state.containers.get(container_id)
        recorded = CONTAINER_QUOTA + container_id in quotas.known.records
        is_our_quota = recorded or (container is not None and quotas.must_be_off(container))
        call = ContainerCall(
            self._flow, "UpdateContainerResources", update_reply(request, is_client_quota=not is_our_quota)
        )
        reply: ContainerReply = await call.decide()
        call.lost()  # its end is never seen; afterwards the runtime gets the current set again
        self._report_unsupported(request, reply)
        return reply.answer

    async def post_stop_container(self, request: ContainerRequest) -> ContainerAnswer:
        """A stop of a container has ended, perhaps with an error: query the runtime."""
        container_id = request.container_meta.id
        if container_id in self._executor.state.containers:
            seen = await self._lookup.list_container(container_id)
            if seen is not None and all(container.phase is Phase.EXITED for container in seen):
                self._executor.lifecycle.phase(container_id, Phase.EXITED)
            else:
                self._executor.reconcile_requested.set()
        return container_echo(request)

    # -- requests that cannot be decided ------------------------------------------------------------------

    def _undecided(self, request: ContainerRequest, reason: str) -> ContainerAnswer:
        """Forward a create unchanged, unless its pod must not run unplaced."""
        executor = self._executor
        meta = request.pod_meta
        message = f"cannot place {meta.namespace}/{meta.name}/{request.container_meta.name}: {reason}"
        executor.telemetry.problem(
            "cannot place a container",
            pod=f"{meta.namespace}/{meta.name}",
            container=request.container_meta.name,
            err=reason,
        )
        executor.reconcile_requested.set()
        if self.must_be_placed(request):
            raise HookCallRefusedError(GrpcStatus.UNAVAILABLE, message)
        return container_echo(request)

    def must_be_placed(self, request: ContainerRequest) -> bool:
        """Return whether a container's pod must not run unplaced."""
        state = self._executor.state
        pod = pod_of(request, "", 0, state.node.machine.bounds)
        is_strict = self._executor.options.refuse_on_error or state.node.refuses_unplaced(pod)
        return is_strict and applies_to(state, pod)
