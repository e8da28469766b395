"""The part of a Kubernetes Node object that matters on the node itself."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class NodeMeta(Struct, frozen=True):
    """A Node object.

    Attributes:
        name, uid: Empty where it does not say them.
        labels, annotations: As it has them.
        capacity, allocatable: Resource to amount in thousandths; empty where it has no status.
        problems: What in it could not be read, one sentence each.
    """

    name: str = ""
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
