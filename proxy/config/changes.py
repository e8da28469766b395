"""Compares two configurations key by key, and says which keys can change in a running daemon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from proxy.config.schema import Config
from proxy.config.setting import Setting, keys

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One key with another value.

    Attributes:
        key: The key, with its section (``log.level``).
        before, after: The values as the file would say them; empty for lists and for keys with values.
        live: Whether a reload changes it in the running daemon.
    """

    key: str
    before: str
    after: str
    live: bool

    def __str__(self) -> str:
        """Return the change in words."""
        if not (self.before or self.after):
            return self.key
        return f"{self.key} {self.before or 'empty'} -> {self.after or 'empty'}"


def changes(before: Config, after: Config) -> list[KeyChange]:
    """Return the keys whose values differ, in the order of the schema."""
    return list(_changes(before, after, ""))


def _changes(before: Any, after: Any, prefix: str) -> Iterator[KeyChange]:
    for item, key, setting in keys(before):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if old == new:
            continue
        if setting is None:
            yield from _changes(old, new, f"{prefix}{key}.")
        else:
            live = setting.changes_live(old, new)
            yield KeyChange(f"{prefix}{key}", _shown(setting, old), _shown(setting, new), live)


def _shown(setting: Setting, value: object) -> str:
    return "" if setting.kind.nested else str(setting.kind.show(value))


def with_live(running: T, wanted: T) -> T:
    """Return the running configuration with those values of another one that need no restart."""
    new: dict[str, Any] = {}
    for item, _, setting in keys(running):
        old, value = getattr(running, item.name), getattr(wanted, item.name)
        if setting is None:
            new[item.name] = with_live(old, value)
        elif setting.changes_live(old, value):
            new[item.name] = value
    return replace(running, **new)  # type: ignore[type-var]  # T is a dataclass, which no bound can say
