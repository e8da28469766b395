"""Sets of small non-negative ids, written and read as Linux lists.

A set is one Python integer (bit i stands for id i), so union, intersection and
subset tests cost the same for 8 CPUs and for 8192. The text form is the
kernel's list format: ascending ids, runs of two or more as ``a-b``, joined by
commas; the empty set is the empty string.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class IdSet:
    """An immutable set of ids. Use the subclasses, so that CPUs and nodes cannot be mixed."""

    __slots__ = ("_bits",)

    LIMIT: ClassVar[int] = 65536
    """Ids at or above this are refused: no kernel has them, and a typing error must not cost memory."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Build a set from ids.

        Args:
            ids: Non-negative integers below ``LIMIT``.

        Raises:
            ValueError: An id is negative or too large.
        """
        bits = 0
        for i in ids:
            if not 0 <= i < self.LIMIT:
                raise ValueError(f"id {i} is outside 0-{self.LIMIT - 1}")
            bits |= 1 << i
        self._bits = bits

    @classmethod
    def from_bits(cls, bits: int) -> Self:
        """Build a set from an integer whose bit i stands for id i."""
        if bits < 0:
            raise ValueError("a bit mask cannot be negative")
        new = cls.__new__(cls)
        new._bits = bits
        return new

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a Linux list such as ``0-3,8``; blanks around it and an empty text are allowed.

        Raises:
            ValueError: The text is not a list, a range runs backwards, or an id is too large.
        """
        bits = 0
        body = text.strip()
        if not body:
            return cls.from_bits(0)
        for part in body.split(","):
            low_text, dash, high_text = part.partition("-")
            low = cls._number(low_text, text)
            high = cls._number(high_text, text) if dash else low
            if high < low:
                raise ValueError(f"range {part!r} in {text!r} runs backwards")
            if high >= cls.LIMIT:
                raise ValueError(f"id {high} in {text!r} is outside 0-{cls.LIMIT - 1}")
            bits |= ((1 << (high - low + 1)) - 1) << low
        return cls.from_bits(bits)

    @staticmethod
    def _number(part: str, text: str) -> int:
        if not (part.isascii() and part.isdigit() and len(part) < 10):
            raise ValueError(f"{text!r} is not a list of ids such as '0-3,8'")
        return int(part)

    @property
    def bits(self) -> int:
        """The set as an integer whose bit i stands for id i."""
        return self._bits

    def __str__(self) -> str:
        parts: list[str] = []
        bits, base = self._bits, 0
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
        """Tell whether the two sets have no id in common."""
        return self._bits & other._bits == 0

    def first(self) -> int:
        """Give the lowest id.

        Raises:
            ValueError: The set is empty.
        """
        if not self._bits:
            raise ValueError("an empty set has no first id")
        return (self._bits & -self._bits).bit_length() - 1


def union(masks: Iterable[int]) -> int:
    """Join sets that are given as bits."""
    return functools.reduce(operator.or_, masks, 0)


class CpuSet(IdSet):
    """A set of CPUs (logical processors, kernel ids)."""

    __slots__ = ()


class Mask(IdSet):
    """A set of NUMA node ids."""

    __slots__ = ()
