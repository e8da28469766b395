"""The daemon under test, and an independent model of the expected CPUs of each container."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cri import Cri, cpuset_of, online
from private_runtime import PrivateRuntime, end_process, wait_for

from proxy.admin.client import query_admin
from proxy.model.idset import CpuSet

PROGRAM = Path(sys.executable).with_name("topoproxy")
QOS_LABEL = "koordinator.sh/qosClass"
CPUSET_ANNOTATION = "scheduling.koordinator.sh/resource-status"
MIB = 1 << 20
RECONCILES_LIMIT_S = 60.0


class DaemonProcess:
    """A ``topoproxy serve`` in front of a private runtime.

    Attributes:
        directory: The directory of configuration, sockets, state and log.
        socket: The CRI socket on which the daemon listens.
        log: The log of the daemon.
    """

    def __init__(self, directory: Path, runtime: PrivateRuntime, config: dict[str, object]) -> None:
        self.directory = directory
        self.runtime = runtime
        self.socket = directory / "cri.sock"
        self.log = directory / "proxy.log"
        self._process: subprocess.Popen[str] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        settings = {
            "apiVersion": "topoproxy/v1",
            "kind": "TopoproxyConfiguration",
            "cpuManagerPolicy": "static",
            "reconcilePeriod": "1s",
            **config,
        }
        (directory / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML

    def start(self) -> None:
        """Start the daemon and wait until it forwards a call."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [
                    *(PROGRAM, "serve", "--config", self.directory / "config.yaml"),
                    *("--listen", f"unix://{self.socket}", "--runtime", f"unix://{self.runtime.socket}"),
                    *("--state-dir", self.directory / "state"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith(("NOTIFY_", "LISTEN_"))},
            )
        process = self._process

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(
                    f"topoproxy ended with {process.returncode}: {self.log.read_text()[-2000:]}"
                )
            with self.client() as client:
                return bool(client.version(timeout=2).runtime_name)

        wait_for("the proxy to answer", answers, limit=20)

    def client(self) -> Cri:
        """Return a client that is connected to the daemon."""
        return Cri(self.socket, self.runtime.cgroup)

    @property
    def pid(self) -> int:
        """The pid of the daemon."""
        assert self._process is not None
        return self._process.pid

    def kill9(self) -> None:
        """Kill the daemon, as a crash would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def stop(self) -> int:
        """Stop the daemon as systemd does; returns its exit status."""
        assert self._process is not None
        end_process(self._process)
        return self._process.returncode

    def restart(self) -> None:
        """Stop the daemon and start it again with the same state."""
        self.stop()
        self.start()

    def status(self) -> Any:
        """Return the answer of the admin socket that ``topoproxy status --json`` prints."""
        return query_admin(self.directory / "admin.sock", "/status", timeout=60)

    def printed_status(self) -> Any:
        """Return the output of ``topoproxy status --json``, which starts a process."""
        admin = f"unix://{self.directory / 'admin.sock'}"
        done = subprocess.run(
            [PROGRAM, "status", "--json", "--timeout", "60", "--admin", admin],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if done.returncode != 1:  # 1: the daemon is not ready
            done.check_returncode()
        return json.loads(done.stdout)

    def reconciles(self) -> int:
        """Return the number of completed reconciles since the daemon started."""
        return int(self.status()["counters"].get("passes", 0))

    def wait_for_reconciles(self, times: int = 2, check: Callable[[], None] = lambda: None) -> None:
        """Wait until this number of reconciles has begun and ended; until then, call the check repeatedly."""
        goal = self.reconciles() + times + 1  # one may be in progress

        def done() -> bool:
            check()
            return self.reconciles() >= goal

        end = time.monotonic() + RECONCILES_LIMIT_S
        while not done():
            assert time.monotonic() < end, f"fewer than {times} reconciles in {RECONCILES_LIMIT_S:g} s"
            time.sleep(0.02)

    def explain(self, subject: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Run ``topoproxy explain``; the caller checks its exit status."""
        admin = f"unix://{self.directory / 'admin.sock'}"
        return subprocess.run(
            [PROGRAM, "explain", subject, *more, "--admin", admin],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={**os.environ, "COLUMNS": "400"},  # sentences in one line
        )


@dataclass(frozen=True)
class PodKind:
    """A class of pods: how kubelet and the scheduler describe it, and where its containers must run.

    Attributes:
        label: Koordinator's class; empty for a plain Kubernetes pod.
        parent: kubelet's cgroup parent for the Kubernetes QoS class.
        resources: The resources as kubelet writes them in CreateContainer.
        pool: ``named`` (the CPUs of the annotation), ``picked`` (the daemon chooses), ``shared`` or ``be``.
        excludes_be: Whether its CPUs leave the BE pool too.
    """

    label: str
    parent: str
    resources: dict[str, int]
    pool: str
    excludes_be: bool = False


def _resources(milli: int, limit: int | None = None, memory: int = 0) -> dict[str, int]:
    found = {"cpu_period": 100_000, "cpu_shares": max(2, milli * 1024 // 1000)}
    if limit:
        found["cpu_quota"] = limit * 100
    if memory:
        found["memory_limit_in_bytes"] = memory
    return found


ONE_CPU = _resources(1000, 1000, 64 * MIB)
KINDS = {
    "lse": PodKind("LSE", "/kubepods", ONE_CPU, "named", excludes_be=True),
    "lsr": PodKind("LSR", "/kubepods", ONE_CPU, "named"),
    "ls": PodKind("LS", "/kubepods/burstable", _resources(500, 800), "shared"),
    "be": PodKind("BE", "/kubepods/besteffort", _resources(0), "be"),
    "whole": PodKind("", "/kubepods", ONE_CPU, "picked", excludes_be=True),
    "part": PodKind("", "/kubepods", _resources(500, 500, 64 * MIB), "shared"),
    "burstable": PodKind("", "/kubepods/burstable", _resources(1000, 2000), "shared"),
    "besteffort": PodKind("", "/kubepods/besteffort", _resources(0), "be"),
}


@dataclass
class ModelContainer:
    """A container in the model."""

    kind: PodKind
    own: CpuSet
    pod: str = ""
    running: bool = False


@dataclass
class ModeledNode:
    """A client of the daemon, and a model of the CPUs that each container must have."""

    runtime: PrivateRuntime
    daemon: DaemonProcess
    cri: Cri
    containers: dict[str, ModelContainer] = field(default_factory=dict)
    _pods: dict[str, tuple[PodKind, CpuSet]] = field(default_factory=dict)

    # Calls.

    def pod(
        self,
        kind: str,
        cpus: CpuSet | None = None,
        name: str = "",
        annotation: str = "",
        total: Mapping[str, int] | None = None,
    ) -> str:
        """Run a sandbox of a kind.

        Args:
            kind: One of ``KINDS``.
            cpus: The CPUs in the scheduler's annotation.
            name: The name of the pod.
            annotation: The whole annotation, instead of ``cpus``.
            total: The sum of its containers' resources, as kubelet writes it into the sandbox's config.
        """
        what = KINDS[kind]
        name = name or f"{kind}-{len(self._pods)}"
        if cpus is not None:
            annotation = json.dumps({"cpuset": str(cpus)})
        pod = self.cri.run_pod(
            name,
            labels={QOS_LABEL: what.label} if what.label else {},
            annotations={CPUSET_ANNOTATION: annotation} if annotation else {},
            cgroup_parent=f"{what.parent}/pod-{name}",
            resources=total,
            namespace="kube-system" if what.label == "SYSTEM" else "default",
        )
        self._pods[pod] = (what, cpus or CpuSet())
        return pod

    def create(self, pod: str, name: str = "main", **options: Any) -> str:
        """Create a container in a pod, with the resources of its kind."""
        kind, own = self._pods[pod]
        container = self.cri.create(pod, name, **(kind.resources | options))
        self.containers[container] = ModelContainer(kind, own, pod)
        return container

    def start(self, container: str) -> None:
        """Start a container; read the CPUs that the daemon picked from the kernel."""
        self.cri.start(container)
        member = self.containers[container]
        member.running = True
        if member.kind.pool == "picked":
            member.own = cpuset_of(container).cpus

    def run(self, pod: str, name: str = "main", **options: Any) -> str:
        """Create and start a container; returns its id."""
        container = self.create(pod, name, **options)
        self.start(container)
        return container

    def spawn(self, kind: str, cpus: CpuSet | None = None) -> str:
        """Run a pod of a kind with one container; returns the container's id."""
        return self.run(self.pod(kind, cpus))

    def remove(self, container: str) -> None:
        """Stop and remove a container."""
        self.cri.stop(container)
        self.containers.pop(container, None)
        self.cri.remove(container)

    # Checks.

    def owned(self, excludes_be: bool = False) -> CpuSet:
        """Return all CPUs with an owner; with ``excludes_be`` only those that leave the BE pool."""
        found = CpuSet()
        for member in self.containers.values():
            if member.kind.excludes_be or not excludes_be:
                found |= member.own
        return found

    def expected(self, member: ModelContainer) -> CpuSet:
        """Return the CPUs that a member must have."""
        if member.kind.pool in ("named", "picked"):
            return member.own
        return online() - self.owned(excludes_be=member.kind.pool == "be")

    def check(self) -> None:
        """Check that the kernel agrees with the model for every running container."""
        for container, member in self.containers.items():
            if member.running:
                found, wanted = cpuset_of(container), self.expected(member)
                message = (
                    f"{member.kind.label or member.kind.parent} {container[:12]}: {found}, expected {wanted}"
                )
                assert wanted, f"no CPUs are left: {message}"
                assert found.cpus == wanted, message
                assert found.effective == wanted, message
                assert found.tasks <= {wanted}, message
                assert found.mems, f"no memory nodes: {message}"
                if member.kind.pool == "picked":
                    assert len(found.cpus) == 1, message

    def wait_until_settled(self, limit: float = 5) -> None:
        """Wait until every running container has its expected CPUs."""

        def settled() -> bool:
            self.check()
            return True

        wait_for("containers to have their expected CPUs", settled, limit)
