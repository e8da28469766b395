"""A node whose daemon is a process, so that another process can replace it."""

from __future__ import annotations

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
from proxy.model.errors import UnavailableError
from tests.testkit.daemon import DaemonNode, temporary_node

LIMIT_S = 60.0


class ProcessNode(DaemonNode):
    """A node whose daemon is a process that reads machine and cgroups below the node's directory."""

    popen: subprocess.Popen[bytes]

    def start(self) -> None:
        from proxy.topology.sysfs_writer import write_sysfs

        write_sysfs(self.machine, self.directory / "machine")
        roots = {"sysfsRoot": "machine/sys", "procfsRoot": "machine/proc", "cgroupRoot": "cgroup"}
        self.settings = "\n".join(f"{key}: {self.directory / name}" for key, name in roots.items())
        self.file = self.directory / "config.yaml"
        self.configure("")
        self.notify_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify_socket.bind(str(self.directory / "notify"))
        self.notify_socket.setblocking(False)
        with (self.directory / "log").open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "proxy", "serve", "--config", str(self.file)],
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(self.directory / "notify")},
            )
        self.wait(lambda: self.answers("ready"))

    def configure(self, text: str) -> None:
        head = "apiVersion: topoproxy/v1\nkind: TopoproxyConfiguration\nkubelet: {stateDir: /nowhere}\n"
        self.file.write_text(head + self.configuration(text))

    def notified(self) -> list[str]:
        """Return the notifications sent to systemd since the last call."""
        found = list[str]()
        while True:
            try:
                found += self.notify_socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return [line for line in found if not line.startswith("STATUS=")]

    @property
    def admin(self) -> Path:
        return self.directory / "admin.sock"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def answers(self, key: str) -> Any:
        assert self.popen.poll() is None, self.log
        try:
            page: Any = query_admin(self.admin, "/status")
        except UnavailableError:
            return None
        return page[key]

    def wait(self, condition: Any) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.log
            time.sleep(0.02)

    def lock_holder(self) -> int:
        """Return the process that holds the lock of the socket."""
        return int((self.directory / "cri.sock.lock").read_text())


@pytest.fixture
def node() -> Iterator[ProcessNode]:
    with temporary_node(ProcessNode) as node:
        node.start()
        try:
            yield node
        finally:
            for pid in {node.popen.pid, node.lock_holder()}:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            node.popen.wait()
            node.notify_socket.close()
