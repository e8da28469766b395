"""Calling hooks for held calls, and doing what they answer.

What hooks want is done between a decision and its barrier: the CPUs of a create are taken already, and no
container has moved yet. So a refusal costs the others nothing, and what a hook names can only be less than
what was decided (``proxy.engine.narrowing``). Hooks' fields are written first, then the engine's own: which
CPUs and memory nodes a request names is always its last word.

While hooks are called anything may happen: the client may go, pools may change, the node may be released. So
the state is read again when they have answered.

Stops and removals cannot be refused, and go on whatever becomes of the hooks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.calls.held_call import Handle, HeldCall, Hold, Trip
from proxy.calls.hook_gateway import LEAVING
from proxy.frontends.hook_bridge.dispatch import HookDispatcher
from proxy.frontends.hook_bridge.facts import remembered_pod_facts
from proxy.frontends.hook_bridge.update_queue import UpdateQueue
from proxy.hooks.events import (
    Point,
    PreCreateContainer,
    PreRemoveContainer,
    PreRemovePodSandbox,
    PreRunPodSandbox,
    PreStartContainer,
    PreStopContainer,
    PreStopPodSandbox,
)
from proxy.hooks.hook import Outcome
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pod, Verdict
from proxy.wire.lenient_message import TooManyFieldsError

if TYPE_CHECKING:
    from proxy.controller.controller import Keeper
    from proxy.engine.state import NodeState
    from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
    from proxy.frontends.hook_bridge.view import HookView

STARTABLE = (Phase.CREATED, Phase.STARTING)


class Hooked:
    """Has hooks called; implements ``proxy.calls.hook_gateway.HookGateway``."""

    active = True

    def __init__(
        self,
        keeper: Keeper,
        way: HookDispatcher,
        following: LifecycleEvents,
        adopt: Callable[[str], Awaitable[bool]],
        hold: Hold,
        learn: Callable[[str], Awaitable[None]],
    ) -> None:
        """Prepare; no hook is called yet.

        Args:
            keeper: The node.
            way: Calls hooks.
            following: Has the facts that hooks are called with.
            adopt: Adopts a container that a call names and that is not known; returns whether it is known
                then.
            hold: Holds a call while a coroutine decides on it.
            learn: Looks up the facts of a container or sandbox that are missing.
        """
        self._keeper = keeper
        self._way = way
        self._following = following
        self._adopt = adopt
        self._hold = hold
        self._learn = learn
        self.update = UpdateQueue(keeper, way, following, adopt, hold, learn).update

    @property
    def points(self) -> frozenset[str]:
        """See ``HookGateway``."""
        return self._way.asking.points

    # -- sandboxes ----------------------------------------------------------------------------------------

    def run_pod(self, call: HeldCall, go: Callable[[HeldCall, Pod], None]) -> None:
        """See ``HookGateway``."""
        bounds = self._keeper.state.node.machine.bounds
        pod = call.sandbox(bounds)
        try:
            event = PreRunPodSandbox(*call.seen_by_hooks().sandbox(pod))
        except TooManyFieldsError as error:
            self._keeper.telemetry.problem("cannot show a RunPodSandbox request to hooks", err=error)
            call.refuse(GrpcStatus.FAILED_PRECONDITION, f"cannot ask hooks about the sandbox: {error}")
            return

        def decided(outcome: Outcome) -> None:
            outcome, body = self._way.written(call, outcome)
            if self._way.refuses(call, outcome):
                self._keeper.overrides.refused_pod(pod, outcome.refusal)
                return
            seen = pod
            if body is not call.body:
                call.change(body)
                seen = _renewed(pod, call.sandbox(bounds))
            if not self._way.relays(call):
                go(call, seen)

        self._way.ask(call, event, decided)

    def ran(self, pod: Pod, call: HeldCall) -> None:
        """See ``HookGateway``."""
        self._following.ran(pod, call.seen_by_hooks())

    # -- creates ------------------------------------------------------------------------------------------

    def create(self, call: HeldCall, container: Container, go: Callable[[HeldCall, Container], None]) -> None:
        """See ``HookGateway``."""
        if isinstance(call.state, Trip):
            call.state.body = call.body
        event, state = self._creating(call, container), self._keeper.state

        def decided(outcome: Outcome) -> None:
            hooked = self._placed(call, container, state, event.decision.cpus, outcome)
            if hooked is not None:
                go(call, hooked)

        def over() -> None:
            self._keeper.lifecycle.failed(container.id)  # it never left for the runtime

        self._way.ask(call, event, decided, over)

    async def create_elsewhere(self, call: HeldCall, container: Container) -> Container | None:
        """See ``HookGateway``. Hooks start again with the request as it came: it had other CPUs then."""
        if isinstance(call.state, Trip) and call.state.body is not None:
            call.change(call.state.body)
        event, state = self._creating(call, container), self._keeper.state
        outcome = await self._way.outcome(self._way.answers(event))
        if call.done:
            self._keeper.lifecycle.failed(container.id)
            return None
        return self._placed(call, container, state, event.decision.cpus, outcome)

    def leaves(self, token: str, call: HeldCall) -> None:
        """See ``HookGateway``."""
        self._following.sent[token] = call.seen_by_hooks().remembered()

    def _creating(self, call: HeldCall, container: Container) -> PreCreateContainer:
        pod, following = container.pod, self._following
        view: HookView = call.seen_by_hooks()
        known = following.memory.pod(pod.sandbox_id)
        facts = remembered_pod_facts(pod, known) if known else view.pod(pod)
        return PreCreateContainer(facts, view.container(), following.decision(container))

    def _placed(
        self, call: HeldCall, placed: Container, state: NodeState, offered: CpuSet, outcome: Outcome
    ) -> Container | None:
        """Apply what hooks want to a placement; None where the call has been answered or let go.

        Args:
            call: The call.
            placed: The container as it was placed.
            state: The state in which hooks were called.
            offered: What it ran on then.
            outcome: What hooks want.
        """
        keeper, token = self._keeper, placed.id
        outcome, body = self._way.written(call, outcome)
        if outcome.refusal:
            verdict = Verdict(GrpcStatus.FAILED_PRECONDITION, "RefusedByHook", outcome.refusal)
            keeper.history.refused(token, verdict)
            keeper.lifecycle.failed(token)
        if self._way.refuses(call, outcome):
            return None
        self._way.narrow(token, outcome, offered)
        if body is not call.body:
            call.change(body)
        if keeper.state is state and not keeper.store.mode.is_leaving:
            return placed  # nothing has happened since
        container = keeper.state.containers.get(token)
        if container is None or keeper.store.mode.is_leaving:
            call.release()
            return None
        return container

    # -- containers that exist ----------------------------------------------------------------------------

    def start(self, call: HeldCall, container_id: str, go: Handle) -> None:
        """See ``HookGateway``."""
        if container_id in self._keeper.state.containers and not self._following.lacks(container_id):
            self._start(call, container_id, go)
        else:
            self._hold(call, self._start_unknown(call, container_id, go))

    async def _start_unknown(self, call: HeldCall, container_id: str, go: Handle) -> None:
        if container_id not in self._keeper.state.containers:
            await self._adopt(container_id)
        if self._following.lacks(container_id):
            await self._learn(container_id)
        if not call.done:
            self._start(call, container_id, go)

    def _start(self, call: HeldCall, container_id: str, go: Handle) -> None:
        container, following = self._keeper.state.containers.get(container_id), self._following
        if container is None or container.phase not in STARTABLE:
            go(call)  # of any other the runtime will say what is wrong with that
            return

        def decided(outcome: Outcome) -> None:
            if not self._way.refuses(call, outcome) and not self._way.relays(call):
                go(call)

        event = PreStartContainer(*following.facts(container), following.decision(container))
        self._way.ask(call, event, decided)

    def updated(self, container_id: str, call: HeldCall) -> None:
        """See ``HookGateway``."""
        self._following.updated(container_id, call.seen_by_hooks())

    def leave(self, call: HeldCall, target: str, go: Handle) -> None:
        """See ``HookGateway``."""
        if self._following.lacks(target):
            self._hold(call, self._leave_unknown(call, target, go))
        else:
            self._leave(call, target, go)

    async def _leave_unknown(self, call: HeldCall, target: str, go: Handle) -> None:
        await self._learn(target)
        if not call.done:
            self._leave(call, target, go)

    def _leave(self, call: HeldCall, target: str, go: Handle) -> None:
        event = self._leaving(call, target)
        if event is None:
            go(call)
            return

        def decided(outcome: Outcome) -> None:
            self._way.update(outcome)
            go(call)

        self._way.ask(call, event, decided)

    def _leaving(self, call: HeldCall, target: str) -> Point | None:
        """Return the event before a stop or a removal; None where it stops or removes nothing."""
        following, state, point = self._following, self._keeper.state, LEAVING[call.method]
        if point == PreStopPodSandbox.NAME:
            pod = state.pods.get(target)
            return None if pod is None else PreStopPodSandbox(following.pod(pod))
        if point == PreRemovePodSandbox.NAME:
            pod = following.find_pod(target)
            return None if pod is None else PreRemovePodSandbox(following.pod(pod))
        container = state.containers.get(target)
        if container is None:
            return None
        if point == PreRemoveContainer.NAME:
            return PreRemoveContainer(*following.facts(container))
        if container.phase is Phase.EXITED:
            return None
        grace = call.seen_by_hooks().grace()
        return PreStopContainer(*following.facts(container), following.decision(container), grace)


def _renewed(before: Pod, pod: Pod) -> Pod:
    """Give a pod that hooks have changed; Kubernetes' class is what kubelet's own cgroup says."""
    if pod.cgroup_parent == before.cgroup_parent:
        return pod
    return structs.replace(pod, kube_qos=before.kube_qos, cgroup_changed_by_hook=True)
