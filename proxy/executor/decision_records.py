"""The records of ``decision_history``, their subjects, and the ways to read a query."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from proxy.model.explanation import Explanation
from proxy.model.workload import Container

PREFIX = 8
"""How many characters of an id suffice to identify its container or pod."""

RecordSubject = Explanation | Container
"""What a record holds: a decision, or a container whose placement needed none."""


class RememberedDecision(Struct, frozen=True):
    """One recorded decision.

    Attributes:
        when: The time that the caller gave (seconds since the epoch, for display).
        explanation: The decision.
        container_id: The container's id; for a decision about a pod, its sandbox's; empty if it has none.
        exists: True as long as the container (or the sandbox) exists.
    """

    when: float
    explanation: Explanation
    container_id: str
    exists: bool


class PodDecisions(Struct, frozen=True):
    """The records of one pod, summarized.

    Attributes:
        pod: ``namespace/name``.
        uid: Its uid.
        when: The time of its newest record.
        records: How many records it has.
        containers: Names of its containers, oldest record first; without the pod's own decision.
        refused: The newest record's reason if that is a refusal; otherwise empty.
        exists: True if the sandbox or a container of the pod exists.
        applied: Whether the decision of the newest record was applied.
    """

    pod: str
    uid: str
    when: float
    records: int
    containers: tuple[str, ...]
    refused: str
    exists: bool
    applied: bool = True


def query_matchers(wanted: str) -> list[Callable[[str, RecordSubject], bool]]:
    """Return the ways to read a query as predicates, in the order in which they are tried."""
    if not wanted:
        return []
    parts = tuple(wanted.split("/"))
    if len(parts) == 3:
        return [lambda _, subject: f"{pod_ref(subject)}/{container_name(subject)}" == wanted]
    if len(parts) == 2:
        return [
            lambda _, subject: pod_ref(subject) == wanted,
            lambda _, subject: (pod_ref(subject).partition("/")[2], container_name(subject)) == parts,
        ]
    matchers: list[Callable[[str, RecordSubject], bool]] = [
        lambda _, subject: pod_ref(subject).partition("/")[2] == wanted,
        lambda _, subject: pod_uid(subject) == wanted,
    ]
    if len(wanted) >= PREFIX:
        matchers.append(lambda i, subject: i.startswith(wanted) or pod_uid(subject).startswith(wanted))
    return matchers


def pod_ref(subject: RecordSubject) -> str:
    """Return ``namespace/name`` of the pod."""
    return subject.pod if isinstance(subject, Explanation) else subject.pod.ref


def pod_uid(subject: RecordSubject) -> str:
    """Return the pod's uid."""
    return subject.uid if isinstance(subject, Explanation) else subject.pod.uid


def container_name(subject: RecordSubject) -> str:
    """Return the container's name; empty for a pod as a whole."""
    return subject.container if isinstance(subject, Explanation) else subject.name


def pod_key(subject: RecordSubject) -> str:
    """Return what distinguishes the pod from others."""
    return pod_uid(subject) or pod_ref(subject)
