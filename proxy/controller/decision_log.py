"""What history gives: records, who they are about, and what a question may mean."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from proxy.model.explanation import Explanation
from proxy.model.workload import Container

PREFIX = 8
"""How many characters of an id tell who is meant."""

What = Explanation | Container
"""Who a record is about: a decision, or a container whose placement needed none."""


class RememberedDecision(Struct, frozen=True):
    """One decision as it is remembered.

    Attributes:
        when: The time that the caller gave (seconds since the epoch, for people).
        explanation: The decision.
        container_id: The container's id; of a decision about a pod its sandbox's; empty where it has none.
        there: True as long as the container (or the sandbox) is there.
    """

    when: float
    explanation: Explanation
    container_id: str
    there: bool


class PodLine(Struct, frozen=True):
    """What is remembered of one pod.

    Attributes:
        pod: ``namespace/name``.
        uid: Its uid.
        when: The time of its newest record.
        records: How many there are.
        containers: Names of its containers, oldest record first; without the pod's own decision.
        refused: The newest record's reason where that is a refusal; else empty.
        there: True where something of it is there.
    """

    pod: str
    uid: str
    when: float
    records: int
    containers: tuple[str, ...]
    refused: str
    there: bool


def meanings(wanted: str) -> list[Callable[[str, What], bool]]:
    """Give what a text may mean, in the order in which it is tried."""
    if not wanted:
        return []
    parts = tuple(wanted.split("/"))
    if len(parts) == 3:
        return [lambda _, what: f"{pod_ref(what)}/{container_name(what)}" == wanted]
    if len(parts) == 2:
        return [
            lambda _, what: pod_ref(what) == wanted,
            lambda _, what: (pod_ref(what).partition("/")[2], container_name(what)) == parts,
        ]
    meanings: list[Callable[[str, What], bool]] = [
        lambda _, what: pod_ref(what).partition("/")[2] == wanted,
        lambda _, what: pod_uid(what) == wanted,
    ]
    if len(wanted) >= PREFIX:
        meanings.append(lambda i, what: i.startswith(wanted) or pod_uid(what).startswith(wanted))
    return meanings


def pod_ref(what: What) -> str:
    """Give ``namespace/name`` of the pod."""
    return what.pod if isinstance(what, Explanation) else what.pod.ref


def pod_uid(what: What) -> str:
    """Give the pod's uid."""
    return what.uid if isinstance(what, Explanation) else what.pod.uid


def container_name(what: What) -> str:
    """Give the container's name; empty for a pod as a whole."""
    return what.container if isinstance(what, Explanation) else what.name


def pod_key(what: What) -> str:
    """Give what tells the pod from others."""
    return pod_uid(what) or pod_ref(what)
