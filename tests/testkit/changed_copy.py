"""Changed copies of values, whether they are structs or dataclasses."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from msgspec import Struct, structs

V = TypeVar("V")


def changed_copy(value: V, **changes: object) -> V:
    """Return a copy of a value with some fields changed."""
    if isinstance(value, Struct):
        return structs.replace(value, **changes)
    if isinstance(value, tuple):
        return value._replace(**changes)  # type: ignore[attr-defined,no-any-return]
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
