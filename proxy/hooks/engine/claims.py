"""Field ownership: each field of an adjustment is set by at most one hook.

Theory. An answer sets a number of *fields*: ``cpus``; for maps each key, ``envs[NAME]``; for updates of other
containers each field of each container, ``updates[id].cpus``. The first hook that sets a field owns it. An
answer that sets a field of another hook is refused as a whole, because half of an answer may be worse than
none. So the merged answers are the plain union of the accepted ones, in any order. NRI tracks owners in the
same way (containerd/nri v0.11 pkg/api/owners.go).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from proxy.hooks.answers import LEAVE, MAPS, NOTHING, Adjustment, Update

AnswerFields = Mapping[str, Any]
"""The fields of an adjustment that are set; maps are not empty."""

UPDATE_FIELDS = tuple(name for name in Update.__slots__)
"""All fields of an update."""


def fields_set_by(adjustment: Adjustment) -> dict[str, Any]:
    """Return the fields that an adjustment sets."""
    return dict(adjustment.set_fields())


def field_names(given: AnswerFields) -> Iterator[str]:
    """Iterate over the names of all fields that are set."""
    for name, value in given.items():
        if name not in MAPS:
            yield name
        elif name != "updates":
            for key in value:
                yield f"{name}[{key}]"
        else:
            for key, update in value.items():
                yield from _update_field_names(key, update)


def _update_field_names(key: str, update: Update) -> Iterator[str]:
    for name in UPDATE_FIELDS:
        value = getattr(update, name)
        if name == "unified":
            for file in value:
                yield f"updates[{key}].unified[{file}]"
        elif value is not LEAVE:
            yield f"updates[{key}].{name}"


class FieldClaims:
    """The fields that the hooks of one call have set so far."""

    __slots__ = ("_merged", "_owners")

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._merged: dict[str, Any] = {}

    def claim(self, hook: str, given: AnswerFields) -> str:
        """Claim all fields of a hook's answer, or none.

        Args:
            hook: Its name.
            given: The fields, which are not changed afterwards.

        Returns:
            Empty, or the conflict: the field and the hook that owns it.
        """
        owners = self._owners
        fields = dict.fromkeys(field_names(given), hook)
        if not owners.keys().isdisjoint(fields):
            name = next(name for name in fields if name in owners)
            return f"cannot set {name}: hook {owners[name]} has set it, and both cannot be right"
        owners.update(fields)
        if self._merged or "updates" in given:
            for name, value in given.items():
                self._merge_field(name, value)
        else:
            self._merged = dict(given)
        return ""

    def _merge_field(self, name: str, value: Any) -> None:
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
            merged[name] = value

    @property
    def owners(self) -> Mapping[str, str]:
        """Field to the hook that set it."""
        return MappingProxyType(self._owners)

    def merged(self) -> Adjustment:
        """Return the merged answers as a new value."""
        if not self._merged:
            return NOTHING
        merged: dict[str, Any] = {
            name: dict(value) if name in MAPS else value for name, value in self._merged.items()
        }
        return Adjustment(**merged)


def _joined(update: Update, other: Update) -> Update:
    """Join two updates of one container that set different fields."""
    values = {name: getattr(update, name) for name in UPDATE_FIELDS}
    for name in UPDATE_FIELDS:
        value = getattr(other, name)
        if name == "unified":
            values[name] = MappingProxyType({**values[name], **value})
        elif value is not LEAVE:
            values[name] = value
    return Update(**values)
