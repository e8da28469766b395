"""The files in which the cluster agent leaves what it has read from the API server.

Each file is one JSON object: what was read, when, at which resourceVersion, and the objects, in the form of
Kubernetes but without the fields that are not used here. ``node.json`` has one object, ``namespaces.json``
all namespaces, ``pods.json`` the pods that are bound to the node.

Theory. A file is replaced as a whole when its objects change. In between, the agent sets its modification
time to when the API server has confirmed them last, by an event, a bookmark or the start of a watch, which
happens at least every 90 seconds. So a reader knows two ages: how long ago the objects were read, and since
when they may be outdated.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

SCHEMA = "topoproxy-cluster-facts/1"
LARGEST = 16 << 20
"""Bytes of a file. 500 pods of ten containers each have 2 MiB; 10,000 namespaces of ten labels each 4 MiB."""
CURRENT_S = 110.0
"""Seconds for which facts count as current after the API server has confirmed them: a watch lasts 90, and the
agent records it every 10."""


class FactsKind(enum.StrEnum):
    """What a file has."""

    NODE = "node"
    NAMESPACES = "namespaces"
    PODS = "pods"

    @property
    def file_name(self) -> str:
        """The name of the file."""
        return f"{self.value}.json"


class ClusterFacts(Struct, frozen=True, rename="camel"):
    """The contents of a file.

    Attributes:
        kind: What it has.
        node: The node whose agent has read it.
        read_at: When the objects were read, in seconds since the epoch.
        resource_version: Of the list or of the last event; empty where it is not known.
        items: The objects; where they are encoded, they may be JSON already (``msgspec.Raw``).
        schema: The version of the form.
    """

    kind: FactsKind
    node: str
    read_at: float
    resource_version: str
    items: Sequence[Any]
    schema: str = SCHEMA


_DECODER = msgspec.json.Decoder(ClusterFacts)


def encode_facts(facts: ClusterFacts) -> bytes:
    """Return the contents of a file.

    Raises:
        ValueError: They would be larger than ``LARGEST``.
    """
    data = msgspec.json.encode(facts)
    if len(data) > LARGEST:
        raise ValueError(f"{facts.kind} would be {len(data) >> 20} MiB, and the limit is {LARGEST >> 20} MiB")
    return data


def decode_facts(data: bytes, kind: FactsKind) -> ClusterFacts:
    """Read the contents of a file.

    Raises:
        ValueError: They are no facts, of another version, or of another kind.
    """
    try:
        found = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a file of the cluster agent: {error}") from None
    if found.schema != SCHEMA:
        raise ValueError(f"its schema is {found.schema!r:.60}, and this version reads {SCHEMA}")
    if found.kind is not kind:
        raise ValueError(f"it has {found.kind}, not {kind}")
    if kind is FactsKind.NODE and len(found.items) != 1:
        raise ValueError(f"it has {len(found.items)} Node objects, not one")
    return found


def namespace_labels(facts: ClusterFacts) -> dict[str, Mapping[str, str]]:
    """Return the labels of each namespace; a namespace without a readable name is left out."""
    found: dict[str, Mapping[str, str]] = {}
    for item in facts.items:
        metadata = item.get("metadata") if isinstance(item, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if isinstance(metadata, dict) and isinstance(name, str) and name:
            labels = metadata.get("labels")
            pairs = labels.items() if isinstance(labels, dict) else ()
            found[name] = {key: value for key, value in pairs if isinstance(value, str)}
    return found
