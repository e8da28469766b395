"""Read-only events, as the daemon sends them, for tests and dry runs.

In the daemon the maps of an event are read from messages, are immutable, and have only the methods of
``Mapping``. A hook that changes one, joins two with ``|`` or passes one to ``json.dumps`` must fail in a
test, not on a node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar

from proxy.config.frozen_mapping import FrozenMapping
from proxy.hooks.answers import Adjustment

_T = TypeVar("_T")
CANNOT_CHANGE: Final = "an event cannot be changed: answer with an Adjustment"


class ReadOnlyMap(FrozenMapping[str, Any]):
    """A map of an event."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError(CANNOT_CHANGE)

    def __delitem__(self, key: object) -> NoReturn:
        raise TypeError(CANNOT_CHANGE)


def read_only(value: _T) -> _T:
    """Return an event, or a part of one, whose maps and lists cannot be changed."""
    made: Any = value
    if isinstance(value, Mapping):
        made = ReadOnlyMap({key: read_only(entry) for key, entry in value.items()})
    elif isinstance(value, list | tuple):
        made = tuple(read_only(entry) for entry in value)
    elif _is_fact(value):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        made = dataclasses.replace(
            made, **{field.name: read_only(getattr(value, field.name)) for field in fields}
        )
    return made  # type: ignore[no-any-return]


def _is_fact(value: object) -> bool:
    """Return whether it is an event or a fact; settings are the hook's own, and machines never change."""
    is_fact = type(value).__module__.startswith("proxy.hooks.")
    return is_fact and dataclasses.is_dataclass(value) and not isinstance(value, Adjustment)
