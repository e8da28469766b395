"""Asking hooks in the way of calls, and doing what they answer.

What hooks want is done between a decision and its barrier: the CPUs of a create are taken already, and
nobody has moved yet. So a refusal costs nobody anything, and what a hook names can only be less than what
was decided (``proxy.plan.narrowing``). Hooks' fields are written first, then the engine's own: which CPUs
and memory nodes a request names is always its last word.

While hooks are asked anything may happen: the client may go, pools may change, the node may be released. So
the state is looked at anew when they have answered. Updates of one container go on in the order in which
they came.

Stops and removals cannot be refused, and go on whatever becomes of the hooks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING

from proxy.cri.asked import LEAVING, Go
from proxy.cri.hooked.adjust import adjusted_create, adjusted_run_pod, adjusted_update
from proxy.cri.hooked.facts import container_facts, pod_facts, resources_of
from proxy.cri.pb import api_pb2 as pb
from proxy.cri.trips import FAILED_PRECONDITION, Call, Hold, Trip
from proxy.cri.views import pod_of
from proxy.hooks.answers import CLEAR, LEAVE, Adjustment
from proxy.hooks.hook import AS_IT_IS, Answers, Outcome
from proxy.hooks.points import (
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
from proxy.keeper.hooked import narrow
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pod
from proxy.plan.narrowing import Narrowing

if TYPE_CHECKING:
    from proxy.cri.hooked.following import Following
    from proxy.cri.hooked.updates import Updates
    from proxy.hooks.hook import Asking
    from proxy.keeper.keeper import Keeper

STARTABLE = (Phase.CREATED, Phase.STARTING)


class Hooked:
    """Has hooks asked; implements ``proxy.cri.asked.Asked``."""

    active = True

    def __init__(
        self,
        keeper: Keeper,
        asking: Asking,
        following: Following,
        updates: Updates,
        adopt: Callable[[str], Awaitable[bool]],
        hold: Hold,
        *,
        owned_cpus: bool = False,
    ) -> None:
        """Ask nobody yet.

        Args:
            keeper: Whose node it is.
            asking: Who asks.
            following: Knows what hooks are told.
            updates: Does what hooks want of other containers.
            adopt: Takes in a container that a call names and nobody knows; tells whether it is known then.
            hold: Holds a call while a coroutine decides on it.
            owned_cpus: Hooks may give CPUs that have owners.
        """
        self._keeper = keeper
        self._asking = asking
        self._following = following
        self._updates = updates
        self._adopt = adopt
        self._hold = hold
        self._owned_cpus = owned_cpus
        self._lines: dict[str, asyncio.Future[None]] = {}
        """The last update in line of each container that has some."""

    @property
    def points(self) -> frozenset[str]:
        """See ``Asked``."""
        return self._asking.points

    # -- sandboxes ----------------------------------------------------------------------------------------

    def run_pod(self, call: Call, go: Callable[[Call, pb.PodSandboxConfig, Pod], None]) -> None:
        """See ``Asked``."""
        request = pb.RunPodSandboxRequest.FromString(call.body)
        config = request.config
        pod = pod_of(config)
        facts = pod_facts(pod, config, request.runtime_handler)

        def decided(outcome: Outcome) -> None:
            if self._refuses(call, outcome):
                return
            if not self._change(call, adjusted_run_pod, outcome):
                go(call, config, pod)
                return
            changed = pb.RunPodSandboxRequest.FromString(call.body).config
            go(call, changed, _renewed(pod, pod_of(changed)))

        self._ask(call, PreRunPodSandbox(facts, resources_of(config.linux.resources)), decided)

    def ran(self, pod: Pod, body: bytes) -> None:
        """See ``Asked``."""
        self._following.ran(pod, body)

    # -- creates ------------------------------------------------------------------------------------------

    def create(self, call: Call, container: Container, go: Callable[[Call, Container], None]) -> None:
        """See ``Asked``."""
        body, offered = call.body, self._keeper.state.offered(container)
        if isinstance(call.state, Trip):
            call.state.body = body

        def decided(outcome: Outcome) -> None:
            hooked = self._placed(call, container.id, offered, outcome)
            if hooked is not None:
                go(call, hooked)

        self._ask(call, self._creating(body, container), decided)

    async def create_elsewhere(self, call: Call, container: Container) -> Container | None:
        """See ``Asked``. Hooks begin anew with the request as it came: they were told of other CPUs."""
        if isinstance(call.state, Trip) and call.state.body:
            call.change(call.state.body)
        offered = self._keeper.state.offered(container)
        answers = self._answers(self._creating(call.body, container))
        outcome = answers.outcome or await answers.wait()
        return None if call.done else self._placed(call, container.id, offered, outcome)

    def leaves(self, token: str, body: bytes) -> None:
        """See ``Asked``."""
        self._following.sent[token] = body

    def _creating(self, body: bytes, container: Container) -> PreCreateContainer:
        pod, following = container.pod, self._following
        known = following.memory.pod(pod.sandbox_id)
        facts = pod_facts(pod, known or pb.CreateContainerFacts.FromString(body).sandbox_config)
        return PreCreateContainer(facts, container_facts(body), following.decision(container))

    def _placed(self, call: Call, token: str, offered: CpuSet, outcome: Outcome) -> Container | None:
        """Do with a placement what hooks want; None where the call has been answered or let go."""
        keeper = self._keeper
        if outcome.refusal:
            keeper.history.amend(token, outcome.refusal)
            keeper.voice.info(f"refused: {outcome.refusal}")
            keeper.failed(token)
        if self._refuses(call, outcome):
            return None
        self._narrow(token, outcome, offered)
        self._change(call, adjusted_create, outcome)
        container = keeper.state.containers.get(token)
        if container is None or keeper.enforcer.paused:
            call.release()
            return None
        keeper.saved[token] = keeper.state.wanted(container)
        return container

    # -- containers that exist ----------------------------------------------------------------------------

    def start(self, call: Call, container_id: str, go: Go) -> None:
        """See ``Asked``."""
        container = self._keeper.state.containers.get(container_id)
        if container is None:
            self._hold(call, self._adopted(call, container_id, lambda: self._start(call, container_id, go)))
        else:
            self._start(call, container_id, go)

    def _start(self, call: Call, container_id: str, go: Go) -> None:
        container = self._keeper.state.containers.get(container_id)
        if container is None or container.phase not in STARTABLE:
            go(call)  # of any other the runtime will say what is wrong with that
            return

        def decided(outcome: Outcome) -> None:
            if not self._refuses(call, outcome):
                go(call)

        following = self._following
        event = PreStartContainer(*following.facts(container), following.decision(container))
        self._ask(call, event, decided)

    async def _adopted(self, call: Call, container_id: str, then: Callable[[], None]) -> None:
        await self._adopt(container_id)
        if not call.done:
            then()

    def update(self, call: Call, container_id: str, go: Go) -> None:
        """See ``Asked``."""
        if container_id in self._lines or container_id not in self._keeper.state.containers:
            self._hold(call, self._in_line(call, container_id, go, None))
            return
        answers = self._update(call, container_id, go)
        if answers is not None:
            self._hold(call, self._in_line(call, container_id, go, answers))

    def _in_line(
        self, call: Call, container_id: str, go: Go, answers: _Waiting | None
    ) -> Coroutine[object, object, None]:
        """Take a place in the line of a container's updates, now; gives what is to be awaited."""
        before, mine = self._lines.get(container_id), asyncio.get_running_loop().create_future()
        self._lines[container_id] = mine

        async def waiting() -> None:
            try:
                if before is not None:
                    await asyncio.wait((before,))
                if container_id not in self._keeper.state.containers:
                    await self._adopt(container_id)
                late = answers
                if late is None and not call.done:
                    late = self._update(call, container_id, go)
                if late is not None:
                    outcome = await late.answers.wait()
                    if not call.done:
                        late.go(outcome)
            finally:
                mine.set_result(None)
                if self._lines.get(container_id) is mine:
                    del self._lines[container_id]

        return waiting()

    def _update(self, call: Call, container_id: str, go: Go) -> _Waiting | None:
        """Ask about an update; gives what is to be waited for, None where it has gone on."""
        container = self._keeper.state.containers.get(container_id)
        if container is None or container.phase is Phase.EXITED:
            go(call)
            return None
        request, following = pb.UpdateContainerResourcesRequest.FromString(call.body), self._following
        offered = self._keeper.state.offered(container)
        event = PreUpdateContainerResources(
            *following.facts(container),
            following.decision(container),
            resources_of(request.linux),
            request.annotations,
        )

        def decided(outcome: Outcome) -> None:
            if not self._refuses(call, outcome):
                self._narrow(container_id, outcome, offered)
                self._change(call, adjusted_update, outcome)
                go(call)

        answers = self._answers(event)
        if answers.outcome is None:
            return _Waiting(answers, decided)
        decided(answers.outcome)
        return None

    def updated(self, trip: Trip) -> None:
        """See ``Asked``."""
        self._following.updated(trip.target, trip.body)

    def leave(self, call: Call, target: str, go: Go) -> None:
        """See ``Asked``."""
        event = self._leaving(call, target)
        if event is None:
            go(call)
            return

        def decided(outcome: Outcome) -> None:
            self._updates.take(outcome.adjustment.updates, outcome.owners)
            go(call)

        self._ask(call, event, decided)

    def _leaving(self, call: Call, target: str) -> Point | None:
        """Give what hooks are told before a stop or a removal; None where it stops or removes nothing."""
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
        grace = pb.StopContainerRequest.FromString(call.body).timeout
        return PreStopContainer(*following.facts(container), following.decision(container), grace)

    # -- asking and doing ---------------------------------------------------------------------------------

    def _answers(self, event: Point) -> Answers:
        try:
            return self._asking.ask(event)
        except Exception as error:  # noqa: BLE001  a fault of ours costs the hooks, never the call
            self._keeper.broken(error)
            return _NONE

    def _ask(self, call: Call, event: Point, go: Callable[[Outcome], None]) -> None:
        answers = self._answers(event)
        if answers.outcome is not None:
            go(answers.outcome)
            return

        async def later() -> None:
            outcome = await answers.wait()
            if not call.done:
                go(outcome)

        self._hold(call, later())

    def _refuses(self, call: Call, outcome: Outcome) -> bool:
        """Refuse the call where hooks do; else have done what they want of others."""
        if outcome.refusal:
            self._keeper.counters["refused_by_hooks"] += 1
            call.refuse(FAILED_PRECONDITION, outcome.refusal)
            return True
        if outcome.adjustment.updates:
            self._updates.take(outcome.adjustment.updates, outcome.owners)
        return False

    def _change(self, call: Call, adjusted: Callable[[bytes, Adjustment], bytes], outcome: Outcome) -> bool:
        """Change a call's message; tells whether it is another one now."""
        try:
            body = adjusted(call.body, outcome.adjustment)
        except HookError as error:
            self._keeper.problems.note(str(error))
            return False
        if body is call.body:
            return False
        call.change(body)
        return True

    def _narrow(self, container_id: str, outcome: Outcome, offered: CpuSet) -> None:
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
        if problem := narrow(self._keeper, container_id, wish, offered):
            self._keeper.problems.note(problem)


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """Hooks that have not answered yet, and what is done when they have."""

    answers: Answers
    go: Callable[[Outcome], None]


class _Nothing:
    """Answers where nobody could be asked."""

    outcome: Outcome | None = AS_IT_IS

    async def wait(self) -> Outcome:
        """Give that nobody wants anything."""
        return AS_IT_IS


_NONE = _Nothing()


def _renewed(before: Pod, pod: Pod) -> Pod:
    """Give a pod that hooks have changed; Kubernetes' class is what kubelet's own cgroup says."""
    if pod.cgroup_parent == before.cgroup_parent:
        return pod
    return dataclasses.replace(pod, kube_qos=before.kube_qos, reparented=True)
