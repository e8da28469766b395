"""Kinds of settings: converting a text of YAML or of the command line to a value, and back.

A value is always read from the text that the user wrote, never from YAML's conversion of it. So ``none``,
``off``, ``1`` and ``010`` keep their meaning as text, and the command line follows the same rules as the
file. The type that YAML assigns to the text (its tag) is used only to check whether the type is right.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.config.endpoint import parse_address, parse_endpoint, show_endpoint
from proxy.config.nested_values import suggestion
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet
from proxy.model.quantity import parse_quantity, show_quantity


@dataclass(frozen=True, slots=True)
class SettingKind:
    """How one kind of value is read and written.

    Attributes:
        wants: A description of a valid value ("a duration such as 10s").
        read: Converts text to a value; raises ValueError or ConfigError with the cause. Kinds of lists and of
            keys with values get a ``YamlNode`` instead, and raise its faults.
        show: Converts a value to a text that reads back as the same value. Kinds that are not scalars return
            lists and dictionaries of strings and whole numbers.
        tags: YAML's short types that are valid for it (``str``, ``int``, ``float``, ``bool``, ``map``, ...).
        shows_wants: True if ``wants`` says more than the key's explanation.
        schema: JSON Schema of the value, as in YAML 1.2 or JSON; ``read`` may be stricter.
    """

    wants: str
    read: Callable[[Any], Any]
    show: Callable[[Any], Any]
    tags: frozenset[str] = frozenset({"str", "int", "float", "bool", "timestamp"})
    shows_wants: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nested(self) -> bool:
        """True for lists, and for keys with values."""
        return not self.tags.isdisjoint({"map", "seq"})


def text_schema(pattern: str) -> dict[str, Any]:
    """Return the JSON Schema of a text that may have blanks around it."""
    return {"type": "string", "pattern": rf"^\s*{pattern}\s*$"}


_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9/._:-]*|(?:[0-9]+(?:ms|[smh]))+")
_YAML_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def quote(text: str) -> str:
    """Write a text as a YAML scalar that every YAML reader reads as a text."""
    if _BARE.fullmatch(text) and text.lower() not in _YAML_WORDS and not text.endswith(":"):
        return text
    escaped = "".join(
        c if c.isprintable() else f"\\U{ord(c):08x}" for c in text.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def float_text(value: float) -> str:
    """Write a number so that YAML reads it as a float: it needs a dot."""
    mantissa, e, exponent = repr(value).partition("e")
    return mantissa + (".0" if e and "." not in mantissa else "") + e + exponent


def choice(values: type[enum.StrEnum], *permitted: enum.StrEnum) -> SettingKind:
    """Return the kind of one word out of an enumeration, or out of some of its values, spelled exactly."""
    choices = [str(v) for v in permitted or values]
    shown = [value or "empty" for value in choices]
    listed = f"{', '.join(shown[:-1])} or {shown[-1]}"

    def read(text: str) -> enum.StrEnum:
        if text not in choices:
            raise ValueError(f"{text!r} is not {listed}{suggestion(text, choices)}")
        return values(text)

    return SettingKind(
        listed, read, str, shows_wants=True, schema={"enum": [*choices, *_as_yaml_1_1(choices)]}
    )


def _as_yaml_1_1(values: Iterable[str]) -> list[bool]:
    """Return the booleans that YAML 1.1 reads for ``on`` and ``off`` among the values."""
    return [value == "on" for value in values if value in ("on", "off")]


def whole_number(low: int, high: int) -> SettingKind:
    """Return the kind of a whole number between two bounds, both included."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,12}", text):
            raise ValueError(f"{text!r} is not a whole number")
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"{value} is not between {low} and {high}")
        return value

    schema = {"type": "integer", "minimum": low, "maximum": high}
    wants = f"a whole number, {low} to {high}"
    return SettingKind(wants, read, str, frozenset({"int"}), shows_wants=True, schema=schema)


def _read_boolean(text: str) -> bool:
    if text.lower() in {"true", "yes", "on"}:
        return True
    if text.lower() in {"false", "no", "off"}:
        return False
    raise ValueError(f"{text!r} is not true or false")


BOOLEAN = SettingKind(
    "true or false",
    _read_boolean,
    lambda v: "true" if v else "false",
    frozenset({"bool"}),
    schema={"type": "boolean"},
)

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")


def parse_duration(text: str) -> float:
    """Read Go's duration text (``10s``, ``1m30s``, ``500ms``; time.ParseDuration).

    Returns:
        Seconds.

    Raises:
        ValueError: It is not a duration.
    """
    body = text.strip()
    if body == "0":
        return 0.0
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", body):
        raise ValueError(f"{text!r} has no unit: write {body}s for seconds")
    total, at = 0.0, 0
    while part := _PART.match(body, at):
        total += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    if at == 0 or at != len(body) or len(body) > 40:
        raise ValueError(f"{text!r} is not a duration such as 10s, 1m30s or 500ms")
    return round(total, 9)  # 13 times 0.001 is a bit more than 0.013; Go counts whole nanoseconds


def show_duration(seconds: float) -> str:
    """Write seconds as a short Go duration that reads back as the same nanoseconds."""
    milliseconds, nanoseconds = divmod(round(seconds * 1e9), 1_000_000)
    minutes, remainder = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h"] if hours else []
    parts += [f"{minutes}m"] if minutes else []
    if remainder % 1000:
        parts.append(f"{remainder}ms" if remainder < 1000 else f"{remainder / 1000:g}s")
    elif remainder or not (parts or nanoseconds):
        parts.append(f"{remainder // 1000}s")
    if nanoseconds:
        parts.append(f"{nanoseconds}ns" if nanoseconds % 1000 else f"{nanoseconds // 1000}us")
    return "".join(parts)


def duration(low: float, high: float) -> SettingKind:
    """Return the kind of a duration between two bounds in seconds, both included."""
    between = f"{show_duration(low)} to {show_duration(high)}"

    def read(text: str) -> float:
        seconds = parse_duration(text)
        if not low <= seconds <= high:
            raise ValueError(f"{text.strip()} is outside {between}")
        return seconds

    schema: dict[str, Any] = {"type": "string", "pattern": rf"^\s*({_PART.pattern})+\s*$"}
    if low == 0:
        schema = {"anyOf": [schema, {"enum": [0, "0"]}]}
    return SettingKind(f"a duration, {between}", read, show_duration, shows_wants=True, schema=schema)


CPUS = SettingKind(
    "a list of CPUs such as 0-1,8",
    CpuSet.parse,
    str,
    schema={
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": CpuSet.LIMIT - 1},
            text_schema("([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?"),
        ]
    },
)


def _read_path(text: str) -> Path:
    if not text.startswith("/") or "\0" in text:
        raise ValueError(f"{text!r} is not an absolute path")
    return Path(os.path.normpath("/" + text.lstrip("/")))


DIRECTORY = SettingKind("an absolute path", _read_path, str, schema={"type": "string", "pattern": "^/"})


def _read_socket(text: str) -> Path:
    try:
        return parse_endpoint(text)
    except ConfigError as error:
        raise ValueError(f"{text!r}: {str(error).partition('socket: ')[2]}") from error


_SOCKET = r"([Uu][Nn][Ii][Xx]:(//)?)?/.*[^/\s]"
SOCKET = SettingKind("the address of a unix socket", _read_socket, show_endpoint, schema=text_schema(_SOCKET))


def _read_optional_socket(text: str) -> Path | None:
    return _read_socket(text) if text.strip() else None


OPTIONAL_SOCKET = SettingKind(
    "the address of a unix socket, or empty",
    _read_optional_socket,
    lambda v: "" if v is None else show_endpoint(v),
    schema=text_schema(f"({_SOCKET})?"),
)


OPTIONAL_FILE = SettingKind(
    "an absolute path, or empty",
    lambda text: _read_path(text) if text.strip() else None,
    lambda v: "" if v is None else str(v),
    schema={"type": "string", "pattern": r"^(\s*$|/)"},
)

OPTIONAL_ADDRESS = SettingKind(
    "an address such as https://127.0.0.1:10250, or empty",
    lambda text: parse_address(text) if text.strip() else "",
    str,
    schema=text_schema(r"([Hh][Tt][Tt][Pp][Ss]?://[^/\s]+:[0-9]{1,5}/?)?"),
)


def read_amount(text: str, milli: bool = False) -> int:
    """Read an amount of a resource that cannot be negative.

    Raises:
        ValueError: It is not an amount, or it is negative.
    """
    amount = parse_quantity(text, milli=milli)
    if amount < 0:
        raise ValueError(f"{text} is negative")
    return amount


AMOUNT: Mapping[str, Any] = {
    "anyOf": [
        {"type": "number", "minimum": 0},
        text_schema(r"(\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?)?"),
    ]
}
"""JSON Schema of an amount of a resource, which may be empty."""


def _amount(wants: str, milli: bool) -> SettingKind:
    return SettingKind(
        f"{wants}, or empty",
        lambda text: read_amount(text, milli) if text.strip() else None,
        lambda v: "" if v is None else show_quantity(v, milli=milli),
        frozenset({"str", "int", "float"}),
        schema=AMOUNT,
    )


CPU_AMOUNT = _amount("an amount of CPU such as 500m", milli=True)
BYTES = _amount("an amount such as 1Gi", milli=False)
