"""Detects that kubelet's files name another endpoint than the one that ``topoproxy attach`` set.

An upgrade of kubeadm writes kubelet's files again. The running kubelet keeps its connections; after its next
start its calls bypass topoproxy. On a node without the journal of an attach nothing is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from proxy.attach.state_file import attached_endpoint
from proxy.backends.kubelet.cri_endpoint import DEFAULT_ENDPOINT, kubelet_files
from proxy.telemetry.port import Telemetry

RESET = "kubelet will bypass topoproxy after its next start (topoproxy attach sets its endpoint again)"
PERIOD_S = 60.0


class AttachedKubelet(Struct, frozen=True):
    """An attach and its current state.

    Attributes:
        endpoint: The endpoint that was set.
        reset: The place that names another endpoint; empty while kubelet's next start uses the endpoint.
    """

    endpoint: str
    reset: str


def attached_kubelet(state: Path, directory: Path, root: Path = Path("/")) -> AttachedKubelet | None:
    """Check kubelet's files against the journal; None on a node that is not attached; blocks on the disk.

    Args:
        state: topoproxy's state directory.
        directory: kubelet's directory, usually ``/var/lib/kubelet``; below ``root`` already.
        root: The directory that stands for ``/``.
    """
    endpoint = attached_endpoint(state)
    if not endpoint:
        return None
    files = kubelet_files(directory, None, root)
    value = files.effective
    if value is None:
        return AttachedKubelet(
            endpoint, f"no file names an endpoint, and kubelet's default is {files.default}"
        )
    return AttachedKubelet(
        endpoint, "" if value.text == endpoint else f"{value.path} names {value.text or DEFAULT_ENDPOINT}"
    )


class EndpointWatch:
    """Checks once a minute, in a worker thread.

    Attributes:
        found: The result of the last check; None if kubelet is not attached.
    """

    def __init__(self, telemetry: Telemetry, check: Callable[[], AttachedKubelet | None]) -> None:
        """Prepare the watch; nothing is read yet.

        Args:
            telemetry: Where to report.
            check: ``attached_kubelet`` of the node.
        """
        self._telemetry = telemetry
        self._check_files = check
        self.found: AttachedKubelet | None = None

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(PERIOD_S)

    async def check(self) -> None:
        """Report that the endpoint was reset, or that this problem is over."""
        before, self.found = self.found, await asyncio.to_thread(self._check_files)
        was, reset = (each.reset if each is not None else "" for each in (before, self.found))
        if was and was != reset:
            self._telemetry.resolved(RESET)
        if reset and was != reset:
            self._telemetry.problem(RESET, reason=reset)

    def page(self) -> dict[str, object]:
        """Return the part of the status about the attach."""
        return {} if self.found is None else {"endpoint": self.found.endpoint, "reset": self.found.reset}
