"""``topoproxy serve`` up to the daemon, which has tests of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from proxy.cli.main import run_command_line
from proxy.config import Config
from proxy.model.errors import LockedError
from proxy.process import run_and_report

if TYPE_CHECKING:
    import pytest


def start(*args: object) -> object:
    return run_command_line(["serve", *map(str, args)])


def test_the_command_passes_the_configuration_to_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("cpuManagerPolicy: static\n")
    config = start(
        "--config",
        tmp_path / "c.yaml",
        "--listen",
        "unix:///l",
        "--runtime",
        "unix:///r",
        "--mode",
        "observe",
    )
    assert isinstance(config, Config)
    assert [str(config.listen), str(config.runtime)] == ["/l", "/r"]
    assert (config.mode, config.cpu_manager_policy) == ("observe", "static")


def test_an_invalid_configuration_does_not_start_the_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "c.yaml").write_text("mode: maybe\n")
    assert start("--config", tmp_path / "c.yaml") == 78
    assert "c.yaml" in capsys.readouterr().err


def ending(monkeypatch: pytest.MonkeyPatch, end: object) -> int:
    def run(config: Config, early: object) -> int:
        assert early is None
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr("proxy.process.run", run)
    return run_and_report(Config())


def test_a_daemon_that_cannot_start_reports_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert ending(monkeypatch, LockedError("cannot listen on /l: pid 1 holds the lock")) == 75
    assert capsys.readouterr().err == "topoproxy: cannot listen on /l: pid 1 holds the lock\n"
    assert ending(monkeypatch, 3) == 3
    assert ending(monkeypatch, KeyboardInterrupt()) == 130


def test_an_internal_error_is_logged_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = []
    monkeypatch.setattr("proxy.logs.log.exception", reported.append)
    assert ending(monkeypatch, ValueError("odd")) == 1
    assert reported == ["cannot continue: internal error"]
