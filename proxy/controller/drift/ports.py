"""What the controller needs of the kernel to notice writes of other programs, beside ``kernel_ports``."""

from __future__ import annotations

from typing import Protocol


class Writes(Protocol):
    """Reports when any program, also ours, writes a group's cpuset. Paths are as in ``Cgroups``.

    ``watch`` is called in the kernel's worker, the rest on the loop; none of it waits.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to take."""

    def watch(self, path: str) -> bool:
        """Watch a group from now on; one that is watched stays so, unless it is another one of that name.

        Returns:
            False where it is not there.

        Raises:
            CgroupError: It cannot be watched (too many are); the next may be refused too.
        """

    def unwatch(self, path: str) -> None:
        """Stop watching a group, also one that is gone."""

    def watched(self) -> set[str]:
        """Return the groups that are watched."""

    def taken(self) -> set[str] | None:
        """Take what was reported since the last time: the groups that were written.

        Returns:
            None where more was reported than could wait: anything may have been written.
        """

    def close(self) -> None:
        """Stop watching everything."""
