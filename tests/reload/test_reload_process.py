"""The daemon as a process: SIGHUP, ``topoproxy reload``, and a kill in the middle of a reload."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_node import FaultyNode, new_node

from proxy.demo.client import CriClient

WAIT_S = 60


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyNode]:
    directory = tmp_path_factory.mktemp("n")
    with new_node(directory) as one:
        one.start()
        yield one


def write(node: FaultyNode, text: str | None = None, **values: object) -> None:
    file = node.directory / "config.yaml"
    base = (
        json.loads((node.directory / "base.json").read_text())
        if (node.directory / "base.json").exists()
        else {}
    )
    if not base:
        base = json.loads(file.read_text())
        (node.directory / "base.json").write_text(json.dumps(base))
    file.write_text(json.dumps({**base, **values}) if text is None else text)


def config(node: FaultyNode) -> dict[str, Any]:
    page = node.status()
    assert page is not None
    return dict(page["config"])


def hang_up(node: FaultyNode) -> dict[str, Any]:
    """Send SIGHUP, and return the status of the reload once it is over."""
    before = config(node)["reload"]
    assert node.popen is not None
    node.popen.send_signal(signal.SIGHUP)
    node.wait_until(lambda: config(node)["reload"] != before, WAIT_S, "the reload")
    return config(node)


def command(node: FaultyNode, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proxy", "reload", "--admin", f"unix://{node.admin}", *args],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def pools(node: FaultyNode) -> str:
    page = node.status()
    assert page is not None
    return str(page["pools"]["shared"])


def test_a_hangup_reloads_and_is_logged(node: FaultyNode) -> None:
    write(node, koordinator={"reservedCPUs": "0-1"}, log={"level": "info"})
    page = hang_up(node)
    assert (page["reload"]["result"], page["reload"]["by"]) == ("applied", "SIGHUP")
    assert pools(node) == "2-15"
    assert "koordinator.reservedCPUs empty -> 0-1; log.level warning -> info" in node.log()
    write(node, text="mode: [")
    page = hang_up(node)
    assert page["reload"]["result"] == "refused"
    assert "line 1: not YAML" in page["reload"]["reason"]
    assert "the configuration was not reloaded, nothing has changed" in node.log()
    assert pools(node) == "2-15"
    drop_in = node.directory / "config.d/50-more.yaml"
    drop_in.parent.mkdir()
    drop_in.write_text("koordinator: {reservedCPUs: 0-3}\n")
    write(node)
    page = hang_up(node)
    assert page["reload"]["result"] == "applied"
    assert page["source"].endswith("config.yaml with config.d/50-more.yaml")
    assert pools(node) == "4-15"


def test_a_hangup_during_the_start_does_not_end_the_daemon(node: FaultyNode) -> None:
    node.kill()
    node.popen = subprocess.Popen(
        [sys.executable, "-m", "proxy", "serve", "--config", str(node.directory / "config.yaml")],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    popen = node.popen
    status = Path(f"/proc/{popen.pid}/status")

    def is_ignored() -> bool:
        found = [line for line in status.read_text().splitlines() if line.startswith("SigIgn:")]
        return bool(int(found[0].split()[1], 16) & 1 << (signal.SIGHUP - 1))

    node.wait_until(is_ignored, WAIT_S, "the first line of the program")
    while node.status() is None:
        assert popen.poll() is None
        popen.send_signal(signal.SIGHUP)
        time.sleep(0.005)
    node.wait_until(lambda: config(node)["reload"], WAIT_S, "the reload")
    assert config(node)["reload"]["reason"] == ""


def test_many_hangups_are_one_reload_or_two(node: FaultyNode) -> None:
    write(node, koordinator={"reservedCPUs": "0-1"})
    assert node.popen is not None
    for _ in range(20):
        node.popen.send_signal(signal.SIGHUP)
    node.wait_until(lambda: pools(node) == "2-15", WAIT_S, "the reload")
    time.sleep(0.5)
    page = node.status()
    assert page is not None
    counters = page["counters"]
    assert sum(n for key, n in counters.items() if key.startswith("config_reloads")) <= 3
    with CriClient(str(node.socket)) as client:
        client.version()


def test_the_command_prints_what_has_changed_and_what_waits(node: FaultyNode) -> None:
    assert '"restart": []' in command(node, "--json").stdout, "deploy/helm/topoproxy/files/node.sh expects it"
    write(node, explainHistory=7, cgroupRoot="/elsewhere")
    done = command(node)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"reloaded {node.directory}/config.yaml: 1 setting changed\n"
        "  explainHistory: 500 -> 7\n"
        "a restart is needed for:\n"
        f"  cgroupRoot: {node.cgroups.root} -> /elsewhere\n"
    )
    write(node, explainHistory=8, moed="observe")
    done = command(node)
    assert (done.returncode, done.stdout) == (78, "")
    assert "moed: unknown key; did you mean mode?" in done.stderr
    assert done.stderr.endswith("nothing has changed\n")
    done = command(node, "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["reload"]["result"]) == (78, "refused")
    assert answer["restart"] == [
        {"key": "cgroupRoot", "before": str(node.cgroups.root), "after": "/elsewhere"}
    ]


def test_a_kill_in_the_middle_of_a_reload_leaves_the_file_in_effect(node: FaultyNode) -> None:
    """The next start uses the file, however far the reload had come."""
    for turn, delay in enumerate((0.0, 0.05, 0.1, 0.2, 0.4)):
        cpus = str(turn)
        write(node, koordinator={"reservedCPUs": cpus})
        assert node.popen is not None
        node.popen.send_signal(signal.SIGHUP)
        time.sleep(delay)
        node.kill()
        node.start()
        page = node.status()
        assert page is not None
        assert page["settings"]["reservedCPUs"] == cpus
        assert config(node)["reload"] == {}


def test_a_reload_leaves_no_child_process(node: FaultyNode) -> None:
    assert node.popen is not None
    children = Path(f"/proc/{node.popen.pid}/task/{node.popen.pid}/children")
    for history in range(8, 12):
        write(node, explainHistory=history)
        hang_up(node)
    node.wait_until(lambda: not children.read_text().split(), 10, "the end of the processes that read")
