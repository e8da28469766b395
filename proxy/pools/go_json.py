"""Read JSON from annotations as Go's decoder reads it into a structure.

Theory. Koordinator is written in Go, so its users' annotations have only been tested with Go's rules: keys
match in any case, ``null`` is the same as absent, unknown keys are passed over, and one member of the wrong
type makes the whole text invalid. Integers have no fraction. An amount (Kubernetes' Quantity) is a string or
a number.

Of several keys that match a field, the last one in the text counts; one that matches exactly has no
precedence. ``null`` is an exception: it leaves a string, a number or an object as it was, and removes a list,
a map or a boolean (which is a pointer in Koordinator's types). This was compared with encoding/json of Go
1.26. What Go does beyond that is not imitated: it merges repeated objects and lists, and rejects a text in
which an earlier value has the wrong type. Keys of maps, such as names of resources, only match exactly.

While a text is parsed, every placement waits. So its size, its nesting and the number of its entries are
limited, far above normal use. The API server accepts at most 256 KiB for all annotations of an object, so a
longer text does not come from there, and is rejected without parsing.

Every fault is a ``ValueError`` whose message is shown to the user; quoted input is truncated and escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sized
from typing import TypeVar

from proxy.model.quantity import parse_quantity
from proxy.model.quoting import QUOTED, printable

LARGEST = 256 << 10
"""Characters of an annotation of a Node; TotalAnnotationSizeLimitB of Kubernetes, in bytes."""
LARGEST_STATUS = 64 << 10
"""Characters of a resource-status annotation: three times a list of every second CPU of 8192."""
LARGEST_ANNOTATION = 32 << 10
"""Characters of any other annotation of a pod: amounts of CPU on 1024 NUMA nodes take 26 KiB."""
MOST_ITEMS = 1024
"""Entries of one list or map; Linux has no more NUMA nodes."""
DEEPEST = 32
"""Levels of nesting; no annotation that is read here has more than five."""
_INT32 = 1 << 31
E = TypeVar("E", bound=Sized)
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def load(text: str, largest: int | None = LARGEST) -> object:
    """Read a JSON text.

    Args:
        text: The text.
        largest: Characters that it may have; None for a text whose length was checked before.

    Raises:
        ValueError: It is not JSON, is too long, or has a constant that only Python accepts (NaN, Infinity).
    """
    if largest is not None and len(text) > largest:
        raise ValueError(f"it has {len(text)} characters; at most {largest} are read")
    if largest is not None and _depth(text) > DEEPEST:
        raise ValueError(f"not JSON that is read here: it is nested more than {DEEPEST} levels deep")
    try:
        value: object = json.loads(
            text, parse_constant=_reject_constant, object_pairs_hook=_in_order_of_the_last
        )
    except RecursionError:
        raise ValueError("not JSON: it is nested too deeply") from None
    except (json.JSONDecodeError, _NotANumberError) as error:
        raise ValueError(f"not JSON: {error}") from None
    except ValueError:  # Python's own message for this is about Python
        raise ValueError("not JSON: a number in it has thousands of digits") from None
    return value


def _in_order_of_the_last(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the members of an object; a repeated key comes where it is last set to something."""
    members = dict(pairs)
    if len(members) != len(pairs):
        members = {}
        for name, value in pairs:
            if value is not None or name not in members:
                members.pop(name, None)
                members[name] = value
    return members


class _NotANumberError(ValueError):
    """A constant that only Python accepts as a number."""


def _depth(text: str) -> int:
    """Return the levels of nesting; 0 if a count of brackets shows that the text cannot be too deep."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return 0
    depth = deepest = 0
    for piece in _NESTING.findall(text):
        if piece in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif piece in "]}":
            depth -= 1
    return deepest


def _reject_constant(name: str) -> object:
    raise _NotANumberError(f"{name} is not a number")


class Fields:
    """The members of a JSON object. Every method raises ValueError for a member of another kind."""

    def __init__(self, raw: object, subject: str = "it") -> None:
        """Wrap the members of a parsed object; null has none.

        Raises:
            ValueError: It is something else.
        """
        if raw is not None and not isinstance(raw, dict):
            raise ValueError(f"{subject} is not a JSON object")
        self._raw: dict[str, object] = raw or {}
        self._last = {_folded(name): value for name, value in self._raw.items()}
        self._last_set = self._last
        if len(self._last) != len(self._raw):
            known = ((_folded(name), value) for name, value in self._raw.items() if value is not None)
            self._last_set = {**dict.fromkeys(self._last), **dict(known)}

    @classmethod
    def parse(cls, text: str, largest: int = LARGEST) -> Fields:
        """Read the object that a text holds.

        Args:
            text: The text.
            largest: Characters that it may have.

        Raises:
            ValueError: It is not a JSON object.
        """
        return cls(load(text, largest))

    def get(self, name: str) -> object:
        """Return the raw value of a member; None if there is none."""
        return self._last_set.get(_folded(name))

    def _pointer(self, name: str) -> object:
        """Return the raw value of a member that ``null`` removes, also after a value in another case."""
        return self._last.get(_folded(name))

    def text(self, name: str) -> str:
        """Return a string; empty if there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} is not a string")
        return value or ""

    def number(self, name: str) -> int:
        """Return a 32-bit integer; 0 if there is none."""
        value = self.get(name)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not -_INT32 <= value < _INT32:
            raise ValueError(f"{name} is not a whole number")
        return value

    def flag(self, name: str) -> bool | None:
        """Return a boolean; None if there is none."""
        value = self._pointer(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} is neither true nor false")
        return value

    def fields(self, name: str) -> Fields:
        """Return a member that is an object; an object without members if there is none."""
        return Fields(self.get(name), name)

    def objects(self, name: str) -> Iterator[Fields]:
        """Return the objects of a list; none if there is no list."""
        yield from objects(self._pointer(name), name)

    def names(self) -> list[str]:
        """Return the names of all members, as they are written.

        Raises:
            ValueError: There are more than ``MOST_ITEMS``.
        """
        return list(_checked_count(self._raw, "it"))

    def entries(self) -> dict[str, object]:
        """Return the entries of a map, whose keys count as they are written.

        Raises:
            ValueError: There are more than ``MOST_ITEMS``.
        """
        return _checked_count(self._raw, "it")

    def amounts(self, name: str) -> dict[str, str | float]:
        """Return a map of amounts as they are written; empty if there is none.

        ``amount`` reads one of them.
        """
        return amounts(self._pointer(name), name)


def _folded(name: str) -> str:
    """Return a key without its case, as Go compares keys with the names of fields, which are ASCII."""
    return name.lower().replace("\N{LATIN SMALL LETTER LONG S}", "s")


def objects(raw: object, what: str) -> Iterator[Fields]:
    """Return the objects of a JSON list; none for null.

    Raises:
        ValueError: It is not a list, or an item is not an object.
    """
    if raw is not None and not isinstance(raw, list):
        raise ValueError(f"{what} is not a list")
    for item in _checked_count(raw or (), what):
        yield Fields(item, f"an item of {what}")


def amounts(raw: object, subject: str = "it") -> dict[str, str | float]:
    """Return a map of amounts as they are written, all of them readable.

    Raises:
        ValueError: It is not an object, or a value is not an amount.
    """
    if raw is not None and not isinstance(raw, dict):
        raise ValueError(f"{subject} is not a JSON object")
    checked: dict[str, str | float] = {}
    for name, value in _checked_count(raw or {}, subject).items():
        try:
            parse_quantity("0" if value is None else value)
        except ValueError as error:
            raise ValueError(f"{subject}: {printable(name, QUOTED)}: {error}") from None
        checked[name] = "0" if value is None else value
    return checked


def _checked_count(entries: E, subject: str) -> E:
    """Return the entries after a check of their number.

    Raises:
        ValueError: There are more than ``MOST_ITEMS``.
    """
    if len(entries) > MOST_ITEMS:
        raise ValueError(f"{subject} has {len(entries)} entries; at most {MOST_ITEMS} are read")
    return entries


def amount(held: Mapping[str, str | float], name: str, *, milli: bool = False) -> int:
    """Read one amount from a map of amounts; 0 if it is missing.

    Args:
        held: A result of ``amounts``.
        name: The resource.
        milli: Count in thousandths, as CPU is counted.
    """
    return parse_quantity(held.get(name, "0"), milli=milli)
