"""Detect that no client is connected although pods run: kubelet then uses another endpoint.

Such a node looks installed but is only half managed: pods are found when the state is reconciled with the
runtime, and get their CPUs late. Decisions that only a CreateContainer can carry are never made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from proxy.frontends.cri.acceptor import Acceptor
from proxy.telemetry.port import Telemetry

NO_CLIENT = "no client is connected, although pods run on the node"
REPORT_AFTER_S = 60.0
"""After this many seconds without a client a problem is reported: kubelet reconnects within a few."""
PERIOD_S = 5.0
LIKELY_CAUSE = (
    "kubelet probably uses another endpoint: the flag --container-runtime-endpoint, which kubeadm writes to "
    "/var/lib/kubelet/kubeadm-flags.env, overrides config.yaml"
)


class ClientWatch:
    """Reports that no client is connected."""

    def __init__(
        self,
        acceptor: Acceptor,
        telemetry: Telemetry,
        pods: Callable[[], int],
        other_endpoints: Callable[[], Sequence[tuple[Path, str]]],
        clock: Callable[[], float],
    ) -> None:
        """Report nothing yet.

        Args:
            acceptor: Accepts the clients.
            telemetry: Where to report.
            pods: Returns how many pods are known.
            other_endpoints: Returns the files that direct kubelet to another endpoint, with that endpoint;
                may block.
            clock: A monotonic clock in seconds.
        """
        self._acceptor = acceptor
        self._telemetry = telemetry
        self._pods = pods
        self._other_endpoints = other_endpoints
        self._clock = clock
        self._since: float | None = None
        self._reported = False

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(PERIOD_S)

    def _lacks_client(self) -> bool:
        return not self._acceptor.connections and self._pods() > 0

    async def check(self) -> None:
        """Report if there has been no client for too long, and the end of that state."""
        if not self._lacks_client():
            self._since = None
            if self._reported:
                self._reported = False
                self._telemetry.resolved(NO_CLIENT)
            return
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since >= REPORT_AFTER_S and not self._reported:
            endpoints = await asyncio.to_thread(self._other_endpoints)
            if not self._lacks_client():
                return  # a client has connected in the meantime
            named = [f"{path} names {endpoint}" for path, endpoint in endpoints]
            self._reported = True
            self._telemetry.problem(NO_CLIENT, reason="; ".join(named) or LIKELY_CAUSE)
