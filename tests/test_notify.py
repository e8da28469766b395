"""The notifications that the daemon sends to systemd."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from proxy.notify import SystemdNotifier


@pytest.fixture(params=["path", "abstract"])
def notify_socket(request: pytest.FixtureRequest, tmp_path: Path):
    """The socket of systemd, with its name in the environment."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@topoproxy-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0", 1))
        listening.settimeout(5)
        yield listening, name


def test_each_state_is_sent_to_systemd_as_its_line(notify_socket) -> None:
    listening, name = notify_socket
    notifier = SystemdNotifier({"NOTIFY_SOCKET": name})
    notifier.ready("placing\n containers")
    assert listening.recv(200) == b"READY=1\nSTATUS=placing containers"
    notifier.ready()
    assert listening.recv(200) == b"READY=1"
    notifier.status("upstream down")
    assert listening.recv(200) == b"STATUS=upstream down"
    notifier.ping()
    assert listening.recv(200) == b"WATCHDOG=1"
    notifier.reloading()
    first, second = listening.recv(200).decode().split("\n")
    assert first == "RELOADING=1"
    assert 0 <= time.monotonic() - int(second.removeprefix("MONOTONIC_USEC=")) / 1e6 < 5
    notifier.stopping("draining")
    assert listening.recv(200) == b"STOPPING=1\nSTATUS=draining"
    notifier.main_process(7)
    assert listening.recv(200) == b"MAINPID=7"


@pytest.mark.parametrize(
    ("more", "interval"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_interval_is_half_of_systemds(more: dict[str, str], interval: float | None) -> None:
    assert SystemdNotifier({"NOTIFY_SOCKET": "/run/notify", **more}).ping_interval_s == interval


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "relative"}])
def test_without_systemd_nothing_happens(environ: dict[str, str]) -> None:
    notifier = SystemdNotifier({**environ, "WATCHDOG_USEC": "30000000"})
    notifier.ready("x")
    assert notifier.ping_interval_s is None


def test_a_missing_listener_is_not_an_error(tmp_path: Path) -> None:
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ping()
