"""The text that ``topoproxy release`` prints at its end."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from proxy.cli.main import cli, run_command_line
from proxy.cli.release import result_text
from proxy.config.schema import Config
from proxy.model.errors import TopoproxyError, UnavailableError

OWN_SETTINGS = "the running daemon has settings of its own"


def test_one_container_is_counted_in_the_singular() -> None:
    first, _ = result_text({"containers": 1, "updated": 0}).splitlines()
    assert first == (
        "released: 1 container has what it would have without topoproxy (0 were updated at the runtime)"
    )
    first, _ = result_text({"containers": 2, "updated": 1}).splitlines()
    assert first == (
        "released: 2 containers have what they would have without topoproxy (1 was updated at the runtime)"
    )


def test_a_release_that_is_undone_meanwhile_is_not_reported_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"stage": "releasing", "updated": 2, "containers": 5}, {"stage": ""}])
    monkeypatch.setattr("proxy.cli.release.query_daemon", lambda *_, **__: next(answers))
    result = CliRunner().invoke(cli, ["release", "--admin", "unix:///run/x.sock"])
    assert isinstance(result.exception, TopoproxyError)
    assert str(result.exception) == "cannot release everything: the release was undone meanwhile"


@pytest.mark.parametrize("undo", [[], ["--undo"]])
def test_a_daemon_that_hangs_is_queried_no_longer_than_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, undo: list[str]
) -> None:
    limits: list[float] = []

    def query(_: object, __: str, timeout: float, **___: object) -> object:
        limits.append(timeout)
        raise UnavailableError("no answer")

    monkeypatch.setattr("proxy.cli.release.query_daemon", query)
    for seconds in ("2", "300"):
        CliRunner().invoke(cli, ["release", *undo, "--timeout", seconds, "--admin", "unix:///run/x.sock"])
    assert limits == [2, 30]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--admin", "unix:///run/x.sock", "--state-dir", "/s", "--mode", "observe"],
            f"--state-dir and --mode have no effect without --offline: {OWN_SETTINGS}",
        ),
        (
            ["--undo", "--log-level", "debug"],
            f"--log-level has no effect without --offline: {OWN_SETTINGS}",
        ),
        (
            ["--listen", "unix:///run/x.sock", "--admin", "unix:///run/y.sock"],
            "--listen has no effect with --admin, which names the daemon's socket",
        ),
        (
            ["--offline", "--admin", "unix:///run/x.sock"],
            "--admin has no effect with --offline: no daemon is queried",
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.cli.release.query_daemon", lambda *_, **__: pytest.fail("it was released"))
    assert run_command_line(["release", *words]) == 2
    assert capsys.readouterr().err == f"topoproxy: cannot release: {message}\n"


@pytest.mark.parametrize(
    ("words", "socket"),
    [
        (["--listen", "unix:///run/x/cri.sock"], "/run/x/admin.sock"),
        (["--admin", "unix:///run/y/z.sock"], "/run/y/z.sock"),
    ],
)
def test_options_that_name_the_daemon_are_accepted(
    words: list[str], socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queried: list[str] = []

    def query(config: Config, *_: object, **__: object) -> None:
        queried.append(str(config.admin_path))
        raise UnavailableError("stop here")

    monkeypatch.setattr("proxy.cli.release.query_daemon", query)
    assert run_command_line(["release", *words]) == UnavailableError.exit_code
    assert queried == [socket]
