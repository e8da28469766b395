"""``topoproxy hooks validate`` and ``run``: files are loaded, and called by the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import proxy
from proxy.cli.hooks import file_commands
from proxy.cli.main import run_command_line

Run = Callable[..., tuple[int, str, str]]
PINNED = """
from dataclasses import dataclass, field
from typing import Literal
from proxy.hooks.api import CLEAR, Adjustment, Configure, Update, Veto

API_VERSION = 1

@dataclass
class Settings:
    name: str = field(default="PINNED", metadata={"help": "The variable."})
    loud: bool = False
    mode: Literal["a", "b"] = "a"
    words: tuple[str, ...] = ("x", "y")

def configure(event):
    global settings
    settings = event.settings

def pre_create_container(event):
    if event.pod.labels.get("no"):
        return Veto("not here")
    return Adjustment(envs={settings.name: str(event.decision.own)}, cpu_quota=CLEAR,
                      updates={"c1": Update(cpu_shares=2, unified={"memory.high": "max"})})
"""
SECOND = """
from proxy.hooks.api import Adjustment
API_VERSION = 1
FAILURE_POLICY = "Fail"
async def pre_create_container(event):
    return Adjustment(envs={"PINNED": "all"})
def post_stop_container(event):
    return None
"""
LOUD = """
import os, subprocess, sys
API_VERSION = 1
print("printed")
os.write(1, b"written\\n")
subprocess.run(["echo", "echoed"])
sys.__stdout__.write("buffered\\n")
def pre_create_container(event):
    print("called")
"""
BROKEN = "API_VERSION = 1\ndef pre_create_container(event):\n    return 1 / 0\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*args: object) -> tuple[int, str, str]:
        code = run_command_line(["hooks", *map(str, args)])
        reported = capsys.readouterr()
        assert isinstance(code, int)
        return code, reported.out, reported.err

    return run_command


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in (("50-pinned", PINNED), ("60-second", SECOND), ("70-broken", BROKEN)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "c.yaml").write_text("hooks: {settings: {50-pinned: {timeout: 2s, config: {name: CPUS}}}}\n")
    return tmp_path


def test_a_valid_file_is_described(files: Path, run: Run) -> None:
    code, reported, errors = run("validate", files / "50-pinned.py", "--config", files / "c.yaml")
    assert (code, errors) == (0, "")
    assert reported == (
        f"{files}/50-pinned.py: valid\n"
        "  handles   configure, pre_create_container\n"
        "  timeout   2 s\n"
        "  policy    Ignore\n"
        "  settings  name=CPUS  (a string: The variable.)\n"
        "            loud=false  (true or false)\n"
        "            mode=a  (one of a, b)\n"
        "            words=[x, y]  (a list of strings)\n"
    )


@pytest.mark.parametrize(
    "command", ["validate 50-loud.py", "run 50-loud.py --example pre_create_container", "list"]
)
@pytest.mark.parametrize("stderr", [True, False])
def test_what_hooks_print_is_no_output_of_a_command(tmp_path: Path, command: str, stderr: bool) -> None:
    (tmp_path / "50-loud.py").write_text(LOUD)
    (tmp_path / "50-loud.py").chmod(0o644)
    none = tmp_path / "none"
    (tmp_path / "c.yaml").write_text(
        f"listen: unix://{tmp_path}/cri.sock\n"
        f"hooks: {{directory: {tmp_path}, vendorDirectory: {none}, serverDirectory: {none}}}\n"
    )
    words = f"hooks {command} --json --config c.yaml"
    run = f"'{sys.executable}' -m proxy {words}{'' if stderr else ' 2>&-'}"
    environ = {**os.environ, "PYTHONPATH": str(Path(proxy.__file__).parents[1])}
    done = subprocess.run(
        run, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["schema"].startswith("topoproxy-hooks-"), "one document"
    if stderr:
        assert {"printed", "written", "echoed"} <= set(done.stderr.split())
        assert ("called" in done.stderr) == command.startswith("run")


@pytest.mark.parametrize(
    ("name", "text", "reported"),
    [
        ("50-x.py", "API_VERSION = 1\ndef (", "SyntaxError"),
        ("50-x.py", "API_VERSION = 9\n", "its API_VERSION is 9"),
        (
            "50-x.py",
            "API_VERSION = 1\ndef pre_create_contaner(event): ...\n",
            "did you mean pre_create_container?",
        ),
        ("x.py", BROKEN, "it is not named NN-name.py"),
        ("50-pinned.py", PINNED, "hooks.settings.50-pinned.config.nmae: unknown key"),
        ("koordlet.json", "{", "it is not JSON"),
    ],
)
def test_a_broken_file_is_reported_with_its_fault(
    files: Path, run: Run, name: str, text: str, reported: str
) -> None:
    (files / name).write_text(text)
    (files / "c.yaml").write_text("hooks: {settings: {50-pinned: {config: {nmae: CPUS}}}}\n")
    code, out, errors = run("validate", files / name, "--config", files / "c.yaml")
    assert code == 65
    assert out.startswith(f"{files}/{name}: broken\n  cannot ")
    assert reported in out
    assert errors == "topoproxy: cannot use the hook file: see above\n"


def test_an_untrusted_file_is_reported_unless_disabled_by_option(files: Path, run: Run) -> None:
    (files / "60-second.py").chmod(0o666)
    code, reported, errors = run("validate", files / "60-second.py", files / "50-pinned.py", "--json")
    assert (code, errors) == (65, "topoproxy: cannot use 1 of 2 hook files: see above\n")
    second, pinned = json.loads(reported)["files"]
    assert second["state"] == "untrusted"
    assert second["error"].endswith(f"chmod go-w {files}/60-second.py")
    assert (pinned["state"], pinned["points"], pinned["policy"]) == (
        "loads",
        ["configure", "pre_create_container"],
        "Ignore",
    )
    assert run("validate", files / "60-second.py", "--untrusted")[0] == 0


def test_server_files_and_masks_can_be_validated(files: Path, run: Run) -> None:
    server = {
        "remote-endpoint": "/run/x.sock",
        "failure-policy": "Fail",
        "runtime-hooks": ["PreRunPodSandbox"],
    }
    (files / "koordlet.json").write_text(json.dumps(server))
    (files / "10-none.py").symlink_to("/dev/null")
    code, reported, _ = run("validate", files / "koordlet.json", files / "10-none.py")
    assert code == 0
    assert "koordlet.json: valid\n  handles   pre_run_pod_sandbox, shutdown\n" in reported
    assert "  policy    Fail\n" in reported
    assert "10-none.py: disabled\n  it disables a hook 10-none of hooks.vendorDirectory\n" in reported


def test_a_missing_file_is_reported(files: Path, run: Run) -> None:
    code, reported, _ = run("validate", files / "11-gone.py")
    assert (code, reported.splitlines()[1]) == (
        65,
        f"  cannot read hook {files}/11-gone.py: there is no such file",
    )


def example(files: Path, run: Run, **pod: Any) -> Path:
    code, reported, _ = run("run", "--print-example", "pre_create_container")
    assert code == 0
    event = json.loads(reported)
    event["pod"] |= pod
    (files / "event.json").write_text(json.dumps(event))
    return files / "event.json"


def test_the_adjustment_of_a_hook_is_printed(files: Path, run: Run) -> None:
    pinned, event = files / "50-pinned.py", example(files, run)
    code, reported, errors = run("run", pinned, "--event", event)
    assert (code, errors) == (0, "")
    assert reported == (
        "pre_create_container, shop/db-0/main:\n"
        "  FIELD                             VALUE    HOOK\n"
        "  cpu_quota                         cleared  50-pinned\n"
        "  envs[PINNED]                      2-5      50-pinned\n"
        "  updates[c1].cpu_shares            2        50-pinned\n"
        "  updates[c1].unified[memory.high]  max      50-pinned\n"
    )
    assert run("run", pinned, "--example", "pre_create_container")[1] == reported


def empty(files: Path) -> Path:
    """An empty configuration."""
    (files / "empty.yaml").write_text("")
    return files / "empty.yaml"


def test_an_event_of_the_node_is_printed_without_a_pod(files: Path, run: Run) -> None:
    (files / "50-sync.py").write_text("API_VERSION = 1\ndef synchronize(event):\n    return None\n")
    args = ["run", files / "50-sync.py", files / "60-second.py", "--example", "synchronize"]
    assert run(*args) == (0, "synchronize: nothing to change\n", "")


def test_settings_come_from_the_configuration_and_from_the_command_line(files: Path, run: Run) -> None:
    args = [files / "50-pinned.py", "--example", "pre_create_container", "--config", files / "c.yaml"]
    assert "envs[CPUS]" in run("run", *args)[1]
    assert "envs[MINE]" in run("run", *args, "--set", "name=MINE", "--set", "loud=true")[1]
    code, _, errors = run("run", *args, "--set", "loud=perhaps")
    assert (code, "config.loud: must be true or false, not a string" in errors) == (65, True)
    without_config = [
        "run",
        files / "50-pinned.py",
        "--example",
        "pre_create_container",
        "--set",
        "name=MINE",
    ]
    assert "envs[MINE]" in run(*without_config, "--config", empty(files))[1]
    for pair in ("loud", "lo-ud=true", "loud=true\nx: y"):
        assert run("run", *args, "--set", pair)[0] == 2
    assert run("run", *args, files / "60-second.py", "--set", "loud=true")[0] == 2


def test_mounts_and_devices_are_printed(files: Path, run: Run) -> None:
    (files / "50-mounts.py").write_text(
        "from proxy.hooks.api import Adjustment, CpuSet, Device, Mount\nAPI_VERSION = 1\n"
        "def pre_create_container(event):\n"
        "    return Adjustment(cpus=CpuSet([2]), mounts={'/m': Mount('/m', '/h', readonly=True),\n"
        "        '/w': Mount('/w', '/h')}, devices={'/dev/a': Device('/dev/a', '/dev/b', 'r')})\n"
    )
    _, reported, _ = run("run", files / "50-mounts.py", "--example", "pre_create_container")
    assert [line.rsplit(maxsplit=1)[0].split(maxsplit=1) for line in reported.splitlines()[2:]] == [
        ["cpus", "2"],
        ["devices[/dev/a]", "/dev/b (r)"],
        ["mounts[/m]", "/h (read-only)"],
        ["mounts[/w]", "/h"],
    ]


def test_a_refusal_by_a_hook_is_printed_and_no_error(files: Path, run: Run) -> None:
    code, reported, _ = run("run", files / "50-pinned.py", "--event", example(files, run, labels={"no": "1"}))
    assert code == 0
    assert reported == (
        "pre_create_container, shop/db-0/main: refused\n"
        "  cannot create container shop/db-0/main: hook 50-pinned: not here\n"
    )


def test_a_conflict_names_both_hooks_and_is_handled_by_policy(files: Path, run: Run) -> None:
    args = ["--example", "pre_create_container"]
    code, reported, _ = run("run", files / "60-second.py", files / "50-pinned.py", *args)
    assert code == 1
    assert reported.startswith("pre_create_container, shop/db-0/main: refused\n")
    assert "FAILED 60-second (policy Fail): cannot set envs[PINNED]: hook 50-pinned has set it" in reported


def test_a_failure_is_printed_with_the_hooks_own_lines(files: Path, run: Run) -> None:
    code, reported, _ = run("run", files / "70-broken.py", "--example", "pre_create_container")
    assert code == 1
    assert reported.startswith(
        "pre_create_container, shop/db-0/main: nothing to change\nFAILED 70-broken (policy "
    )
    assert f'  File "{files}/70-broken.py", line 3, in pre_create_container\n' in reported


def test_the_result_can_be_printed_as_json(files: Path, run: Run) -> None:
    _, reported, _ = run("run", files / "60-second.py", "--example", "pre_create_container", "--json")
    data = json.loads(reported)
    (call,) = data["asked"]
    assert call["outcome"]["adjustment"] == {"envs": {"PINNED": "all"}}
    assert call["outcome"]["owners"] == {"envs[PINNED]": "60-second"}
    assert call["event"]["point"] == "pre_create_container"
    (hook,) = data["hooks"]
    assert (hook["name"], hook["calls"], hook["failures"], hook["asked"]) == ("60-second", 1, {}, "ok")


@pytest.mark.parametrize(
    ("args", "code", "reported"),
    [
        ([], 2, "name a file"),
        (
            ["60-second.py"],
            2,
            "give either --event or --example (the files handle post_stop_container, pre_create_container",
        ),
        (
            ["60-second.py", "--example", "pre_create_container", "--event", "-"],
            2,
            "give either --event or --example",
        ),
        (
            ["60-second.py", "--example", "shutdown"],
            2,
            "cannot run hooks at shutdown: the files handle post_stop_container, ",
        ),
        (["60-second.py", "--example", "pre_create"], 2, "did you mean pre_create_container?"),
        (["60-second.py", "--event", "none.json"], 65, "cannot read the event none.json: No such file"),
        (["60-second.py", "--event", "60-second.py"], 65, "it is not JSON"),
        (["60-second.py", "--event", "/dev/zero"], 65, "the event /dev/zero: it is not a regular file"),
        (["gone.py", "--example", "shutdown"], 65, "cannot read hook gone.py: there is no such file"),
        (["koordlet.json", "--example", "shutdown"], 2, "it is not named NN-name.py"),
        (["50-pinned.py", "--set", "words.x=a"], 2, "it must be KEY=VALUE, and KEY a field of Settings"),
        (["50-pinned.py", "--set", "name=a\u2028b: c"], 2, "it must be KEY=VALUE"),
        (["50-pinned.py", "--set", "name=a: b"], 2, "cannot use --set name=a: b: not YAML: mapping values"),
        (["50-pinned.py", "--set", "name=null"], 2, "cannot use --set name=null: name: has no value"),
        (["50-pinned.py", "--set", "words=a,b"], 65, "must be a list of strings, not a string ('a,b')"),
        (["60-second.py", "--print-example", "nothing"], 2, "topoproxy hooks points lists them"),
    ],
)
def test_a_command_line_that_cannot_be_run_is_reported(
    files: Path, run: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, reported: str
) -> None:
    monkeypatch.chdir(files)
    result = run("run", *args)
    assert (result[0], reported in result[2]) == (code, True), result


COUNTS = """
from proxy.hooks.api import Adjustment, Update
API_VERSION = 1
known = set()

def synchronize(event):
    known.update(one.container.id for one in event.containers)

def post_start_container(event):
    known.add(event.container.id)
    if event.container.id == "bad":
        raise ValueError("no")

def pools_changed(event):
    return Adjustment(updates={each: Update(cpu_shares=2) for each in sorted(known)})
"""


def test_several_events_are_sent_in_order(files: Path, run: Run) -> None:
    (files / "40-counts.py").write_text(COUNTS)
    run_command = {"point": "post_start_container", "container": {"id": "c7", "name": "main"}}
    bad = {"point": "post_start_container", "container": {"id": "bad"}}
    (files / "a.json").write_text(json.dumps([run_command, bad, {"point": "pre_stop_container"}]))
    (files / "b.json").write_text("\ufeff" + json.dumps({"point": "pools_changed"}))
    args = ("run", files / "40-counts.py", "--event", files / "a.json", "--event", files / "b.json")
    code, reported, _ = run(*args)
    assert code == 1
    lines = reported.splitlines()
    assert lines[0] == "post_start_container, //main: nothing to change"
    assert lines[1] == "post_start_container: nothing to change"
    assert lines[2].startswith("FAILED 40-counts (policy Ignore): ValueError: no")
    (last_start,) = [i for i, line in enumerate(lines) if line == "pre_stop_container: no hook handles it"]
    assert lines[last_start + 1] == "pools_changed:"
    assert [line.split()[0] for line in lines[last_start + 3 :]] == [
        "updates[bad].cpu_shares",
        "updates[c7].cpu_shares",
    ]
    data = json.loads(run(*args, "--json")[1])
    assert [one["event"]["point"] for one in data["asked"]] == [
        "post_start_container",
        "post_start_container",
        "pre_stop_container",
        "pools_changed",
    ]


def test_an_invalid_event_is_reported_with_its_number(files: Path, run: Run) -> None:
    (files / "a.json").write_text('[{"point": "pre_create_container"}, {"point": "pre_create"}]')
    _, _, reported = run("run", files / "60-second.py", "--event", files / "a.json")
    assert (
        "cannot use point: there is no hook point 'pre_create'; did you mean pre_create_container?"
        in reported
    )
    assert f"(in event 2 of {files / 'a.json'})" in reported


def test_control_characters_and_invalid_text_are_removed(files: Path, run: Run) -> None:
    event = {"point": "pre_create_container", "pod": {"name": "a\x1b[31m\nb\ud800"}}
    (files / "a.json").write_text(json.dumps(event))
    args = ("run", files / "60-second.py", "--event", files / "a.json")
    code, reported, _ = run(*args)
    assert code == 0
    assert reported.startswith("pre_create_container, /a [31m b /:\n")
    code, reported, _ = run(*args, "--json")
    assert json.loads(reported)["asked"][0]["event"]["pod"]["name"] == event["pod"]["name"]  # type: ignore[index]
    assert (code, reported.isascii()) == (0, True)


def test_a_setting_may_have_several_values(files: Path, run: Run) -> None:
    args = ("run", files / "50-pinned.py", "--example", "pre_create_container")
    code, reported, errors = run(*args, "--set", "words=[a, b]", "--set", "name=C")
    assert (code, "envs[C]" in reported) == (0, True), errors


def test_a_hook_that_cannot_be_configured_is_not_called(files: Path, run: Run) -> None:
    (files / "50-no.py").write_text(f"{BROKEN}def configure(event):\n    raise ValueError('no disk')\n")
    code, reported, errors = run("run", files / "50-no.py", "--example", "pre_create_container")
    assert (code, reported) == (1, "")
    assert errors.startswith(f"topoproxy: cannot configure hook {files}/50-no.py: ValueError: no disk")


@pytest.mark.parametrize("path", file_commands.shipped().values(), ids=lambda path: path.stem)
def test_shipped_hooks_are_valid(path: Path, run: Run) -> None:
    assert run("validate", path, "--untrusted")[0] == 0


@pytest.mark.parametrize(
    ("code", "how"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 11)", "SIGSEGV")]
)
def test_a_file_that_ends_its_process_is_reported(files: Path, run: Run, code: str, how: str) -> None:
    (files / "50-ends.py").write_text(f"import faulthandler, os\nfaulthandler.disable()\n{code}\n")
    (files / "50-ends.py").chmod(0o644)
    ended, reported, _ = run("validate", files / "50-ends.py", "--untrusted")
    assert ended == 65
    assert (
        f"50-ends.py: broken\n  cannot load hook {files}/50-ends.py: it ended the process with {how}\n"
        in reported
    )
