"""A node to break: the stand-in runtime, a directory with the kernel's cpuset rules, the daemon as a process.

The promises are checked in the cgroup files and at the runtime, not at the daemon. ``overlaps`` must be empty
at any moment, even while no daemon runs; ``unsettled`` must become empty when a daemon runs and the calls are
over.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from procs import BENCH, BenchError, environment

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.client import CriClient, DemoPod
from proxy.demo.runtime import StandInRuntime
from proxy.demo.runtime_records import ContainerRecord
from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

MACHINE = regular_machine(1, 1, 8, 2)
QOS = "koordinator.sh/qosClass"
KINDS = (
    DemoPod("ls", "LS", KubeQos.BURSTABLE),
    DemoPod("be", "BE", KubeQos.BEST_EFFORT),
    DemoPod("burstable", "", KubeQos.BURSTABLE),
    DemoPod("lse-low", "LSE", KubeQos.GUARANTEED, "2-3", 2),
    DemoPod("lse-high", "LSE", KubeQos.GUARANTEED, "6-7,14", 3),
    DemoPod("whole", "", KubeQos.GUARANTEED, "", 2),
    DemoPod("more", "", KubeQos.GUARANTEED, "", 1),
)


def owns(record: ContainerRecord) -> bool:
    """Return whether a container was promised exclusive CPUs."""
    return record.config.annotations.get("owns") == "yes"


@dataclass
class FaultyNode:
    """One node in a directory."""

    directory: Path
    version: int = 1
    moved: set[str] = field(default_factory=set)
    """Ids of containers that are moved: they own what the kernel has; the runtime is updated later."""
    popen: subprocess.Popen[bytes] | None = None
    faults: dict[str, object] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    import_path: str = ""
    """The directory from which the program is imported; the working tree by default."""

    def __post_init__(self) -> None:
        machine = self.directory / "machine"
        write_sysfs(MACHINE, machine)
        self.cgroups = FakeCgroups(
            self.directory / "cgroup", MACHINE.online, MACHINE.memory_nodes, self.version
        )
        self.runtime = StandInRuntime(self.directory / "runtime.sock", self.cgroups)
        self.socket, self.admin = self.directory / "cri.sock", self.directory / "admin.sock"
        config = {
            "apiVersion": "topoproxy/v1",
            "kind": "TopoproxyConfiguration",
            "kubelet": {"stateDir": str(self.directory / "kubelet")},
            "cpuManagerPolicy": "static",
            "reconcilePeriod": "1s",
            "callTimeout": "5s",
            "listen": f"unix://{self.socket}",
            "adminSocket": f"unix://{self.admin}",
            "runtime": f"unix://{self.runtime.socket_path}",
            "stateDir": str(self.directory / "state"),
            "sysfsRoot": str(machine / "sys"),
            "procfsRoot": str(machine / "proc"),
            "cgroupRoot": str(self.cgroups.root),
            "log": {"level": "warning"},
        }
        (self.directory / "config.yaml").write_text(json.dumps(config))  # JSON is YAML

    # -- the daemon ---------------------------------------------------------------------------------------

    def start(self, **faults: object) -> float:
        """Start a daemon, with faults if any are named here or for all daemons (``faults``).

        Returns:
            Seconds until it has reconciled with the runtime and answered a call, minus those in which its
            first thread was runnable but had no CPU.
        """
        self.kill()
        faults = self.faults | faults
        program = [str(BENCH / "faulty.py")] if faults else ["-m", "proxy"]
        begun = time.monotonic()
        with (self.directory / "daemon.log").open("ab") as log:
            self.popen = subprocess.Popen(  # the argument vector is ours
                [sys.executable, *program, "serve", "--config", str(self.directory / "config.yaml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory if self.import_path else BENCH.parent,
                env={
                    **environment(malloc=False),
                    **({"PYTHONPATH": self.import_path} if self.import_path else {}),
                    "FAULTS": json.dumps(faults),
                    "SIZES": str(self.directory / "sizes"),
                },
            )
        self.wait_until(self._ready, 30, "ready")
        with CriClient(str(self.socket)) as client:
            client.version()
        return time.monotonic() - begun - self._waited()

    def _waited(self) -> float:
        """Seconds in which the daemon's first thread waited for a CPU (Linux, sched-stats.rst)."""
        assert self.popen is not None
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.popen.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def _ready(self) -> bool:
        if self.popen is not None and self.popen.poll() is not None:
            raise BenchError(f"cannot start the daemon: {self.log()}")
        page = self.status()
        return bool(page and page["ready"])

    def status(self) -> dict[str, Any] | None:
        """Return the output of ``topoproxy status``; None if no daemon answers."""
        with contextlib.suppress(TopoproxyError, OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.admin))  # without the retries of the command
            page = query_admin(self.admin, "/status")
            return page if isinstance(page, dict) else None
        return None

    def sizes(self) -> dict[str, int]:
        """Return how much the daemon's objects hold, by class and attribute; it must have faults."""
        assert self.popen is not None
        file = self.directory / "sizes"
        file.unlink(missing_ok=True)
        self.popen.send_signal(signal.SIGRTMIN)
        sizes: dict[str, int] = {}

        def reported() -> bool:
            with contextlib.suppress(OSError, ValueError):
                sizes.update(json.loads(file.read_text()))
            return bool(sizes)

        self.wait_until(reported, 30, "what the daemon's objects hold")
        return sizes

    def log(self) -> str:
        """Return the end of the daemons' log."""
        return (self.directory / "daemon.log").read_text(errors="replace")[-2000:]

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> None:
        """End the daemon as a crash does."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()
            self.popen = None

    @staticmethod
    def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise BenchError(f"{what}: not within {seconds:g} s")
            time.sleep(0.01)

    # -- what a client does -------------------------------------------------------------------------------

    def pod(self, client: CriClient, kind: DemoPod) -> str:
        """Run a sandbox; gives its id."""
        name = f"{kind.name}-{next(self.numbers)}"
        spec = DemoPod(name, kind.qos, kind.kube_qos, kind.cpuset, kind.cpus)
        return client.run_pod(spec).pod_id

    def create(self, client: CriClient, pod_id: str, attempt: int) -> str:
        """Create the pod's container."""
        config = self.runtime.pods[pod_id].config
        kind = next(k for k in KINDS if config.metadata.name.startswith(f"{k.name}-"))
        resources = pb.LinuxContainerResources(
            cpu_period=100_000, cpu_quota=100_000 * kind.cpus, cpu_shares=1024 * kind.cpus or 2
        )
        request = pb.CreateContainerRequest(pod_sandbox_id=pod_id, sandbox_config=config)
        request.config.metadata.name, request.config.metadata.attempt = "main", attempt
        request.config.annotations["owns"] = "yes" if kind.owns else "no"
        request.config.linux.resources.CopyFrom(resources)
        created = client.call("CreateContainer", request)
        return str(created.container_id)

    # -- what was promised --------------------------------------------------------------------------------

    def _records(self) -> list[ContainerRecord]:
        return list(self.runtime.containers.values())

    def _effective_cpus(self, record: ContainerRecord) -> CpuSet:
        if self.version == 1:  # the configured CPUs are those in effect: one file instead of four
            return self.cgroups.cpus(record.cgroup)
        return self.cgroups.read(record.cgroup).cpus

    def overlaps(self) -> list[str]:
        """Name running containers that are on CPUs of a running owner, or on none."""
        found = []
        with self.runtime._service.lock:  # nothing starts, ends or is updated during the check
            running = [r for r in self._records() if r.state == pb.CONTAINER_RUNNING]
            sets = {record.id: self._effective_cpus(record) for record in running}
        for record in running:
            if not sets[record.id]:
                found.append(f"{self.name(record)} has no CPUs")
            mine = CpuSet.parse(record.resources.cpuset_cpus)
            if record.id in self.moved:
                mine = sets[record.id]
            for other in running:
                both = mine & sets[other.id]
                if owns(record) and other.pod_id != record.pod_id and both:
                    found.append(f"{self.name(other)} is on CPUs {both} of {self.name(record)}")
        return found

    def unsettled(self) -> list[str]:
        """Name owners that the daemon does not know, and running containers that are on wrong CPUs."""
        page = self.status()
        if page is None:
            return ["no answer"]
        held = {row["cpus"] for row in page["exclusive"]}
        found = [*page["violations"]]
        with self.runtime._service.lock:
            ready = {pod.id for pod in self.runtime.pods.values() if pod.ready}
            live = [
                r
                for r in self._records()
                if r.state == pb.CONTAINER_RUNNING or (r.state == pb.CONTAINER_CREATED and r.pod_id in ready)
            ]  # a container in a sandbox that has ended will never start
            sets = {r.id: self._effective_cpus(r) for r in live if r.state == pb.CONTAINER_RUNNING}
        own = {r.id: CpuSet.parse(r.resources.cpuset_cpus) for r in live if owns(r)}
        for record in live:
            if record.id in self.moved & own.keys() & sets.keys():
                if own[record.id] != sets[record.id]:
                    cpus = own[record.id]
                    found.append(f"{self.name(record)} is on {sets[record.id]}, the runtime has {cpus}")
                own[record.id] = sets[record.id]
        known = [CpuSet.parse(cpus) for cpus in held]
        found += [
            f"{self.name(r)} is lost"
            for r in live
            if r.id in own
            and str(own[r.id]) not in held
            # While a container is moved, it has both sets.
            and not (r.id in self.moved and any(own[r.id] <= cpus for cpus in known))
        ]
        if len(held) != len({str(cpus) for cpus in own.values()}):
            found.append(
                f"owned are {sorted(held)}, and those of containers are {sorted(map(str, own.values()))}"
            )
        shared = MACHINE.online
        for cpus in own.values():
            shared -= cpus
        for record in live:
            if record.id in sets and sets[record.id] != own.get(record.id, shared):
                found.append(
                    f"{self.name(record)} is on {sets[record.id]}, not on {own.get(record.id, shared)}"
                )
        return found

    def name(self, record: ContainerRecord) -> str:
        pod = self.runtime.pods.get(record.pod_id)
        where = "" if pod is not None and pod.ready else ", its sandbox is not there"
        state = pb.ContainerState.Name(record.state).removeprefix("CONTAINER_").lower()
        return f"{pod.config.metadata.name if pod else record.pod_id}/{record.id[:6]} ({state}{where})"

    def lost_owners(self) -> list[str]:
        """Name owners that the daemon does not know."""
        return [what for what in self.unsettled() if what.endswith(("is lost", "no answer"))]

    def wait_until_settled(self, seconds: float = 15.0) -> list[str]:
        """Wait until each container has its expected CPUs; returns the violations after the time limit."""
        end = time.monotonic() + seconds
        while (found := self.unsettled()) and time.monotonic() < end:
            time.sleep(0.02)
        return found


@contextlib.contextmanager
def new_node(directory: Path, version: int = 1) -> Iterator[FaultyNode]:
    """Set up a node in an empty directory with a short path."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    node = FaultyNode(directory, version)
    with node.runtime.start():
        try:
            yield node
        finally:
            node.kill()
