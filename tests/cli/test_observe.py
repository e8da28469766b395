"""``topoproxy observe report`` against a daemon's admin socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli.main import run_command_line
from proxy.cli.observe import observe
from proxy.model.errors import UnavailableError
from tests.testkit.answers import check_answer

ROOT = Path(__file__).parents[2]

ANSWER = {"mode": "observe", "sums": {"containers": 1, "moves": 1}, "pods": []}


def run(*args: object) -> str:
    result = CliRunner().invoke(observe, ["report", *(str(w) for w in args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_report_is_printed(serve_admin) -> None:
    config = serve_admin({"/observe/report": lambda: ANSWER})
    assert run("--config", config).startswith(
        "Mode observe: the plan is applied to 0 of 1 running container.\n"
    )
    assert json.loads(run("--json", "--config", config)) == ANSWER


def test_a_missing_daemon_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        run("--admin", tmp_path / "no.sock")
    assert caught.value.exit_code == 69


def test_the_page_shows_what_the_command_prints(serve_admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    answer = json.loads((ROOT / "tests/observe/observe_report.json").read_text())
    check_answer(answer)
    config = serve_admin({"/observe/report": lambda: answer})
    expected = (ROOT / "docs/observe.md").read_text().split("$ topoproxy observe report\n")[1].split("```")[0]
    assert run("--config", config) == expected


@pytest.mark.parametrize("name", ["Ä Ö", "", "UPPER"])
def test_a_report_for_a_name_that_no_node_can_have_is_refused(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    assert run_command_line(["report", "--admin", "unix:///none/a", "--node", name]) == 2
    assert "--node" in capsys.readouterr().err
