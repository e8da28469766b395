"""The socket that is open before the daemon starts."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxy.config.load import parse
from proxy.early_socket import open_socket
from proxy.model.errors import ConfigError, LockedError
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(1, 1, 2, 2)


def settings(directory: Path, more: str = "") -> str:
    return f"""
listen: unix://{directory}/cri.sock
adminSocket: unix://{directory}/admin.sock
runtime: unix://{directory}/runtime.sock
stateDir: {directory}/state
mode: observe
{more}"""


def connected(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("apiVersion: topoproxy/v1\nkind: TopoproxyConfiguration" + settings(tmp_path))
    return path


def test_the_socket_is_open_before_the_daemon_is_created(tmp_path: Path) -> None:
    early = open_socket(parse(settings(tmp_path), "test"), MACHINE)
    try:
        assert connected(tmp_path / "cri.sock")
        assert early.machine is MACHINE
        assert early.config.mode == "observe"
        with pytest.raises(LockedError, match="cannot listen on"):
            open_socket(parse(settings(tmp_path), "test"), MACHINE)
        assert not (tmp_path / "state").exists()
    finally:
        early.listener.close()


def test_no_socket_is_opened_if_the_settings_do_not_fit_the_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reservedSystemCPUs"):
        open_socket(parse(settings(tmp_path, "reservedSystemCPUs: 0-3"), "test"), MACHINE)
    assert not (tmp_path / "cri.sock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_daemon_exists_waits_for_it(
    tmp_path: Path, config_file: Path, number: signal.Signals
) -> None:
    argv = [sys.executable, "-m", "proxy", "serve", "--config", str(config_file)]
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(argv, stderr=log)
    try:
        until = time.monotonic() + 60
        while not connected(tmp_path / "cri.sock") and time.monotonic() < until:
            time.sleep(0.001)
        daemon.send_signal(number)
        assert daemon.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        daemon.kill()
        daemon.wait()
    assert not (tmp_path / "cri.sock").exists()


def test_a_socket_that_cannot_be_opened_ends_the_process_with_its_exit_code(
    tmp_path: Path, config_file: Path
) -> None:
    early = open_socket(parse(settings(tmp_path), "test"), MACHINE)
    try:
        argv = [sys.executable, "-m", "proxy", "serve", "--config", str(config_file)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    finally:
        early.listener.close()
    assert done.returncode == 75
    assert done.stderr.startswith("topoproxy: cannot listen on ")
