"""Sends systemd the daemon's readiness, a status line, and signs of life (sd_notify(3))."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class SystemdNotifier:
    """Sends state lines to the socket that systemd names; without one every call does nothing.

    Attributes:
        ping_interval_s: Seconds between calls of ``ping`` (half of what systemd waits); None without a
            watchdog.
    """

    __slots__ = ("_address", "ping_interval_s")

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        # An abstract name is written with @ in the environment and starts with a zero byte in the kernel.
        self._address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""
        self.ping_interval_s = self._watchdog(environ) if self._address else None

    @staticmethod
    def _watchdog(environ: Mapping[str, str]) -> float | None:
        text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        if not text.isdigit() or int(text) == 0 or (pid and pid != str(os.getpid())):
            return None
        return int(text) / 2_000_000

    def ready(self, status: str = "") -> None:
        """The service is up."""
        self._send("READY=1", *([_status(status)] if status else []))

    def reloading(self) -> None:
        """The service reads its configuration again; ``ready`` follows.

        The message has the time, because ``Type=notify-reload`` needs it (sd_notify(3)).
        """
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def status(self, text: str) -> None:
        """The present activity of the daemon, for ``systemctl status``."""
        self._send(_status(text))

    def main_process(self, pid: int) -> None:
        """Another process is the service from now on."""
        self._send(f"MAINPID={pid}")

    def stopping(self, status: str = "") -> None:
        """The service is stopping."""
        self._send("STOPPING=1", *([_status(status)] if status else []))

    def ping(self) -> None:
        """The service is alive."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as client:
                client.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)
        except OSError:
            pass  # A failed send must not end the daemon; a lost ping shows up as a watchdog restart.


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())
