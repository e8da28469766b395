"""A real kubelet on this machine that joins a real API server; a daemon is between it and the bed's runtime.

kubelet runs in the bed's mount namespace, as the runtime does: what it mounts for pods must be seen there,
and its directories below /var are the bed's own. Its network is the machine's, because the API server is
there. It changes kernel settings when it starts: these files are covered by plain ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from bed import Bed, end_process, hierarchies

from tests.cluster.control_plane import free_port

if TYPE_CHECKING:
    from tests.cluster.control_plane import ControlPlane

VAR = ("lib/kubelet", "log/pods", "log/containers")
TUNABLES = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
"""What kubelet sets (kubernetes pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables)."""


class RealKubelet:
    """A kubelet; ``start`` and ``stop`` as often as wanted.

    Attributes:
        name: Of its Node object.
        log: What it wrote.
    """

    def __init__(self, directory: Path, bed: Bed, plane: ControlPlane, socket: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = directory / "kubelet.log"
        self._bed = bed
        self._plane = plane
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
            "cgroupRoot": self._bed.cgroup,
            "containerRuntimeEndpoint": f"unix://{socket}",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "10Mi"},
            "failCgroupV1": False,
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "2s",
            "registerNode": True,
            "resolvConf": "",
            "syncFrequency": "10s",
            "volumePluginDir": str(directory / "plugins"),
        }

    def _cover(self, directory: Path) -> None:
        """Cover in the bed's mount namespace what kubelet would leave on the machine."""
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
        done = self._bed.run(["mount", "--bind", str(source), str(target)])
        assert done.returncode == 0, done.stdout

    def _make_cgroups(self) -> None:
        """Make the cgroup below which kubelet has its pods; on v1 a cpuset begins empty."""
        for root in hierarchies():
            group = root / self._bed.cgroup.lstrip("/")
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (group / file).exists() and not (group / file).read_text().strip():
                    (group / file).write_text((root / file).read_text())

    @property
    def ready(self) -> bool:
        """Whether the node is ready for pods, as the API server has it."""
        found = self._plane.get(f"/api/v1/nodes/{self.name}") or {}
        conditions = found.get("status", {}).get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def start(self) -> None:
        """Start it; it joins within seconds."""
        program = Path(os.environ["TOPOPROXY_CLUSTER"]) / "kubelet"
        kubeconfig = self._plane.kubeconfig(f"{self.name}-token", f"kubelet-{self.name}")
        command = [
            *(str(program), f"--config={self._config}", f"--kubeconfig={kubeconfig}"),
            *(f"--cert-dir={self._certificates}", f"--hostname-override={self.name}", "--v=2"),
        ]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._bed.inside(command, network=False),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )

    def check(self) -> None:
        """Raise where it has ended."""
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-2000:]

    def stop(self) -> None:
        """End it; pods run on."""
        if self._process is not None:
            end_process(self._process)
            self._process = None

    def close(self) -> None:
        """End it and remove its directories from the machine."""
        self.stop()
        for each in self._made:
            with contextlib.suppress(OSError):
                each.rmdir()
