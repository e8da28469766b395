"""Reads the requests that kube-scheduler sends to an extender (see ``service``).

Each field is decoded when it is used: the pod is large, and most requests repeat one that is known.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from proxy.model.errors import InputError


class Victim(Struct, frozen=True):
    """A pod that kube-scheduler proposes to end (``MetaPod``)."""

    uid: str = field(name="UID")


class Victims(Struct, frozen=True):
    """The pods of one node that kube-scheduler proposes to end (``MetaVictims``)."""

    pods: list[Victim] | None = field(default=None, name="Pods")
    violations: int = field(default=0, name="NumPDBViolations")


ExtenderArgs = dict[str, msgspec.Raw]
"""The fields of a request."""
_REQUEST = msgspec.json.Decoder(ExtenderArgs)
_NAMES = msgspec.json.Decoder(list[str])
_VICTIMS = msgspec.json.Decoder(dict[str, Victims | None])


def decoded(body: bytes) -> ExtenderArgs:
    """Return the fields of a request.

    Raises:
        InputError: It is not a JSON object.
    """
    try:
        return _REQUEST.decode(body)
    except msgspec.ValidationError as error:
        raise InputError("cannot read the request: it is not an object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"cannot read the request: {error}") from error


def value_of(args: ExtenderArgs, name: str) -> Any:
    """Return the value of a field; None if there is none.

    Raises:
        InputError: It is not valid JSON.
    """
    try:
        return msgspec.json.decode(args.get(name, b"null"))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"cannot read the request: {name}: {error}") from error


def node_names(args: ExtenderArgs) -> list[str]:
    """Return the names of the nodes that are left.

    Raises:
        InputError: They are missing.
    """
    try:
        return _NAMES.decode(args.get("NodeNames", b"null"))
    except msgspec.DecodeError as error:
        message = "NodeNames is missing (nodeCacheCapable must be set)"
        raise InputError(f"cannot read the request: {message}") from error


def proposed_victims(args: ExtenderArgs) -> dict[str, Victims | None]:
    """Return the victims that kube-scheduler proposes, by the name of their node.

    Raises:
        InputError: They are missing or malformed.
    """
    try:
        return _VICTIMS.decode(args.get("NodeNameToMetaVictims", b"null"))
    except msgspec.DecodeError as error:
        message = "NodeNameToMetaVictims is missing or malformed (nodeCacheCapable must be set)"
        raise InputError(f"cannot preempt: {message}") from error


def text_of(args: ExtenderArgs, name: str) -> str:
    """Return a field that must be a text.

    Raises:
        InputError: It is missing, or not a text.
    """
    value = value_of(args, name)
    if not isinstance(value, str) or not value:
        raise InputError(f"cannot read the request: {name} is missing")
    return value
