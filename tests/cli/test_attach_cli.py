"""``topoproxy attach`` and ``detach`` as commands: the diff, the question, the exit codes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli.main import cli, run_command_line
from proxy.model.errors import PermissionDeniedError
from tests.attach.conftest import CONFIG, OURS, RUNTIME, UNIT, FakeNode
from tests.attach.conftest import fake as fake

Fake = Callable[[str], FakeNode]


def run(node: FakeNode, *args: str) -> Result:
    config = node.state.with_name("c.yaml")
    config.write_text(
        f"stateDir: {node.state}\nprocfsRoot: {node.root}/proc\nadminSocket: unix://{node.state}/a\n"
    )
    config.chmod(0o600)
    return CliRunner().invoke(cli, [*args, "--config", str(config), "--root", str(node.root)])


def test_a_dry_run_prints_a_diff_and_changes_nothing(fake: Fake) -> None:
    node = fake("kubeadm-flags")
    before = node.hashes()
    result = run(node, "attach", "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "--- /var/lib/kubelet/kubeadm-flags.env\n+++ /var/lib/kubelet/kubeadm-flags.env\n"
    )
    assert f'-KUBELET_KUBEADM_ARGS="--container-runtime-endpoint={RUNTIME} --v=2"\n' in result.stdout
    assert f'+KUBELET_KUBEADM_ARGS="--container-runtime-endpoint={OURS} --v=2"\n' in result.stdout
    assert node.hashes() == before
    assert not node.state.exists()
    assert run(node, "detach", "--dry-run").stdout == "kubelet is not attached\n"


def test_without_a_terminal_attach_needs_yes(fake: Fake) -> None:
    node = fake("config-file")
    before = node.hashes()
    result = run(node, "attach")
    assert "(--yes)" in str(result.exception)
    assert node.hashes() == before


def test_a_daemon_that_does_not_answer_changes_nothing(fake: Fake) -> None:
    node = fake("config-file")
    before = node.hashes()
    result = run(node, "attach", "--yes", "--timeout", "2")
    assert result.exit_code == 1
    assert "no process listens there" in str(result.exception)
    assert node.hashes() == before


@pytest.mark.parametrize("name", ["attach", "detach"])
def test_the_help_imports_few_modules(name: str) -> None:
    code = "import sys\nfrom proxy.cli.main import main\n"
    code += "try: main(sys.argv[1:])\nfinally: print(sorted(sys.modules))"
    args = [sys.executable, "-c", code, name, "--help"]
    reported = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    for module in ("asyncio", "grpc", "proxy.attach", "subprocess"):
        assert f"'{module}'" not in reported
    assert run_command_line([name, "--timeout", "0"]) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_rolls_an_attach_back(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    node = fake("config-file")
    before = node.hashes()

    def query(*args: object, **kwargs: object) -> object:
        os.kill(os.getpid(), number)
        return {}

    monkeypatch.setattr("proxy.cli.attach.query_daemon", query)
    with handlers_of_a_program():
        result = run(node, "attach", "--yes")
    assert result.exit_code == (1 if number == signal.SIGINT else 128 + number)  # click's Abort
    assert f"attach was interrupted: all changes were rolled back: kubelet uses {RUNTIME}" in result.stderr
    assert node.hashes() == before


@contextmanager
def handlers_of_a_program() -> Iterator[None]:
    """Handle signals as a program that was just started does."""
    wanted = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    old = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def test_a_configuration_of_kubelet_that_may_not_be_read_is_not_called_missing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = fake("unit")
    (node.root / UNIT).write_text(f"[Service]\nExecStart=/usr/bin/kubelet --config=/{CONFIG}\n")
    resolve = Path.resolve

    def denied(path: Path, strict: bool = False) -> Path:
        if strict:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return resolve(path)

    monkeypatch.setattr(Path, "resolve", denied)
    error = run(node, "attach", "--dry-run").exception
    assert isinstance(error, PermissionDeniedError)
    assert str(error).endswith("config.yaml cannot be read: Permission denied")
