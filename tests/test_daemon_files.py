"""The daemon reports files of its configuration that are open to other users."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from pathlib import Path
from typing import Any

from proxy.sockets.unix_socket import bind_at
from proxy.topology.regular_machine import regular_machine
from tests.testkit.daemon import DaemonNode, run

MACHINE = regular_machine(1, 1, 2, 1)


def test_a_token_that_others_can_read_is_a_problem(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("word\n")
    token.chmod(0o644)
    node = DaemonNode(tmp_path, MACHINE)
    kubelet = f"{{pods: 'https://127.0.0.1:9', tokenFile: {token}, timeout: 100ms}}"
    daemon = node.daemon(f"kubelet: {kubelet}")
    wanted = f"kubelet.tokenFile: {token} can be read by others (mode 0644): chmod o-r {token}"

    async def scenario() -> None:
        assert wanted in [problem["keys"]["reason"] for problem in daemon.parts.pages.status()["problems"]]

    run(daemon, scenario)


def test_another_socket_at_the_path_keeps_its_mode(tmp_path: Path) -> None:
    daemon = DaemonNode(tmp_path, MACHINE).daemon()

    async def scenario() -> None:
        at = daemon.parts.listener.path
        wanted = at.stat().st_mode
        at.chmod(0o600)
        await _mirrored(daemon)
        assert at.stat().st_mode == wanted
        at.unlink()
        with bind_at(at, 0o600):
            await _mirrored(daemon)
            assert stat.S_IMODE(at.stat().st_mode) == 0o600
        at.unlink()

    with bind_at(daemon.config.runtime, 0o606):
        run(daemon, scenario)


async def _mirrored(daemon: Any) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await daemon._keep_socket_mode()
