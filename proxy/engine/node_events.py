"""What happens to a node, as values: the input of ``proxy.engine.handle``.

Times are by a clock that never jumps, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from proxy.engine.effects import AbortReason
from proxy.engine.enforcement_state import Enforcement
from proxy.engine.facts import MatterFacts
from proxy.engine.inflight import InflightCall
from proxy.engine.node import Node
from proxy.engine.node_effects import Follow
from proxy.engine.owners import CpuHold
from proxy.engine.write_conflicts import DriftEvent
from proxy.model.idset import CpuSet
from proxy.model.kubelet import Held
from proxy.model.machine import Machine
from proxy.model.mode import NodeMode
from proxy.model.pod_selection import PodSelection
from proxy.model.workload import Container, Phase, Pod, Request

# -- containers ---------------------------------------------------------------------------------------------


class ContainerCreated(Struct, frozen=True):
    """The runtime has made a container and named it.

    Attributes:
        token: The id that it has in the state.
        container_id: Its id at the runtime.
        sent: The CPUs that its request brought to the runtime; None where they are not known.
    """

    token: str
    container_id: str
    sent: CpuSet | None = None


class CreateFailed(Struct, frozen=True):
    """A create has failed, or is decided again.

    Attributes:
        token: The id that its container has in the state.
    """

    token: str


class CreateLost(Struct, frozen=True):
    """A create was cancelled under way: the runtime may have made the container or not.

    Attributes:
        token: The id that its container has in the state.
        at: When.
    """

    token: str
    at: float


class PhaseChanged(Struct, frozen=True):
    """A container has entered a phase. One that has exited stays so, and gives its CPUs back.

    Attributes:
        container_id: The container.
        phase: The phase.
    """

    container_id: str
    phase: Phase


class ContainersRemoved(Struct, frozen=True):
    """Containers, known or not, are gone.

    Attributes:
        ids: Their ids.
    """

    ids: tuple[str, ...]


class ContainerTouched(Struct, frozen=True):
    """Something has happened to a container: lists of the runtime from before say nothing about it.

    Attributes:
        container_id: The container.
    """

    container_id: str


class ContainerIsBack(Struct, frozen=True):
    """A list shows that a container is not gone after all.

    Attributes:
        container_id: The container.
    """

    container_id: str


class ContainersUpdated(Struct, frozen=True):
    """Containers that exist have another placement, request, cgroup or phase.

    Attributes:
        containers: The containers as they are from now on.
        reason: What happened, in a few words.
        recorded: Whether the ledger records them.
    """

    containers: tuple[Container, ...]
    reason: str
    recorded: bool = True


class CpusGiven(Struct, frozen=True):
    """Containers may use other CPUs than before, by a hook, a move, or in place of CPUs that are offline.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


# -- decisions ----------------------------------------------------------------------------------------------
# Each is answered by ``PlanDecided``, and the placement is in the state at once where there is one.


class CreateRequested(Struct, frozen=True):
    """A container is to be created.

    Attributes:
        pod: Its pod.
        name: Its name.
        attempt: Its attempt.
        request: What it asks for.
        token: Its id until the runtime has assigned one.
    """

    pod: Pod
    name: str
    attempt: int
    request: Request
    token: str


class CreateResumed(Struct, frozen=True):
    """Hooks have been asked about a container that is to be created, or its reservation was carried out.

    Attributes:
        container: The container as it was placed.
        is_reserved: Whether its reservation has been carried out.
    """

    container: Container
    is_reserved: bool = False


class CreateNotReserved(Struct, frozen=True):
    """The reservation of a create was given up, and its placement withdrawn.

    Attributes:
        container: The container as it was placed.
        reason: Why.
    """

    container: Container
    reason: AbortReason


class StartRequested(Struct, frozen=True):
    """A container is to be started.

    Attributes:
        container_id: Its id.
        is_prepared: Whether the start has been prepared, or the container cannot be found.
        obstacle: Why it cannot be prepared; empty where it can.
    """

    container_id: str
    is_prepared: bool = False
    obstacle: str = ""


class UpdateRequested(Struct, frozen=True):
    """A client updates the resources of a container.

    Attributes:
        container_id: Its id.
        cpus, mems: The sets that the client names, as text; empty for none.
        cpu_quota: Microseconds; -1 for no limit, 0 for not set.
    """

    container_id: str
    cpus: str
    mems: str
    cpu_quota: int


class CpusNotFreed(Struct, frozen=True):
    """The CPUs of a create cannot be freed: it is to be placed elsewhere.

    Attributes:
        token: The id that its container has in the state.
        reason: The CPUs, and why they cannot be freed.
        new_token: Its id from now on.
    """

    token: str
    reason: AbortReason
    new_token: str


class ContainerFound(Struct, frozen=True):
    """The runtime has a container that is not known: it keeps what it runs on, where it may.

    Attributes:
        container_id: Its id.
        pod: Its pod.
        name: Its name.
        attempt: Its attempt.
        request: What it asked for, with the CPUs that it has.
        phase: Its phase.
        saved: The CPUs that the runtime has saved for it; None where they are not known.
    """

    container_id: str
    pod: Pod
    name: str
    attempt: int
    request: Request
    phase: Phase
    saved: CpuSet | None


class SandboxRequested(Struct, frozen=True):
    """A sandbox is to be created.

    Attributes:
        pod: Its pod; ``sandbox_id`` is a token until the runtime has named it.
        total: What the pod asks for as a whole.
    """

    pod: Pod
    total: Request


# -- pods ---------------------------------------------------------------------------------------------------


class PodLearned(Struct, frozen=True):
    """A sandbox exists, or more is known about its pod.

    Attributes:
        pod: The pod.
        reason: What happened, in a few words.
        recorded: Whether the ledger records it.
    """

    pod: Pod
    reason: str
    recorded: bool = True


class SandboxRunning(Struct, frozen=True):
    """A sandbox has been made; what an earlier sandbox of the same pod still holds goes.

    Attributes:
        pod: The pod with the sandbox's id.
        token: What it was admitted under; empty where nothing was set aside for it.
    """

    pod: Pod
    token: str = ""


class SandboxFailed(Struct, frozen=True):
    """A sandbox has failed: what was set aside for it is free again.

    Attributes:
        token: What it was admitted under.
    """

    token: str


class SandboxStopped(Struct, frozen=True):
    """A sandbox has been stopped: nothing in it runs any more.

    Attributes:
        sandbox_id: Its id.
    """

    sandbox_id: str


class SandboxRemoved(Struct, frozen=True):
    """A sandbox is gone, and its containers with it.

    Attributes:
        sandbox_id: Its id.
    """

    sandbox_id: str


# -- reservations -------------------------------------------------------------------------------------------


class CpusHeld(Struct, frozen=True):
    """A reservation holds CPUs beside placements, or nothing any more.

    Attributes:
        reservation: Its name.
        hold: What it holds; None for nothing.
        reason: What happened, in a few words.
        placed: Containers whose placements change by it.
    """

    reservation: str
    hold: CpuHold | None
    reason: str
    placed: tuple[Container, ...] = ()


# -- calls in flight ----------------------------------------------------------------------------------------


class CallDeparted(Struct, frozen=True):
    """A call has left for the runtime, or may have left with an earlier run of the daemon.

    Attributes:
        call: The call.
    """

    call: InflightCall


class CallLanded(Struct, frozen=True):
    """A call is over, and says nothing about its container.

    Attributes:
        call: The call.
    """

    call: InflightCall


class CallStrayed(Struct, frozen=True):
    """The answer to a call is not waited for any more.

    Attributes:
        call: The call.
        at: When.
    """

    call: InflightCall
    at: float


class StartRefused(Struct, frozen=True):
    """The runtime has answered a start with an error, and the container is still starting.

    Attributes:
        call: The call.
        at: When.
    """

    call: InflightCall
    at: float


class StartEnded(Struct, frozen=True):
    """A start is over.

    Attributes:
        call: The call.
        phase: The phase that its container is in; None where that is not known.
    """

    call: InflightCall
    phase: Phase | None


class UpdateEnded(Struct, frozen=True):
    """An update has been answered.

    Attributes:
        call: The call.
        saved: The CPUs that the runtime has saved by it; None where it has saved none.
    """

    call: InflightCall
    saved: CpuSet | None


class ResendWanted(Struct, frozen=True):
    """The runtime is to be sent the CPUs of a container once the calls in flight for it are over.

    Attributes:
        container_id: The container.
    """

    container_id: str


class CallConfined(Struct, frozen=True):
    """The container of a call is kept within its current cpuset while the call is in flight, or no longer is.

    Attributes:
        call: The call.
        confined: Whether it is.
    """

    call: InflightCall
    confined: bool


class StrayListed(Struct, frozen=True):
    """The runtime has listed what it has, while a stray was in flight.

    Attributes:
        call: The stray.
        phase: The phase that the list shows for its container; None where it says nothing.
        asked: When the list was asked for.
        now: When it came.
        held: Time alone does not end the stray.
    """

    call: InflightCall
    phase: Phase | None
    asked: float
    now: float
    held: bool


class StrayEnded(Struct, frozen=True):
    """A stray is over.

    Attributes:
        call: The stray.
        phase: The phase that its container is in.
    """

    call: InflightCall
    phase: Phase


# -- what is known of the runtime ---------------------------------------------------------------------------


class SavedCpusLearned(Struct, frozen=True):
    """It is known which CPUs the runtime has saved for a container, or not known any more.

    Attributes:
        container_id: The container; one that does not exist is passed over.
        cpus: The CPUs; None where they are not known.
    """

    container_id: str
    cpus: CpuSet | None


class ContainersUnsettled(Struct, frozen=True):
    """Containers may run on other CPUs than the runtime has saved for them: it is to be sent theirs.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


class SettlingBegan(Struct, frozen=True):
    """A container that was unsettled is looked at.

    Attributes:
        container_id: The container.
    """

    container_id: str


# -- the node -----------------------------------------------------------------------------------------------


class RuntimeListed(Struct, frozen=True):
    """The runtime has listed what it has, completely.

    Attributes:
        pods: Ids of all sandboxes.
        containers: Ids of all containers.
        since: The number of the newest change when it was asked.
    """

    pods: Collection[str]
    containers: Collection[str]
    since: int


class NodeRulesChanged(Struct, frozen=True):
    """Other rules are in effect on the node.

    Attributes:
        node: The rules, with the machine.
        reason: What happened, in a few words.
        follow: Which containers are written in the kernel.
    """

    node: Node
    reason: str
    follow: Follow = Follow.MOVED


class HardwareChanged(Struct, frozen=True):
    """CPUs or memory came or went.

    Attributes:
        machine: The machine as it is now.
    """

    machine: Machine


class KubeletAssigned(Struct, frozen=True):
    """The CPU manager of kubelet holds other CPUs.

    Attributes:
        held: What it holds.
    """

    held: Held


class BeLimited(Struct, frozen=True):
    """BE is suppressed to some CPUs, or not any more.

    Attributes:
        cpus: The CPUs; None where it is not suppressed.
    """

    cpus: CpuSet | None


class ModeChanged(Struct, frozen=True):
    """What is done with the node has changed. Jobs that are queued for the kernel follow it, too.

    Attributes:
        mode: The mode from now on.
    """

    mode: NodeMode


class EnforcementChanged(Struct, frozen=True):
    """Other pods are selected for enforcement.

    Attributes:
        selection: The pods from now on.
    """

    selection: PodSelection


class EnforcementRead(Struct, frozen=True):
    """It is known to which pods the last daemon applied the plan, after what it had in its ledger is known.

    Attributes:
        mode: The mode of that daemon.
        enforcement: To which pods it applied the plan.
    """

    mode: NodeMode
    enforcement: Enforcement


class EnforcementPaused(Struct, frozen=True):
    """Running pods are not to be changed any further for now, or are again.

    Attributes:
        paused: Whether they are not.
    """

    paused: bool


class EnforcementStepDue(Struct, frozen=True):
    """The next running pods may be changed; answered by ``EnforcementStep`` where there are any.

    Attributes:
        count: The most pods of one step.
        skip: Keys of pods that are passed over.
    """

    count: int
    skip: frozenset[str] = frozenset()


class EnforcementStepDone(Struct, frozen=True):
    """For pods of a step what is in effect is what is to be.

    Attributes:
        keys: Their keys.
    """

    keys: frozenset[str]


class EnforcementStepFailed(Struct, frozen=True):
    """The plan could not be applied to pods of a step.

    Attributes:
        keys: Their keys.
    """

    keys: frozenset[str]


class LedgerRead(Struct, frozen=True):
    """The ledger of an earlier run has been read.

    Attributes:
        pods: Its sandboxes.
        containers: Its containers.
        holds: What reservations of that run held, by reservation.
        lost: Tokens of the containers whose creates were in flight.
        at: When it was read.
    """

    pods: tuple[Pod, ...]
    containers: tuple[Container, ...]
    holds: Mapping[str, CpuHold]
    lost: tuple[str, ...]
    at: float


class FactsLearned(Struct, frozen=True):
    """A matter of the node has other facts.

    Attributes:
        facts: All facts.
        recorded: Whether the ledger follows; else it is where they come from.
    """

    facts: MatterFacts
    recorded: bool = True


NodeEvent = (
    LedgerRead
    | ContainerCreated
    | CreateFailed
    | CreateLost
    | PhaseChanged
    | ContainersRemoved
    | ContainerTouched
    | ContainerIsBack
    | ContainersUpdated
    | CpusGiven
    | CreateRequested
    | CreateResumed
    | CreateNotReserved
    | StartRequested
    | UpdateRequested
    | CpusNotFreed
    | ContainerFound
    | SandboxRequested
    | PodLearned
    | SandboxRunning
    | SandboxFailed
    | SandboxStopped
    | SandboxRemoved
    | CpusHeld
    | CallDeparted
    | CallLanded
    | CallStrayed
    | StartRefused
    | StartEnded
    | UpdateEnded
    | ResendWanted
    | CallConfined
    | StrayListed
    | StrayEnded
    | RuntimeListed
    | NodeRulesChanged
    | HardwareChanged
    | KubeletAssigned
    | BeLimited
    | SavedCpusLearned
    | ContainersUnsettled
    | SettlingBegan
    | ModeChanged
    | EnforcementChanged
    | EnforcementRead
    | EnforcementPaused
    | EnforcementStepDue
    | EnforcementStepDone
    | EnforcementStepFailed
    | FactsLearned
    | DriftEvent
)
