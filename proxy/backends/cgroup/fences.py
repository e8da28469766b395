"""Write the CPU lists of groups above containers on cgroup v2, without changes.

On v2 a list outside of the parent's list has no effect, and the lists of groups below need not fit. So only
the one file is written. The list of a group with processes in it or below it cannot be emptied again
(ENOSPC).
"""

from __future__ import annotations

import errno
from pathlib import Path

from proxy.backends.cgroup.files import OsCgroupFiles, cause_of_errno
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet

_FILE = "cpuset.cpus"


class KernelFences:
    """Implements ``proxy.executor.systemd.ports.Fences``."""

    def __init__(self, root: Path) -> None:
        """Set the root of the hierarchy."""
        self._files = OsCgroupFiles(root)

    def replace_cpus(self, path: str, cpus: CpuSet) -> CpuSet:
        """Write a list and return the previous one; see ``Fences``."""
        if not path.strip("/") or not cpus:
            raise CgroupError(f"cannot set CPUs of cgroup /{path} to {str(cpus) or 'none'}", errno.EINVAL)
        try:
            before = CpuSet.parse(self._files.read(path, _FILE).strip())
            if before != cpus:
                self._files.write(path, _FILE, f"{cpus}\n")
        except OSError as error:
            number = error.errno or 0
            raise CgroupError(
                f"cannot set CPUs to {cpus} in cgroup /{path}: {cause_of_errno(number)}",
                errno.ENOENT if number in GONE else number,
            ) from None
        except ValueError as error:
            raise CgroupError(f"cannot read CPUs of cgroup /{path}: {error}") from None
        return before
