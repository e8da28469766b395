"""``topoproxy upgrade --check``: what it finds between two versions, and how it ends."""

from __future__ import annotations

import copy
import errno
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.backends.ledger import format as fmt
from proxy.cli.main import cli, run_command_line
from proxy.cli.settings import read_config
from proxy.config import Config
from proxy.doctor.checks import CheckResult
from proxy.model import schema_ids
from proxy.model.errors import PermissionDeniedError
from proxy.public_interfaces import interface, shipped_unit
from proxy.topology.reader import read_machine
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs
from proxy.upgrade.checks import CHECKS, UpgradeFacts, examine, unit_changes
from proxy.upgrade.gather import UNITS, gather
from tests.cli.conftest import _serving
from tests.testkit.answers import check_answer

OURS = interface(Config())


def older(**changed: Any) -> dict[str, Any]:
    page: dict[str, Any] = copy.deepcopy(OURS)
    return {**page, "version": "0.0.9", **changed}


def found(facts: UpgradeFacts) -> dict[str, tuple[CheckResult, str]]:
    return {each.id: (each.result, each.text) for each in examine(facts)}


def test_the_same_version_hinders_nothing() -> None:
    findings = examine(UpgradeFacts(OURS, "", OURS))
    assert [each.id for each in findings] == list(CHECKS)
    assert {each.result for each in findings} == {CheckResult.OK}


def test_keys_that_go_come_or_change_their_default() -> None:
    before = older()
    defaults, effective = (before["configuration"][name] for name in ("defaults", "effective"))
    for part in (defaults, effective):
        part["oldKey"] = "1"
        del part["explainHistory"]
        part["reconcilePeriod"] = "30s"
    results = found(UpgradeFacts(before, "", OURS))
    assert results["version"] == (CheckResult.OK, f"0.0.9 runs, this is {OURS['version']}")
    assert results["configuration-keys"] == (CheckResult.WARN, "removed: oldKey; new: explainHistory")
    assert results["configuration-values"] == (CheckResult.WARN, "will change: reconcilePeriod 30s -> 10s")


@pytest.mark.parametrize(
    ("theirs", "ours", "forward", "back"),
    [
        ({"writes": 1, "reads": [1]}, {"writes": 1, "reads": [1]}, CheckResult.OK, CheckResult.OK),
        ({"writes": 1, "reads": [1, 2]}, {"writes": 2, "reads": [1, 2]}, CheckResult.OK, CheckResult.OK),
        ({"writes": 1, "reads": [1]}, {"writes": 2, "reads": [1, 2]}, CheckResult.OK, CheckResult.WARN),
        ({"writes": 1, "reads": [1]}, {"writes": 3, "reads": [2, 3]}, CheckResult.FAIL, CheckResult.WARN),
        ({"writes": 2, "reads": [1, 2]}, {"writes": 1, "reads": [1]}, CheckResult.FAIL, CheckResult.OK),
    ],
)
def test_the_ledger_is_compared_both_ways(
    theirs: Any, ours: Any, forward: CheckResult, back: CheckResult
) -> None:
    results = found(UpgradeFacts(older(ledger=theirs), "", {**OURS, "ledger": ours}))
    assert (results["ledger"][0], results["way-back"][0]) == (forward, back)


def test_names_that_go_away_are_named() -> None:
    before = older(metrics=[*OURS["metrics"], "topoproxy_gone_total"], answers=["topoproxy-old/1"])  # type: ignore[misc]
    assert found(UpgradeFacts(before, "", OURS))["outputs"] == (
        CheckResult.WARN,
        "removed: topoproxy-old/1, topoproxy_gone_total",
    )


def test_hooks_of_an_api_that_is_gone_hinder_only_if_a_file_uses_it() -> None:
    assert found(UpgradeFacts(older(hooks=[0, 1]), "", OURS))["hooks"][0] is CheckResult.OK
    why = "50-a.py: its API_VERSION is 0"
    assert found(UpgradeFacts(older(), "", OURS, hooks=[why]))["hooks"] == (CheckResult.FAIL, why)


def test_a_silent_daemon_leaves_what_files_say() -> None:
    results = found(UpgradeFacts({}, "no process listens there", OURS, refused="line 3: unknown key"))
    assert results["version"][0] is CheckResult.WARN
    assert results["configuration"] == (CheckResult.FAIL, "line 3: unknown key")
    for name in ("configuration-keys", "configuration-values", "way-back", "outputs"):
        assert results[name][0] is CheckResult.SKIP
    assert results["ledger"][0] is CheckResult.OK


def test_units_are_compared_without_comments_and_order() -> None:
    assert list(unit_changes("# a\n[Service]\nA=1\nB=2\n", "[Service]\nB=2\n; x\n\nA=1\n")) == []
    assert list(unit_changes("A=1\nB=2\n", "A=1\nB=3\n")) == ["+B=3", "-B=2"]


def test_a_unit_in_etc_that_hides_the_new_one_is_found(tmp_path: Path) -> None:
    for name in UNITS:
        text = shipped_unit(name).read_text()
        for directory in ("etc", "usr"):
            (tmp_path / directory).mkdir(exist_ok=True)
            (tmp_path / directory / name).write_text(text)
    places = (tmp_path / "etc", tmp_path / "usr")
    assert gather(Config(), "", Path("none"), 1, OURS, places).units == {}
    unit = tmp_path / "etc/topoproxy.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=30", "WatchdogSec=90"))
    assert gather(Config(), "", Path("none"), 1, OURS, places).units == {
        str(unit): ["+WatchdogSec=30", "-WatchdogSec=90"]
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_sysfs(regular_machine(2, 1, 4, 2), tmp_path / "machine")
    for name in ("proc", "state", "hooks"):
        (tmp_path / name).mkdir()
    file = tmp_path / "c.yaml"
    none = tmp_path / "none"
    file.write_text(
        f"listen: unix://{tmp_path}/cri.sock\nstateDir: {tmp_path}/state\n"
        f"sysfsRoot: {tmp_path}/machine/sys\nprocfsRoot: {tmp_path}/proc\n"
        f"hooks: {{directory: {tmp_path}/hooks, vendorDirectory: {none}, serverDirectory: {none}}}\n"
    )
    file.chmod(0o600)
    return file


def upgrade(*args: object) -> Result:
    return CliRunner().invoke(cli, ["upgrade", *map(str, args)])


def test_the_running_daemon_is_asked(config: Path, tmp_path: Path) -> None:
    running = json.loads(upgrade("--describe", "--config", config).stdout)
    check_answer(running)
    running["version"] = "0.0.9"
    machine = read_machine(tmp_path / "machine/sys", tmp_path / "proc")
    (tmp_path / "state/ledger.jsonl").write_bytes(fmt.header(machine.fingerprint))
    with _serving(tmp_path / "admin.sock", {"/interface": lambda: running}):
        done = upgrade("--check", "--config", config)
    assert done.exit_code == 0, done.output
    assert "0.0.9 runs, this is" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{len(CHECKS)} checks: ")
    assert "FAIL" not in done.stdout


@pytest.mark.parametrize("answer", [{}, [], {"schema": "topoproxy-interface/1"}, {"version": 3}])
def test_an_answer_without_a_version_is_a_warning(config: Path, tmp_path: Path, answer: object) -> None:
    with _serving(tmp_path / "admin.sock", {"/interface": lambda: answer}):
        done = upgrade("--check", "--config", config)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    answer_of = f"the answer of the daemon at {tmp_path}/admin.sock"
    assert f"the running version is not known: {answer_of} does not name it" in " ".join(done.stdout.split())


def test_a_daemon_that_hangs_is_not_waited_for_longer_than_requested(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("proxy.cli.upgrade.REPLACE_S", 3.0)
    admin = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(admin))
        hanging.listen()
        code = run_command_line(["upgrade", "--now", "--timeout", "0.2", "--config", str(config)])
    error = f"topoproxy: cannot query the daemon at {admin}: no answer in 0.2 seconds\n"
    assert (code, *capsys.readouterr()) == (69, "", error)


def test_options_of_the_running_daemon_are_kept(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-state"
    other.mkdir()
    (other / "ledger.jsonl").write_bytes(fmt._line(b'{"n": 0, "format": 2, "machine": "x"}'))
    options = {"listen": f"unix://{tmp_path}/other.sock", "state_dir": str(other)}
    running = json.loads(json.dumps(interface(read_config(config, options))))
    check_answer(running)
    assert running["configuration"]["options"] == {
        "listen": f"unix://{tmp_path}/other.sock",
        "stateDir": str(other),
    }
    saved = tmp_path / "running.json"
    saved.write_text(json.dumps(running))
    done = upgrade("--check", "--config", config, "--from", saved, "--json")
    checks = {each["id"]: (each["result"], each["text"]) for each in json.loads(done.stdout)["checks"]}
    assert checks["configuration-values"] == ("ok", "every setting keeps its value")
    assert checks["ledger"][0] == "fail", "the ledger is the one of the option"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"listen": "tcp://x"}, "cannot use the option for listen: "),
        ({"someKey": "1"}, "the running daemon's options: someKey is not a key"),
        ({"hooks.settings": "{}"}, "the option for hooks.settings: only a file can set hooks.settings"),
    ],
)
def test_an_option_that_this_version_refuses_is_a_failure(
    config: Path, tmp_path: Path, options: dict[str, str], cause: str
) -> None:
    saved = tmp_path / "running.json"
    running = older()
    running["configuration"]["options"] = options
    saved.write_text(json.dumps(running))
    done = upgrade("--check", "--config", config, "--from", saved, "--json")
    checks = {each["id"]: (each["result"], each["text"]) for each in json.loads(done.stdout)["checks"]}
    assert checks["configuration"][0] == "fail"
    assert cause in checks["configuration"][1]


def test_the_configuration_is_compared_also_with_another_socket(config: Path, tmp_path: Path) -> None:
    running = json.loads(upgrade("--describe", "--config", config).stdout)
    with _serving(tmp_path / "other.sock", {"/interface": lambda: running}):
        done = upgrade("--check", "--config", config, "--admin", f"unix://{tmp_path}/other.sock", "--json")
    checks = {each["id"]: (each["result"], each["text"]) for each in json.loads(done.stdout)["checks"]}
    assert checks["configuration-values"] == ("ok", "every setting keeps its value")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check", "--from", "x", "--admin", "unix:///a"], "compare: --admin has no effect with --from"),
        (["--describe", "--admin", "unix:///a"], "describe this version: --admin has no effect"),
        (["--describe", "--from", "x"], "describe this version: --from has no effect with --describe"),
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["upgrade", *words]) == 2
    assert capsys.readouterr().err.startswith(f"topoproxy: cannot {message}")


def test_a_refused_configuration_a_bad_hook_and_a_strange_ledger_hinder(config: Path, tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    saved.write_text(upgrade("--describe", "--config", config).stdout)
    assert upgrade("--check", "--config", config, "--from", saved).exit_code == 0
    (tmp_path / "hooks/50-a.py").write_text("API_VERSION = 99\n")
    (tmp_path / "hooks/50-a.py").chmod(0o644)
    (tmp_path / "state/ledger.jsonl").write_bytes(fmt._line(b'{"n": 0, "format": 2, "machine": "x"}'))
    done = upgrade("--check", "--config", config, "--from", saved, "--json")
    answer = json.loads(done.stdout)
    check_answer(answer)
    assert (done.exit_code, answer["ok"]) == (1, False)
    texts = {each["id"]: each["text"] for each in answer["checks"] if each["result"] == "fail"}
    assert set(texts) == {"ledger", "hooks"}
    expected = f"cannot load hook {tmp_path}/hooks/50-a.py: its API_VERSION is 99, and supported is 1"
    assert texts["hooks"] == expected
    assert "it has format 2, and this version reads 1" in texts["ledger"]
    config.write_text(f"{config.read_text()}nextKey: 1\n")
    done = upgrade("--check", "--config", config, "--from", saved)
    assert done.exit_code == 1
    assert "nextKey: unknown key" in done.stdout


def test_hook_files_that_this_version_cannot_use_hinder(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hinders(text: str) -> tuple[str, str]:
        hook.write_text(text)
        hook.chmod(0o644)
        code = run_command_line(
            ["upgrade", "--check", "--config", str(config), "--from", str(saved), "--json"]
        )
        output = capfd.readouterr()
        (row,) = (each for each in json.loads(output.out)["checks"] if each["id"] == "hooks")
        assert code == (row["result"] == "fail")
        assert output.err == ("loaded\n" if "print" in text else "")
        return row["result"], row["text"]

    saved, hook = tmp_path / "before.json", tmp_path / "hooks/50-a.py"
    saved.write_text(upgrade("--describe", "--config", config).stdout)
    valid = "API_VERSION = 1\ndef post_start_container(event): ...\nprint('loaded')\n"
    assert hinders(valid) == ("ok", "this version can use all hook files")
    for text, why in (
        (valid.replace("1", "0", 1), "its API_VERSION is 0, and supported is 1"),
        ("def\n", "SyntaxError: invalid syntax (line 1)"),
        ("import os\nos._exit(3)\n", "it ended the process with exit code 3"),
    ):
        assert hinders(text) == ("fail", f"cannot load hook {hook}: {why}")
    assert hinders("")[0] == "ok", "an empty file disables a hook of its name"
    hook.unlink()
    hook.symlink_to("/dev/null")
    assert upgrade("--check", "--config", config, "--from", saved).exit_code == 0


def test_a_hook_file_that_the_running_version_cannot_use_either_is_a_warning(
    config: Path, tmp_path: Path
) -> None:
    running = json.loads(upgrade("--describe", "--config", config).stdout)
    hook = tmp_path / "hooks/50-a.py"
    hook.write_text("def\n")
    hook.chmod(0o644)
    for state, result in (
        ("broken", "warn"),
        ("untrusted", "warn"),
        ("old version running", "fail"),
        ("running", "fail"),
    ):
        page = {"hooks": [{"name": "50-a", "path": str(hook), "state": state}]}
        with _serving(tmp_path / "admin.sock", {"/interface": lambda: running, "/hooks": lambda p=page: p}):
            done = upgrade("--check", "--config", config, "--json")
        (row,) = (each for each in json.loads(done.stdout)["checks"] if each["id"] == "hooks")
        assert (row["result"], done.exit_code) == (result, int(result == "fail")), state
        assert "SyntaxError" in row["text"]
    with _serving(tmp_path / "admin.sock", {"/interface": lambda: running}):
        assert upgrade("--check", "--config", config).exit_code == 1, "the daemon does not list its hooks"


def test_invalid_arguments_and_files_are_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["upgrade", "--config", str(config)]) == 2
    assert run_command_line(["upgrade", "--check", "--describe", "--config", str(config)]) == 2
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "bare.json").write_text(json.dumps({"schema": schema_ids.INTERFACE}))
    command = ["upgrade", "--check", "--config", str(config), "--from", str(tmp_path / "bare.json")]
    assert run_command_line(command) == 65
    assert "bare.json: it has no version, which" in capsys.readouterr().err
    for name in ("x.json", "none.json"):
        command = ["upgrade", "--check", "--config", str(config), "--from", str(tmp_path / name)]
        assert run_command_line(command) == 65
    assert "it is not what topoproxy upgrade --describe prints" in capsys.readouterr().err


@pytest.mark.parametrize(
    "part",
    [
        {"hooks": [{}]},
        {"configuration": {"options": {"hooks.settings": {}}}},
        {"configuration": []},
        {"ledger": {"writes": [1]}},
        {"metrics": "none"},
    ],
)
def test_a_description_with_a_part_of_the_wrong_type_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: dict[str, object]
) -> None:
    saved = tmp_path / "running.json"
    saved.write_text(json.dumps(older() | part))
    assert run_command_line(["upgrade", "--check", "--config", str(config), "--from", str(saved)]) == 65
    error = capsys.readouterr().err
    assert "it is not what topoproxy upgrade --describe prints: Expected " in error
    assert f"$.{next(iter(part))}" in error


def test_a_configuration_that_is_refused_is_not_described(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("nextKey: 1\n")
    assert run_command_line(["upgrade", "--describe", "--config", str(config)]) == 78
    output = capsys.readouterr()
    assert output.out == ""
    assert "nextKey: unknown key" in output.err

    def denied(*_args: object) -> None:
        raise PermissionDeniedError("cannot read the configuration: Permission denied")

    monkeypatch.setattr("proxy.cli.upgrade.read_config", denied)
    assert run_command_line(["upgrade", "--describe", "--config", str(config)]) == 77
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("unusable", ["query_admin", "read_small_file"])
@pytest.mark.parametrize("step", ["--check", "--now"])
def test_a_user_without_permission_learns_nothing_about_the_upgrade(
    config: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, step: str, unusable: str
) -> None:
    def denied(*_args: object) -> None:
        if unusable == "query_admin":
            raise PermissionDeniedError("cannot query the daemon: Permission denied (it answers root)")
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(f"proxy.upgrade.gather.{unusable}", denied)
    assert run_command_line(["upgrade", step, "--config", str(config)]) == 77
    output = capsys.readouterr()
    assert output.out == ""
    assert "Permission denied" in output.err


def test_what_to_do_must_be_specified_once(capsys: pytest.CaptureFixture) -> None:
    for args, which in (([], ""), (["--now", "--describe"], "only one of ")):
        assert run_command_line(["upgrade", *args]) == 2
        message = f"topoproxy: cannot upgrade: specify {which}--check, --now or --describe\n"
        assert capsys.readouterr().err == message
