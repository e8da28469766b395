"""``topoproxy attach`` and ``detach`` as commands: the diff, the question, the exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from proxy.cli.main import cli, command_line
from tests.attach.conftest import OURS, RUNTIME, FakeNode
from tests.attach.conftest import fake as fake

Fake = Callable[[str], FakeNode]


def run(node: FakeNode, *words: str) -> Result:
    config = node.state.with_name("c.yaml")
    config.write_text(
        f"stateDir: {node.state}\nprocfsRoot: {node.root}/proc\nadminSocket: unix://{node.state}/a\n"
    )
    config.chmod(0o600)
    return CliRunner().invoke(cli, [*words, "--config", str(config), "--root", str(node.root)])


def test_a_dry_run_prints_a_diff_and_changes_nothing(fake: Fake) -> None:
    node = fake("kubeadm-flags")
    before = node.hashes()
    done = run(node, "attach", "--dry-run")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(
        "--- /var/lib/kubelet/kubeadm-flags.env\n+++ /var/lib/kubelet/kubeadm-flags.env\n"
    )
    assert f'-KUBELET_KUBEADM_ARGS="--container-runtime-endpoint={RUNTIME} --v=2"\n' in done.stdout
    assert f'+KUBELET_KUBEADM_ARGS="--container-runtime-endpoint={OURS} --v=2"\n' in done.stdout
    assert node.hashes() == before
    assert not node.state.exists()
    assert run(node, "detach", "--dry-run").stdout == "kubelet is not attached\n"


def test_without_a_terminal_it_needs_yes(fake: Fake) -> None:
    node = fake("config-file")
    before = node.hashes()
    done = run(node, "attach")
    assert "(--yes)" in str(done.exception)
    assert node.hashes() == before


def test_a_daemon_that_does_not_answer_changes_nothing(fake: Fake) -> None:
    node = fake("config-file")
    before = node.hashes()
    done = run(node, "attach", "--yes", "--timeout", "2")
    assert done.exit_code == 1
    assert "no process listens there" in str(done.exception)
    assert node.hashes() == before


@pytest.mark.parametrize("name", ["attach", "detach"])
def test_the_help_imports_little(name: str) -> None:
    code = "import sys\nfrom proxy.cli.main import main\n"
    code += "try: main(sys.argv[1:])\nfinally: print(sorted(sys.modules))"
    words = [sys.executable, "-c", code, name, "--help"]
    reported = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for module in ("asyncio", "grpc", "proxy.attach", "subprocess"):
        assert f"'{module}'" not in reported
    assert command_line([name, "--timeout", "0"]) == 2
