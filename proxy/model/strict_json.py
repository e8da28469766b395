"""Reads JSON of users: a key that is in an object twice, NaN and infinities are errors.

Python's reader would silently use the last value of a repeated key, and accept numbers that JSON lacks.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Never


class StrictJsonError(ValueError):
    """An object has a key twice, or a number is not one of JSON; the message says which."""


def read_json(text: str) -> object:
    """Read one JSON value.

    Raises:
        StrictJsonError: An object has a key twice, or a number is NaN or infinite.
        ValueError: The text is not JSON.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_with_unique_keys, parse_constant=_reject_constant)


def _with_unique_keys(items: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(items)
    if len(result) != len(items):
        ((repeated, _),) = Counter(key for key, _ in items).most_common(1)
        short = repeated if len(repeated) <= 60 else f"{repeated[:57]}..."
        raise StrictJsonError(f"the key {short!r} is there twice in one object")
    return result


def _reject_constant(name: str) -> Never:
    raise StrictJsonError(f"{name} is not a JSON value")
