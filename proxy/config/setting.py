"""Keys of the configuration file, and how they are attached to the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, fields
from typing import Any

from proxy.config.kinds import SettingKind


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file.

    Attributes:
        key: Its name.
        kind: How its value is read.
        doc: Its explanation.
        live: A reload changes it in the running daemon; otherwise it takes effect at the next start.
        restart_for: Values of a live key: a change from or to one of them takes effect only at a restart.
        rule: The field of ``proxy.engine.node.Node`` that takes the value unchanged; empty for none.
    """

    key: str
    kind: SettingKind
    doc: str
    live: bool = False
    restart_for: frozenset[object] = frozenset()
    rule: str = ""

    def changes_live(self, before: object, after: object) -> bool:
        """Return whether a reload can change it from one value to another in the running daemon."""
        return self.live and not any(value in (before, after) for value in self.restart_for)


def key(
    name: str,
    kind: SettingKind,
    doc: str,
    *,
    live: bool = False,
    restart_for: Iterable[object] = (),
    rule: str = "",
) -> dict[str, Setting]:
    """Return the metadata of a field that stands for a key."""
    return {"setting": Setting(name, kind, doc, live, frozenset(restart_for), rule)}


def section(name: str, doc: str) -> dict[str, str]:
    """Return the metadata of a field that stands for a section, which has keys of its own."""
    return {"section": name, "doc": doc}


def keys(of: type[Any] | Any) -> Iterator[tuple[Field[Any], str, Setting | None]]:
    """Iterate over the fields that are keys of the file: field, key, and its setting (None: a section)."""
    for item in fields(of):
        setting: Setting | None = item.metadata.get("setting")
        if setting is not None:
            yield item, setting.key, setting
        elif "section" in item.metadata:
            yield item, item.metadata["section"], None


def rules(config: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the rules of the node in a configuration and its sections: field of ``Node``, value."""
    for item, _, setting in keys(config):
        if setting is None:
            yield from rules(getattr(config, item.name))
        elif setting.rule:
            yield setting.rule, getattr(config, item.name)
