"""Converts a decision to plain data for JSON, and back, and answers ``/explain``.

docs/explain.md has the names of the fields.

CPUs are Linux lists (``"0-3,8"``), NUMA nodes are lists of ids (null if any will do). Writing gives every
field, whatever its value. Data of an older or newer version can be read: a missing field gets its default, an
unknown field is ignored, and a field that is present must have its type. ``said``, ``lacks`` and ``blame``
are the former names of ``providers``, ``shortfalls`` and ``conflicts``, written for one release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeGuard, TypeVar, get_args, get_origin

from msgspec import Struct
from msgspec.structs import fields

from proxy.executor.decision_history import DecisionHistory
from proxy.executor.decision_records import PodDecisions, RememberedDecision
from proxy.model import schema_ids
from proxy.model.errors import InputError
from proxy.model.explanation import Explanation, ProviderAnswer
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask

Data = dict[str, object]
T = TypeVar("T", bound=Struct)

DEFAULT_LIMIT = 500
"""How many records, or pods, are returned if no number is requested."""


def history_page(
    history: DecisionHistory,
    params: Mapping[str, str],
    now: Callable[[RememberedDecision], str] = lambda record: "",
) -> dict[str, object]:
    """Answer a query.

    Args:
        history: The remembered decisions.
        params: ``query``: the name of what to explain (see ``DecisionHistory.find``); ``limit``: how many of
            the newest records, or pods, to return.
        now: Returns the current facts about a container that still exists; empty if it does not.

    Returns:
        ``records``, the newest last: those that the query found, none without a query. ``pods``, the newest
        last: all known pods, if there is no query or it found nothing. ``remembered``: how many records there
        are in all.

    Raises:
        InputError: A parameter is unknown, or the limit is not a number.
    """
    for name in params:
        if name not in ("query", "limit"):
            raise InputError(f"cannot explain: {name!r} is not a parameter (query, limit)")
    most = _limit(params.get("limit", ""))
    query = params.get("query", "")
    records = history.find(query)
    pods = [] if records else history.pods()
    return {
        "schema": schema_ids.EXPLAIN,
        "query": query,
        "records": [_data_with_note(record, now) for record in records[-most:]],
        "pods": [_pod_data(line) for line in pods[-most:]],
        "remembered": history.size,
    }


def record_data(record: RememberedDecision) -> dict[str, object]:
    """Return a record as plain data."""
    return {
        "when": record.when,
        "id": record.container_id,
        "there": record.exists,
        "decision": to_data(record.explanation),
    }


def _data_with_note(
    record: RememberedDecision, now: Callable[[RememberedDecision], str]
) -> dict[str, object]:
    """Return a record as plain data, with ``now`` if its container exists and something has changed."""
    data, text = record_data(record), now(record) if record.exists else ""
    return {**data, "now": text} if text else data


def _pod_data(line: PodDecisions) -> dict[str, object]:
    return {
        "pod": line.pod,
        "uid": line.uid,
        "when": line.when,
        "records": line.records,
        "containers": list(line.containers),
        "refused": line.refused,
        "there": line.exists,
        "applied": line.applied,
    }


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    if text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0:
        return int(text)
    raise InputError(f"cannot explain: limit is {text[:20]!r}, not a number from 1 to 999999")


def to_data(record: Explanation) -> Data:
    """Return a decision as plain data."""
    verdict = record.verdict
    providers, shortfalls = _plain(record.answers), _plain(record.shortfalls)
    return {
        "event": record.event,
        "pod": record.pod,
        "uid": record.uid,
        "container": record.container,
        "attempt": record.attempt,
        "verdict": {
            "admitted": verdict.admitted,
            "code": verdict.code,
            "reason": verdict.reason,
            "message": verdict.operator_message,
        },
        "pool": record.pool,
        "cpus": str(record.cpus),
        "mems": _plain(record.mems),
        "devices": list(record.devices),
        "reasons": list(record.reasons),
        "facts": _plain(record.facts),
        "providers": providers,
        "said": providers,
        "merge": _plain(record.merge),
        "steps": _plain(record.steps),
        "moved": _plain(record.moved),
        "more_moved": record.more_moved,
        "shortfalls": shortfalls,
        "lacks": shortfalls,
        "applied": record.applied,
    }


def from_data(data: object) -> Explanation:
    """Read a decision.

    Raises:
        InputError: The data is not a decision; the message names the field.
    """
    return _read(Explanation, data, _TOP)


_TOP = "decision"
_DATA_NAMES = {
    "answers": ("providers", "said"),
    "shortfalls": ("shortfalls", "lacks"),
    "conflicts": ("conflicts", "blame"),
    "affinity": ("nodes",),
    "detail": (),
}
"""Fields with other names in the data, the present name first; ``detail`` is not written."""
_LAST_FIELDS = ("count", "preferred", "hints")
"""Fields of an answer in the order in which they are written."""
_EMPTY_VALUES: Mapping[object, object] = {str: "", int: 0, bool: False, CpuSet: "", TopologyHint: {}}
"""The value for a missing field that has no default; fields not listed here get null."""


def _plain(value: object) -> object:
    """Return a value of a decision as plain data."""
    if isinstance(value, CpuSet):
        return str(value)
    if isinstance(value, Mask | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, Struct):
        return value
    names = value.__struct_fields__
    if isinstance(value, ProviderAnswer):
        names = (*(name for name in names if name not in _LAST_FIELDS), *_LAST_FIELDS)
    return {key: _plain(getattr(value, name)) for name in names for key in _DATA_NAMES.get(name, (name,))}


_fields = cache(fields)


def _read(kind: type[T], data: object, where: str) -> T:
    """Read a structure from a mapping, field by field."""
    if not isinstance(data, Mapping):
        raise InputError(f"cannot read {where}: it is {_kind(data)}, not a mapping")
    values: dict[str, object] = {}
    for member in _fields(kind):
        names = _DATA_NAMES.get(member.name, (member.name,))
        name = next((name for name in names if name in data), None)
        if name is not None:
            values[member.name] = _value(member.type, data[name], where, name)
        elif member.required:
            values[member.name] = _value(member.type, _EMPTY_VALUES.get(member.type), where, member.name)
    return kind(**values)


def _value(kind: Any, value: object, where: str, name: str) -> object:
    """Read the value of a field."""
    if isinstance(kind, UnionType):  # with None
        if value is None:
            return None
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        return _list(get_args(kind)[0], value, where, name)
    if issubclass(kind, Struct):
        return _read(kind, value, f"{where}.{name}".removeprefix(f"{_TOP}."))
    if kind is Mask:
        if isinstance(value, list) and all(_is_number(v) and 0 <= v < Mask.LIMIT for v in value):
            return Mask(value)
        raise _wrong(where, name, value, "a list of node ids")
    if kind is int and not _is_number(value):
        raise _wrong(where, name, value, "a number")
    if kind is bool and not isinstance(value, bool):
        raise _wrong(where, name, value, "true or false")
    if kind in (str, CpuSet) and not isinstance(value, str):
        raise _wrong(where, name, value, "a string")
    if kind is not CpuSet:
        return value
    try:
        return CpuSet.parse(str(value))
    except ValueError as error:
        raise InputError(f"cannot read {where}: {name} names no CPUs: {error}") from error


def _list(kind: Any, value: object, where: str, name: str) -> tuple[object, ...]:
    """Read a list of texts or of structures."""
    texts = kind is str
    if not isinstance(value, list) or (texts and not all(isinstance(v, str) for v in value)):
        raise _wrong(where, name, value, "a list of strings" if texts else "a list")
    if texts:
        return tuple(value)
    return tuple(_read(kind, item, f"{where}.{name}[{i}]") for i, item in enumerate(value))


def _wrong(where: str, name: str, value: object, expected: str) -> InputError:
    return InputError(f"cannot read {where}: {name} is {_kind(value)}, not {expected}")


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "true or false", str: "a string", int: "a number", float: "a fraction"}
    return names.get(type(value), "a list" if isinstance(value, list) else "a mapping")
