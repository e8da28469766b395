"""The extender as a process, and a stock kube-scheduler that asks it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.cluster.control_plane import ControlPlane, free_port

SCHEDULER = "topoproxy-scheduler"
ACCOUNT = "/api/v1/namespaces/topoproxy-system/serviceaccounts/topoproxy-scheduler-extender"
DEPLOY = Path(__file__).parents[2] / "deploy" / "scheduler"
PROFILE: dict[str, Any] = {"profiles": [{"schedulerName": SCHEDULER}], "percentageOfNodesToScore": 100}


def extender_config(port: int, **more: Any) -> dict[str, Any]:
    """Return the part of a scheduler's configuration that names the extender."""
    extender = {
        "urlPrefix": f"http://127.0.0.1:{port}",
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "bindVerb": "bind",
        "preemptVerb": "preempt",
        "weight": 10,
        "nodeCacheCapable": True,
        "httpTimeout": "10s",
        **more,
    }
    return {**PROFILE, "extenders": [extender]}


class ExtenderProcess:
    """A running extender."""

    def __init__(self, plane: ControlPlane, port: int = 0) -> None:
        """Prepare to start it, with the permissions of deploy/scheduler/rbac.yaml."""
        self.plane = plane
        self.port = port or free_port()
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = plane.create(f"{ACCOUNT}/token", asked)["status"]["token"]
        self._kubeconfig = plane.kubeconfig(token, f"extender-{self.port}.kubeconfig")
        self.log = plane.directory / f"extender-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        command = [
            *(sys.executable, "-m", "proxy", "scheduler-extender", "--plain-http"),
            *("--listen", f"127.0.0.1:{self.port}", "--kubeconfig", str(self._kubeconfig)),
        ]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        if wait:
            self.until_ready()

    def get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return f"{error.code}: {error.read().decode()}"

    def is_ready(self) -> bool:
        try:
            return self.get("/readyz") == "ok\n"
        except OSError:
            return False

    def until_ready(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.is_ready():
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            assert self.process is None or self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """End it without a chance to say anything."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(30)
        self.process = None
        return code

    def resident_mib(self) -> float:
        assert self.process is not None
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
