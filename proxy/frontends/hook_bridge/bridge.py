"""Call hooks for held calls, and apply their answers.

Answers of hooks are applied between a decision and its barrier: the CPUs of a create are reserved already,
but no container has moved yet. So a refusal does not affect other containers, and a hook can only choose
fewer CPUs than the decision has (``proxy.engine.hook_narrowing``). The fields of hooks are written first and
the engine's own last, so the engine determines the CPUs and memory nodes that a request names.

While hooks are called, the state may change: the client may disconnect, pools may change, the node may be
released. So the state is read again after they have answered.

Stops and removals cannot be refused, and continue even if hooks fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.calls.hook_gateway import END_POINTS, ProceedWithPod
from proxy.calls.undecided_call import CallContext, CallHandler, UndecidedCall
from proxy.frontends.hook_bridge.facts import remembered_pod_facts
from proxy.frontends.hook_bridge.held_call_hooks import HeldCallHooks
from proxy.frontends.hook_bridge.update_queue import UpdateQueue
from proxy.hooks.answers import CLEAR, LEAVE
from proxy.hooks.events import (
    Point,
    PreCreateContainer,
    PreRemoveContainer,
    PreRemovePodSandbox,
    PreRunPodSandbox,
    PreStartContainer,
    PreStopContainer,
    PreStopPodSandbox,
    PreUpdateContainerResources,
)
from proxy.hooks.facts import Device, Mount
from proxy.hooks.hook import Outcome
from proxy.model.devices import DeviceField
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pod, Verdict
from proxy.wire.container_path import container_path

if TYPE_CHECKING:
    from proxy.engine.state import NodeState
    from proxy.frontends.hook_bridge.view import HookView

STARTABLE = (Phase.CREATED, Phase.STARTING)


class HookBridge:
    """Calls hooks; implements ``proxy.calls.hook_gateway.HookGateway``."""

    active = True

    def __init__(self, hooks: HeldCallHooks) -> None:
        """Prepare; no hook is called yet."""
        self._hooks = hooks
        self._executor = hooks.executor
        self._lifecycle_events = hooks.lifecycle_events
        self._before: Mapping[str, Callable[[UndecidedCall, str, CallHandler], None]] = {
            PreStartContainer.NAME: self._start,
            PreUpdateContainerResources.NAME: UpdateQueue(hooks).update,
            **dict.fromkeys(END_POINTS.values(), self._end),
        }

    @property
    def points(self) -> frozenset[str]:
        """See ``HookGateway``."""
        return self._hooks.hook_caller.points

    # -- sandboxes ----------------------------------------------------------------------------------------

    def run_pod(self, call: UndecidedCall, proceed: ProceedWithPod) -> None:
        """See ``HookGateway``."""
        bounds = self._executor.state.node.machine.bounds
        pod = call.sandbox(bounds)
        event = PreRunPodSandbox(*call.hook_view().sandbox(pod))

        def decided(outcome: Outcome) -> None:
            before = call.body
            applied = self._hooks.apply(call, outcome, refused)
            if applied is not None and not self._hooks.forward_if_released(call):
                is_changed = call.body is not before
                now = _renewed(pod, call.sandbox(bounds)) if is_changed else pod
                proceed(call, now, is_changed=is_changed)

        def refused(message: str) -> None:
            self._executor.overrides.refused_pod(pod, message)
            self._executor.rejections.rejected(pod, "", _refused_by_hook(message))

        self._hooks.call_hooks(call, event, decided)

    def pod_created(self, pod: Pod, call: UndecidedCall) -> None:
        """See ``HookGateway``."""
        self._lifecycle_events.pod_created(pod, call.hook_view())

    # -- creates ------------------------------------------------------------------------------------------

    def create(
        self, call: UndecidedCall, container: Container, proceed: Callable[[UndecidedCall, Container], None]
    ) -> None:
        """See ``HookGateway``."""
        if self._lifecycle_events.lacks_facts(container.pod.sandbox_id):
            self._hooks.spawn(call, self._create_later(call, container.id, proceed))
        else:
            self._create(call, container, proceed)

    async def _create_later(
        self, call: UndecidedCall, token: str, proceed: Callable[[UndecidedCall, Container], None]
    ) -> None:
        """Look up the labels and annotations of the sandbox as created: a hook may have changed them."""
        executor = self._executor
        placed = executor.state.containers[token]
        await self._hooks.look_up(placed.pod.sandbox_id, adopt=False)
        container = executor.state.containers.get(token)
        if call.done:
            executor.lifecycle.withdrawn(token)
        elif container is None or executor.store.mode.in_release:
            call.release()
        else:
            self._create(call, container, proceed)

    def _create(
        self, call: UndecidedCall, container: Container, proceed: Callable[[UndecidedCall, Container], None]
    ) -> None:
        if isinstance(call.context, CallContext):
            call.context.body = call.body
        event, state = self._create_event(call, container), self._executor.state

        def decided(outcome: Outcome) -> None:
            changed = self._apply_to_placement(call, container, state, event.decision.cpus, outcome)
            if changed is not None:
                proceed(call, changed)

        def over() -> None:
            self._executor.lifecycle.withdrawn(container.id)

        self._hooks.call_hooks(call, event, decided, over)

    async def create_again(self, call: UndecidedCall, container: Container) -> Container | None:
        """See ``HookGateway``. Hooks start again with the original request, because the CPUs have changed."""
        if isinstance(call.context, CallContext) and call.context.body is not None:
            call.replace_body(call.context.body)
        event, state = self._create_event(call, container), self._executor.state
        outcome = await self._hooks.await_outcome(self._hooks.start_hooks(event))
        if call.done:
            self._executor.lifecycle.failed(container.id)
            return None
        return self._apply_to_placement(call, container, state, event.decision.cpus, outcome)

    def create_sent(self, token: str, call: UndecidedCall) -> None:
        """See ``HookGateway``."""
        self._lifecycle_events.sent[token] = call.hook_view().remembered()
        if isinstance(call.context, CallContext):
            call.context.body = None  # hooks do not start again after the create was sent

    def _create_event(self, call: UndecidedCall, container: Container) -> PreCreateContainer:
        pod, lifecycle_events = container.pod, self._lifecycle_events
        view: HookView = call.hook_view()
        known = lifecycle_events.object_cache.pod(pod.sandbox_id)
        facts = remembered_pod_facts(pod, known) if known else view.pod(pod)
        return PreCreateContainer(facts, view.container(), lifecycle_events.decision(container))

    def _apply_to_placement(
        self, call: UndecidedCall, placed: Container, state: NodeState, offered: CpuSet, outcome: Outcome
    ) -> Container | None:
        """Apply the changes of hooks to a placement; None if the call has been answered or forwarded.

        Args:
            call: The call.
            placed: The container as it was placed.
            state: The state in which hooks were called.
            offered: The CPUs that the container had then.
            outcome: The outcome of the hooks.
        """
        executor, token = self._executor, placed.id

        def refused(message: str) -> None:
            executor.creates.reject(placed, _refused_by_hook(message))
            executor.lifecycle.withdrawn(token)

        fields = call.context.device_fields if isinstance(call.context, CallContext) else None
        clash = _conflict(fields, outcome) if fields else ""
        if clash:
            outcome = Outcome(refusal=f"cannot place {placed.ref}: {clash}")
        applied = self._hooks.apply(call, outcome, refused)
        if applied is None:
            return None
        self._hooks.narrow(token, applied, offered)
        if (limit := applied.adjustment.memory_limit) is not LEAVE:
            executor.overrides.limit_memory(token, -1 if limit is CLEAR else limit)
        if (quota := applied.adjustment.cpu_quota) is not LEAVE:
            executor.overrides.set_quota(token, -1 if quota is CLEAR else quota)
        if executor.state is state and not executor.store.mode.in_release:
            return placed  # nothing has changed since
        container = executor.state.containers.get(token)
        if container is None or executor.store.mode.in_release:
            call.release()
            return None
        return container

    # -- existing containers and sandboxes ----------------------------------------------------------------

    def before(self, point: str, call: UndecidedCall, target: str, proceed: CallHandler) -> None:
        """See ``HookGateway``."""
        self._before[point](call, target, proceed)

    def _start(self, call: UndecidedCall, container_id: str, proceed: CallHandler) -> None:
        if self._hooks.knows(container_id):
            self._start_known(call, container_id, proceed)
        else:
            start = partial(self._start_known, call, container_id, proceed)
            self._hooks.spawn(call, self._after_look_up(call, container_id, start, adopt=True))

    async def _after_look_up(
        self, call: UndecidedCall, target: str, step: Callable[[], None], *, adopt: bool = False
    ) -> None:
        await self._hooks.look_up(target, adopt=adopt)
        if not call.done:
            step()

    def _start_known(self, call: UndecidedCall, container_id: str, proceed: CallHandler) -> None:
        container, lifecycle_events = (
            self._executor.state.containers.get(container_id),
            self._lifecycle_events,
        )
        if container is None or container.phase not in STARTABLE:
            proceed(call)  # the runtime reports why it cannot be started
            return

        def decided(outcome: Outcome) -> None:
            if not self._hooks.refuse_or_update(call, outcome) and not self._hooks.forward_if_released(call):
                proceed(call)

        event = PreStartContainer(*lifecycle_events.facts(container), lifecycle_events.decision(container))
        self._hooks.call_hooks(call, event, decided)

    def updated(self, container_id: str, call: UndecidedCall) -> None:
        """See ``HookGateway``."""
        self._lifecycle_events.updated(container_id, call.hook_view())

    def _end(self, call: UndecidedCall, target: str, proceed: CallHandler) -> None:
        """Call hooks before a stop or a removal, which continues whatever they answer."""
        if self._lifecycle_events.lacks_facts(target):
            end = partial(self._end_known, call, target, proceed)
            self._hooks.spawn(call, self._after_look_up(call, target, end))
        else:
            self._end_known(call, target, proceed)

    def _end_known(self, call: UndecidedCall, target: str, proceed: CallHandler) -> None:
        event = self._end_event(call, target)
        if event is None:
            proceed(call)
            return

        def decided(outcome: Outcome) -> None:
            self._hooks.start_updates(outcome)
            proceed(call)

        self._hooks.call_hooks(call, event, decided)

    def _end_event(self, call: UndecidedCall, target: str) -> Point | None:
        """Return the event before a stop or a removal; None if it stops or removes nothing."""
        lifecycle_events, state, point = self._lifecycle_events, self._executor.state, END_POINTS[call.method]
        if point == PreStopPodSandbox.NAME:
            pod = state.pods.get(target)
            return None if pod is None else PreStopPodSandbox(lifecycle_events.pod(pod))
        if point == PreRemovePodSandbox.NAME:
            pod = lifecycle_events.find_pod(target)
            return None if pod is None else PreRemovePodSandbox(lifecycle_events.pod(pod))
        container = state.containers.get(target)
        if container is None:
            return None
        if point == PreRemoveContainer.NAME:
            return PreRemoveContainer(*lifecycle_events.facts(container))
        if container.phase is Phase.EXITED:
            return None
        grace = call.hook_view().grace()
        return PreStopContainer(
            *lifecycle_events.facts(container), lifecycle_events.decision(container), grace
        )


def _refused_by_hook(message: str) -> Verdict:
    return Verdict(GrpcStatus.FAILED_PRECONDITION, "RefusedByHook", message)


def _conflict(fields: Mapping[str, DeviceField], outcome: Outcome) -> str:
    """Return the field that a hook and a device plugin set to different values; empty if there is none."""
    for name, hook in outcome.owners.items():
        kind, bracket, key = name.partition("[")
        spelled = f"{kind}[{container_path(key[:-1])}]" if kind in ("mounts", "devices") and bracket else name
        if (field := fields.get(spelled)) is not None:
            wanted = getattr(outcome.adjustment, kind).get(key[:-1])
            if _device_value(wanted) != field.value:
                return f"hook {hook} and {field.plugin} set {spelled} differently"
    return ""


def _device_value(wanted: object) -> tuple[object, ...]:
    """Return a hook's value in the form of ``DeviceField``; another value if a plugin cannot set it."""
    if isinstance(wanted, Device):
        return wanted.host_path, wanted.permissions
    if isinstance(wanted, Mount) and wanted.propagation == "private":
        return wanted.host_path, wanted.readonly
    return (wanted,)


def _renewed(before: Pod, pod: Pod) -> Pod:
    """Return a pod that hooks have changed; its Kubernetes QoS class is that of kubelet's own cgroup."""
    if pod.cgroup_parent == before.cgroup_parent:
        return pod
    return structs.replace(pod, kube_qos=before.kube_qos, cgroup_changed_by_hook=True)
