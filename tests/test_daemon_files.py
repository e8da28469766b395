"""The daemon reports files of its configuration that are open to other users."""

from __future__ import annotations

from pathlib import Path

from proxy.topology.build import described
from tests.testkit.daemon import DaemonNode, run

MACHINE = described(1, 1, 2, 1)


def test_a_token_that_others_can_read_is_a_problem(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("word\n")
    token.chmod(0o644)
    node = DaemonNode(tmp_path, MACHINE)
    kubelet = f"{{pods: 'https://127.0.0.1:9', tokenFile: {token}, timeout: 100ms}}"
    daemon = node.daemon(f"kubelet: {kubelet}")
    wanted = f"kubelet.tokenFile: {token} can be read by others (mode 0644): chmod o-r {token}"

    async def scenario() -> None:
        assert wanted in [problem["keys"]["reason"] for problem in daemon.pages.status()["problems"]]

    run(daemon, scenario)
