"""To which containers and sandboxes something has happened since when.

A list of the runtime is old when it arrives: it says nothing about containers to which something has happened
since it was asked for. So the side that asks notes the number of the newest change first, and passes over
all ids with a later one. Ids that are gone are remembered, too: a list from before does not bring them back.

Only the newest changes are remembered, in two maps of which the older one is dropped when the newer one is
full. A list that is older than the changes that are remembered says nothing about any container.
"""

from __future__ import annotations

from typing import NamedTuple

from proxy.model.persistent_map import PersistentMap

REMEMBERED_CHANGES = 2048
"""At least so many changes are remembered; no list is so old."""
_NO_CHANGES: PersistentMap[int] = PersistentMap()


class ChangeSequence(NamedTuple):
    """What has happened lately, by id.

    Attributes:
        number: The number of the newest change.
        recent: The newest changes' numbers, by id.
        older: The numbers of the changes before them.
        recent_since, older_since: The number of the newest change before each of the two.
    """

    number: int = 0
    recent: PersistentMap[int] = _NO_CHANGES
    older: PersistentMap[int] = _NO_CHANGES
    recent_since: int = 0
    older_since: int = 0

    def touched(self, some_id: str) -> ChangeSequence:
        """Return the sequence after something has happened to a container or a sandbox; it may be gone."""
        number, recent, older, recent_since, older_since = self
        if len(recent) >= REMEMBERED_CHANGES:
            recent, older, recent_since, older_since = _NO_CHANGES, recent, number, recent_since
        return ChangeSequence(number + 1, recent.put(some_id, number + 1), older, recent_since, older_since)

    def forgotten(self, some_id: str) -> ChangeSequence:
        """Return the sequence without an id: a list shows that it is not gone after all."""
        return self._replace(recent=self.recent.drop(some_id), older=self.older.drop(some_id))

    def is_unchanged(self, some_id: str, since: int) -> bool:
        """Return whether nothing has happened to an id since the newest change had a number."""
        if since < self.older_since:
            return False  # what happened then is not remembered
        return max(self.recent.get(some_id, 0) or 0, self.older.get(some_id, 0) or 0) <= since
