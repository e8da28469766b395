"""Maps and lists of a message that become plain values when a hook reads them.

Most hooks read two or three fields of a request that has a hundred. So a fact holds the message and a
function that reads its part. The first access makes a dict or a tuple of the part, and drops the message.

Hooks read from several threads, and an exception may end the thread of a hook that hangs at any point. So
there is no lock, which such a thread could hold for ever: two first reads at the same time read the part
twice and get equal values. A message from which facts are read is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar, overload

from proxy.hooks.readonly import CANNOT_CHANGE

_T = TypeVar("_T")
_V = TypeVar("_V")
_Values = TypeVar("_Values", bound=Collection[Any])


class _Lazy(Generic[_Values]):
    """A collection that is read at the first access."""

    __slots__ = ("_load", "_origin", "_values")

    def __init__(self, load: Callable[[Any], _Values], origin: object) -> None:
        """Make a collection that is not read yet.

        Args:
            load: Makes the values of ``origin``, a new dict or a tuple; equal ones each time.
            origin: The object to read from.
        """
        self._values: _Values | None = None
        self._load = load
        self._origin: object = origin

    def _all(self) -> _Values:
        values = self._values
        if values is None:
            # Another thread may have read it in the meantime, and dropped the origin: check the values again.
            origin = self._origin
            if (values := self._values) is None:
                values = self._values = self._load(origin)
                self._origin = None
        return values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __contains__(self, item: object) -> bool:
        return item in self._all()

    def __eq__(self, other: object) -> bool:
        entries = self._all()
        return entries == (other._all() if isinstance(other, type(self)) else other)

    def __repr__(self) -> str:
        return repr(self._all())


class LazyMap(_Lazy[dict[str, _V]], Mapping[str, _V]):
    """A map of texts that is read at the first access; it compares and prints as a dict."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # as a dict

    def __getitem__(self, key: str) -> _V:
        return self._all()[key]

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError(CANNOT_CHANGE)

    def __delitem__(self, key: object) -> NoReturn:
        raise TypeError(CANNOT_CHANGE)

    def __reduce__(self) -> tuple[type, tuple[dict[str, _V]]]:
        return dict, (self._all(),)  # copies and pickles are plain


class LazyList(_Lazy[tuple[_T, ...]], Sequence[_T]):
    """A list that is read at the first access; it compares, hashes and prints as a tuple."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[_T, ...]: ...

    def __getitem__(self, index: int | slice) -> _T | tuple[_T, ...]:
        return self._all()[index]

    def __hash__(self) -> int:
        return hash(self._all())

    def __reduce__(self) -> tuple[type, tuple[tuple[_T, ...]]]:
        return tuple, (self._all(),)
