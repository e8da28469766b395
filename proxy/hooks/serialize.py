"""Events, adjustments and outcomes as plain data that JSON can hold, and back.

The keys are the fields of ``proxy.hooks.events``, ``facts`` and ``answers``; an event has its ``point``
next to them::

    {"point": "pre_create_container",
     "pod": {"namespace": "shop", "name": "db-0", "qos": "LSR"},
     "container": {"name": "main"},
     "decision": {"pool": "own", "cpus": "2-3", "own": "2-3"}}

CPUs and memory nodes are Linux lists such as ``0-3,8``. A machine is what ``topoproxy topology --json``
prints, of which ``cpu_rows`` and ``numa.nodes`` are enough. In an adjustment, a missing field is
left unchanged and ``null`` is ``CLEAR``, in maps too, as in a JSON merge patch (RFC 7396). In an event, a
missing field gets its default. If ``allowed`` and ``allowed_mems`` of a decision are missing, they are its
CPUs and nodes, as in the engine when hooks may not reassign exclusive CPUs. Invalid data is refused with its
path.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proxy.hooks.answers import CLEAR, LEAVE, MAPS, Adjustment, Update
from proxy.hooks.events import POINTS, Point
from proxy.hooks.facts import Decision
from proxy.hooks.hook import Outcome
from proxy.hooks.readonly import read_only
from proxy.hooks.samples import MACHINES, sample
from proxy.model.errors import InputError, TopologyError
from proxy.model.idset import CpuSet, IdSet, Mask
from proxy.model.machine import Machine
from proxy.topology.description import machine_from_json
from proxy.topology.facts import machine_to_json

_KIND_NAMES: Final = {str: "a string", int: "a whole number", bool: "true or false"}


def event_from_data(data: object) -> Point:
    """Make an event of plain data.

    Args:
        data: An object with the key ``point`` and the fields of that point.

    Raises:
        InputError: It is not an event, a key is unknown or missing, or a value has the wrong type; the text
            has the path.
    """
    given = _object(data, "the event")
    name = given.get("point")
    if not isinstance(name, str) or name not in POINTS:
        close = difflib.get_close_matches(name, POINTS, n=1) if isinstance(name, str) else ()
        meant = f"did you mean {close[0]}?" if close else "topoproxy hooks points lists them"
        problem = "it is missing" if name is None else f"there is no hook point {_shown(name)}"
        raise _invalid("point", f"{problem}; {meant}")
    rest = {key: value for key, value in given.items() if key != "point"}
    event: Point = _record(POINTS[name], rest, "")
    return read_only(event)


def event_to_data(event: Point) -> dict[str, Any]:
    """Return an event as plain data; ``event_from_data`` makes an equal one of it.

    Settings of ``configure`` that are a dataclass become an object of its fields, and stay an object when
    read back.
    """
    return {"point": event.NAME, **_fields(event)}


def adjustment_to_data(adjustment: Adjustment) -> dict[str, Any]:
    """Return an adjustment as plain data; ``null`` is ``CLEAR``."""
    return _fields(adjustment)


def outcome_to_data(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain data: ``adjustment``, ``owners`` (field to hook), ``refusal`` (or empty)."""
    return {
        "adjustment": adjustment_to_data(outcome.adjustment),
        "owners": dict(outcome.owners),
        "refusal": outcome.refusal,
    }


def example(point: str) -> dict[str, Any]:
    """Return a full event of a point as plain data: a container that owns CPUs, on a machine of two nodes.

    Args:
        point: The name of the point's handlers, such as ``pre_create_container``.

    Raises:
        InputError: There is no such point.
    """
    if point not in POINTS:
        raise InputError(f"cannot give an example of {point!r}: no such hook point")
    record: Any = POINTS[point]
    small = {name: MACHINES[name] for name, kind in _kinds(record).items() if kind is Machine}
    return event_to_data(sample(point)) | small


def _invalid(path: str, cause: str) -> InputError:
    return InputError(f"cannot use {path.removeprefix('.') or 'the data'}: {cause}")


def _object(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _invalid(path, f"it must be an object, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache
def _kinds(record: type) -> Mapping[str, Any]:
    """Return the kinds of a dataclass's fields."""
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def _record(record: type, data: Mapping[str, object], path: str) -> Any:
    kinds = _kinds(record)
    for key in data:
        if key not in kinds:
            raise _invalid(f"{path}.{key}", f"no such key; there are {', '.join(kinds)}")
    values = {key: _read(kinds[key], value, f"{path}.{key}") for key, value in data.items()}
    if record is Decision:
        values.setdefault("allowed", values.get("cpus", CpuSet()))
        values.setdefault("allowed_mems", values.get("mems") or Mask())
    for field in dataclasses.fields(record):
        bare = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if bare and field.name not in values:
            values[field.name] = _absent(kinds[field.name], f"{path}.{field.name}")
    return record(**values)


def _absent(kind: Any, path: str) -> Any:
    """Return the default of a missing value, if its kind has one."""
    if dataclasses.is_dataclass(kind) and kind is not Machine:
        return _record(typing.cast("type", kind), {}, path)
    raise _invalid(path, "it is missing")


def _read(kind: Any, value: object, path: str) -> Any:
    if kind is Any:
        return value
    if kind in _KIND_NAMES:
        if type(value) is not kind:
            raise _invalid(path, f"it must be {_KIND_NAMES[kind]}, not {_shown(value)}")
        return value
    if isinstance(kind, type) and issubclass(kind, IdSet):
        return _ids(kind, value, path)
    if kind is Machine:
        return _machine(value, path)
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast("type", kind), _object(value, path), path)
    return _composed(kind, value, path)


def _composed(kind: Any, value: object, path: str) -> Any:
    """Read values that consist of other kinds: maps, lists, and values that may be ``null``."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Mapping:
        return {key: _read(parts[1], item, f"{path}[{key}]") for key, item in _object(value, path).items()}
    if origin is Sequence:
        if not isinstance(value, list | tuple):
            raise _invalid(path, f"it must be a list, not {_shown(value)}")
        return tuple(_read(parts[0], item, f"{path}[{number}]") for number, item in enumerate(value))
    if value is None:
        return None if type(None) in parts else CLEAR
    (real,) = (part for part in parts if part is not type(None) and typing.get_origin(part) is None)
    return _read(real, value, path)


def _ids(kind: type[IdSet], value: object, path: str) -> IdSet:
    if not isinstance(value, str):
        raise _invalid(path, f"it must be a list such as '0-3,8', not {_shown(value)}")
    try:
        return kind.parse(value)
    except ValueError as error:
        raise _invalid(path, str(error)) from None


def _machine(value: object, path: str) -> Machine:
    try:
        return machine_from_json(value)
    except TopologyError as error:
        raise _invalid(path, str(error.__cause__ or error)) from None


def _fields(record: Any) -> dict[str, Any]:
    """Return a dataclass's fields; of an answer only the fields that are set."""
    answer = isinstance(record, Adjustment | Update)
    written: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not answer or (value is not LEAVE and (field.name not in MAPS or value)):
            written[field.name] = _write(value)
    return written


def _write(value: Any) -> Any:
    if value is CLEAR:
        return None
    if isinstance(value, IdSet):
        return str(value)
    if isinstance(value, Machine):
        return machine_to_json(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): _write(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_write(item) for item in value]
    return value
