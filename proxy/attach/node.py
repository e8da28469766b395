"""The node whose kubelet is attached or detached: its directories, and how to reach its daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.backends.kubelet.cri_endpoint import KubeletFiles, kubelet_files, running_flags

RESCUE = "rescue-detach"
"""The script in the state directory that undoes an attach without Python."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class AttachNode:
    """The node.

    Attributes:
        root: The directory that stands for ``/`` in the paths of kubelet and systemd.
        state: topoproxy's state directory.
        directory: kubelet's directory, without ``root``.
        procfs: The directory that stands for /proc.
        listen: The socket that kubelet should use.
        query: Queries the daemon: the route, and whether it is an action.
        report_progress: Takes messages.
    """

    root: Path
    state: Path
    directory: Path
    procfs: Path
    listen: Path
    query: Callable[[str, bool], Mapping[str, object]]
    report_progress: Callable[[str], None]

    @property
    def endpoint(self) -> str:
        """The endpoint that kubelet should use."""
        return f"unix://{self.listen}"

    def files(self) -> KubeletFiles:
        """Find the files that decide on kubelet's endpoint."""
        directory = self.root / self.directory.relative_to("/")
        return kubelet_files(directory, running_flags(self.procfs), self.root)
