"""Read a Node object from JSON: as ``kubectl get node NAME -o json`` prints it, or only its metadata.

A member of the wrong type counts as absent and is reported; the others are used. A text that is not a Node
object is an error, so that the caller can keep the last valid object.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.model.kubelet import NodeMeta
from proxy.model.quantity import parse_quantity
from proxy.model.quoting import printable
from proxy.pools.go_json import load

_OWN = ("name", "labels", "annotations")
"""Members that distinguish metadata from any other object."""


def node_meta(text: str) -> NodeMeta:
    """Read a Node object.

    Raises:
        ValueError: The text holds no Node object; the message says why.
    """
    return node_meta_of(load(text, largest=None))


def node_meta_of(raw: object) -> NodeMeta:
    """Read a Node object from parsed JSON.

    Raises:
        ValueError: It is not a Node object; the message says why.
    """
    if not isinstance(raw, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - one kind of error for all bad input
    kind = raw.get("kind", "Node")
    if kind != "Node":
        raise ValueError(printable(f"it is of kind {kind!r}, not a Node"))
    metadata = raw.get("metadata", raw)
    if not isinstance(metadata, dict) or not any(name in metadata for name in _OWN):
        raise ValueError(f"it has no metadata with any of {', '.join(_OWN)}")
    problems: list[str] = []
    status = _object(raw.get("status"), "status", problems)
    return NodeMeta(
        _text(metadata.get("name"), "name", problems),
        _text(metadata.get("uid"), "uid", problems),
        _texts(metadata.get("labels"), "labels", problems),
        _texts(metadata.get("annotations"), "annotations", problems),
        _amounts(status.get("capacity"), "capacity", problems),
        _amounts(status.get("allocatable"), "allocatable", problems),
        tuple(problems),
    )


def _object(raw: object, name: str, problems: list[str]) -> Mapping[str, object]:
    if raw is None or isinstance(raw, dict):
        return raw or {}
    problems.append(f"{name} is not a JSON object")
    return {}


def _text(raw: object, name: str, problems: list[str]) -> str:
    if raw is None or isinstance(raw, str):
        return raw or ""
    problems.append(printable(f"{name} is {raw!r}, not a string"))
    return ""


def _texts(raw: object, name: str, problems: list[str]) -> dict[str, str]:
    members = _object(raw, name, problems)
    return {key: text for key, value in members.items() if (text := _text(value, f"{name}: {key}", problems))}


def _amounts(raw: object, subject: str, problems: list[str]) -> dict[str, int]:
    milli_amounts: dict[str, int] = {}
    for name, value in _object(raw, subject, problems).items():
        try:
            milli_amounts[name] = parse_quantity(value, milli=True)
        except ValueError as error:
            problems.append(printable(f"{subject}: {name}: {error}"))
    return milli_amounts
