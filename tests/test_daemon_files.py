"""The daemon reports files of its configuration that are open to other users."""

from __future__ import annotations

import asyncio
from pathlib import Path

from proxy.apply.folder import FolderCgroups
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.topology.build import described

MACHINE = described(1, 1, 2, 1)


def test_a_token_that_others_can_read_is_a_problem(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("word\n")
    token.chmod(0o644)
    config = parse(
        f"""
listen: unix://{tmp_path}/cri.sock
adminSocket: unix://{tmp_path}/admin.sock
runtime: unix://{tmp_path}/runtime.sock
stateDir: {tmp_path}/state
kubelet: {{pods: "https://127.0.0.1:9", tokenFile: {token}, timeout: 100ms}}
""",
        "test",
    )

    async def problems() -> list[object]:
        daemon = Daemon(
            config,
            machine=MACHINE,
            cgroups=FolderCgroups(tmp_path / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1),
        )
        await daemon.start()
        try:
            assert daemon.pages is not None
            return [problem["what"] for problem in daemon.pages.status()["problems"]]
        finally:
            await daemon.stop()

    wanted = f"kubelet.tokenFile: {token} can be read by others (mode 0644): chmod o-r {token}"
    assert wanted in asyncio.run(problems())
