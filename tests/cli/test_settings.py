"""Options of the command line override the configuration file."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import click
import pytest

from proxy.cli.main import run_command_line
from proxy.cli.settings import _OPTIONS, read_config
from proxy.config import Config
from proxy.config.schema import keys
from proxy.model.errors import ConfigError, UsageError
from tests.testkit.commands import commands


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text("mode: observe\nlisten: /a/b.sock\nlog: {level: debug}\n")
    return tmp_path / "c.yaml"


def test_every_option_names_a_setting_and_explains_it() -> None:
    known = {key for _, key, setting in keys(Config()) if setting}
    known |= {
        f"{s}.{key}"
        for field, s, none in keys(Config())
        if none is None
        for _, key, _ in keys(getattr(Config(), field.name))
    }
    assert {key for _, _, key, _ in _OPTIONS} <= known


def test_the_command_line_overrides_the_file(file: Path) -> None:
    options = {
        "listen": "unix:///x/y.sock",
        "mode": None,
        "log_format": "json",
        "state_dir": "/s",
        "admin": "/z/a.sock",
    }
    config = read_config(file, options)
    assert (str(config.listen), config.mode, config.log.level, config.log.format) == (
        "/x/y.sock",
        "observe",
        "debug",
        "json",
    )
    assert (str(config.state_dir), str(config.admin_path)) == ("/s", "/z/a.sock")


def test_the_agent_reads_the_configuration_also_with_an_admin_socket(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("httpx2", reason="needs requirements-cluster.lock")
    process = importlib.import_module("proxy.agent.process")
    found: list[Config] = []
    monkeypatch.setattr(process, "run", lambda config: found.append(config) or 0)
    file.write_text(file.read_text() + "cluster: {node: n1, events: false}\n")
    words = ["agent", "--config", str(file), "--admin", "unix:///z/a.sock", "--kubeconfig", "/k"]
    assert run_command_line(words) == 0
    (config,) = found
    assert (str(config.admin_path), config.cluster.node, config.cluster.events) == ("/z/a.sock", "n1", False)
    assert str(config.cluster.kubeconfig) == "/k"
    assert run_command_line([*words[:2], str(file.with_name("none.yaml")), *words[3:]]) == 78


def test_a_relative_directory_is_relative_to_the_caller(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_config(file, {"state_dir": "state", "sysfs_root": "./sys"}).state_dir == tmp_path / "state"
    assert os.fspath(read_config(file, {"cgroup_root": "../g"}).cgroup_root) == str(tmp_path.parent / "g")


def test_invalid_options_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cannot use --listen: 'x\.sock': the path of the socket must be absolute"
    ):
        read_config(file, {"listen": "x.sock"})
    with pytest.raises(UsageError, match="cannot use --state-dir: '' is not an absolute path"):
        read_config(file, {"state_dir": ""})
    with pytest.raises(UsageError, match=r"listen: /a/b\.sock is the runtime's own socket"):
        read_config(file, {"runtime": "/a/b.sock"})
    with pytest.raises(ConfigError, match="there is no such file"):
        read_config(tmp_path / "no", {})


@pytest.mark.usefixtures("removed_directory")
def test_a_relative_directory_in_a_directory_that_was_removed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["check-config", "--state-dir", "state"]) == 2
    error = "topoproxy: cannot use --state-dir state: the current directory was removed\n"
    assert capsys.readouterr().err == error
    assert run_command_line(["check-config", "--state-dir", str(tmp_path)]) == 0


RANGES = [
    (name, option)
    for name, command in commands().items()
    for option in command.params
    if isinstance(option.type, click.FloatRange)
]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "NaN"])
@pytest.mark.parametrize(("name", "option"), RANGES, ids=[f"{name} {option.name}" for name, option in RANGES])
def test_a_number_that_is_not_finite_is_refused(name: str, option: click.Parameter, text: str) -> None:
    with pytest.raises(click.BadParameter):
        option.type.convert(text, option, None)


@pytest.mark.parametrize(("name", "option"), RANGES, ids=[f"{name} {option.name}" for name, option in RANGES])
def test_a_number_has_an_upper_bound(name: str, option: click.Parameter) -> None:
    with pytest.raises(click.BadParameter):
        option.type.convert("1e308", option, None)


def test_options_with_numbers_are_known() -> None:
    names = {(name, option.name) for name, option in RANGES}
    assert {("attach", "timeout"), ("simulate", "rate"), ("demo", "pause"), ("status", "timeout")} <= names
    assert run_command_line(["attach", "--timeout", "nan"]) == 2
