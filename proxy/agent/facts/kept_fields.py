"""Keep the fields of objects that the daemon reads; all others are dropped before anything is stored.

An annotation may have 256 KiB, and a Pod object has ten times what is used of it. So only what has a reader
is kept: memory, files and the daemon's reading stay small whatever others write at their objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from proxy.backends.kubelet.pod_spec import CONFIG_HASH
from proxy.pools.facts import POD_KEYS
from proxy.pools.node_keys import PREFIXES

Item = Mapping[str, Any]
_ANNOTATIONS = frozenset({*POD_KEYS, CONFIG_HASH})
LONGEST_TEXT = 64 << 10
"""Characters of an annotation; no reader takes a longer one."""


def node_fields(item: Item) -> bytes:
    """Return the JSON of a Node object's fields that are used.

    Raises:
        ValueError: It is no such object.
    """
    metadata = _metadata(item, "name", "uid")
    for part in ("labels", "annotations"):
        found = _texts(item["metadata"].get(part))
        metadata[part] = {key: text for key, text in found.items() if key.startswith(PREFIXES)}
    status = _only(item.get("status"), ("capacity", "allocatable"))
    return msgspec.json.encode({"kind": "Node", "metadata": metadata, "status": status})


def namespace_fields(item: Item) -> bytes:
    """Return the JSON of a Namespace object's fields that are used.

    Raises:
        ValueError: It is no such object.
    """
    metadata = _metadata(item, "name")
    return msgspec.json.encode({"metadata": {**metadata, "labels": _texts(item["metadata"].get("labels"))}})


def pod_fields(item: Item) -> bytes:
    """Return the JSON of a Pod object's fields that are used.

    Raises:
        ValueError: It is no such object.
    """
    metadata = _metadata(item, "namespace", "name", "uid")
    metadata["labels"] = _texts(item["metadata"].get("labels"))
    annotations = _texts(item["metadata"].get("annotations"))
    metadata["annotations"] = {key: annotations[key] for key in annotations.keys() & _ANNOTATIONS}
    given = item.get("spec")
    spec = _only(given, ("resources", "overhead"))
    for part in ("initContainers", "containers"):
        containers = given.get(part) if isinstance(given, Mapping) else None
        if isinstance(containers, list):
            spec[part] = [_only(each, ("name", "restartPolicy", "resources")) for each in containers]
    status = _only(item.get("status"), ("qosClass",))
    return msgspec.json.encode({"metadata": metadata, "spec": spec, "status": status})


def _metadata(item: Item, *names: str) -> dict[str, Any]:
    metadata = item.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise ValueError("it has no metadata.name")  # noqa: TRY004 - one kind of error for all bad input
    return _only(metadata, names)


def _only(raw: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: raw[name] for name in names if name in raw} if isinstance(raw, Mapping) else {}


def _texts(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        return {}
    return {key: text for key, text in raw.items() if isinstance(text, str) and len(text) <= LONGEST_TEXT}
