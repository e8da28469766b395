"""Decide which CFS quotas of owners of CPUs are off, and which are restored afterwards.

Whether a quota is off follows from the state alone, by Koordinator's rule for owners (``pools.claims``). The
number of containers that a pod runs at the same time is known if kubelet reported the pod; otherwise the
containers count that exist when a container is created.

The previous quota is kept in a record. The ledger has the record before the quota is removed, so that the
quota can be restored after a crash. There are two kinds of records: of pods (``q/`` and the pod's key) and of
containers (``qc/`` and the id).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field, structs

from proxy.engine.enforcement import applies_to, was_applied_to
from proxy.model.requests import ContainerKind
from proxy.model.workload import LIVE, Container, Phase, Placement, Pod, Pool, Request
from proxy.pools.claims import UNLIMITED, quota_of_owner

if TYPE_CHECKING:
    from proxy.engine.state import NodeState

POD_QUOTA, CONTAINER_QUOTA = "q/", "qc/"
QuotaPlace = tuple[str, str]
"""The place of a cgroup: ``cgroup_parent``, and a container's id; the id is empty for the pod itself."""


class QuotaRecord(Struct, frozen=True):
    """A quota in microseconds and the path of its cgroup, if that is known."""

    quota: int
    group: str = ""


class RemovedQuotas(Struct, frozen=True):
    """The quotas that were removed.

    Attributes:
        records: The previous quotas, by the ledger's key.
        unsent: Ids of containers whose quota still has to be sent to the runtime.
    """

    records: Mapping[str, QuotaRecord] = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()

    @staticmethod
    def load(entries: Mapping[str, Mapping[str, object]]) -> tuple[dict[str, QuotaRecord], list[str]]:
        """Return the records that a ledger holds, and the keys of its invalid entries."""
        records, invalid = dict[str, QuotaRecord](), list[str]()
        for key, value in entries.items():
            if key.startswith((POD_QUOTA, CONTAINER_QUOTA)):
                quota, group = value.get("quota"), value.get("group", "")
                if isinstance(quota, int) and quota > 0 and isinstance(group, str):
                    records[key] = QuotaRecord(quota, group)
                else:
                    invalid.append(key)
        return records, invalid

    def dump(self) -> dict[str, dict[str, object]]:
        """Return the records as plain data."""
        return {key: {"quota": at.quota, "group": at.group} for key, at in self.records.items()}

    def keep(self, records: Mapping[str, QuotaRecord]) -> RemovedQuotas:
        """Return the removed quotas with more records."""
        return structs.replace(self, records={**self.records, **records})

    def forget(self, keys: Iterable[str]) -> RemovedQuotas:
        """Return the removed quotas without some records."""
        dropped = set(keys)
        return RemovedQuotas(
            {key: record for key, record in self.records.items() if key not in dropped},
            self.unsent.difference(key.removeprefix(CONTAINER_QUOTA) for key in dropped),
        )

    def carried(self, container_id: str, *, off: bool) -> int:
        """Return the quota that a call to the runtime carries for a container; 0 to leave it."""
        record = self.records.get(CONTAINER_QUOTA + container_id)
        return UNLIMITED if off else record.quota if record is not None else 0

    def requested(self, container_id: str, quota: int, *, off: bool) -> tuple[RemovedQuotas, int]:
        """Return the removed quotas after a client's update of a container, and the quota of the update.

        Args:
            container_id: The container.
            quota: The quota that the client requests; 0 for none.
            off: Whether the container's quota is off.
        """
        key, quotas = CONTAINER_QUOTA + container_id, self
        if quota > 0 and (off or key in self.records):
            quotas = self.keep({key: QuotaRecord(quota)})
        elif quota < 0:
            quotas = self.forget((key,))
        return quotas, quotas.carried(container_id, off=off) if off or not quota else 0

    def refused(self, container_id: str, quota: int, former: QuotaRecord | None) -> RemovedQuotas:
        """Return the removed quotas after the runtime refused a client's update.

        Args:
            container_id: The container.
            quota: The quota that the client requested; 0 for none.
            former: The record before the request; None if there was none.
        """
        key = CONTAINER_QUOTA + container_id
        recorded = QuotaRecord(quota) if quota > 0 else None
        if not quota or self.records.get(key) != recorded:
            return self  # the request changed no record, or a later one did
        return self.forget((key,)) if former is None else self.keep({key: former})

    def saved(self, container_id: str, quota: int) -> RemovedQuotas:
        """Return the removed quotas after the runtime has saved the quota that a call carried."""
        if quota != UNLIMITED:
            return self.forget((CONTAINER_QUOTA + container_id,))
        return structs.replace(self, unsent=self.unsent - {container_id})


# -- events and effects -------------------------------------------------------------------------------------


class CpuControllerChecked(Struct, frozen=True):
    """The node was checked for the cpu controller's tree, where CFS quotas are written.

    Attributes:
        found: Whether the node has it.
    """

    found: bool


class QuotasRead(Struct, frozen=True):
    """The ledger of an earlier run has records of quotas, by its key."""

    records: Mapping[str, QuotaRecord]


class QuotasToRemove(Struct, frozen=True):
    """Quotas are in effect that must be off; they are removed next.

    Attributes:
        records: The quotas in effect, by the ledger's key.
    """

    records: Mapping[str, QuotaRecord]


class QuotasRestored(Struct, frozen=True):
    """Quotas are in effect again.

    Attributes:
        keys: The ledger's keys of these quotas.
    """

    keys: tuple[str, ...]


class QuotaSaved(Struct, frozen=True):
    """The runtime has saved the quota that a call carried for a container; 0 if it carried none."""

    container_id: str
    quota: int


class QuotasUnsent(Struct, frozen=True):
    """The runtime has saved other quotas for some containers than those in effect."""

    ids: tuple[str, ...]


class QuotaRequested(Struct, frozen=True):
    """A hook requests another quota for a container (0: the same); answered by ``QuotaCarried``."""

    container_id: str
    quota: int


class QuotaRefused(Struct, frozen=True):
    """The runtime answered an update with an error; the container keeps the quota that it had.

    If there was no answer, the requested quota stays recorded instead: it may be in effect, and a client
    sends the update again.

    Attributes:
        container_id: The container.
        quota: The quota that was requested; 0 for none.
        former: The record before the request; None if there was none.
    """

    container_id: str
    quota: int
    former: QuotaRecord | None


class QuotasToRestore(Struct, frozen=True):
    """Quotas that need not be off any more may be restored; answered by ``RestoreQuotas``.

    Attributes:
        later: The quotas that may not be tried now, by the ledger's key.
    """

    later: frozenset[str] = frozenset()


class QuotaCarried(Struct, frozen=True):
    """The quota that a call to the runtime carries instead of the requested one; 0 to leave that."""

    quota: int


class RestoreQuotas(Struct, frozen=True):
    """Restore quotas.

    Attributes:
        send: The containers whose quota is sent to the runtime.
        write: The quotas that are written, with the places of cgroups whose paths are unknown.
    """

    send: tuple[str, ...]
    write: Mapping[str, tuple[QuotaRecord, QuotaPlace]]


QuotaEvent = (
    QuotasToRemove
    | QuotasRestored
    | QuotaSaved
    | QuotasUnsent
    | QuotaRequested
    | QuotaRefused
    | QuotasToRestore
)
QuotaEffect = QuotaCarried | RestoreQuotas
QuotaStep = tuple[RemovedQuotas, tuple[QuotaEffect, ...]]


def step(state: NodeState, event: QuotaEvent) -> QuotaStep:
    """Return the removed quotas after an event, and the effects to perform."""
    quotas = state.facts.quotas
    match event:
        case QuotasToRemove(records):
            return quotas.keep(records), ()
        case QuotasRestored(keys):
            return quotas.forget(keys), ()
        case QuotasUnsent(ids):
            return structs.replace(quotas, unsent=quotas.unsent.union(ids)), ()
        case QuotaSaved(container_id, quota):
            container = state.containers.get(container_id)
            is_newest = container is None or quota == carried_quota(state, container)
            return quotas.saved(container_id, quota) if is_newest else quotas, ()
        case QuotaRequested(container_id, quota):
            container = state.containers.get(container_id)
            quotas, carried = (quotas, 0) if container is None else requested_quota(state, container, quota)
            return quotas, (QuotaCarried(carried),)
        case QuotaRefused(container_id, quota, former):
            return quotas.refused(container_id, quota, former), ()
        case QuotasToRestore(later):
            return _restoration(quotas, state, later)


def quotas_after_create(state: NodeState, container: Container) -> RemovedQuotas:
    """Return the removed quotas after a create, including the quota that its request left out, if any.

    If another container of the pod was created after the request was forwarded, or a release has begun, the
    quota is restored at once.
    """
    requested = container.placement.hook_quota or container.request.cpu_quota
    quotas = state.facts.quotas
    if requested <= 0 or not writes_quotas(state):
        return quotas
    if not applies_to(state, container.pod) and not was_applied_to(state, container.pod):
        return quotas
    if container.placement.cfs_quota_off or must_have_no_quota(state, container):
        return quotas.keep({CONTAINER_QUOTA + container.id: QuotaRecord(requested)})
    return quotas


def _restoration(quotas: RemovedQuotas, state: NodeState, later: frozenset[str]) -> QuotaStep:
    """Decide which quotas are restored; the records of containers that are gone are dropped."""
    gone, send = list[str](), list[str]()
    write: dict[str, tuple[QuotaRecord, QuotaPlace]] = {}
    off = {
        key
        for c in containers_without_quota(state)
        for key in (POD_QUOTA + c.pod.key, CONTAINER_QUOTA + c.id)
    }
    for key, record in quotas.records.items():
        container = state.containers.get(key.removeprefix(CONTAINER_QUOTA))
        if key in off or key in later:
            continue
        if key.startswith(POD_QUOTA):
            write[key] = record, ("", "")
        elif container is None or container.phase is Phase.EXITED:
            gone.append(key)
        else:
            send.append(container.id)
            if container.phase is not Phase.CREATED:
                write[key] = record, (container.pod.cgroup_parent, container.id)
    return quotas.forget(gone), (RestoreQuotas(tuple(send), write),)


# -- queries ------------------------------------------------------------------------------------------------


def removable(state: NodeState, off: Iterable[Container]) -> dict[str, QuotaPlace]:
    """Return the places of quotas that must be off now, by the ledger's key.

    If several pods name the same cgroup parent, that cgroup belongs to none of them, so its quota is left.
    """
    pods: defaultdict[str, set[str]] = defaultdict(set)
    for pod in state.pods.values():
        pods[pod.cgroup_parent].add(pod.key)
    places: dict[str, QuotaPlace] = {}
    for container in off:
        parent = container.pod.cgroup_parent
        if len(pods[parent]) <= 1:
            places[POD_QUOTA + container.pod.key] = parent, ""
        if container.phase in LIVE:
            places[CONTAINER_QUOTA + container.id] = parent, container.id
    return places


def concurrent_containers(state: NodeState, pod: Pod, name: str) -> int:
    """Return how many containers of a pod run at the same time, including the one with this name."""
    if pod.requests is not None:
        return len(pod.requests.of_kinds(ContainerKind.APP, ContainerKind.SIDECAR))
    containers = state.in_sandbox(pod.sandbox_id)
    return len({name, *(c.name for c in containers if c.phase is not Phase.EXITED)})


def quota_record(state: NodeState, container_id: str) -> QuotaRecord | None:
    """Return the record of a container's quota; None if there is none."""
    return state.facts.quotas.records.get(CONTAINER_QUOTA + container_id)


def pool_forbids_quota(state: NodeState, pod: Pod, name: str, pool: Pool) -> bool:
    """Return whether a container's CFS quota has to be off."""
    if pool is not Pool.OWN:
        return False
    containers = concurrent_containers(state, pod, name)
    return quota_of_owner(containers=containers, keep=state.node.keep_quota) is not None


def writes_quotas(state: NodeState) -> bool:
    """Return whether CFS quotas are written at all: to remove them, or to restore those that are off."""
    may_be_off = bool(state.facts.quotas.records) or state.mode.in_release
    return state.facts.has_cpu_controller and (may_be_off or applies_to(state, None))


def must_have_no_quota(state: NodeState, container: Container) -> bool:
    """Return whether a container's quota must be off now."""
    if (
        not state.facts.has_cpu_controller
        or container.phase is Phase.EXITED
        or not applies_to(state, container.pod)
    ):
        return False
    pod = state.current_pod(container.pod)
    return pool_forbids_quota(state, pod, container.name, container.placement.pool)


def containers_without_quota(state: NodeState) -> list[Container]:
    """Return the containers that must have no quota now."""
    if not writes_quotas(state):
        return []
    return [
        c for c in state.containers.values() if c.placement.pool is Pool.OWN and must_have_no_quota(state, c)
    ]


def carried_quota(state: NodeState, container: Container) -> int:
    """Return the quota that a call to the runtime carries for a container; 0 to leave it."""
    if not writes_quotas(state):
        return 0
    return state.facts.quotas.carried(container.id, off=must_have_no_quota(state, container))


def requested_quota(state: NodeState, container: Container, quota: int) -> tuple[RemovedQuotas, int]:
    """Return the removed quotas after a client updates a container, and the quota that replaces the client's.

    Args:
        state: The node as it is.
        container: The container.
        quota: The quota that the client requests; 0 for none.
    """
    if quota >= 0 and not writes_quotas(state):
        return state.facts.quotas, 0
    return state.facts.quotas.requested(container.id, quota, off=must_have_no_quota(state, container))


def without_quota(placement: Placement, request: Request) -> Placement:
    """Return the placement of a container whose quota is off; if it requested one, a reason is added."""
    reasons = ("its CFS quota is off",) if request.cpu_quota > 0 else ()
    return structs.replace(placement, cfs_quota_off=True, reasons=(*placement.reasons, *reasons))
