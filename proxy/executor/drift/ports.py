"""What the executor needs from the kernel to notice writes of other programs, besides ``kernel_ports``."""

from __future__ import annotations

from typing import Protocol


class WriteEvents(Protocol):
    """Reports when any program, including this one, writes a group's cpuset. Paths are as in ``Cgroups``.

    ``watch`` is called in the kernel worker, the other methods on the event loop; none of them blocks.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are reports to take."""

    def watch(self, path: str) -> bool:
        """Watch a group from now on; a watched one stays watched unless another of its name replaced it.

        Returns:
            False where the group does not exist.

        Raises:
            CgroupError: It cannot be watched (too many are); the next may be refused too.
        """

    def unwatch(self, path: str) -> None:
        """Stop watching a group, also one that is gone."""

    def watched(self) -> set[str]:
        """Return the groups that are watched."""

    def taken(self) -> set[str] | None:
        """Take the reports since the last time: the groups that were written.

        Returns:
            None where the queue of reports overflowed: any group may have been written.
        """

    def close(self) -> None:
        """Stop watching everything."""
