"""TopoproxyConfig objects as the agent reads them, and the reports that it writes about them.

Read: the content of an object, and whether it is selected by the labels of a node. Written: the annotation of
the Node object, and the node's entry in the status of the config object. ``cluster_config`` follows the
objects and applies the settings.
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
"""Annotation of a Node object: the object that the node uses, and whether its settings are accepted."""
MOST_STATUS_NODES = 20
"""The most nodes in the status of an object (``maxItems`` of the CRD): each change of the status goes to all
nodes."""


class ConfigObject(Struct, frozen=True):
    """A TopoproxyConfig.

    Attributes:
        name, generation: Of the object.
        priority: The highest of several objects applies.
        selector: Labels of the nodes.
        text: The settings as JSON.
        nodes: The nodes that its status lists.
        uid: Of the object; a later object of the same name has another one.
    """

    name: str
    generation: int
    priority: int
    selector: LabelSelector
    text: str
    nodes: frozenset[str]
    uid: str = ""


class ConfigAnswer(Struct, frozen=True):
    """The answer of a node to an object.

    Attributes:
        name, generation: Of the object.
        accepted: Whether its settings are in effect on the node.
        reason: Why they are not in effect, or why they still are although the object no longer applies; empty
            otherwise.
        uid: Of the object.
    """

    name: str
    generation: int
    accepted: bool
    reason: str = ""
    uid: str = ""


def config_object(item: Mapping[str, Any]) -> ConfigObject:
    """Read a TopoproxyConfig.

    Raises:
        ValueError: A field is invalid.
    """
    metadata, spec = item["metadata"], item.get("spec") or {}
    settings = spec.get("config")
    if not isinstance(settings, Mapping):
        raise ValueError("spec.config is missing")  # noqa: TRY004 - one kind of error for all bad input
    return ConfigObject(
        str(metadata["name"]),
        int(metadata.get("generation") or 0),
        int(spec.get("priority") or 0),
        _selector(spec.get("nodeSelector") or {}),
        json.dumps(settings, ensure_ascii=False, sort_keys=True, indent=1),
        reported_nodes(item),
        str(metadata.get("uid") or ""),
    )


def reported_nodes(item: Mapping[str, Any]) -> frozenset[str]:
    """Return the nodes that the status of an object lists."""
    status = item.get("status") or {}
    return frozenset(str(entry.get("name")) for entry in status.get("nodes") or ())


def _selector(raw: Mapping[str, Any]) -> LabelSelector:
    labels = tuple(sorted((str(key), str(value)) for key, value in (raw.get("matchLabels") or {}).items()))
    expressions = tuple(
        LabelExpression(
            str(expression["key"]),
            LabelOperator(expression["operator"]),
            tuple(map(str, expression.get("values") or ())),
        )
        for expression in raw.get("matchExpressions") or ()
    )
    return LabelSelector(labels, expressions)


def applicable_object(objects: Iterable[ConfigObject], labels: Mapping[str, str]) -> ConfigObject | None:
    """Return the object that applies to a node with these labels; None if no object does."""
    matching = (candidate for candidate in objects if candidate.selector.matches(labels))
    return min(matching, key=lambda candidate: (-candidate.priority, candidate.name), default=None)


def node_annotation(answer: ConfigAnswer | None) -> dict[str, str | None]:
    """Return the annotation of the Node object; a value of None removes it."""
    if answer is None:
        return {ANNOTATION: None}
    content: dict[str, object] = {
        "name": answer.name,
        "generation": answer.generation,
        "accepted": answer.accepted,
    }
    if answer.reason:
        content["reason"] = answer.reason
    return {ANNOTATION: json.dumps(content, ensure_ascii=False)}


def object_status(name: str, answer: ConfigAnswer | None = None, node: str = "") -> dict[str, Any]:
    """Return the status that a node applies to an object: with only its own list entry, or with none."""
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


def has_room(config: ConfigObject, node: str) -> bool:
    """Return whether a node is listed in the status of an object, or whether there is room for it."""
    return node in config.nodes or len(config.nodes) < MOST_STATUS_NODES
