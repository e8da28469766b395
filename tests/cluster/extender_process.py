"""The extender as a process, and a stock kube-scheduler that calls it."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.control_plane import ControlPlane, free_port

SCHEDULER = "topoproxy-scheduler"
ACCOUNT = "/api/v1/namespaces/topoproxy-system/serviceaccounts/topoproxy-scheduler-extender"
DEPLOY = Path(__file__).parents[2] / "deploy" / "scheduler"
PROFILE: dict[str, Any] = {"profiles": [{"schedulerName": SCHEDULER}], "percentageOfNodesToScore": 100}


def make_certificates(directory: Path) -> None:
    """Make an authority, and certificates of the server and of kube-scheduler: NAME.crt and NAME.key."""
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    key = "ec -pkeyopt ec_paramgen_curve:prime256v1"
    steps = [f"req -x509 -newkey {key} -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=ca"]
    for name in ("server", "client"):
        steps.append(f"req -newkey {key} -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
        signed = f"-CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile san -out {name}.crt"
        steps.append(f"x509 -req -in {name}.csr {signed}")
    for step in steps:
        subprocess.run(["openssl", *step.split()], cwd=directory, check=True, capture_output=True)


def extender_config(process: ExtenderProcess, **more: Any) -> dict[str, Any]:
    """Return the part of a scheduler's configuration that names the extender."""
    directory = process.plane.directory
    extender = {
        "urlPrefix": f"https://127.0.0.1:{process.port}",
        "enableHTTPS": True,
        "tlsConfig": {
            "caFile": str(directory / "ca.crt"),
            "certFile": str(directory / "client.crt"),
            "keyFile": str(directory / "client.key"),
        },
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
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = plane.create(f"{ACCOUNT}/token", request)["status"]["token"]
        if not (plane.directory / "ca.crt").exists():
            make_certificates(plane.directory)
        self._kubeconfig = plane.kubeconfig(token, f"extender-{self.port}.kubeconfig")
        self.log = plane.directory / f"extender-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True, environment: Mapping[str, str] | None = None) -> None:
        command = [
            *(sys.executable, "-m", "proxy", "scheduler-extender"),
            *("--tls-cert", "server.crt", "--tls-key", "server.key", "--client-ca", "ca.crt"),
            *("--listen", f"127.0.0.1:{self.port}", "--kubeconfig", str(self._kubeconfig)),
        ]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=self.plane.directory,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        if wait:
            self.until_ready()

    def get(self, path: str, *, trusted: bool = False, body: object = None) -> str:
        """Read a page; with a body, send a request as kube-scheduler does."""
        context = ssl.create_default_context(cafile=self.plane.directory / "ca.crt")
        if trusted:
            client = self.plane.directory / "client"
            context.load_cert_chain(client.with_suffix(".crt"), client.with_suffix(".key"))
        url = f"https://127.0.0.1:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(url, data, timeout=5, context=context) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return f"{error.code}: {error.read().decode()}"

    def is_ready(self) -> bool:
        return self.answers("/readyz")

    def answers(self, path: str) -> bool:
        """Return whether a page for probes reports success."""
        try:
            return self.get(path) == "ok\n"
        except OSError:
            return False

    def until_ready(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.is_ready():
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            assert self.process is None or self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """End it without a chance to give up its lease."""
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
