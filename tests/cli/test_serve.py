"""``topoproxy serve`` up to the daemon, which has tests of its own."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli.serve import serve
from proxy.config import Config
from proxy.model.errors import ConfigError, LockedError


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A daemon that only remembers its configuration."""
    seen = types.SimpleNamespace(config=None, end=0)

    def run(config: Config) -> int:
        seen.config = config
        if isinstance(seen.end, Exception):
            raise seen.end
        return seen.end

    seen.run = run
    monkeypatch.setitem(sys.modules, "proxy.daemon", seen)
    return seen


def start(*words: object) -> Result:
    return CliRunner().invoke(serve, [str(w) for w in words])


def test_the_daemon_gets_the_configuration_and_gives_the_exit_code(daemon, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("cpuManagerPolicy: static\n")
    daemon.end = 3
    done = start(
        "--config",
        tmp_path / "c.yaml",
        "--listen",
        "unix:///l",
        "--runtime",
        "unix:///r",
        "--mode",
        "observe",
    )
    assert done.exit_code == 3
    assert [str(daemon.config.listen), str(daemon.config.runtime)] == ["/l", "/r"]
    assert (daemon.config.mode, daemon.config.cpu_manager_policy) == ("observe", "static")


def test_a_refused_configuration_does_not_start_it(daemon, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("mode: maybe\n")
    assert isinstance(start("--config", tmp_path / "c.yaml").exception, ConfigError)
    assert daemon.config is None


def test_a_daemon_that_cannot_start_says_why(daemon, tmp_path: Path) -> None:
    daemon.end = LockedError("cannot listen on /l: pid 1 holds the lock")
    (tmp_path / "c.yaml").write_text("")
    assert start("--config", tmp_path / "c.yaml").exception is daemon.end


def test_a_fault_of_ours_is_logged_with_its_place(
    daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said = []
    monkeypatch.setattr("proxy.logs.log.exception", said.append)
    daemon.end = ValueError("odd")
    (tmp_path / "c.yaml").write_text("")
    assert start("--config", tmp_path / "c.yaml").exit_code == 1
    assert said == ["cannot go on: a fault of our own"]
    assert logging.getLogger().handlers is not None
