"""Converts a configuration to plain data and back, to pass it from one process to another.

Texts are written as in the file, so the receiving process reads each value by the same rules, and does not
need YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from proxy.config.kinds import float_text
from proxy.config.nested_values import YamlNode
from proxy.config.schema import Config
from proxy.config.setting import keys
from proxy.model.errors import ConfigError

T = TypeVar("T")
_CANNOT = "cannot read the settings of another version"


class PlainNode:
    """Plain data with the attributes of a node of a YAML file; it has no line."""

    __slots__ = ("id", "tag", "value")

    line = 0

    def __init__(self, data: object) -> None:
        self.value: object
        if isinstance(data, Mapping):
            self.id, self.tag = "mapping", "map"
            self.value = [(PlainNode(key), PlainNode(value)) for key, value in data.items()]
        elif isinstance(data, list):
            self.id, self.tag, self.value = "sequence", "seq", [PlainNode(value) for value in data]
        elif isinstance(data, bool):
            self.id, self.tag, self.value = "scalar", "bool", str(data).lower()
        elif isinstance(data, float):
            self.id, self.tag, self.value = "scalar", "float", float_text(data)
        else:
            self.id, self.tag, self.value = "scalar", "int" if isinstance(data, int) else "str", str(data)

    @property
    def start_mark(self) -> PlainNode:
        """The node itself, in place of a position in the file."""
        return self


def to_plain(part: Any) -> dict[str, Any]:
    """Return all settings of a configuration or a section by key, as values that JSON can hold."""
    return {
        key: to_plain(value) if setting is None else setting.kind.show(value)
        for item, key, setting in keys(part)
        for value in (getattr(part, item.name),)
    }


def from_plain(values: Mapping[str, Any]) -> Config:
    """Return the configuration that ``to_plain`` has written.

    Raises:
        ConfigError: The keys are not those of this version, or a value cannot be read.
    """
    return _read(values, Config(), "")


def _read(values: Mapping[str, Any], part: T, prefix: str) -> T:
    known_keys = {key for _, key, _ in keys(part)}
    if differing := known_keys ^ values.keys():
        raise ConfigError(f"{_CANNOT}: {prefix}{min(differing)} is not known to both")
    new: dict[str, Any] = {}
    for item, key, setting in keys(part):
        if setting is None:
            new[item.name] = _read(values[key], getattr(part, item.name), f"{prefix}{key}.")
            continue
        kind = setting.kind
        try:
            new[item.name] = kind.read(YamlNode(PlainNode(values[key])) if kind.nested else values[key])
        except ValueError as error:
            raise ConfigError(f"{_CANNOT}: {prefix}{key}: {error}") from error
    return replace(part, **new)  # type: ignore[type-var]  # T is a dataclass, which no bound can say
