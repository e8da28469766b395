"""The effects of an event of the node, as values: the output of ``proxy.engine.handle``.

``NodeStore`` performs them at once, in the order in which they are given. Those whose names begin with
``Notify`` go to the observers, with their fields as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from msgspec import Struct

from proxy.engine.call_answers import CallAnswer, ForwardUnchanged
from proxy.engine.container_create import Plan
from proxy.engine.inflight import InflightCall
from proxy.engine.node_policy import PolicyValue
from proxy.engine.partition import PartitionEffect
from proxy.engine.placement import moves
from proxy.engine.pod_admission import PodAdmission
from proxy.engine.quotas import QuotaEffect
from proxy.engine.reservation_effects import RequestReconcile
from proxy.engine.state import NodeState
from proxy.engine.suppression import SuppressionEffect
from proxy.engine.systemd_masks import ReportReversedMask
from proxy.engine.write_conflicts import DriftEffect
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pod

Record = Pod | Container | Mapping[str, object]
"""The value that the ledger keeps under a key: a sandbox, a container, or plain data."""


class WriteScope(Enum):
    """Which containers' cpusets are written to the kernel after a change, and how."""

    MOVED = "the containers whose CPUs change, in the background"
    ALL = "all containers, in the background"
    CALLER = "none: the caller writes the kernel itself, because it waits for the result"


class PutRecord(Struct, frozen=True):
    """Write a record to the ledger, or delete one, without waiting for it.

    Attributes:
        key: The key of the record; see ``proxy.executor.ledger_writer``.
        record: The record; None to delete it.
    """

    key: str
    record: Record | None


class Change(Struct, frozen=True):
    """Pools or rules may differ: the observers are notified, the kernel backend first.

    Attributes:
        before: The state that was replaced.
        after: The state that replaced it.
        write_scope: Which containers the kernel backend writes.
        shrink: Ids of containers that must leave CPUs, because a pool or the machine changed.
        grow: Ids of containers that only gain CPUs.
    """

    before: NodeState
    after: NodeState
    write_scope: WriteScope = WriteScope.MOVED
    shrink: tuple[str, ...] = ()
    grow: tuple[str, ...] = ()

    @property
    def moved(self) -> list[str]:
        """The ids of containers whose CPUs change, those that lose some first."""
        return [*self.shrink, *self.grow]


class SyncRuntimeSoon(Struct, frozen=True):
    """Send the CPUs of containers that await a sync to the runtime."""


class CallOver(Struct, frozen=True):
    """A call is no longer in flight: everything that waits for its end continues.

    Attributes:
        number: The number of the call.
    """

    number: int


class OrphanOver(Struct, frozen=True):
    """An orphan is over: ``OrphanEnded`` follows once systemd has the right CPUs for its container.

    Attributes:
        call: The orphan.
        phase: The phase that its container is in.
    """

    call: InflightCall
    phase: Phase


class WriteCpusets(Struct, frozen=True):
    """Write the cpusets of containers to the kernel, in the background.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


class CompareCpusets(Struct, frozen=True):
    """Compare the cpusets of containers with the kernel, in the background.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


class CompareUnits(Struct, frozen=True):
    """Compare the systemd units of containers, in the background.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


class NotifyCreated(Struct, frozen=True):
    """The runtime has made a container and named it.

    Attributes:
        token: The id that it had in the state until now.
        container: The container with its id.
    """

    token: str
    container: Container


class NotifyFailed(Struct, frozen=True):
    """A create has failed.

    Attributes:
        token: The id that its container had.
    """

    token: str


class NotifyEntered(Struct, frozen=True):
    """A created container has entered another phase.

    Attributes:
        container: The container in that phase.
        phase: The phase.
    """

    container: Container
    phase: Phase


class NotifyRemoved(Struct, frozen=True):
    """A container has been removed.

    Attributes:
        container: The container as it was.
    """

    container: Container


class NotifyCpusAssigned(Struct, frozen=True):
    """A container may use other CPUs than before.

    Attributes:
        container: The container.
    """

    container: Container


class NotifyPodFound(Struct, frozen=True):
    """A sandbox has been made by a call that another process relayed.

    Attributes:
        pod: The pod.
    """

    pod: Pod


class NotifyPodStopped(Struct, frozen=True):
    """A sandbox has been stopped.

    Attributes:
        pod: The pod.
    """

    pod: Pod


class NotifyPodRemoved(Struct, frozen=True):
    """A sandbox has been removed, or did not exist.

    Attributes:
        sandbox_id: Its id.
    """

    sandbox_id: str


class NotifyListed(Struct, frozen=True):
    """The runtime has listed its sandboxes and containers.

    Attributes:
        pods: Ids of all sandboxes.
        containers: Ids of all containers.
        since: The number of the newest change when the lists were requested; for newer changes the lists are
            stale.
    """

    pods: Collection[str]
    containers: Collection[str]
    since: int


class PlanDecided(Struct, frozen=True):
    """The answer to an event that requests a decision.

    Attributes:
        plan: The decision.
        answer: The answer to the create, if the event requests one.
        withdrawn: The token of an earlier decision about the same create; empty if there was none.
    """

    plan: Plan
    answer: CallAnswer = ForwardUnchanged()
    withdrawn: str = ""


class PodDecided(Struct, frozen=True):
    """The answer to a request for a sandbox.

    Attributes:
        admission: The decision.
        answer: The answer to the RunPodSandbox call.
    """

    admission: PodAdmission
    answer: CallAnswer


class EnforcementStep(Struct, frozen=True):
    """The answer to an event that requests the next step of enforcement.

    Attributes:
        keys: Keys of the pods that the step changes.
    """

    keys: tuple[str, ...]


class NodePolicyApplied(Struct, frozen=True):
    """The answer to ``NodePolicyRead``.

    Attributes:
        changed: The changed rules of the node with their new values, by their names in the configuration.
        notes: Sentences about owners of CPUs that are reserved now, one for each owner.
    """

    changed: Mapping[str, PolicyValue[object]]
    notes: tuple[str, ...]


class KubeletCpusChanged(Struct, frozen=True):
    """Report that kubelet's CPU manager holds other CPUs.

    Attributes:
        came: CPUs that it holds now and did not hold before.
        went: CPUs that it no longer holds.
    """

    came: CpuSet
    went: CpuSet


class LossesChanged(Struct, frozen=True):
    """The hardware losses of some containers differ from those that were reported.

    Attributes:
        changes: The containers, with their loss as text; the text is empty if the loss has ended.
    """

    changes: tuple[tuple[Container, str], ...]


Notice = (
    Change
    | NotifyCreated
    | NotifyFailed
    | NotifyEntered
    | NotifyCpusAssigned
    | NotifyRemoved
    | NotifyPodFound
    | NotifyPodStopped
    | NotifyPodRemoved
    | NotifyListed
)
"""The effects that are notifications of observers."""
NodeEffect = (
    PutRecord
    | SyncRuntimeSoon
    | RequestReconcile
    | CallOver
    | OrphanOver
    | WriteCpusets
    | CompareCpusets
    | CompareUnits
    | PlanDecided
    | PodDecided
    | CallAnswer
    | EnforcementStep
    | NodePolicyApplied
    | KubeletCpusChanged
    | LossesChanged
    | ReportReversedMask
    | DriftEffect
    | QuotaEffect
    | PartitionEffect
    | SuppressionEffect
    | Notice
)
NodeEffects = tuple[NodeEffect, ...]
NOTHING: NodeEffects = ()
"""No effects."""


def pool_changes(
    before: NodeState, after: NodeState, write_scope: WriteScope = WriteScope.MOVED
) -> tuple[Change, ...]:
    """Return the effects of a change of pools or rules; none if neither differs.

    Args:
        before: The state that is replaced.
        after: The state that replaces it.
        write_scope: Which containers' cpusets are written to the kernel.
    """
    if before.pools is after.pools and before.node is after.node:
        return ()
    return (Change(before, after, write_scope, *moves(before, after)),)


def fact_records(before: NodeState, after: NodeState) -> tuple[PutRecord, ...]:
    """Return the ledger's records of facts that differ between two states; None for a fact that is gone."""
    if before.facts is after.facts:
        return ()
    return tuple(PutRecord(key, record) for key, record in after.facts.changed_records(before.facts).items())
