"""A real etcd and kube-apiserver on loopback, and a client of the cluster's administrator."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.api_client import AdminApiClient, ApiError

START_S = 90.0
PROGRAMS = ("kube-apiserver",)
NODES = ("n1", "n2")
"""Nodes whose kubelets have credentials: the token of ``n1`` is ``n1-token``."""
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "disruption-controller",
    "garbage-collector-controller",
    "pod-garbage-collector-controller",
)


def control_plane_skip_reason(*programs: str) -> str:
    """Return why there can be no control plane here; empty if there can.

    Args:
        programs: Needed besides kube-apiserver.
    """
    directory = os.environ.get("TOPOPROXY_CLUSTER", "")
    if not directory:
        return "needs a kube-apiserver, which make test-cluster builds (TOPOPROXY_CLUSTER: its directory)"
    for program in (*PROGRAMS, *programs):
        if not (Path(directory) / program).exists():
            return f"there is no {program} in {directory}"
    return "" if shutil.which("etcd") else "needs etcd (Debian: etcd-server)"


def free_port() -> int:
    """Return a port on which no process listens, outside of the range of outgoing connections (Linux)."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


class ControlPlane(AdminApiClient):
    """etcd and an API server; ``stop_api`` and ``start_api`` make an outage."""

    def __init__(self, directory: Path) -> None:
        super().__init__("127.0.0.1", free_port())
        self.directory = directory
        self._etcd_port, peer = free_port(), free_port()
        self.server = f"https://127.0.0.1:{self.port}"
        subprocess.run(
            ["openssl", "genrsa", "-out", directory / "sa.key", "2048"], check=True, capture_output=True
        )
        tokens = ['admin-token,admin,1,"system:masters"']
        tokens += [f'{node}-token,system:node:{node},{node},"system:nodes"' for node in NODES]
        (directory / "tokens.csv").write_text("\n".join(tokens) + "\n")
        etcd = f"http://127.0.0.1:{self._etcd_port}"
        self._etcd = self._start(
            "etcd", "etcd", f"--data-dir={directory}/etcd", f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}", f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        self._api: subprocess.Popen[bytes] | None = None
        self._more: list[subprocess.Popen[bytes]] = []

    def _start(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{log}.log").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, cwd=self.directory)

    def start_api(self) -> None:
        directory = self.directory
        program = Path(os.environ["TOPOPROXY_CLUSTER"]) / "kube-apiserver"
        self._api = self._start(
            "apiserver", str(program), f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--service-account-key-file={directory}/sa.key",
            f"--service-account-signing-key-file={directory}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-account-lookup=true",
            f"--token-auth-file={directory}/tokens.csv", "--authorization-mode=Node,RBAC",
            "--bind-address=127.0.0.1", f"--secure-port={self.port}", f"--cert-dir={directory}/certs",
            "--service-cluster-ip-range=10.96.0.0/16", "--advertise-address=127.0.0.1",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--enable-admission-plugins=NodeRestriction",
            "--endpoint-reconciler-type=none",
        )  # fmt: skip
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                if self.request("GET", "/readyz", raw=True) == "ok":
                    return
            except (OSError, ApiError):
                pass
            assert self._api.poll() is None, (directory / "apiserver.log").read_text()[-2000:]
            time.sleep(0.1)
        raise TimeoutError((directory / "apiserver.log").read_text()[-2000:])

    def stop_api(self) -> None:
        """Kill the API server, as a power failure would."""
        if self._api is not None:
            self._api.send_signal(signal.SIGKILL)
            self._api.wait()
            self._api = None

    def start_scheduler(self, **more: Any) -> None:
        """Start the stock kube-scheduler until it is ready; ``more`` is added to its configuration."""
        config = self.directory / f"scheduler-{len(self._more)}.yaml"
        value = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubeconfig())},
            "leaderElection": {"leaderElect": False},
            **more,
        }
        config.write_text(yaml.safe_dump(value))
        port = self._run_program("kube-scheduler", f"--config={config}")
        end = time.monotonic() + START_S
        while not self._is_ready(port):
            assert time.monotonic() < end, (self.directory / "kube-scheduler.log").read_text()[-2000:]
            time.sleep(0.05)

    def start_controllers(self) -> None:
        """Start kube-controller-manager with the controllers of workloads and those that clean up."""
        self._run_program(
            "kube-controller-manager", f"--kubeconfig={self.kubeconfig()}", "--leader-elect=false",
            f"--controllers={','.join(CONTROLLERS)}", f"--cert-dir={self.directory}/controller-certs",
        )  # fmt: skip

    def _run_program(self, program: str, *arguments: str) -> int:
        path, port = Path(os.environ["TOPOPROXY_CLUSTER"]) / program, free_port()
        where = ("--bind-address=127.0.0.1", f"--secure-port={port}")
        self._more.append(self._start(program, str(path), *where, *arguments))
        return port

    def _is_ready(self, port: int) -> bool:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=self._context)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        return False

    def close(self) -> None:
        for process in self._more:
            process.kill()
            process.wait()
        super().close()
        self.stop_api()
        self._etcd.kill()
        self._etcd.wait()

    def compact(self) -> None:
        """Make etcd forget all revisions before the newest one."""
        server = f"http://127.0.0.1:{self._etcd_port}/v3/kv"
        request = urllib.request.Request(f"{server}/range", b'{"key": "AA=="}')
        with urllib.request.urlopen(request, timeout=10) as answer:
            revision = json.loads(answer.read())["header"]["revision"]
        body = json.dumps({"revision": revision, "physical": True}).encode()
        request = urllib.request.Request(f"{server}/compaction", body)
        urllib.request.urlopen(request, timeout=10).close()

    def kubeconfig(self, token: str = "admin-token", name: str = "kubeconfig", server: str = "") -> Path:
        file = self.directory / name
        cluster = {"server": server or self.server, "insecure-skip-tls-verify": True}
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        file.write_text(yaml.safe_dump(value))
        return file
