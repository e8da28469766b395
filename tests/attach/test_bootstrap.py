"""The script that attaches a new node: it waits for the units, and changes nothing if they do not start."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.attach.conftest import EMBEDDED, OURS, FakeNode

SCRIPT = Path(__file__).parents[2] / "systemd/bootstrap-node.sh"
SYSTEMCTL = '#!/bin/sh\necho "$3" >>"$LOG"\n[ "$(grep -c "$3" "$LOG")" -ge "$TIMES" ]\n'


@pytest.mark.parametrize(
    ("times", "seconds", "options", "attached"),
    [(1, "1", [], True), (2, "3", ["--timeout", "300"], True), (9, "1", [], False)],
)
def test_the_script_attaches_once_both_units_run(
    tmp_path: Path, times: int, seconds: str, options: list[str], attached: bool
) -> None:
    command = " ".join(["attach --yes", *options])
    for name, text in (("systemctl", SYSTEMCTL), ("topoproxy", '#!/bin/sh\necho "$*" >>"$LOG"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "TIMES": str(times)}
    done = subprocess.run(
        ["sh", SCRIPT, seconds, *options], env=env, capture_output=True, text=True, timeout=60
    )
    lines = log.read_text().splitlines()
    assert (done.returncode == 0) is attached
    assert (command in lines) is attached
    if attached:
        assert lines == [*["containerd.service"] * times, *["kubelet.service"] * times, command]
    else:
        assert "containerd.service is not active" in done.stderr


@pytest.mark.skipif(Path("/run/systemd/system").exists(), reason="systemd runs")
def test_the_script_fails_at_once_if_systemd_does_not_run(tmp_path: Path) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text('#!/bin/sh\necho "System has not been booted with systemd" >&2\nexit 1\n')
    systemctl.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", SCRIPT], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    expected = "bootstrap-node: cannot attach kubelet: systemd does not run: nothing is changed\n"
    assert (done.stdout, done.stderr) == ("", expected)


@contextmanager
def admin_socket(node: FakeNode) -> Iterator[Path]:
    """Serve the admin socket as the daemon of the node does."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            verb, route, _ = self.rfile.readline().decode().split()
            body = json.dumps(node.query(route, verb == "POST"))
            self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{body}".encode())

    path = node.state.with_name("admin.sock")
    with socketserver.ThreadingUnixStreamServer(str(path), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield path
        server.shutdown()


@pytest.mark.parametrize("layout", ["instance-config", "k3s-server"])
def test_the_attach_of_the_script_is_a_real_one_and_can_be_repeated(
    fake: Callable[[str], FakeNode], tmp_path: Path, layout: str
) -> None:
    node = fake(layout)
    before = node.hashes()
    env = {**os.environ}
    if layout == "k3s-server":
        node.runtime = EMBEDDED.removeprefix("unix://")
        env |= dict.fromkeys(("TOPOPROXY_RUNTIME_UNIT", "TOPOPROXY_KUBELET_UNIT"), "k3s.service")
    config = tmp_path / "c.yaml"
    program = tmp_path / "bin/topoproxy"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m proxy "$@" --config {config} --root {node.root}\n'
    )
    program.chmod(0o755)
    with admin_socket(node) as admin:
        settings = {
            "stateDir": str(node.state),
            "procfsRoot": f"{node.root}/proc",
            "adminSocket": f"unix://{admin}",
        }
        config.write_text(json.dumps(settings))
        config.chmod(0o600)
        for expected in (f"attached: kubelet uses {OURS}", f"kubelet is attached already, and uses {OURS}"):
            done = subprocess.run(["sh", SCRIPT, "9"], env=env, capture_output=True, text=True, timeout=60)
            assert (done.returncode, expected in done.stdout) == (0, True), done
        assert node.uses_us()
        done = subprocess.run(
            [program, "detach", "--yes"], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done
    assert node.hashes() == before
