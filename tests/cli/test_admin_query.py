"""Queries of commands: what answers at the admin socket may not be topoproxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.cli import admin_query
from proxy.cli.main import run_command_line


@pytest.mark.parametrize("answer", [{}, [], {"schema": "another/1"}, {"schema": 5}])
@pytest.mark.parametrize("command", [["reload"], ["enforce", "pause"], ["enforce", "resume"], ["release"]])
def test_an_action_that_another_program_answers_is_not_reported_as_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    answer: object,
) -> None:
    monkeypatch.setattr(admin_query, "query_admin", lambda *_args, **_keys: answer)
    admin = tmp_path / "other.sock"
    assert run_command_line([*command, "--admin", f"unix://{admin}"]) == 69
    output = capsys.readouterr()
    assert output.out == ""
    error = f"topoproxy: cannot query the daemon at {admin}: what answers there is not topoproxy ("
    assert output.err.startswith(error)
