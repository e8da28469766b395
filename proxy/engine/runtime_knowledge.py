"""What is known of the runtime besides its containers, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec import Struct, structs

from proxy.engine.change_sequence import ChangeSequence
from proxy.engine.delegated_creates import Attempt, DelegatedCreate, DelegatedCreates, with_delegated
from proxy.model.idset import CpuSet
from proxy.model.persistent_map import PersistentMap
from proxy.model.workload import Container

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED_FAILURES = 256
"""This many failed creates are remembered; the oldest are forgotten first."""


class RuntimeKnowledge(Struct, frozen=True):
    """What is known of the runtime.

    A runtime may finish a create whose client has gone and keep the container back, as CRI-O does
    (``backends/runtime/quirks/crio``). The next request for the same pod, name and attempt is answered with
    that container, which has the CPUs of the first request. So after a create that failed or lost its client,
    the next answer to the same request does not show what the runtime has saved.

    Attributes:
        saved: By container id, the CPUs that the runtime uses when it next starts or updates the container.
            A container whose value is not known is not in it.
        unsettled: Ids of containers that the runtime is to be sent their CPUs for, in order.
        lost: By token, when a create lost its client, by the clock. The runtime may have made its container.
        changes: What has happened to containers and sandboxes, to detect stale lists of the runtime.
        failed: Creates that failed here, and perhaps not at the runtime, the oldest first.
        arriving: Tokens of sandboxes that are being made, for which something is set aside: no list of the
            runtime has them.
        delegated: Decisions about creates that another program sends, the oldest first.
    """

    saved: PersistentMap[CpuSet] = PersistentMap()
    unsettled: Mapping[str, None] = {}
    lost: Mapping[str, float] = {}
    changes: ChangeSequence = ChangeSequence()
    failed: Mapping[Attempt, None] = {}
    arriving: frozenset[str] = frozenset()
    delegated: DelegatedCreates = {}

    def saving(self, container_id: str, cpus: CpuSet | None) -> RuntimeKnowledge:
        """Return it with what the runtime has saved for a container; None where that is not known."""
        saved = self.saved.drop(container_id) if cpus is None else self.saved.put(container_id, cpus)
        return self if saved is self.saved else structs.replace(self, saved=saved)

    def unsettling(self, ids: Iterable[str]) -> RuntimeKnowledge:
        """Return it with containers that the runtime is to be sent their CPUs for, in addition."""
        return structs.replace(self, unsettled={**self.unsettled, **dict.fromkeys(ids)})

    def settling(self, container_id: str) -> RuntimeKnowledge:
        """Return it without a container that the runtime was to be sent its CPUs for."""
        return structs.replace(self, unsettled=_without(self.unsettled, container_id))

    def losing(self, container: Container, at: float) -> RuntimeKnowledge:
        """Return it after a create has lost its client at a time."""
        return structs.replace(self.failing(container), lost={**self.lost, container.id: at})

    def finding(self, token: str) -> RuntimeKnowledge:
        """Return it after the outcome of a lost create has become known."""
        return structs.replace(self, lost=_without(self.lost, token)) if token in self.lost else self

    def failing(self, container: Container) -> RuntimeKnowledge:
        """Return it after a create did not succeed here."""
        failed = dict(self.failed)
        if len(failed) >= REMEMBERED_FAILURES:
            del failed[next(iter(failed))]
        failed[attempt_of(container)] = None
        return structs.replace(self, failed=failed)

    def created(self, token: str, container: Container, sent: CpuSet | None) -> RuntimeKnowledge:
        """Return it after the runtime has named a container, for which a request brought some CPUs."""
        saved, lost, failed = self.saved, self.lost, self.failed
        if lost:
            lost = _without(lost, token)
        if failed and (attempt := attempt_of(container)) in failed:
            failed, sent = _without(failed, attempt), None  # it may be an earlier request's
        saved = saved.drop(container.id) if sent is None else saved.put(container.id, sent)
        changes = self.changes.touched(container.id)
        unsettled, arriving = self.unsettled, self.arriving
        return RuntimeKnowledge(saved, unsettled, lost, changes, failed, arriving, self.delegated)

    def admitting(self, token: str) -> RuntimeKnowledge:
        """Return it after something has been set aside for a sandbox that is being made."""
        return structs.replace(self, arriving=self.arriving | {token})

    def arrived(self, token: str) -> RuntimeKnowledge:
        """Return it after a sandbox has been made, or has failed."""
        return structs.replace(self, arriving=self.arriving - {token}) if token in self.arriving else self

    def delegating(self, container: Container, one: DelegatedCreate) -> RuntimeKnowledge:
        """Return it after a decision was returned to a caller."""
        return structs.replace(self, delegated=with_delegated(self.delegated, attempt_of(container), one))

    def undelegated(self, attempt: Attempt) -> RuntimeKnowledge:
        """Return it without the decision about a create that has come again."""
        return structs.replace(self, delegated=_without(self.delegated, attempt))

    def touched(self, some_id: str) -> RuntimeKnowledge:
        """Return it after something has happened to a container or a sandbox; it may be gone."""
        return structs.replace(self, changes=self.changes.touched(some_id))

    def removed(self, container_id: str) -> RuntimeKnowledge:
        """Return it after a container, known or not, has gone."""
        unsettled = self.unsettled
        if container_id in unsettled:
            unsettled = _without(unsettled, container_id)
        saved, changes = self.saved.drop(container_id), self.changes.touched(container_id)
        lost, failed, arriving = self.lost, self.failed, self.arriving
        return RuntimeKnowledge(saved, unsettled, lost, changes, failed, arriving, self.delegated)


def attempt_of(container: Container) -> Attempt:
    """Return what a container is to the create that requests it."""
    return container.pod.sandbox_id, container.name, container.attempt


def _without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return {each: value for each, value in mapping.items() if each != key}
