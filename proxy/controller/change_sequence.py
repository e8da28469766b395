"""Who has had something happen to him since when. Pure.

A list of the runtime's is old when it arrives: it says nothing about those to whom something has happened
since it was asked for. So whoever asks takes the number of the newest happening first, and then passes over
all who have a later one. Those who have gone are remembered too, the newest of them: a list from before does
not bring them back.
"""

from __future__ import annotations

from collections import OrderedDict

LEFT_LIMIT = 2048
"""So many of those who have gone are remembered; no list is so old."""


class ChangeSequence:
    """Happenings by id, of containers and of sandboxes.

    Attributes:
        number: The newest one's.
    """

    def __init__(self) -> None:
        self.number = 0
        self._touched: dict[str, int] = {}
        self._left: OrderedDict[str, int] = OrderedDict()

    def touch(self, some_id: str) -> None:
        """Something happened to somebody."""
        self.number += 1
        self._touched[some_id] = self.number

    def left(self, some_id: str) -> None:
        """Somebody, known or not, has gone."""
        self.number += 1
        self._touched.pop(some_id, None)
        self._left[some_id] = self.number
        self._left.move_to_end(some_id)
        if len(self._left) > LEFT_LIMIT:
            self._left.popitem(last=False)

    def forget(self, some_id: str) -> None:
        """Somebody has not gone after all: a list tells."""
        self._left.pop(some_id, None)

    def none(self, some_id: str, since: int) -> bool:
        """Tell whether nothing happened to somebody since the newest happening had a number."""
        return max(self._touched.get(some_id, 0), self._left.get(some_id, 0)) <= since
