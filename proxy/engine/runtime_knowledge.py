"""The known state of the runtime besides its containers, as a value.

Changes of containers and sandboxes are numbered. A list from the runtime may be outdated when it arrives: it
is not valid for containers that have changed since it was requested. So the caller stores the number of the
newest change before it requests the list, and ignores entries whose id has changed since. Removed ids are
remembered too, so that an outdated list does not bring them back.

There are many changes and few queries, and a query concerns only the newest changes. So each change is
linked to the one before it. Two chains are kept, and the older one is dropped when the newer one is long. A
list that is older than both chains is not valid for any container.

The knowledge includes creates that were decided here, but that another program sends to the runtime. As a
hook server, topoproxy answers with CPUs and never sees the call itself. The same create may still arrive a
second time: the caller repeats it because it failed, or the call passes through topoproxy on its way to the
runtime. Both are one container, so the first decision is withdrawn before the second is made. The values
that the first decision wrote into the request are not the client's, so the client's own values count again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

from msgspec import Struct, structs

from proxy.model.idset import CpuSet
from proxy.model.persistent_map import PersistentMap
from proxy.model.workload import Container, Pod, Request

REMEMBERED_CHANGES = 2048
"""At least this many changes are remembered; a list arrives before so many more happen."""


class _Link(Struct, frozen=True, eq=False):
    """A change of a container or sandbox, linked to the change before it.

    Attributes:
        number: Its number.
        object_id: The id of what has changed.
        before: The change before it.
    """

    number: int
    object_id: str
    before: _Link | None

    def __repr__(self) -> str:
        return f"{self.object_id} and {self.number - 1} before it"


class ChangeSequence(Struct, frozen=True):
    """The latest changes of containers and sandboxes, numbered.

    Attributes:
        number: The number of the newest change.
        recent: The newest changes.
        older: The changes before them.
        recent_since, older_since: The number of the newest change before each of the two.
    """

    number: int = 0
    recent: _Link | None = None
    older: _Link | None = None
    recent_since: int = 0
    older_since: int = 0

    def touched(self, object_id: str) -> ChangeSequence:
        """Return the sequence after a container or sandbox has changed; it may be gone."""
        before, now = self.number, self.number + 1
        if before - self.recent_since >= REMEMBERED_CHANGES:
            return ChangeSequence(now, _Link(now, object_id, None), self.recent, before, self.recent_since)
        link = _Link(now, object_id, self.recent)
        return ChangeSequence(now, link, self.older, self.recent_since, self.older_since)

    def forgotten(self, object_id: str) -> ChangeSequence:
        """Return the sequence without the changes of an id that a list shows to exist after all."""
        recent, older = _unlinked(self.recent, object_id), _unlinked(self.older, object_id)
        return structs.replace(self, recent=recent, older=older)

    def is_unchanged(self, object_id: str, since: int) -> bool:
        """Return whether an id has not changed since the newest change had the number ``since``."""
        if since < self.older_since:
            return False  # changes before that are not remembered
        for link in (self.recent, self.older):
            while link is not None and link.number > since:
                if link.object_id == object_id:
                    return False
                link = link.before
        return True


def _unlinked(link: _Link | None, object_id: str) -> _Link | None:
    """Return changes without those of an id."""
    kept = list[_Link]()
    while link is not None:
        if link.object_id != object_id:
            kept.append(link)
        link = link.before
    rebuilt: _Link | None = None
    for change in reversed(kept):
        rebuilt = _Link(change.number, change.object_id, rebuilt)
    return rebuilt


REMEMBERED_DELEGATED = 512
"""This many delegated creates are remembered; the oldest are forgotten first."""


class CreateKey(NamedTuple):
    """Identify the container of a create before it has an id: a sandbox has one of each name and attempt."""

    sandbox_id: str
    name: str
    attempt: int


class DelegatedCreate(Struct, frozen=True):
    """A decision that was returned to a caller.

    Attributes:
        token: The id of the container in the state.
        cpus, mems, quota: The values of the request, as they were returned.
    """

    token: str
    cpus: str
    mems: str
    quota: int


def clients_request(request: Request, returned: DelegatedCreate, first: Request) -> Request:
    """Return a request with the client's values in place of those returned for its first request."""
    return structs.replace(
        request,
        cpuset_cpus=first.cpuset_cpus if request.cpuset_cpus == returned.cpus else request.cpuset_cpus,
        cpuset_mems=first.cpuset_mems if request.cpuset_mems == returned.mems else request.cpuset_mems,
        cpu_quota=first.cpu_quota if request.cpu_quota == returned.quota else request.cpu_quota,
    )


K = TypeVar("K")
V = TypeVar("V")
REMEMBERED_FAILURES = 256
"""This many failed creates are remembered; the oldest are forgotten first."""
REMEMBERED_GROUPS = 64
"""This many cgroups of inherited pods are remembered, in addition to twice the number of pods."""


class RuntimeKnowledge(Struct, frozen=True):
    """The known state of the runtime.

    A runtime may finish a create whose client has disconnected and hide the container, as CRI-O does
    (``backends/runtime/quirks/crio``). The next request for the same pod, name and attempt is answered with
    that container, which has the CPUs of the first request. So after a create that failed or lost its client,
    the next answer to the same request does not show which CPUs the runtime has saved.

    Attributes:
        saved: By container id, the CPUs that the runtime uses when it next starts or updates the container.
            A container whose value is unknown has no entry.
        awaiting_sync: Ids of containers whose CPUs must be sent to the runtime, in order.
        lost_creates: When creates lost their clients, by token; times of the monotonic clock. The runtime may
            have made the containers.
        changes: The changes of containers and sandboxes, to detect outdated lists.
        failed_creates: Creates that failed here, but perhaps not at the runtime, the oldest first.
        arriving_sandboxes: Tokens of sandboxes that are being made and are in the state already, because CPUs
            or memory are set aside for them or a hook changed their pod; no list of the runtime has these
            tokens.
        delegated_creates: Decisions about creates that another program sends, the oldest first.
        inherited_cgroups: Cgroup parents of pods whose sandbox was not made through this run of the daemon.
            Such a cgroup may still be as narrow as an earlier run has left it (``engine.pod_fence``).
        superseded: Keys of pods that a later pod of the same namespace and name has replaced.
    """

    saved: PersistentMap[CpuSet] = PersistentMap()
    awaiting_sync: Mapping[str, None] = {}
    lost_creates: Mapping[str, float] = {}
    changes: ChangeSequence = ChangeSequence()
    failed_creates: Mapping[CreateKey, None] = {}
    arriving_sandboxes: frozenset[str] = frozenset()
    delegated_creates: Mapping[CreateKey, DelegatedCreate] = {}
    inherited_cgroups: frozenset[str] = frozenset()
    superseded: frozenset[str] = frozenset()

    def with_saved(self, container_id: str, cpus: CpuSet | None) -> RuntimeKnowledge:
        """Return the knowledge with the CPUs that the runtime has saved for a container; None if unknown."""
        saved = self.saved.drop(container_id) if cpus is None else self.saved.put(container_id, cpus)
        return self if saved is self.saved else structs.replace(self, saved=saved)

    def with_nothing_saved(self) -> RuntimeKnowledge:
        """Return the knowledge without saved CPUs, because other programs may have changed them."""
        return structs.replace(self, saved=PersistentMap())

    def with_awaiting_sync(self, ids: Iterable[str]) -> RuntimeKnowledge:
        """Return the knowledge with more containers whose CPUs must be sent to the runtime."""
        return structs.replace(self, awaiting_sync={**self.awaiting_sync, **dict.fromkeys(ids)})

    def without_awaiting_sync(self, container_id: str) -> RuntimeKnowledge:
        """Return the knowledge without a container whose CPUs were to be sent to the runtime."""
        return structs.replace(self, awaiting_sync=_without(self.awaiting_sync, container_id))

    def with_lost_create(self, container: Container, at: float) -> RuntimeKnowledge:
        """Return the knowledge after a create has lost its client at a time."""
        return structs.replace(
            self.with_failed_create(container), lost_creates={**self.lost_creates, container.id: at}
        )

    def without_lost_create(self, token: str) -> RuntimeKnowledge:
        """Return the knowledge after the outcome of a lost create has become known."""
        return (
            structs.replace(self, lost_creates=_without(self.lost_creates, token))
            if token in self.lost_creates
            else self
        )

    def with_failed_create(self, container: Container) -> RuntimeKnowledge:
        """Return the knowledge after a create has failed here."""
        failed = dict(self.failed_creates)
        if len(failed) >= REMEMBERED_FAILURES:
            del failed[next(iter(failed))]
        failed[create_key_of(container)] = None
        return structs.replace(self, failed_creates=failed)

    def created(self, token: str, container: Container, sent: CpuSet | None) -> RuntimeKnowledge:
        """Return the knowledge after the runtime has created a container with the CPUs that were sent."""
        saved, lost, failed = self.saved, self.lost_creates, self.failed_creates
        if lost:
            lost = _without(lost, token)
        if failed and (key := create_key_of(container)) in failed:
            failed, sent = _without(failed, key), None  # the container may come from an earlier request
        saved = saved.drop(container.id) if sent is None else saved.put(container.id, sent)
        changes = self.changes.touched(container.id)
        awaiting_sync, arriving = self.awaiting_sync, self.arriving_sandboxes
        return RuntimeKnowledge(
            saved,
            awaiting_sync,
            lost,
            changes,
            failed,
            arriving,
            self.delegated_creates,
            self.inherited_cgroups,
            self.superseded,
        )

    def with_arriving_sandbox(self, token: str) -> RuntimeKnowledge:
        """Return the knowledge after CPUs or memory were set aside for a sandbox that is being made."""
        return structs.replace(self, arriving_sandboxes=self.arriving_sandboxes | {token})

    def without_arriving_sandbox(self, token: str) -> RuntimeKnowledge:
        """Return the knowledge after a sandbox has been made, or has failed."""
        return (
            structs.replace(self, arriving_sandboxes=self.arriving_sandboxes - {token})
            if token in self.arriving_sandboxes
            else self
        )

    def with_delegated_create(self, container: Container, create: DelegatedCreate) -> RuntimeKnowledge:
        """Return the knowledge after a decision was returned to a caller, as the newest one."""
        key = create_key_of(container)
        others = _without(self.delegated_creates, key)
        if len(others) >= REMEMBERED_DELEGATED:
            del others[next(iter(others))]
        return structs.replace(self, delegated_creates={**others, key: create})

    def without_delegated_create(self, key: CreateKey) -> RuntimeKnowledge:
        """Return the knowledge without the decision about a create that has come again."""
        return structs.replace(self, delegated_creates=_without(self.delegated_creates, key))

    def with_inherited_cgroups(self, parents: Iterable[str]) -> RuntimeKnowledge:
        """Return the knowledge with more pods that were not made through this run of the daemon.

        Args:
            parents: Their cgroup parents; an empty one is ignored.
        """
        return structs.replace(self, inherited_cgroups=self.inherited_cgroups.union(filter(None, parents)))

    def trimmed(self, parents: Collection[str]) -> RuntimeKnowledge:
        """Return the knowledge without inherited pods that have ended, once there are many of them.

        A pod whose sandbox is recreated keeps its cgroup, but no list shows the pod in between. So cgroups
        stay for a while after their pods have ended.

        Args:
            parents: The cgroup parents of all pods.
        """
        if len(self.inherited_cgroups) <= 2 * len(parents) + REMEMBERED_GROUPS:
            return self
        return structs.replace(self, inherited_cgroups=self.inherited_cgroups.intersection(parents))

    def with_sandbox(self, pod: Pod, pods: Iterable[Pod]) -> RuntimeKnowledge:
        """Return the knowledge after a sandbox was made: its pod supersedes other pods of the same name.

        A pod that has been superseded stays superseded, even if it gets another sandbox.

        Args:
            pod: The pod of the sandbox.
            pods: The pods that had a sandbox before.
        """
        if pod.key in self.superseded:
            return self
        earlier = {each.key for each in pods if each.name == pod.name and each.namespace == pod.namespace} - {
            pod.key
        }
        if earlier <= self.superseded:
            return self
        return structs.replace(self, superseded=self.superseded | earlier)

    def without_sandbox(self, pod: Pod, pods: Iterable[Pod]) -> RuntimeKnowledge:
        """Return the knowledge after a sandbox was removed.

        Args:
            pod: The pod of the sandbox.
            pods: The pods that still have a sandbox.
        """
        if pod.key not in self.superseded or any(each.key == pod.key for each in pods):
            return self
        return structs.replace(self, superseded=self.superseded - {pod.key})

    def touched(self, object_id: str) -> RuntimeKnowledge:
        """Return the knowledge after a container or sandbox has changed; it may be gone."""
        return structs.replace(self, changes=self.changes.touched(object_id))

    def removed(self, container_id: str) -> RuntimeKnowledge:
        """Return the knowledge after a container, known or not, was removed."""
        awaiting_sync = self.awaiting_sync
        if container_id in awaiting_sync:
            awaiting_sync = _without(awaiting_sync, container_id)
        saved, changes = self.saved.drop(container_id), self.changes.touched(container_id)
        lost, failed, arriving = self.lost_creates, self.failed_creates, self.arriving_sandboxes
        return RuntimeKnowledge(
            saved,
            awaiting_sync,
            lost,
            changes,
            failed,
            arriving,
            self.delegated_creates,
            self.inherited_cgroups,
            self.superseded,
        )


def create_key_of(container: Container) -> CreateKey:
    """Return the key of the create that a container comes from."""
    return CreateKey(container.pod.sandbox_id, container.name, container.attempt)


def superseded_pods(pods: Iterable[Pod]) -> frozenset[str]:
    """Return the keys of pods that a later pod of the same namespace and name has replaced.

    Args:
        pods: The pods of all sandboxes, in the order in which these were made.
    """
    keys: dict[tuple[str, str], dict[str, None]] = {}
    for pod in pods:
        keys.setdefault((pod.namespace, pod.name), {})[pod.key] = None
    return frozenset(key for of_name in keys.values() for key in list(of_name)[:-1])


def _without(mapping: Mapping[K, V], key: K) -> dict[K, V]:
    return {each: value for each, value in mapping.items() if each != key}
