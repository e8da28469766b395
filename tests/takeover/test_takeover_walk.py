"""The commands with a daemon as a process, a stand-in runtime, and a stand-in for kubelet."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.client import query_admin
from proxy.backends.kubelet.checkpoint_writer import none_state
from proxy.cli.main import run_command_line
from proxy.model.errors import InputError, TopoproxyError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.takeover.service import CANNOT_CONTINUE, CANNOT_STEP, COMPLETED
from tests.testkit.waiting import wait_until

DOCS = Path(__file__).parents[2] / "docs/takeover.md"


@dataclass
class Done:
    """The exit code and the output of a command."""

    returncode: int
    stdout: str
    stderr: str


def run(node: Any, *args: str) -> Done:
    """Run ``topoproxy takeover`` in this process; the daemon is another process."""
    config = ["--config", str(node.directory / "config.yaml")]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run_command_line(["takeover", *args, *config])
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def data(node: Any, *args: str) -> Any:
    done = run(node, *args, "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def refused(node: Any, *args: str) -> str:
    done = run(node, *args)
    assert (done.returncode, done.stdout) == (1, ""), done.stdout + done.stderr
    return done.stderr


def succeeded(node: Any, *args: str) -> str:
    done = run(node, *args)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def pods_at(node: Any, *pods: Any) -> list[str]:
    return [node.cpus(pod) for pod in pods]


def stop_kubelet(node: Any) -> None:
    node.kubelet.stop()
    node.kubelet_runs(runs=False)


def start_kubelet(node: Any, policy: str) -> None:
    """Start kubelet; raises if kubelet would crash-loop."""
    node.kubelet.start(policy)
    node.kubelet_runs(runs=True)


def test_pipes_in_place_of_kubelets_files_block_nothing(kubelet_node: Any) -> None:
    node = kubelet_node
    node.launch("old")
    text = node.kubelet.path.read_text()
    for path in (node.kubelet.path, node.kubelet.path.with_name("memory_manager_state")):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    plan = data(node, "plan", "--timeout", "20")
    assert not plan["can_start"]
    assert any("it is not a regular file" in each for each in plan["conflicts"]), plan["conflicts"]
    assert "it is not a regular file" in refused(node, "start")
    node.kubelet.path.unlink()
    node.kubelet.path.write_text(text)
    assert data(node, "plan")["can_start"]


def test_a_takeover_and_its_revert(kubelet_node: Any) -> None:
    node = kubelet_node
    old, short = node.launch("old"), node.launch("short")
    assert pods_at(node, old, short) == ["2-3", "4-5"]
    untouched = node.kubelet.path.read_text()
    plan = data(node, "plan")
    assert (plan["stage"], plan["can_start"], plan["conflicts"]) == ("none", True, [])
    assert [(a["container"], a["cpus"], a["in_effect"], a["state"]) for a in plan["allocations"]] == [
        ("demo/old/main", "2-3", "2-3", "runs"),
        ("demo/short/main", "4-5", "4-5", "runs"),
    ]
    assert plan["kubelet"]["running"] == ["process 4711 is kubelet"]
    assert run(node, "plan").returncode == 0

    assert "2 allocations of kubelet's CPU manager" in succeeded(node, "start")
    assert "nothing to do" in succeeded(node, "start")
    new = node.launch("new")
    named = node.kubelet.held[new.config.metadata.uid]["main"]
    assert str(named) == "6-7"
    assert node.cpus(new) == "6,14", "a whole core that the daemon chose, not the CPUs that kubelet named"
    node.reconcile(old, short, new)
    assert pods_at(node, old, short, new) == ["2-3", "4-5", "6,14"]
    status = data(node, "status")
    assert [each["container"] for each in status["left"]] == ["demo/old/main", "demo/short/main"]
    assert any("runs on CPUs 6,14, and kubelet's file says 6-7" in message for message in status["notes"])
    assert any("write static there" in message for message in status["notes"])

    assert "kubelet runs (process 4711 is kubelet)" in refused(node, "finish", "--with-running")
    node.end(short)
    wait_until(lambda: len(data(node, "status")["left"]) == 1)
    stop_kubelet(node)
    message = refused(node, "finish")
    assert "1 of kubelet's allocations are still in use (demo/old/main)" in message
    assert "or finish --with-running" in message
    assert "for policy none" in (
        reported := succeeded(node, "finish", "--with-running").replace("of policy", "for policy")
    )
    assert "cpuManagerPolicy: none" in reported
    assert node.kubelet.path.read_text() == none_state()
    assert (node.directory / "state/takeover/cpu_manager_state.before-finish").read_text() != untouched
    start_kubelet(node, "none")
    assert "nothing to do" in succeeded(node, "finish")
    node.proxy.kill()
    node.proxy.start()
    later = node.launch("later")
    assert pods_at(node, old, new) == ["2-3", "6,14"]
    assert len(CpuSet.parse(node.cpus(later))) == 2
    assert data(node, "status")["stage"] == "finished"
    page: Any = query_admin(node.proxy.admin, "/status", 60)
    assert page["settings"]["reservedSystemCPUs"] == "0-1", (
        "kubelet reserved them before its policy became none"
    )

    assert "kubelet runs" in refused(node, "revert")
    stop_kubelet(node)
    assert "policy static" in succeeded(node, "revert")
    assert "nothing to do" in succeeded(node, "revert")
    start_kubelet(node, "static")
    everyone = {pod.config.metadata.uid: node.cpus(pod) for pod in (old, new, later)}
    assert {uid: str(pod["main"]) for uid, pod in node.kubelet.held.items()} == everyone
    last = node.launch("last")
    assert node.cpus(last) == str(node.kubelet.held[last.config.metadata.uid]["main"])
    assert data(node, "status")["stage"] == "none"


def test_finish_for_a_kubelet_that_stays_static(kubelet_node: Any) -> None:
    node = kubelet_node
    old = node.launch("old")
    succeeded(node, "start")
    new = node.launch("new")
    stop_kubelet(node)
    succeeded(node, "finish", "--with-running", "--kubelet-policy", "static")
    start_kubelet(node, "static")
    held = {uid: str(pod["main"]) for uid, pod in node.kubelet.held.items()}
    assert held == {pod.config.metadata.uid: node.cpus(pod) for pod in (old, new)}
    assert data(node, "status")["target"] == "static"
    third = node.launch("third")
    assert CpuSet.parse(node.cpus(third)).isdisjoint(CpuSet.parse(f"{node.cpus(old)},{node.cpus(new)}"))


def test_a_forced_step_ends_with_a_restart_of_kubelet(kubelet_node: Any) -> None:
    node = kubelet_node
    node.launch("old")
    succeeded(node, "start")
    node.launch("new")
    restart = ["systemctl restart kubelet"]
    finished = data(node, "finish", "--with-running", "--force")
    assert finished["next"] == [
        "kubelet's configuration must say cpuManagerPolicy: none before kubelet starts",
        "reservedSystemCPUs: 0-1 may stay; set the same in the configuration of topoproxy",
        *restart,
    ]
    assert data(node, "status")["next"] == finished["next"]
    assert data(node, "revert", "--force")["next"] == restart, "the configuration still says static"


def test_a_start_can_be_reverted_while_kubelet_runs(kubelet_node: Any) -> None:
    node = kubelet_node
    old = node.launch("old")
    text = node.kubelet.path.read_text()
    succeeded(node, "start")
    assert "right as it is" in succeeded(node, "revert")
    assert (node.kubelet.path.read_text(), node.cpus(old)) == (text, "2-3")
    assert data(node, "status")["stage"] == "none"
    new = node.launch("new")
    assert node.cpus(new) == "4-5", "kubelet names the CPUs again"


def test_a_kubelet_that_writes_during_finish_is_detected(kubelet_node: Any) -> None:
    """kubelet's process is not visible, and kubelet writes its file from memory."""
    node = kubelet_node
    node.launch("old")
    succeeded(node, "start")
    assert data(node, "status")["conflicts"] == []
    node.kubelet_runs(runs=False)
    config = ["--config", str(node.directory / "config.yaml")]
    command = [sys.executable, "-m", "proxy", "takeover", "finish", "--with-running", *config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as finishing:
        end = time.monotonic() + 60
        while node.kubelet.path.read_text() != none_state() and time.monotonic() < end:
            time.sleep(0.01)
        node.kubelet.write()
        _, reported = finishing.communicate(timeout=60)
    assert finishing.returncode == 1
    assert "did not stay as it was written, so kubelet runs after all" in reported
    assert data(node, "status")["stage"] == "started"


def test_start_and_plan_report_a_conflict(kubelet_node: Any) -> None:
    node = kubelet_node
    node.kubelet.path.write_text(node.kubelet.path.read_text().replace("0-15", "0-14"))
    plan = run(node, "plan")
    assert plan.returncode == 1
    assert "Obstacles\n  - kubelet's state file" in plan.stdout
    assert "its checksum is wrong" in plan.stdout
    (obstacle,) = re.findall("Obstacles\n  - (.*)\n", plan.stdout)
    assert plan.stderr == f"topoproxy: cannot start the takeover: {obstacle}\n", (
        "the plan command reports the reason too"
    )
    status = run(node, "status")
    assert (status.returncode, status.stderr) == (0, "")
    assert f"Obstacles\n  - {obstacle}\n" in status.stdout
    assert status.stdout.endswith("To take the node over\n  1. remove the obstacles\n")
    assert data(node, "status")["conflicts"] == data(node, "plan")["conflicts"]
    assert "its checksum is wrong" in refused(node, "start")
    assert data(node, "start")["done"] is False
    node.kubelet.path.write_text(none_state())
    assert "policy is none: it holds no CPUs" in refused(node, "start")
    assert "it has not started" in refused(node, "finish")
    assert "nothing to do" in succeeded(node, "revert")
    assert data(node, "status")["stage"] == "none"


def test_invalid_requests_are_refused(kubelet_node: Any) -> None:
    """The commands send no such requests; other clients of the socket may."""
    admin = kubelet_node.proxy.admin
    for route, params, message in (
        ("/takeover/finish", {"kubelet-policy": "odd"}, "there is no policy 'odd'"),
        ("/takeover/finish", {"force": "yes"}, "force is true or false"),
        ("/takeover/start", {"force": "true"}, "there is no parameter 'force'"),
    ):
        with pytest.raises(InputError, match=message):
            query_admin(admin, route, 60, params, act=True)
    with pytest.raises(InputError, match="there is no view 'odd'"):
        query_admin(admin, "/takeover", 60, {"view": "odd"})
    with pytest.raises(UnavailableError, match="only POST is answered"):
        query_admin(admin, "/takeover/start", 60)
    assert data(kubelet_node, "status")["stage"] == "none"


def test_the_status_of_the_daemon_shows_a_takeover(kubelet_node: Any) -> None:
    admin = kubelet_node.proxy.admin
    page: Any = query_admin(admin, "/status", 60)
    assert "takeover" not in page
    succeeded(kubelet_node, "start")
    page = query_admin(admin, "/status", 60)
    assert (page["takeover"], page["settings"]["cpuManagerPolicy"]) == ("started", "static")
    assert page["settings"]["reservedSystemCPUs"] == "0-1"
    succeeded(kubelet_node, "revert")
    page = query_admin(admin, "/status", 60)
    assert page["settings"]["cpuManagerPolicy"] == "none"


def test_the_commands_fail_without_a_daemon(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "proxy", "takeover", "status", "--admin", f"unix://{tmp_path}/no.sock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "no process listens there" in done.stderr) == (69, True)


MORTAL = """
import os, signal, sys
from proxy.takeover import writer
calls = [int(sys.argv.pop(1))]
def mortal(write):
    def wrapped(*args):
        for act in (lambda: None, lambda: write(*args)):
            act()
            calls[0] -= 1
            if calls[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return wrapped
writer.write_cpu_state = mortal(writer.write_cpu_state)
keep = writer.TakeoverWriter._store_record
writer.TakeoverWriter._store_record = mortal(keep)
from proxy.admin.client import query_admin
from proxy.cli.main import main
main()
"""
"""A daemon that kills itself before or after one of the writes of a step."""


@contextmanager
def dying_daemon(node: Any, dies_at: int) -> Iterator[None]:
    """Replace the daemon by one that dies at a write; the normal daemon runs again afterwards."""
    node.proxy.stop()
    config = ["--config", str(node.directory / "config.yaml")]
    command = [sys.executable, "-c", MORTAL, str(dies_at), "serve", *config]
    env = {key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env)
    try:
        wait_until(lambda: is_ready(node))
        yield
        assert process.wait(30) == -9
    finally:
        process.kill()
        process.wait()
    node.proxy.start()
    wait_until(lambda: is_ready(node))


def is_ready(node: Any) -> bool:
    try:
        page: Any = query_admin(node.proxy.admin, "/status", 60)
    except TopoproxyError:
        return False
    return bool(page["ready"])


def problems(node: Any) -> list[str]:
    """Return the messages of the problems of a takeover that the daemon's status has."""
    page: Any = query_admin(node.proxy.admin, "/status", 60)
    return [each["message"] for each in page["problems"] if "takeover" in each["message"]]


def test_the_problem_of_a_step_ends_with_one_that_succeeds(kubelet_node: Any) -> None:
    node = kubelet_node
    succeeded(node, "start")
    stop_kubelet(node)
    backups = node.directory / "state/takeover"
    backups.write_text("not a directory")
    assert f"cannot make {backups}" in refused(node, "finish")
    assert problems(node) == [CANNOT_STEP]
    backups.unlink()
    succeeded(node, "finish")
    assert problems(node) == []


@pytest.mark.parametrize("dies_at", [1, 2, 4, 6])
def test_a_daemon_that_is_killed_in_a_step(kubelet_node: Any, dies_at: int) -> None:
    """Before and after each of: the record, kubelet's file, the record."""
    node = kubelet_node
    old = node.launch("old")
    succeeded(node, "start")
    new = node.launch("new")
    places = pods_at(node, old, new)
    stop_kubelet(node)
    with dying_daemon(node, dies_at):
        assert run(node, "finish", "--with-running").returncode == 69
    written = dies_at >= 4
    assert data(node, "status")["stage"] == ("finished" if written else "started")
    assert (node.kubelet.path.read_text() == none_state()) is written
    reported = {2: [CANNOT_CONTINUE], 4: [COMPLETED]}.get(dies_at, [])
    assert problems(node) == reported
    succeeded(node, "finish", "--with-running")
    assert problems(node) == [], "a step that succeeds ends them"
    assert node.kubelet.path.read_text() == none_state()
    start_kubelet(node, "none")
    assert pods_at(node, old, new) == places
    stop_kubelet(node)
    with dying_daemon(node, dies_at):
        assert run(node, "revert").returncode == 69
    assert problems(node) == reported
    succeeded(node, "revert")
    assert problems(node) == []
    start_kubelet(node, "static")
    assert pods_at(node, old, new) == places
    assert sorted(str(pod["main"]) for pod in node.kubelet.held.values()) == places


def test_the_document_has_the_output_of_the_commands(kubelet_node: Any) -> None:
    """Each block of docs/takeover.md that begins with a command is that command's output, line by line."""
    node = kubelet_node
    node.launch("db")
    node.launch("web")
    seen = 0
    for block in re.findall(r"^```console\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE):
        command, _, expected = block.partition("\n")
        if command == "$ systemctl stop kubelet":
            stop_kubelet(node)
            continue
        if command.startswith("$ systemctl start kubelet"):
            start_kubelet(node, command.rpartition(" ")[2])
            continue
        if command == "$ kubectl apply -f api.yaml":
            node.launch("api")
            continue
        done = run(node, *command.removeprefix("$ topoproxy takeover ").split())
        reported = done.stdout + done.stderr
        reported = reported.replace(str(node.directory / "kubelet"), "/var/lib/kubelet")
        reported = re.sub(r"since [0-9: -]+", "since 2026-11-20 10:00:00", reported)
        assert reported == expected, f"{command}\n{reported}"
        seen += 1
    assert seen > 5
