"""Reading the configuration again in another process: every failure there is a refusal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.origin import Origin
from proxy.model.errors import ConfigError
from proxy.reload import reread as module
from proxy.reload.reread import reread
from tests.testkit.waiting import wait_until


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    (tmp_path / "config.yaml").write_text("callTimeout: 3s\nadmission: {namespaces: [a, b-*]}\n")
    options = {"log.level": ("--log-level", "debug")}
    return Origin(tmp_path / "config.yaml", FrozenMapping(options), trusted=False)


def refused(origin: Origin) -> str:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(reread(origin))
    return str(caught.value)


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run another program instead of the reader."""
    monkeypatch.setattr(module, "_START", code)


def test_settings_of_the_file_and_the_command_line_arrive(origin: Origin) -> None:
    config = asyncio.run(reread(origin))
    assert (config.call_timeout, config.log.level) == (3, "debug")
    assert config.admission.namespaces.patterns == ("a", "b-*")
    assert (config.origin, config.source) == (origin, str(origin.file))


def test_a_bad_or_missing_file_is_refused(origin: Origin) -> None:
    assert origin.file is not None
    origin.file.write_text("callTimeout: soon\n")
    assert f"cannot use the configuration {origin.file}: line 1: callTimeout: " in refused(origin)
    origin.file.unlink()
    assert refused(origin) == f"cannot read the configuration {origin.file}: there is no such file"


def test_a_file_of_another_user_is_refused_if_it_must_be_trusted(origin: Origin) -> None:
    assert origin.file is not None
    origin.file.chmod(0o666)
    assert "cannot trust the configuration" in refused(Origin(origin.file, FrozenMapping(), trusted=True))


def test_a_bad_command_line_option_is_refused(origin: Origin) -> None:
    bad = Origin(origin.file, FrozenMapping({"log.level": ("--log-level", "loud")}), trusted=False)
    assert refused(bad).startswith("cannot use --log-level: 'loud' is not ")


def test_another_installed_version_is_refused(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"version": "99.1", "values": {}})
    child(monkeypatch, f"print({answer!r})")
    assert "version 99.1 is installed, and " in refused(origin)
    assert refused(origin).endswith("runs: restart the daemon")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit('no room')", "its process ended with 1: no room"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended with -9: no output"),
        ("import nothing_of_this_name", "its process ended with 1: ModuleNotFoundError"),
    ],
)
def test_a_reader_process_that_fails_is_reported(
    origin: Origin, monkeypatch: pytest.MonkeyPatch, code: str, expected: str
) -> None:
    child(monkeypatch, code)
    assert f"cannot read the configuration again: {expected}" in refused(origin)


def test_a_reader_process_that_hangs_is_ended(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    begin = asyncio.create_subprocess_exec

    async def recorded(*command: str, **streams: int) -> asyncio.subprocess.Process:
        process = await begin(*command, **streams)
        begun.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    child(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(module, "READ_LIMIT_S", 2.0)
    assert refused(origin) == "cannot read the configuration again: it takes longer than 2 s"
    (pid,) = begun
    state = Path(f"/proc/{pid}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX")


def test_a_reader_process_that_cannot_be_started_is_reported(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    assert "no process can be started for it: No such file or directory" in refused(origin)
