"""The agent as a process with a daemon on an imitated node, and the objects that it has published."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api_client import Json, bound_token
from tests.cluster.control_plane import ControlPlane

NUMATOPOLOGY = "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies/n1"
TOPOLOGY = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/n1"
_WRITES = re.compile(
    r'^apiserver_request_total\{.*\bresource="(numatopologies|noderesourcetopologies|nodes|pods|events)"'
    r'.*verb="(APPLY|PATCH|PUT|POST|DELETE)"[^}]*\} (\d+)',
    re.M,
)


def _with_account(account: Path, command: list[str]) -> list[str]:
    """Return a command that finds a service account where kubelet mounts it."""
    if os.geteuid() != 0:
        pytest.skip("needs root: a mount")
    where = "/var/run/secrets/kubernetes.io/serviceaccount"
    mount = f'mount -t tmpfs none /var/run && mkdir -p {where} && mount --bind "$0" {where} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, str(account), *command]


class AgentProcess:
    """A running agent."""

    def __init__(
        self,
        plane: ControlPlane,
        directory: Path,
        settings: str = "",
        node: str = "n1",
        server: str = "",
        environment: Mapping[str, str] | None = None,
        account: Path | None = None,
    ) -> None:
        """Start an agent.

        Args:
            plane: Its API server.
            directory: The daemon's directory; the agent's configuration and log are in it, too.
            settings: More lines of its configuration.
            node: The name of the Node object.
            server: The address of the API server, if it is not the server's own.
            environment: More variables.
            account: A directory that it finds as the service account of a pod, in place of a kubeconfig.
        """
        name = f"agent-{time.monotonic_ns()}"
        self.kubeconfig = plane.kubeconfig(bound_token(plane, node), name, server)
        config = directory / "agent.yaml"
        config.write_text(
            f"adminSocket: unix://{directory}/admin.sock\nlisten: unix://{directory}/cri.sock\n"
            f"runtime: unix://{directory}/runtime.sock\nstateDir: {directory}/state\n{settings}"
        )
        self.log = directory / "agent.log"
        command = [sys.executable, "-m", "proxy", "agent", "--config", str(config), "--node", node]
        more = {"PYTHONPATH": str(Path(__file__).parents[2]), **(environment or {})}
        if account is None:
            command += ["--kubeconfig", str(self.kubeconfig)]
        else:
            command = _with_account(account, command)
            more |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(plane.port)}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **more})

    @property
    def rss_kb(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1])

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(10) == 0, self.log.read_text()
        finally:
            self.process.kill()


@contextlib.contextmanager
def running_agent(
    plane: ControlPlane, directory: Path, settings: str = "", node: str = "n1", **more: Any
) -> Iterator[AgentProcess]:
    agent = AgentProcess(plane, directory, settings, node, **more)
    try:
        yield agent
        agent.stop()
    finally:
        agent.process.kill()
        agent.process.wait()
        print(agent.log.read_text())


def free_cpus(plane: ControlPlane) -> str | None:
    """Return the free CPUs of the Numatopology; None if there is none."""
    found = plane.get(NUMATOPOLOGY)
    return None if found is None else str(found["spec"]["numares"]["cpu"]["allocatable"])


def condition(plane: ControlPlane, node: str = "n1") -> Json:
    found = plane.get(f"/api/v1/nodes/{node}") or {}
    each = [c for c in found.get("status", {}).get("conditions", []) if c["type"] == "TopologyPlacement"]
    return each[0] if each else {}


def events(plane: ControlPlane, namespace: str = "demo") -> list[Json]:
    found: list[Json] = plane.request("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
    return found


def writes(plane: ControlPlane, *, events: bool = False) -> int:
    """Return how many writes of our kinds of objects the API server has answered, with Events or without."""
    found = _WRITES.findall(plane.request("GET", "/metrics", raw=True))
    return sum(int(n) for resource, _, n in found if events or resource != "events")


def wait_until_quiet(plane: ControlPlane, quiet_s: float, limit_s: float = 30.0) -> None:
    """Wait until our kinds of objects have not been written for some seconds; Events do not count."""
    began = since = time.monotonic()
    before = writes(plane)
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() - began < limit_s, f"there are always writes within {quiet_s} s"
        time.sleep(0.25)
        now = writes(plane)
        if now != before:
            before, since = now, time.monotonic()
