"""Adjust groups above and below the one that is written: on cgroup v1 each must lie within its parent.

Theory. The kernel refuses a list that one of the group's children does not fit into (EBUSY), and one that
does not fit into the parent's (EACCES); so sets grow from the top and shrink from the bottom. On v2 nothing
is refused, and what counts is the effective list.

* Above (kubelet's groups of pods and classes, or whatever else lies there): ancestors that are too narrow are
  widened, from the top, to what they have and what is needed. They are never narrowed.
* Below (a runtime or an init system in a container makes groups of its own): on v1 a new group of this kind
  copies its parent's list, and it keeps that. When the container's group shrinks, groups below keep what is
  left of theirs, or get all of the new set where nothing is; when it grows, groups that had the
  whole list of the container get the whole list again. A group that had less keeps what it has. On v2 the
  kernel does all of that.

Both directions are bounded; a group that is created meanwhile is seen in the next round. When the group
cannot be narrowed in the end, it and those below it get back what they had.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence

from msgspec import Struct

from proxy.model.errors import CgroupError
from proxy.model.idset import IdSet

DEPTH = 8
"""The depth of groups below a container that are adjusted; deeper ones are left as they are."""
GROUPS = 1024
ROUNDS = 3


class NestedLists(Struct, frozen=True):
    """One of the two lists of all groups of a tree; every call raises CgroupError as the kernel refuses.

    Attributes:
        held: Reads a group's list.
        put: Writes it, as it is.
        children: Paths of the groups right below.
        version: 1 or 2.
    """

    held: Callable[[str], IdSet]
    put: Callable[[str, IdSet], None]
    children: Callable[[str], Sequence[str]]
    version: int


def widen(lists: NestedLists, path: str, value: IdSet) -> bool:
    """Make the ancestors of a group hold a value, from the top; True when one was written."""
    widened = False
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts)):
        ancestor = "/".join(parts[:depth])
        held = lists.held(ancestor)
        # An empty list means "as the parent" on v2, and "cannot be used" on v1.
        if not value <= held and (held or lists.version == 1):
            lists.put(ancestor, held | value)
            widened = True
    return widened


def narrow(lists: NestedLists, path: str, value: IdSet, refusal: CgroupError) -> None:
    """Write a list that groups below do not fit into: after theirs (v1). All of it is done, or nothing.

    Args:
        lists: Where.
        path: The group.
        value: The ids that it should hold.
        refusal: The error with which the kernel refused the write; raised again where no group below prevents
            the write.
    """
    work = _Narrowing(lists)
    try:
        for _ in range(ROUNDS):
            try:
                work.narrow(path, value, 0, refusal)
            except CgroupError as error:
                if error.errno != errno.EBUSY or error is refusal:
                    raise
                refusal = error  # a group came while we were at it
            else:
                return
        raise refusal
    except CgroupError:
        work.put_back()
        raise


class _Narrowing:
    """Narrows a group and those below it, and remembers what they had."""

    def __init__(self, lists: NestedLists) -> None:
        self._lists = lists
        self._remaining = GROUPS
        self._written: list[tuple[str, IdSet, IdSet]] = []

    def narrow(self, path: str, value: IdSet, depth: int, refusal: CgroupError) -> None:
        lists = self._lists
        below = lists.children(path)
        self._remaining -= len(below)
        if not below or depth >= DEPTH or self._remaining < 0:
            raise refusal
        held = lists.held(path)
        if not value <= held:
            widen(lists, path, value)
            self._put(path, held, held | value)  # so that those below can go over before the rest goes
        for child in below:
            try:
                has = lists.held(child)
                if has <= value:
                    continue
                want = value if has == held else has & value or value
                try:
                    self._put(child, has, want)
                except CgroupError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    self.narrow(child, want, depth + 1, error)
            except CgroupError as error:
                if error.errno != errno.ENOENT:
                    raise  # else it has just gone
        self._put(path, held | value, value)

    def _put(self, path: str, had: IdSet, value: IdSet) -> None:
        self._lists.put(path, value)
        self._written.append((path, had, value))

    def put_back(self) -> None:
        """Restore the lists that were changed, the last one first: so each fits where it was.

        A group with another list by now was changed by another writer, and is left, as is one that refuses.
        """
        for path, had, value in reversed(self._written):
            with contextlib.suppress(CgroupError):
                if self._lists.held(path) == value:
                    self._lists.put(path, had)


def follow(lists: NestedLists, path: str, before: IdSet, value: IdSet) -> None:
    """Widen the groups below that had all of a group's list, after that list has grown (v1).

    A group that refuses is left: nothing depends on it.
    """
    level = [path]
    budget = GROUPS
    for _ in range(DEPTH):
        widened: list[str] = []
        for above in level:
            for child in lists.children(above):
                budget -= 1
                with contextlib.suppress(CgroupError):
                    if budget >= 0 and lists.held(child) == before:
                        lists.put(child, value)
                        widened.append(child)
        if not widened:
            return
        level = widened
