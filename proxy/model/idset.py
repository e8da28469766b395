"""Sets of small non-negative ids, written and read as Linux lists.

A set is one Python integer (bit i is id i), so union, intersection and subset tests cost the same for 8 CPUs
and for 8192. The text form is the kernel's list format: ascending ids, runs of two or more as ``a-b``, joined
by commas; the empty set is the empty string.

An operation on such an integer costs its whole length, so a loop that shifts it once for each id is
quadratic. Sets wider than ``_NARROW`` ids are built, walked and printed through their binary digits, which is
linear.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from typing import TYPE_CHECKING, ClassVar, Self, cast

from proxy.model.quoting import printable, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NARROW = 1024
"""Up to this many ids a set is handled by shifts, whose cost is then bounded and small."""
_FEW = 64
"""Up to this many ranges are joined by shifts."""
_LONGEST = 6
"""Characters of a list for each possible id: five digits and a comma."""
_LONGEST_WRITE = 64 << 10
"""The most characters of a list that is stored as it was written."""
_SHOWN = 60
"""Characters of the machine's ids that a message shows."""


class IdSet:
    """An immutable set of ids. Use the subclasses, so that CPUs and nodes cannot be mixed."""

    __slots__ = ("_bits",)

    LIMIT: ClassVar[int] = 65536
    """Ids at or above this are rejected: no kernel has them, and a typing error must not cost memory."""
    NOUN: ClassVar[str] = "id"
    """The word for one id, in messages."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Build a set from ids.

        Args:
            ids: Non-negative integers below ``LIMIT``.

        Raises:
            ValueError: An id is negative or too large.
        """
        bits = 0
        high: list[int] = []
        for i in ids:
            if 0 <= i < _NARROW:
                bits |= 1 << i
            elif 0 <= i < self.LIMIT:
                high.append(i)
            else:
                raise ValueError(f"id {i} is outside 0-{self.LIMIT - 1}")
        self._bits = bits | _joined([(i, i) for i in high]) if high else bits

    @classmethod
    def from_bits(cls, bits: int) -> Self:
        """Build a set from an integer whose bit i is id i."""
        if bits < 0:
            raise ValueError("a bit mask cannot be negative")
        new = cls.__new__(cls)
        new._bits = bits
        return new

    @classmethod
    def union_of(cls, sets: Iterable[Self]) -> Self:
        """Build the set of the ids that are in any of some sets."""
        return cls.from_bits(union(each._bits for each in sets))

    @classmethod
    def parse(cls, text: str, within: Self | None = None) -> Self:
        """Read a Linux list such as ``0-3,8``; blanks around it and an empty text are allowed.

        The work is linear in the length of the text.

        Args:
            text: The list.
            within: The ids that exist; None for all below ``LIMIT``.

        Raises:
            ValueError: The text is not a list, a range runs backwards, an id is too large or is not among
                ``within``. The message quotes the text, truncated and escaped.
        """
        body = text.strip()
        if not body:
            return cls.from_bits(0)
        if len(body) > _LONGEST * cls.LIMIT:
            raise ValueError(f"a list of {len(body)} characters is too long")
        limit = cls.LIMIT if within is None else min(cls.LIMIT, within._bits.bit_length())
        bits = 0
        wide: list[tuple[int, int]] = []
        for part in body.split(","):
            low_text, dash, high_text = part.partition("-")
            low = cls._number(low_text, text)
            high = cls._number(high_text, text) if dash else low
            if high < low:
                raise ValueError(f"range {quoted(part)} in {quoted(text)} runs backwards")
            if high >= limit:
                if within is not None:
                    within.require(high)
                raise ValueError(f"id {high} in {quoted(text)} is outside 0-{cls.LIMIT - 1}")
            if high < _NARROW:
                bits |= ((1 << (high - low + 1)) - 1) << low
            else:
                wide.append((low, high))
        if wide:
            bits |= _joined(wide)
        if within is not None and bits & ~within._bits:
            within.require(cls.from_bits(bits & ~within._bits).first())
        return cls.from_bits(bits)

    @staticmethod
    def _number(part: str, text: str) -> int:
        if not (part.isascii() and part.isdigit() and len(part) < 10):
            raise ValueError(f"{quoted(text)} is not a list of ids such as '0-3,8'")
        return int(part)

    # A property without a function in Python: each decision reads it many times.
    bits = cast(
        "int",
        property(operator.attrgetter("_bits"), doc="The set as an integer whose bit i is id i."),
    )

    def __str__(self) -> str:
        parts: list[str] = []
        bits, base = self._bits, 0
        if bits.bit_length() > _NARROW:
            for match in re.finditer("1+", _digits(bits)):
                low, end = match.span()
                parts.append(str(low) if end - low == 1 else f"{low}-{end - 1}")
            return ",".join(parts)
        while bits:
            skip = (bits & -bits).bit_length() - 1
            bits >>= skip
            base += skip
            run = (~bits & (bits + 1)).bit_length() - 1
            parts.append(str(base) if run == 1 else f"{base}-{base + run - 1}")
            bits >>= run
            base += run
        return ",".join(parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        bits, base = self._bits, 0
        if bits.bit_length() > _NARROW:
            yield from (i for i, digit in enumerate(_digits(bits)) if digit == "1")
            return
        while bits:
            skip = (bits & -bits).bit_length()
            base += skip
            bits >>= skip
            yield base - 1

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __bool__(self) -> bool:
        return self._bits != 0

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and item >= 0 and bool(self._bits >> item & 1)

    def __hash__(self) -> int:
        return hash(self._bits)

    def __eq__(self, other: object) -> bool:
        return self._bits == other._bits if isinstance(other, type(self)) else NotImplemented

    def __le__(self, other: Self) -> bool:
        return self._bits & ~other._bits == 0

    def __lt__(self, other: Self) -> bool:
        return self._bits != other._bits and self <= other

    def __or__(self, other: Self) -> Self:
        return self.from_bits(self._bits | other._bits)

    def __and__(self, other: Self) -> Self:
        return self.from_bits(self._bits & other._bits)

    def __sub__(self, other: Self) -> Self:
        return self.from_bits(self._bits & ~other._bits)

    def isdisjoint(self, other: Self) -> bool:
        """Return whether the two sets have no id in common."""
        return self._bits & other._bits == 0

    def require(self, item: int) -> None:
        """Check that an id is one of the machine's, which this set holds.

        Raises:
            ValueError: The machine does not have the id; the message names those that it has.
        """
        if item not in self:
            raise ValueError(f"{self.NOUN} {item} is not on this machine ({printable(str(self), _SHOWN)})")

    def first(self) -> int:
        """Return the lowest id.

        Raises:
            ValueError: The set is empty.
        """
        if not self._bits:
            raise ValueError("an empty set has no first id")
        return (self._bits & -self._bits).bit_length() - 1


def _digits(bits: int) -> str:
    """Return the bits as digits, that of id 0 first."""
    return bin(bits)[:1:-1]


def _joined(runs: Sequence[tuple[int, int]]) -> int:
    """Join ranges, each given by its first and its last id, in linear time."""
    if len(runs) <= _FEW:
        return union(((1 << (high - low + 1)) - 1) << low for low, high in runs)
    steps = [0] * (max(high for _, high in runs) + 2)
    for low, high in runs:
        steps[low] += 1
        steps[high + 1] -= 1
    digits = ["1" if depth else "0" for depth in itertools.accumulate(steps)]
    return int("".join(reversed(digits)), 2)


def plausible(text: str) -> str:
    """Return a list of ids verbatim; an empty text if no kernel would accept it.

    The kernel reads 100 characters and 6 for each CPU that it was built for, at most 8192
    (``max_write_len`` of ``cpuset.cpus``).
    """
    return text if len(text) <= _LONGEST_WRITE and text.isascii() else ""


def union(masks: Iterable[int]) -> int:
    """Join sets that are given as bits."""
    return functools.reduce(operator.or_, masks, 0)


class CpuSet(IdSet):
    """A set of CPUs (logical processors, kernel ids)."""

    __slots__ = ()
    NOUN: ClassVar[str] = "CPU"


class Mask(IdSet):
    """A set of NUMA node ids."""

    __slots__ = ()
    NOUN: ClassVar[str] = "NUMA node"
