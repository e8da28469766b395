"""The proxy of the demonstration: ``topoproxy serve`` as a process of its own, so that it can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from proxy.demo.client import CriClient
from proxy.model.errors import TopoproxyError, UnavailableError


class ProxyProcess:
    """Starts, kills and asks one proxy.

    Args:
        directory: Its files: configuration, state, log.
        settings: The configuration's keys and values, without ``listen`` and ``stateDir``.
    """

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        self.socket = directory / "cri.sock"
        self.admin = directory / "admin.sock"
        self.log = directory / "topoproxy.log"
        self._config = directory / "config.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        values = {
            "apiVersion": "topoproxy/v1",
            "kind": "TopoproxyConfiguration",
            "kubelet": {"stateDir": str(directory / "kubelet")},  # the machine's own kubelet plays no part
            **settings,
            "listen": f"unix://{self.socket}",
            "adminSocket": f"unix://{self.admin}",
            "stateDir": str(directory / "state"),
        }
        self._config.write_text(yaml.safe_dump(values, sort_keys=False))

    @property
    def pid(self) -> int:
        """The process id; 0 when it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self, seconds: float = 20.0) -> float:
        """Start it and wait for the first good answer through it.

        Returns:
            Seconds until that answer.

        Raises:
            UnavailableError: It ended, or gave no answer in time; the end of its log is in the message.
        """
        started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - no part of it is input
                [sys.executable, "-m", "proxy", "serve", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demonstration, which then cleans up
                env={key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"},
            )
        while time.monotonic() < started + seconds and self._process.poll() is None:
            if self._answers():
                return time.monotonic() - started
            time.sleep(0.02)
        self.kill()
        lines = self.log.read_text(errors="replace").splitlines()[-3:]
        raise UnavailableError("cannot start the proxy: " + ("\n".join(lines) or "it gave no answer"))

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it as systemd would (SIGTERM, and SIGKILL after ten seconds)."""
        self._end(signal.SIGTERM)

    def _end(self, with_signal: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(with_signal)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        """Return whether a process answers through the socket; a dead one is left by a killed proxy."""
        if not self.socket.exists():
            return False
        try:
            with CriClient(str(self.socket), timeout=0.5) as client:
                client.version()
        except TopoproxyError:
            return False
        return True
