"""Adjust the groups above and below a group that is written: on cgroup v1 each must lie within its parent.

The kernel refuses a list into which the list of a child does not fit (EBUSY), and a list that does not fit
into the parent's list (EACCES). So lists grow from the top and shrink from the bottom. On v2 no list is
refused, and the effective list is decisive.

* Above (kubelet's groups of pods and QoS classes, or any other groups): ancestors that are too narrow are
  widened, from the top: the needed ids are added to their list. Ancestors are never narrowed.
* Below (a runtime or an init system in a container makes its own groups): on v1 such a new group copies its
  parent's list and keeps it. When the container's group shrinks, groups below keep the ids that remain of
  their list, or get the whole new list if none remains. When it grows, groups that had the whole list of the
  container get the whole new list. A group that had less keeps its list. On v2 the kernel does all of this.

Both directions are bounded. A group that is created during the work is seen in the next round. If the group
cannot be narrowed in the end, it and the groups below it get their previous lists back.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence

from msgspec import Struct

from proxy.model.errors import CgroupError
from proxy.model.idset import IdSet

DEPTH_LIMIT = 8
"""The depth of groups below a container that are adjusted; deeper ones are left as they are."""
GROUPS_LIMIT = 1024
ROUNDS_LIMIT = 3


class NestedLists(Struct, frozen=True):
    """Access to one of the two lists of all groups of a tree; calls raise CgroupError if the kernel refuses.

    Attributes:
        read: Reads a group's list.
        write: Writes a group's list, without adjusting other groups.
        children: Returns the paths of the groups directly below.
        version: 1 or 2.
    """

    read: Callable[[str], IdSet]
    write: Callable[[str, IdSet], None]
    children: Callable[[str], Sequence[str]]
    version: int


def widen_above(lists: NestedLists, path: str, value: IdSet) -> bool:
    """Add a value to the lists of a group's ancestors, from the top; return True if one was written."""
    widened = False
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts)):
        ancestor = "/".join(parts[:depth])
        held = lists.read(ancestor)
        # An empty list means "as the parent" on v2, and "cannot be used" on v1.
        if not value <= held and (held or lists.version == 1):
            lists.write(ancestor, held | value)
            widened = True
    return widened


def write_narrowing_below(lists: NestedLists, path: str, value: IdSet, refusal: CgroupError) -> None:
    """Write a list into which groups below do not fit (v1): narrow them first. If it fails, undo all of it.

    Args:
        lists: Access to the lists.
        path: The group.
        value: The ids that the group should have.
        refusal: The error with which the kernel refused the write; raised again if no group below prevents
            the write.
    """
    work = _Narrowing(lists)
    try:
        for _ in range(ROUNDS_LIMIT):
            try:
                work.narrow(path, value, 0, refusal)
            except CgroupError as error:
                if error.errno != errno.EBUSY or error is refusal:
                    raise
                refusal = error  # a group was created during the work
            else:
                return
        raise refusal
    except CgroupError:
        work.restore()
        raise


class _Narrowing:
    """Narrows a group and the groups below it, and remembers their previous lists."""

    def __init__(self, lists: NestedLists) -> None:
        self._lists = lists
        self._remaining = GROUPS_LIMIT
        self._written: list[tuple[str, IdSet, IdSet]] = []

    def narrow(self, path: str, value: IdSet, depth: int, refusal: CgroupError) -> None:
        lists = self._lists
        below = lists.children(path)
        self._remaining -= len(below)
        if not below or depth >= DEPTH_LIMIT or self._remaining < 0:
            raise refusal
        held = lists.read(path)
        if not value <= held:
            widen_above(lists, path, value)
            self._put(path, held, held | value)  # groups below need both old and new ids while they change
        for child in below:
            try:
                has = lists.read(child)
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
                    raise  # after ENOENT, which means that the child is gone, continue
        self._put(path, held | value, value)

    def _put(self, path: str, had: IdSet, value: IdSet) -> None:
        self._lists.write(path, value)
        self._written.append((path, had, value))

    def restore(self) -> None:
        """Restore the lists that were changed, the last one first, so that each fits into its parent.

        A group that has another list by now was changed by another writer, and is left as it is. A group
        whose write is refused is left too.
        """
        for path, had, value in reversed(self._written):
            with contextlib.suppress(CgroupError):
                if self._lists.read(path) == value:
                    self._lists.write(path, had)


def widen_below(lists: NestedLists, path: str, before: IdSet, value: IdSet) -> None:
    """After a group's list has grown, widen the groups below that had the whole previous list (v1).

    If a write is refused, that group is left as it is: nothing depends on it.
    """
    level = [path]
    budget = GROUPS_LIMIT
    for _ in range(DEPTH_LIMIT):
        widened: list[str] = []
        for above in level:
            for child in lists.children(above):
                budget -= 1
                with contextlib.suppress(CgroupError):
                    if budget >= 0 and lists.read(child) == before:
                        lists.write(child, value)
                        widened.append(child)
        if not widened:
            return
        level = widened
