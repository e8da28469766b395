"""Choose the TopoproxyConfig that applies on a node.

Of the objects whose selector matches the labels of the Node object, the one with the highest priority
applies; of equal ones the one whose name sorts first. Two objects are never merged: one object says all that
a node has from the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from proxy.model.label_selector import LabelExpression, LabelOperator, LabelSelector

GROUP, VERSION, PLURAL = "topoproxy.io", "v1alpha1", "topoproxyconfigs"
COLLECTION = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
ANNOTATION = f"{GROUP}/config"
"""Annotation of a Node object: which object the node uses, and whether it has accepted it."""
MOST_NODES = 20
"""Nodes in the status of an object (``maxItems`` of the CRD): each change of it goes to all nodes."""


class ConfigObject(Struct, frozen=True):
    """A TopoproxyConfig.

    Attributes:
        name, generation: Of the object.
        priority: The highest of several objects applies.
        selector: Labels of the nodes.
        text: The settings as JSON.
        nodes: The nodes that its status lists.
    """

    name: str
    generation: int
    priority: int
    selector: LabelSelector
    text: str
    nodes: frozenset[str]


class ConfigAnswer(Struct, frozen=True):
    """The answer of a node to an object.

    Attributes:
        name, generation: Of the object.
        accepted: Whether its settings are in effect on the node.
        reason: Why not; empty if they are.
    """

    name: str
    generation: int
    accepted: bool
    reason: str = ""


def config_object(item: Mapping[str, Any]) -> ConfigObject:
    """Read a TopoproxyConfig.

    Raises:
        ValueError: A field is invalid.
    """
    metadata, spec = item["metadata"], item.get("spec") or {}
    status = item.get("status") or {}
    wanted = spec.get("config")
    if not isinstance(wanted, Mapping):
        raise ValueError("spec.config is missing")  # noqa: TRY004 - one kind of error for all bad input
    return ConfigObject(
        str(metadata["name"]),
        int(metadata.get("generation") or 0),
        int(spec.get("priority") or 0),
        _selector(spec.get("nodeSelector") or {}),
        json.dumps(wanted, ensure_ascii=False, sort_keys=True, indent=1),
        frozenset(str(each.get("name")) for each in status.get("nodes") or ()),
    )


def _selector(raw: Mapping[str, Any]) -> LabelSelector:
    labels = tuple(sorted((str(key), str(value)) for key, value in (raw.get("matchLabels") or {}).items()))
    expressions = tuple(
        LabelExpression(
            str(each["key"]), LabelOperator(each["operator"]), tuple(map(str, each.get("values") or ()))
        )
        for each in raw.get("matchExpressions") or ()
    )
    return LabelSelector(labels, expressions)


def select(objects: Iterable[ConfigObject], labels: Mapping[str, str]) -> ConfigObject | None:
    """Return the object that applies on a node with some labels; None for none."""
    matching = (each for each in objects if each.selector.matches(labels))
    return min(matching, key=lambda each: (-each.priority, each.name), default=None)


def node_annotation(answer: ConfigAnswer | None) -> dict[str, str | None]:
    """Return the annotation of the Node object; a value of None takes it off."""
    if answer is None:
        return {ANNOTATION: None}
    said: dict[str, object] = {
        "name": answer.name,
        "generation": answer.generation,
        "accepted": answer.accepted,
    }
    if answer.reason:
        said["reason"] = answer.reason
    return {ANNOTATION: json.dumps(said, ensure_ascii=False)}


def object_status(name: str, answer: ConfigAnswer | None = None, node: str = "") -> dict[str, Any]:
    """Return the status that a node applies to an object: its own entry of a list by name, or without one."""
    status: dict[str, Any] = {}
    if answer is not None:
        entry: dict[str, Any] = {"name": node, "generation": answer.generation, "accepted": answer.accepted}
        if answer.reason:
            entry["reason"] = answer.reason
        status = {"nodes": [entry]}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TopoproxyConfig",
        "metadata": {"name": name},
        "status": status,
    }


def has_room(found: ConfigObject, node: str) -> bool:
    """Return whether a node is listed in the status of an object, or may be."""
    return node in found.nodes or len(found.nodes) < MOST_NODES
