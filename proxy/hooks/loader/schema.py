"""A hook's own settings: the dataclass ``Settings`` in its file defines what may be configured.

Its fields are keys of ``hooks.settings.NAME.config``; a field without a default must be set, and
``metadata={"help": "..."}`` explains it. The types::

    bool, int, float, str             as YAML has them; a whole number is a float, too
    list[str], tuple[str, ...]        a list of strings; and so of int and float
    dict[str, str]                    keys with strings; and so with int and float
    Literal[...], an enum.StrEnum     one of these
    X | None                          as X; None only by default

``__post_init__`` may check all fields together and raise ValueError.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.config.nested_values import suggestion
from proxy.model.errors import HookError

_TYPES = (
    "bool, int, float, str, list[str], tuple[str, ...], dict[str, str] (or of int and float), Literal[...]"
    " or an enum.StrEnum"
)
_DESCRIPTIONS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "a string"),
    (Mapping, "keys with values"), ((list, tuple), "a list"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One key that a hook's settings have.

    Attributes:
        name: Its name.
        wants: A description of the valid values.
        default: The value if it is not given; meaningless if it is ``required``.
        required: It must be given.
        help: Its meaning, in the hook's words.
        read: Converts the plain value to the field's value; raises ValueError with the cause.
    """

    name: str
    wants: str
    default: Any
    required: bool
    help: str
    read: Callable[[Any], Any]


def keys_of(settings: Any) -> list[SettingKey]:
    """Read what a hook's ``Settings`` declares.

    Args:
        settings: The file's ``Settings``.

    Raises:
        HookError: It is not a dataclass, or the type of a field is not supported; the text is only the cause.
    """
    if not isinstance(settings, type) or not dataclasses.is_dataclass(settings):
        raise HookError("Settings is not a dataclass: put @dataclass above it")
    try:
        hints = typing.get_type_hints(settings)
    except Exception as error:
        raise HookError(f"the types of Settings cannot be read: {error}") from error
    return [_key(item, hints[item.name]) for item in dataclasses.fields(settings) if item.init]


def settings_of(settings: Any, given: Mapping[str, Any] | None, where: str) -> Any:
    """Make a hook's settings from the configuration.

    Args:
        settings: The file's ``Settings``; None if it has none.
        given: Plain values by key; None if nothing is configured.
        where: The path of these keys, for messages: ``hooks.settings.10-x.config``.

    Returns:
        An instance of ``settings``; None if the hook has none.

    Raises:
        HookError: All errors, with paths; the text is only the cause.
    """
    if settings is None:
        if given:
            raise HookError(f"{where}: this hook has no settings, and {', '.join(map(str, given))} is given")
        return None
    known = {key.name: key for key in keys_of(settings)}
    values: dict[str, Any] = {}
    problems = list(_read(known, given or {}, where, values))
    if problems:
        raise HookError("; ".join(problems))
    try:
        return settings(**values)
    except ValueError as error:
        raise HookError(f"{where}: {error}") from error


def _read(
    known: Mapping[str, SettingKey], given: Mapping[str, Any], where: str, values: dict[str, Any]
) -> Iterator[str]:
    for name, value in given.items():
        key = known.get(name)
        if key is None:
            hint = suggestion(str(name), known) or f" (there are: {', '.join(known) or 'none'})"
            yield f"{where}.{name}: unknown key{hint}"
            continue
        try:
            values[name] = key.read(value)
        except ValueError as error:
            yield f"{where}.{name}{error}" if str(error).startswith("[") else f"{where}.{name}: {error}"
    for name, key in known.items():
        if key.required and name not in given:
            yield f"{where}.{name}: is missing; it must be {key.wants}" + (
                f" ({key.help})" if key.help else ""
            )


def _key(item: dataclasses.Field[Any], kind: Any) -> SettingKey:
    try:
        wants, read = _reader(kind)
    except ValueError as error:
        raise HookError(f"Settings.{item.name} {error}; it can be {_TYPES}") from error
    default = item.default
    if item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    required = default is dataclasses.MISSING
    if kind in _READERS and not required and default is not None:
        try:
            read(default)
        except ValueError as error:
            place = f"Settings.{item.name}" + ("" if str(error).startswith("[") else ": ")
            raise HookError(f"the default of {place}{error}") from error
    return SettingKey(item.name, wants, default, required, str(item.metadata.get("help", "")), read)


def _reader(kind: Any) -> tuple[str, Callable[[Any], Any]]:
    """Describe as text which values a type takes, and return the function that reads them.

    Raises:
        ValueError: Values of this type cannot be configured.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and types.NoneType in args:
        return _reader(next(arg for arg in args if arg is not types.NoneType))
    if origin is typing.Literal:
        return _choice_reader(args)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        message, read_value = _choice_reader(tuple(str(member) for member in kind))
        return message, lambda value: kind(read_value(value))
    reader = _READERS.get(kind)
    if reader is None:
        raise ValueError(f"is a {kind.__name__ if isinstance(kind, type) and not args else kind}")
    return reader


def _choice_reader(values: tuple[Any, ...]) -> tuple[str, Callable[[Any], Any]]:
    message = ", ".join(str(value) for value in values)

    def read(value: Any) -> Any:
        for known in values:
            if type(known) is type(value) and known == value:
                return known
        texts = [known for known in values if isinstance(known, str)]
        hint = suggestion(value, texts) if isinstance(value, str) else ""
        raise ValueError(f"must be one of {message}, not {_described(value)}{hint}")

    return f"one of {message}", read


def _described(value: Any) -> str:
    """Describe a value for a message."""
    for kind, text in _DESCRIPTIONS:
        if isinstance(value, kind):
            return text if isinstance(value, (Mapping, list, tuple)) else f"{text} ({str(value)[:40]!r})"
    return repr(value)[:40]


def _plain_reader(kind: type, wants: str) -> tuple[str, Callable[[Any], Any]]:
    def read(value: Any) -> Any:
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            quotes = ": put it in quotes" if kind is str and isinstance(value, (int, float)) else ""
            raise ValueError(f"must be {wants}, not {_described(value)}{quotes}")
        return kind(value)

    return wants, read


def _list_reader(kind: type, many: str, make: Callable[[list[Any]], Any]) -> tuple[str, Callable[[Any], Any]]:
    read_value = _READERS[kind][1]

    def read(value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"must be a list of {many}, not {_described(value)}")  # noqa: TRY004 - bad input
        return make([_inner(f"[{at}]", read_value, entry) for at, entry in enumerate(value)])

    return f"a list of {many}", read


def _map_reader(kind: type, many: str) -> tuple[str, Callable[[Any], Any]]:
    read_value = _READERS[kind][1]

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be keys with {many}, not {_described(value)}")  # noqa: TRY004 - bad input
        return {str(name): _inner(f"[{name}]", read_value, entry) for name, entry in value.items()}

    return f"keys with {many}", read


def _inner(place: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


_READERS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: _plain_reader(bool, "true or false"),
    int: _plain_reader(int, "a whole number"),
    float: _plain_reader(float, "a number"),
    str: _plain_reader(str, "a string"),
}
for _of, _many in ((str, "strings"), (int, "whole numbers"), (float, "numbers")):
    _READERS[list[_of]] = _list_reader(_of, _many, list)  # type: ignore[valid-type]
    _READERS[tuple[_of, ...]] = _list_reader(_of, _many, tuple)  # type: ignore[valid-type]
    _READERS[dict[str, _of]] = _map_reader(_of, _many)  # type: ignore[valid-type]
