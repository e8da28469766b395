"""A daemon that accepts requests and does not answer counts as unreachable as soon as one that is down."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from proxy import logs
from proxy.agent.daemon_client import DaemonClient
from proxy.agent.node_follower import CHANGES_WAIT_S, SILENT_S, NodeFollower
from proxy.model.errors import TopoproxyError, UnavailableError
from tests.agent.objects.test_objects import PAGE
from tests.testkit.simulated_clock import run_simulated


class HangingDaemon:
    """Answers until it hangs, or is down."""

    def __init__(self) -> None:
        self.hangs = self.down = False

    async def query(
        self, route: str, params: Mapping[str, str] | None = None, *, timeout: float = 5.0, act: bool = False
    ) -> object:
        if self.down:
            raise UnavailableError("connection refused")
        if self.hangs:
            await asyncio.sleep(timeout)
            raise UnavailableError("no answer")
        if route == "/changes":
            await asyncio.sleep(CHANGES_WAIT_S)
            return {"version": "1", "notices": []}
        return PAGE


@pytest.mark.parametrize("fault", ["hangs", "down"])
def test_a_daemon_that_does_not_answer_counts_as_unreachable_after_its_limit(fault: str) -> None:
    daemon, silences = HangingDaemon(), list[tuple[float, TopoproxyError]]()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        follower = NodeFollower(
            cast("DaemonClient", daemon),
            "n1",
            logs.telemetry(),
            lambda before, page, notices: None,
            lambda error: silences.append((loop.time(), error)),
        )
        task = asyncio.create_task(follower.run())
        await asyncio.sleep(3 * CHANGES_WAIT_S + 1)
        assert follower.page is not None
        assert not silences
        setattr(daemon, fault, True)
        began = loop.time()
        await asyncio.sleep(4 * SILENT_S)
        task.cancel()
        ((at, _),) = silences
        assert SILENT_S - CHANGES_WAIT_S < at - began <= CHANGES_WAIT_S + SILENT_S + 3

    run_simulated(run())
