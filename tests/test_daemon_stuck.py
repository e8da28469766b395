"""The daemon as a process whose worker threads hang: what continues, and that the process still ends.

What hangs is real: the kernel worker is in a system call that does not return, as the test holds the lock
that orders the writes of the imitated cgroup tree.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.client import query_admin
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.cgroup.hierarchies import FAKE_TREE_FILE
from proxy.demo.client import CriClient, DemoPod
from proxy.demo.runtime import StandInRuntime
from proxy.model.errors import TopoproxyError
from proxy.topology.regular_machine import regular_machine
from tests.testkit.waiting import wait_until

DRAIN_S = 1.0
SLACK_S = 10.0
"""What a busy machine may add; an end that hangs takes much longer."""
PROGRAM = """
import functools, sys, threading
from pathlib import Path
from unittest import mock
from proxy import daemon, process
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.config.load import parse
from proxy.executor import background, context, worker_health
from proxy.topology.regular_machine import regular_machine

root = Path(sys.argv[1])
context.STUCK_S = 0.3
worker_health.PERIOD_S = 0.1
parts = dict(machine=regular_machine(2, 1, 4, 2), cgroups=FakeCgroups.open(root / "cgroup"))
process.Daemon = functools.partial(daemon.Daemon, **parts)
config = parse(sys.argv[2], "test")
{more}
sys.exit(process.run_and_report(config))
"""
CONFIG = """
listen: unix://{0}/cri.sock
adminSocket: unix://{0}/admin.sock
runtime: unix://{0}/runtime.sock
stateDir: {0}/state
drainTimeout: 1s
callTimeout: 500ms
reconcilePeriod: 1s
"""
EVERY_WORKER_HANGS = """
close = background.Worker.close
def hang(self):
    self.start(threading.Event().wait)
    close(self)
background.Worker.close = hang
"""
THE_END_HANGS = 'mock.patch.object(daemon, "shut_down", lambda *_: daemon.asyncio.Event().wait()).start()'
A_THREAD_REMAINS = "threading.Thread(target=threading.Event().wait).start()"


class Node:
    """A daemon in its own process, with the stand-in runtime."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        machine = regular_machine(2, 1, 4, 2)
        self.cgroups = FakeCgroups(directory / "cgroup", machine.online, machine.memory_nodes, 1)
        self.runtime = StandInRuntime(directory / "runtime.sock", self.cgroups)
        self.process: subprocess.Popen[str] | None = None

    def start(self, more: str = "", **environ: str) -> None:
        program = [sys.executable, "-c", PROGRAM.replace("{more}", more)]
        self.process = subprocess.Popen(
            [*program, str(self.directory), CONFIG.format(self.directory)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        wait_until(lambda: self.page().get("ready"))

    def page(self) -> dict[str, Any]:
        with contextlib.suppress(TopoproxyError):
            page = query_admin(self.directory / "admin.sock", "/status", 30)
            assert isinstance(page, dict)
            return page
        return {}

    @contextlib.contextmanager
    def stuck_kernel(self) -> Iterator[None]:
        """Block each write of the tree while this context holds its lock."""
        with (self.directory / "cgroup" / FAKE_TREE_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def end(self) -> tuple[int, float, str]:
        """Send SIGTERM; return the exit code, the seconds until the end, and the log."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        _, reported = self.process.communicate(timeout=60)
        return self.process.returncode, time.monotonic() - began, reported


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("n"))
    made.runtime.start()
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.process.kill()
            made.process.communicate()
        made.runtime.stop()


def test_sigterm_ends_the_process_in_time_although_the_kernel_hangs(
    node: Node,
) -> None:
    node.start()
    with CriClient(node.directory / "cri.sock") as client:
        client.launch(DemoPod("ls", "LS"))
        pod = client.run_pod(DemoPod("lse", "LSE", cpuset="2-3"))
        with node.stuck_kernel():
            with pytest.raises(TopoproxyError, match="in time"):
                client.create(pod)
            wait_until(lambda: node.page()["workers"]["kernel"]["stuck_s"] > 0)
            page = node.page()
            assert page["ready"] is False
            assert any("is stuck in one job worker=kernel" in p["what"] for p in page["problems"])
            metrics = query_admin(node.directory / "admin.sock", "/metrics", 30)
            assert isinstance(metrics, str)
            (line,) = [
                x
                for x in metrics.split("\n")
                if x.startswith('topoproxy_worker_stuck_seconds{worker="kernel"')
            ]
            assert float(line.split()[-1]) > 0
            client.version()
        wait_until(lambda: node.page()["ready"])
        client.create(pod)
        assert [owner["cpus"] for owner in node.page()["exclusive"]] == ["2-3"]
        other = client.run_pod(DemoPod("other", "LSE", cpuset="4-5"))
        with node.stuck_kernel():
            with pytest.raises(TopoproxyError, match="in time"):
                client.create(other)
            code, seconds, reported = node.end()
    assert (code, seconds < DRAIN_S + 5 + SLACK_S) == (0, True), reported
    assert not (node.directory / "cri.sock").exists()
    assert not (node.directory / "admin.sock").exists()


@pytest.mark.parametrize(
    ("more", "code"),
    [(EVERY_WORKER_HANGS, 0), (THE_END_HANGS, 1), (A_THREAD_REMAINS, 1)],
    ids=["every worker", "the end itself", "a foreign thread"],
)
def test_sigterm_ends_the_process_in_time_whatever_hangs(node: Node, more: str, code: int) -> None:
    node.start(more)
    found, seconds, reported = node.end()
    assert (found, seconds < DRAIN_S + 5 + SLACK_S) == (code, True), reported
    assert ("the process ends without waiting any longer seconds=5.6" in reported) == bool(code)
    assert not (node.directory / "cri.sock").exists()


def test_a_daemon_without_stuck_workers_ends_at_once(node: Node) -> None:
    node.start()
    code, seconds, reported = node.end()
    assert code == 0
    assert seconds < DRAIN_S + SLACK_S, reported
    assert "in time" not in reported


def test_no_watchdog_notification_is_sent_once_a_restart_may_help(node: Node) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
        notify_socket.bind(str(node.directory / "notify"))
        notify_socket.settimeout(0.5)
        node.start(
            "worker_health.RESTART_S, worker_health.STEADY_S = 6.0, 0.1",
            NOTIFY_SOCKET=str(node.directory / "notify"),
            WATCHDOG_USEC="200000",
        )
        with CriClient(node.directory / "cri.sock") as client:
            client.launch(DemoPod("ls", "LS"))
            pod = client.run_pod(DemoPod("lse", "LSE", cpuset="2-3"))
            time.sleep(0.2)  # an idle machine gets here before the worker has worked for STEADY_S
            with node.stuck_kernel():
                with pytest.raises(TopoproxyError, match="in time"):
                    client.create(pod)
                received = _received(notify_socket)
                assert "WATCHDOG=1" in received, "at first the stuck worker is only reported"
                assert any(line.startswith("STATUS=the kernel worker has been stuck") for line in received)
                wait_until(lambda: "WATCHDOG=1" not in _received(notify_socket, 1.0))
            wait_until(lambda: "WATCHDOG=1" in _received(notify_socket, 1.0))
        assert node.end()[0] == 0


def _received(notify_socket: socket.socket, seconds: float = 0.7) -> list[str]:
    """Return the notifications of the daemon in the next seconds."""
    end, received = time.monotonic() + seconds, list[str]()
    notify_socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            notify_socket.recv(4096)  # earlier notifications
    notify_socket.settimeout(0.1)
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            received += notify_socket.recv(4096).decode().split("\n")
    return received
