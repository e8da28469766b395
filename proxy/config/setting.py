"""Keys of the configuration file, and how the fields of a dataclass carry them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from typing import Any

from proxy.config.kinds import SettingKind


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file: its name, how its value is read, and what it means."""

    key: str
    kind: SettingKind
    doc: str


def key(name: str, kind: SettingKind, doc: str) -> dict[str, Setting]:
    """Return the metadata of a field that is a key."""
    return {"setting": Setting(name, kind, doc)}


def section(name: str, doc: str) -> dict[str, str]:
    """Return the metadata of a field that holds keys of its own."""
    return {"section": name, "doc": doc}


def keys(of: type[Any] | Any) -> Iterator[tuple[Field[Any], str, Setting | None]]:
    """Iterate over the fields that are keys of the file: field, key, and its setting (None: a section)."""
    for item in fields(of):
        setting: Setting | None = item.metadata.get("setting")
        if setting is not None:
            yield item, setting.key, setting
        elif "section" in item.metadata:
            yield item, item.metadata["section"], None
