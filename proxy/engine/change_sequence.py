"""The order of changes: which containers and sandboxes have changed since a given number.

A list of the runtime is old when it arrives: it says nothing about containers to which something has happened
since it was requested. So the caller notes the number of the newest change first, and passes over
all ids with a later one. Ids that are gone are remembered, too: a list from before does not bring them back.

Changes are many and questions are few, and a question concerns the newest changes alone: so they are linked,
each to the one before it. Only the newest are remembered, in two links of which the older one is dropped when
the newer one is long. A list that is older than the changes that are remembered says nothing about any
container.
"""

from __future__ import annotations

from msgspec import Struct, structs

REMEMBERED_CHANGES = 2048
"""At least this many changes are remembered; no list is so old."""


class _Link(Struct, frozen=True, eq=False):
    """One change.

    Attributes:
        number: Its number.
        some_id: The id of what has changed.
        before: The change before it.
    """

    number: int
    some_id: str
    before: _Link | None

    def __repr__(self) -> str:
        return f"{self.some_id} and {self.number - 1} before it"


class ChangeSequence(Struct, frozen=True):
    """What has happened lately.

    Attributes:
        number: The number of the newest change.
        recent: The newest changes.
        older: The changes before them.
        recent_since, older_since: The number of the newest change before each of the two.
    """

    number: int = 0
    recent: _Link | None = None
    older: _Link | None = None
    recent_since: int = 0
    older_since: int = 0

    def touched(self, some_id: str) -> ChangeSequence:
        """Return the sequence after something has happened to a container or a sandbox; it may be gone."""
        before, now = self.number, self.number + 1
        if before - self.recent_since >= REMEMBERED_CHANGES:
            return ChangeSequence(now, _Link(now, some_id, None), self.recent, before, self.recent_since)
        link = _Link(now, some_id, self.recent)
        return ChangeSequence(now, link, self.older, self.recent_since, self.older_since)

    def forgotten(self, some_id: str) -> ChangeSequence:
        """Return the sequence without an id: a list shows that it is not gone after all."""
        recent, older = _without(self.recent, some_id), _without(self.older, some_id)
        return structs.replace(self, recent=recent, older=older)

    def is_unchanged(self, some_id: str, since: int) -> bool:
        """Return whether nothing has happened to an id since the newest change had a number."""
        if since < self.older_since:
            return False  # what happened then is not remembered
        for link in (self.recent, self.older):
            while link is not None and link.number > since:
                if link.some_id == some_id:
                    return False
                link = link.before
        return True


def _without(link: _Link | None, some_id: str) -> _Link | None:
    """Return changes without those of an id."""
    kept = list[_Link]()
    while link is not None:
        if link.some_id != some_id:
            kept.append(link)
        link = link.before
    left: _Link | None = None
    for each in reversed(kept):
        left = _Link(each.number, each.some_id, left)
    return left
