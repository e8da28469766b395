"""A real kubelet on this host that joins a real API server; a daemon is between it and the private runtime.

kubelet runs in the runtime's mount namespace: its mounts for pods must be visible there, and its directories
below /var are private to it. It uses the host's network, where the API server listens.
kubelet changes kernel settings when it starts, so regular files are mounted over them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_runtime import PrivateRuntime, end_process, hierarchies

from tests.cluster.control_plane import free_port

if TYPE_CHECKING:
    from tests.cluster.control_plane import ControlPlane

VAR = ("lib/kubelet", "log/pods", "log/containers")
TUNABLES = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
"""Files that kubelet writes (kubernetes pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables)."""


@dataclass(frozen=True)
class CallFigures:
    """The durations of CRI calls in kubelet's histograms since its start.

    Attributes:
        counts: The number of calls by kind.
        sums: The total duration in seconds by kind.
        buckets: The number of calls by kind and upper bound of the duration in seconds.
        errors: The number of failed calls by kind.
    """

    counts: Mapping[str, float]
    sums: Mapping[str, float]
    buckets: Mapping[tuple[str, float], float]
    errors: Mapping[str, float]

    @staticmethod
    def read(text: str) -> CallFigures:
        """Read kubelet's metrics."""
        found: dict[str, dict[Any, float]] = {"count": {}, "sum": {}, "bucket": {}, "errors": {}}
        for line in text.splitlines():
            if match := _DURATION.match(line):
                part, kind, bound, value = match.groups()
                found[part][kind if bound is None else (kind, float(bound))] = float(value)
            elif match := _ERROR.match(line):
                found["errors"][match[1]] = float(match[2])
        assert found["count"], "kubelet's metrics have no durations of calls"
        return CallFigures(found["count"], found["sum"], found["bucket"], found["errors"])

    def since(self, before: CallFigures, kind: str) -> tuple[int, float, float]:
        """Return the number of calls of a kind since ``before``, their mean and an upper bound."""
        count = self.counts.get(kind, 0) - before.counts.get(kind, 0)
        total = self.sums.get(kind, 0) - before.sums.get(kind, 0)
        bounds = [
            bound
            for (each, bound), value in self.buckets.items()
            if each == kind and value - before.buckets.get((each, bound), 0) >= count
        ]
        return int(count), total / max(count, 1), min(bounds)


_DURATION = re.compile(
    r"kubelet_runtime_operations_duration_seconds_(bucket|sum|count)"
    r'\{operation_type="([a-z_]+)"(?:,le="([^"]+)")?\} (\S+)'
)
_ERROR = re.compile(r'kubelet_runtime_operations_errors_total\{operation_type="([a-z_]+)"\} (\S+)')


class RealKubelet:
    """A kubelet that can be started and stopped repeatedly.

    Attributes:
        name: The name of its Node object.
        log: Its log file.
    """

    def __init__(
        self, directory: Path, runtime: PrivateRuntime, plane: ControlPlane, socket: Path, name: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = directory / "kubelet.log"
        self._runtime = runtime
        self._plane = plane
        self._read_only = free_port()
        self._manifests = directory / "manifests"
        self._manifests.mkdir()
        self._config = directory / "kubelet.json"
        self._config.write_text(json.dumps(self._settings(socket, directory)))
        self._certificates = directory / "certs"
        self._process: subprocess.Popen[str] | None = None
        self._made: list[Path] = []
        self._cover(directory)
        self._make_cgroups()

    def _settings(self, socket: Path, directory: Path) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": free_port(),
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self._runtime.cgroup,
            "containerRuntimeEndpoint": f"unix://{socket}",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "10Mi"},
            "fileCheckFrequency": "1s",
            "failCgroupV1": False,
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "2s",
            "readOnlyPort": self._read_only,
            "registerNode": True,
            "resolvConf": "",
            "staticPodPath": str(self._manifests),
            "syncFrequency": "10s",
            "volumePluginDir": str(directory / "plugins"),
        }

    def _cover(self, directory: Path) -> None:
        """Cover the files that kubelet would change on the host by mounts in the runtime's namespace."""
        for each in VAR:
            target, own = Path("/var") / each, directory / each.replace("/", "-")
            own.mkdir()
            if not target.exists():
                target.mkdir(parents=True)
                self._made.append(target)
            self._bind(own, target)
        for each in TUNABLES:
            target, own = Path("/proc/sys") / each, directory / each.replace("/", "-")
            own.write_text(target.read_text())
            self._bind(own, target)

    def _bind(self, source: Path, target: Path) -> None:
        done = self._runtime.run(["mount", "--bind", str(source), str(target)])
        assert done.returncode == 0, done.stdout

    def _make_cgroups(self) -> None:
        """Create the parent cgroup of kubelet's pods; on v1 a new cpuset is empty and must be filled."""
        for root in hierarchies():
            group = root / self._runtime.cgroup.lstrip("/")
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (group / file).exists() and not (group / file).read_text().strip():
                    (group / file).write_text((root / file).read_text())

    @property
    def ready(self) -> bool:
        """Whether the Node object is ready."""
        found = self._plane.get(f"/api/v1/nodes/{self.name}") or {}
        conditions = found.get("status", {}).get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def start(self) -> None:
        """Start kubelet; it joins the cluster within seconds."""
        program = Path(os.environ["TOPOPROXY_CLUSTER"]) / "kubelet"
        kubeconfig = self._plane.kubeconfig(f"{self.name}-token", f"kubelet-{self.name}")
        command = [
            *(str(program), f"--config={self._config}", f"--kubeconfig={kubeconfig}"),
            *(f"--cert-dir={self._certificates}", f"--hostname-override={self.name}", "--v=2"),
        ]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._runtime.inside(command, network=False),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )

    def add_static_pod(self, name: str, spec: Mapping[str, object]) -> None:
        """Add a static pod, which needs no API server."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "demo"},
            "spec": spec,
        }
        hidden = self._manifests / f".{name}"
        hidden.write_text(json.dumps(pod))
        hidden.rename(self._manifests / f"{name}.yaml")

    def remove_static_pod(self, name: str) -> None:
        """Remove a static pod."""
        (self._manifests / f"{name}.yaml").unlink(missing_ok=True)

    def calls(self) -> CallFigures:
        """Return kubelet's metrics of its calls to the runtime's socket."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._read_only}/metrics", timeout=10) as answer:
            return CallFigures.read(answer.read().decode())

    def check(self) -> None:
        """Raise an error if kubelet has ended."""
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-2000:]

    def stop(self) -> None:
        """Stop kubelet; its pods continue to run."""
        if self._process is not None:
            end_process(self._process)
            self._process = None

    def close(self) -> None:
        """Stop kubelet and remove its directories from the host."""
        self.stop()
        for each in self._made:
            with contextlib.suppress(OSError):
                each.rmdir()
