"""Who has said what: fields of adjustments, each owned by one hook.

Theory. What a hook says is a set of *fields*: ``cpus``; of maps each key, ``envs[NAME]``; of updates for
others each field of each, ``updates[id].cpus``. The first hook that says a field owns it. An answer that
says a field of somebody else is refused as a whole: nothing of it is taken, as half of an answer may be
worse than none. So what hooks want together is the plain union of the answers taken, whatever their order.
NRI keeps owners in the same way (``pkg/api/owners.go``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from proxy.hooks.answers import LEAVE, MAPS, NOTHING, Adjustment, Update

Said = Mapping[str, Any]
"""Fields of an adjustment that say something; maps are not empty."""

UPDATES = tuple(name for name in Update.__slots__)
"""All fields of an update."""


def said_by(adjustment: Adjustment) -> dict[str, Any]:
    """Give what an adjustment says."""
    return dict(adjustment.said())


def named(said: Said) -> Iterator[str]:
    """Walk the names of all fields that are said."""
    for name, value in said.items():
        if name not in MAPS:
            yield name
        elif name != "updates":
            for key in value:
                yield f"{name}[{key}]"
        else:
            for key, update in value.items():
                yield from _named_for(key, update)


def _named_for(key: str, update: Update) -> Iterator[str]:
    for name in UPDATES:
        value = getattr(update, name)
        if name == "unified":
            for file in value:
                yield f"updates[{key}].unified[{file}]"
        elif value is not LEAVE:
            yield f"updates[{key}].{name}"


class Claims:
    """What hooks of one call have said so far."""

    __slots__ = ("_merged", "_owners")

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._merged: dict[str, Any] = {}

    def claim(self, hook: str, said: Said) -> str:
        """Take all that a hook says, or nothing of it.

        Returns:
            Empty, or why not: the field and who owns it.
        """
        owners = self._owners
        fields = list(named(said))
        for name in fields:
            if (owner := owners.get(name)) is not None:
                return f"cannot set {name}: hook {owner} has set it, and both cannot be right"
        for name in fields:
            owners[name] = hook
        for name, value in said.items():
            self._take(name, value)
        return ""

    def _take(self, name: str, value: Any) -> None:
        merged = self._merged
        if name not in MAPS:
            merged[name] = value
        elif name == "updates":
            known = merged.setdefault(name, {})
            for key, update in value.items():
                known[key] = _joined(known[key], update) if key in known else update
        elif name in merged:
            merged[name] = {**merged[name], **value}
        else:
            merged[name] = dict(value)

    @property
    def owners(self) -> Mapping[str, str]:
        """Field to the hook that has said it."""
        return MappingProxyType(self._owners)

    def merged(self) -> Adjustment:
        """Give what the hooks want together, as values of its own."""
        if not self._merged:
            return NOTHING
        merged: dict[str, Any] = {
            name: dict(value) if name in MAPS else value for name, value in self._merged.items()
        }
        return Adjustment(**merged)


def _joined(one: Update, other: Update) -> Update:
    """Join two updates of one container that say different fields."""
    values = {name: getattr(one, name) for name in UPDATES}
    for name in UPDATES:
        value = getattr(other, name)
        if name == "unified":
            values[name] = MappingProxyType({**values[name], **value})
        elif value is not LEAVE:
            values[name] = value
    return Update(**values)
