"""Decides CreateContainer calls, and follows each until its answer."""

from __future__ import annotations

import contextlib
from functools import partial

from msgspec import structs

from proxy.calls.hook_gateway import NO_HOOKS, HookGateway
from proxy.calls.undecided_call import (
    NO_DEVICES,
    CallContext,
    CreateRequest,
    SpawnForCall,
    UndecidedCall,
    send,
)
from proxy.engine.call_answers import (
    RELEASED_WITH_SANDBOX,
    AllocateFirst,
    CallAnswer,
    Forward,
    ForwardUnchanged,
    Refuse,
    ReserveFirst,
    unallocated_verdict,
    unreserved_verdict,
)
from proxy.engine.container_events import CreateNotReserved, CreateResumed, CreateWithoutDevices
from proxy.engine.enforcement import applies_to, is_applied_to_all
from proxy.engine.node_effects import PlanDecided
from proxy.engine.owners import needs_pod_total
from proxy.engine.pod_admission import with_earlier_decision
from proxy.engine.pod_events import PodLearned
from proxy.engine.reservation_effects import AbortReason
from proxy.engine.start_step import is_below_class
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import requests_devices
from proxy.executor.adoption import listed_pod
from proxy.executor.device_grants import DeviceGrants
from proxy.executor.device_ports import DevicePluginError
from proxy.executor.fact_lookup import holders
from proxy.executor.node_executor import NodeExecutor
from proxy.executor.ports import DeviceFacts
from proxy.executor.reservations import CreateClient
from proxy.model.errors import DeviceConflictError, RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Container, KubeQos, Pod, Pool
from proxy.telemetry import metrics

POD_UNKNOWN = "cannot find the pod of a create"


class CreateCalls:
    """CreateContainer."""

    def __init__(self, executor: NodeExecutor, spawn: SpawnForCall) -> None:
        self.executor = executor
        self.hooks: HookGateway = NO_HOOKS
        self.requests = {"CreateContainer": self._create}
        self.finished = {"CreateContainer": self._create_done}
        self._spawn = spawn
        self._unreported = UnreportedPods(executor)

    def _create(self, call: UndecidedCall) -> None:
        requested, store = call.create_request(), self.executor.store
        pod = store.state.pods.get(requested.sandbox_id)
        if pod is None or not (pod.cgroup_parent or pod.cgroup_changed_by_hook):
            described = requested.pod(store.state.node.machine.bounds)
            if described.uid or described.name:
                pod = self._described(described, pod)
            elif pod is None:
                self._spawn(call, self._look_up(call, requested))
                return
        elif pod.cpuset is not None and not pod.cpuset_chosen_locally:
            pod = self._renewed(pod, requested)
        self._decide_in_pod(call, pod, requested)

    async def _look_up(self, call: UndecidedCall, requested: CreateRequest) -> None:
        """Read the pod of a create, which neither the request nor the state has, from the runtime's list."""
        executor, sandbox_id = self.executor, requested.sandbox_id
        found, code = None, GrpcStatus.UNAVAILABLE
        try:
            pods = await executor.fact_lookup.worker.run(executor.runtime.list_pods)
        except (UnavailableError, RuntimeCallError) as error:
            cause = str(error)
        else:
            found = next((pod for pod in pods if pod.id == sandbox_id), None)
            code, cause = GrpcStatus.NOT_FOUND, "the runtime does not list it"
        if call.done:
            return
        state = executor.state
        pod = state.pods.get(sandbox_id)  # another call may have named it in the meantime
        if pod is None and found is not None:
            pod = executor.sandboxes.named_by_create(listed_pod(found, "", state.node.machine.bounds))
            self._record_pod(pod)
        if pod is not None:
            self._decide_in_pod(call, pod, requested)
            return
        executor.telemetry.problem(POD_UNKNOWN, sandboxID=sandbox_id, err=cause)
        executor.reconcile_requested.set()
        if is_applied_to_all(state):
            call.refuse(code, f"cannot place {requested.name}: cannot find sandbox {sandbox_id}: {cause}")
        else:
            call.release()  # the pod may be an observed one

    def _decide_in_pod(self, call: UndecidedCall, pod: Pod, requested: CreateRequest) -> None:
        """Decide a create at once, or query kubelet first if its facts may change the decision."""
        executor = self.executor
        store = executor.store
        if pod.cgroup_changed_by_hook:
            call.set_cgroup_parent(pod.cgroup_parent)
        state, fact_lookup = store.state, executor.fact_lookup
        devices = requested.devices() if fact_lookup.devices_matter(state.node, pod) else NO_DEVICES
        queries_kubelet = self._needs_report(pod, requested) or (
            devices is not NO_DEVICES and fact_lookup.knows_devices(devices)
        )
        if (
            queries_kubelet
            or holders(state, pod)
            or executor.kubelet_cpus.needs_cpus_of_container(pod, requested.resources)
        ):
            self._spawn(call, self._query_facts_first(call, pod, requested, devices))
        else:
            self._decide(call, pod, requested)

    def _needs_report(self, pod: Pod, requested: CreateRequest) -> bool:
        """Return whether to query kubelet for the pod: it has not reported it, or with another request."""
        fact_lookup = self.executor.fact_lookup
        return fact_lookup.needs_pod_requests(self.executor.state, pod) or fact_lookup.is_outdated(
            pod, requested.name, requested.resources
        )

    def _described(self, pod: Pod, known: Pod | None) -> Pod:
        """Return the pod as the request describes it; the state lacks it, or has only a part of it."""
        if known is not None:
            pod = structs.replace(
                with_earlier_decision(pod, known), requests=known.requests, source=known.source
            )
        elif pod.uid:
            pod = self.executor.sandboxes.named_by_create(pod)
        if pod.uid:
            self._record_pod(pod)
        return pod

    def _renewed(self, pod: Pod, requested: CreateRequest) -> Pod:
        """Return a pod whose annotation names CPUs with its current request: a resize may have changed it."""
        total = requested.pod_total()
        if total is None or total == pod.total:
            return pod
        renewed = structs.replace(pod, total=total)
        self._record_pod(renewed)
        return renewed

    def _record_pod(self, pod: Pod) -> None:
        """Record the facts that a request has about its pod; they may change which CPUs are shared."""
        self.executor.store.handle(PodLearned(pod))

    async def _query_facts_first(
        self, call: UndecidedCall, pod: Pod, requested: CreateRequest, devices: DeviceFacts
    ) -> None:
        """Read the facts that the call lacks from kubelet and sysfs, then decide."""
        executor = self.executor
        fact_lookup = executor.fact_lookup
        if self._needs_report(pod, requested):
            before = pod
            reported = await fact_lookup.pod(before)
            # The state may know more about the pod by now: take over only the facts from kubelet.
            pod = executor.state.current_pod(pod)
            if reported is not before:
                pod = structs.replace(pod, requests=reported.requests, source=reported.source)
            if pod.sandbox_id in executor.state.pods:
                executor.store.handle(PodLearned(pod, recorded=False))
            if self._unreported.includes(pod, requested.name) and executor.options.refuse_on_error:
                if not call.done:
                    message = "kubelet has not given its pod, and it may ask for devices"
                    call.refuse(GrpcStatus.UNAVAILABLE, f"cannot place {pod.ref}/{requested.name}: {message}")
                return
        if devices is not NO_DEVICES and executor.fact_lookup.knows_devices(devices):
            requested.resources = await executor.fact_lookup.devices(
                pod, requested.name, devices, requested.resources
            )
            pod = executor.state.current_pod(pod)
        await fact_lookup.record_exited(pod)
        if executor.kubelet_cpus.needs_cpus_of_container(pod, requested.resources):
            await executor.kubelet_cpus.reread()
        if not call.done:
            self._decide(call, pod, requested)

    def _decide(self, call: UndecidedCall, pod: Pod, requested: CreateRequest) -> None:
        executor = self.executor
        if executor.store.state.mode.in_release:
            call.release()
            return
        if self._unreported.refs:
            self._unreported.end_others()
        executor.sandboxes.end_earlier_inits(pod, requested.name)
        if (pod.cpuset_chosen_locally or pod.kube_qos is KubeQos.GUARANTEED) and needs_pod_total(
            executor.store.state.node, pod, requested.resources
        ):
            with contextlib.suppress(*call.decode_errors):
                pod = structs.replace(pod, total=requested.pod_total())
        grants, state = executor.device_grants, executor.store.state
        if grants is not None and requests_devices(state, pod, requested.name) and applies_to(state, pod):
            self._spawn(call, self._decide_devices(call, pod, requested, grants))
        else:
            decided = executor.creates.place(pod, requested.name, requested.attempt, requested.resources)
            self._decided(call, decided)

    async def _decide_devices(
        self, call: UndecidedCall, pod: Pod, requested: CreateRequest, grants: DeviceGrants
    ) -> None:
        """Decide a create that device plugins may have a preference for."""
        decided = await grants.place(pod, requested.name, requested.attempt, requested.resources)
        container = decided.plan.container
        if not call.done:
            self._decided(call, decided)
        elif container is not None:
            self.executor.lifecycle.withdrawn(container.id)

    def _decided(self, call: UndecidedCall, decided: PlanDecided) -> None:
        container, answer = decided.plan.container, decided.answer
        if container is None:
            send(call, answer)
            return
        call.context = CallContext(target=container.id)
        if type(answer) is AllocateFirst:
            self._spawn(call, self._allocate(call, container))
        elif "pre_create_container" in self.hooks.points and type(answer) is not ForwardUnchanged:
            self.hooks.create(call, container, partial(self._resume_decided, self.executor.state, answer))
        else:
            self._carry_out_create(call, container, answer)

    async def _allocate(self, call: UndecidedCall, container: Container) -> None:
        """Let device plugins prepare a container's devices, and add their answers to the request."""
        grants, context = self.executor.device_grants, call.context
        assert grants is not None, "there are no devices without plugins"
        refused: tuple[type[Exception], ...] = (DevicePluginError, DeviceConflictError, *call.decode_errors)
        try:
            answers = await grants.prepare(container)
            if call.done or not isinstance(context, CallContext):
                return  # the end of the call has removed the container
            context.device_fields = call.add_devices(answers)
        except refused as error:
            if not call.done:
                self._without_devices(call, container, str(error))
            return
        if "pre_create_container" in self.hooks.points:
            self.hooks.create(call, container, self._resume)
        else:
            self._resume(call, container)

    def _without_devices(self, call: UndecidedCall, container: Container, cause: str) -> None:
        """Refuse a create that cannot use its devices; continue with it if its pod is now only observed."""
        executor = self.executor
        answer = executor.store.answer(CreateWithoutDevices(container, cause))
        if type(answer) is Refuse:
            executor.creates.reject(container, unallocated_verdict(container, cause))
        send(call, answer)

    def _resume_decided(
        self, decided_in: NodeState, answer: CallAnswer, call: UndecidedCall, container: Container
    ) -> None:
        """Resume a create after hooks have answered; the answer is reused if the state has not changed."""
        if self.executor.state is decided_in:
            self._carry_out_create(call, container, answer)
        else:
            self._resume(call, container)

    def _resume(self, call: UndecidedCall, container: Container, *, is_reserved: bool = False) -> None:
        """Resume a create after hooks have answered, or after its reservation has been carried out."""
        event = CreateResumed(container, is_reserved=is_reserved)
        self._carry_out_create(call, container, self.executor.store.answer(event))

    def _carry_out_create(self, call: UndecidedCall, container: Container, answer: CallAnswer) -> None:
        if type(answer) is ReserveFirst:
            owns = answer.container.placement.pool is Pool.OWN
            create = self._create_owner if owns else self._create_narrowed
            self._spawn(call, create(call, answer.container))
            return
        if type(answer) is Refuse:  # a placed container is refused only if it lacks its devices
            self._without_devices(call, container, RELEASED_WITH_SANDBOX)
            return
        if type(answer) is Forward:
            if isinstance(call.context, CallContext):  # otherwise the create is over already
                call.context.sent_cpus = answer.planned_cpus
            if self.hooks.active:
                self.hooks.create_sent(container.id, call)
        send(call, answer)

    async def _create_narrowed(self, call: UndecidedCall, container: Container) -> None:
        """Record the CPUs that hooks have named, which no list of the runtime would show after a crash."""
        await self.executor.reservations.narrow(container)
        if not call.done and is_below_class(self.executor.state, container):
            # The runtime may write the container's cpuset already at the create.
            await self.executor.writes.widen_groups(container)
        if not call.done:
            self._resume(call, container, is_reserved=True)

    async def _create_owner(self, call: UndecidedCall, container: Container) -> None:
        async def placed_elsewhere(new: Container) -> Container | None:
            nonlocal container
            container = new
            if isinstance(call.context, CallContext):
                call.context.target = new.id
            if "pre_create_container" in self.hooks.points:
                changed = await self.hooks.create_again(call, new)
                if changed is None:
                    return None
                container = changed
            return container

        client = CreateClient(lambda: not isinstance(call.context, CallContext), placed_elsewhere)
        ended = await self.executor.reservations.create(container, client)
        if not ended.is_committed:
            if ended.reason is not None:  # otherwise it has been answered
                self._not_reserved(call, container, ended.reason)
            return
        self._resume(call, container, is_reserved=True)

    def _not_reserved(self, call: UndecidedCall, container: Container, reason: AbortReason) -> None:
        """Refuse a create whose CPUs cannot be freed; continue with it if its pod is now only observed."""
        answer = self.executor.store.answer(CreateNotReserved(container, reason))
        if type(answer) is Refuse:
            verdict = unreserved_verdict(self.executor.state, container, reason)
            verdict = structs.replace(verdict, detail=f"cannot free CPUs: {reason.message}")
            self.executor.creates.reject(container, verdict)
        send(call, answer)

    def answered(self, context: CallContext, container_id: str) -> None:
        """The runtime has created the container and named it."""
        if container_id:
            context.is_named = True
            executor = self.executor
            state, cgroups = executor.state, executor.cpuset_writer.sandbox_cgroups
            sent = context.sent_cpus
            if cgroups.monitored and self._may_be_earlier(state.containers.get(context.target)):
                sent = None
            executor.lifecycle.created(context.target, container_id, sent)
            state = executor.state
            container = state.containers.get(container_id)
            if container and state.owners and container.pod.sandbox_id in cgroups.monitored:
                executor.spawn(executor.writes.clear_sandboxes())

    def _may_be_earlier(self, container: Container | None) -> bool:
        """Return whether CRI-O may have created a container for an earlier run (``quirks.crio``)."""
        if (
            container is None
            or container.pod.cgroup_parent not in self.executor.state.runtime.inherited_cgroups
        ):
            return False
        return container.pod.sandbox_id in self.executor.cpuset_writer.sandbox_cgroups.monitored

    def _create_done(self, call: UndecidedCall, context: CallContext, status: int | None) -> None:
        if context.is_named:
            return
        if status in (None, GrpcStatus.OK):  # OK without a readable id: the list shows what was created
            self.executor.lifecycle.uncertain(context.target)
        else:
            self.executor.lifecycle.failed(context.target)


DEVICES_UNKNOWN = "cannot find out whether a container requests devices: kubelet has not given its pod"


class UnreportedPods:
    """Keeps a problem for each pod that kubelet has not reported, until it does or the pod is gone.

    Attributes:
        refs: Key to name of the pods that have a problem.
    """

    def __init__(self, executor: NodeExecutor) -> None:
        """Begin without such pods.

        Args:
            executor: The node.
        """
        self._executor = executor
        self.refs: dict[str, str] = {}

    def includes(self, pod: Pod, name: str) -> bool:
        """Return whether a container would be created without devices that it may request, and report that.

        It always gets the devices that it holds already.

        Args:
            pod: The pod, after kubelet was queried for it.
            name: The container.
        """
        executor = self._executor
        state = executor.state
        devices = state.devices
        unknown = pod.requests is None and bool(devices.registered) and applies_to(state, pod)
        unknown = unknown and not devices.held.get(pod.key, {}).get(name)
        if unknown:
            self.refs[pod.key] = pod.ref
            executor.telemetry.count(metrics.CREATES_DEVICES_UNKNOWN)
            executor.telemetry.problem(DEVICES_UNKNOWN, pod=pod.ref)
        return unknown

    def end_others(self) -> None:
        """End the problems of pods that kubelet has reported by now, and of pods that are gone."""
        executor = self._executor
        known = {each.key: each for each in executor.state.pods.values()}
        for key, ref in list(self.refs.items()):
            each = known.get(key)
            if each is None or each.requests is not None or not executor.state.devices.registered:
                del self.refs[key]
                end = executor.telemetry.forget if each is None else executor.telemetry.resolved
                end(DEVICES_UNKNOWN, pod=ref)
