"""A node under kubelet's static CPU manager, with a stand-in for kubelet that has its rules for a start."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.kubelet.checkpoint_writer import none_state, static_state
from proxy.backends.kubelet.checkpoints import HeldCpus, held_cpus, read_cpu_checkpoint
from proxy.demo.client import CriClient, DemoPod, StartedPod
from proxy.demo.environment import ProxyProcess
from proxy.demo.runtime import StandInRuntime
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

EIGHT = CpuSet(range(8))


class CrashLoopError(Exception):
    """kubelet would exit at its start."""


@dataclass
class PlayedKubelet:
    """The CPU manager of a kubelet: its state in memory, and the file that it writes from that state.

    Its rules at a start are those of kubelet 1.36 (pkg/kubelet/cm/cpumanager/policy_static.go,
    validateState), implemented here a second time.
    """

    directory: Path
    online: CpuSet = EIGHT
    reserved: CpuSet = field(default_factory=lambda: CpuSet([0]))
    policy: str = "static"
    held: dict[str, dict[str, CpuSet]] = field(default_factory=dict)
    runs: bool = False
    options: dict[str, str] = field(default_factory=dict)
    crash_loop: type[Exception] = CrashLoopError

    @property
    def path(self) -> Path:
        return self.directory / "cpu_manager_state"

    @property
    def strict(self) -> bool:
        return self.options.get("strict-cpu-reservation") == "true"

    def configure(self, policy: str, options: dict[str, str] | None = None) -> None:
        """Write its configuration, which takes effect at the next start."""
        values = {"kind": "KubeletConfiguration", "cpuManagerPolicy": policy}
        more = {"cpuManagerPolicyOptions": options} if options else {}
        (self.directory / "config.yaml").write_text(
            json.dumps({**values, **more, "reservedSystemCPUs": str(self.reserved)})
        )

    def start(self, policy: str = "static", options: dict[str, str] | None = None) -> None:
        """Start; raise if the real kubelet would exit and its supervisor would restart it without end."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.configure(policy, options)
        self.options = options or {}
        if policy == "none" and options:
            raise CrashLoopError("received unsupported options")
        if not self.path.exists():
            self.policy, self.held, self.runs = policy, {}, True
            self.write()
            return
        found = read_cpu_checkpoint(self.path.read_text())
        if found.version is None:
            raise CrashLoopError("checkpoint is corrupted")
        if found.policy != policy:
            raise CrashLoopError(f'policy "{policy}" differs from state checkpoint policy "{found.policy}"')
        reported = held_cpus(found)
        if policy == "static":
            self._validate(reported)
        elif reported.held or reported.default:
            raise CrashLoopError("none holds CPUs")  # kubelet itself would not check this
        self.policy, self.runs = policy, True
        self.held = {uid: dict(names) for uid, names in reported.held.items()}

    def _validate(self, reported: HeldCpus) -> None:
        everything = reported.default
        for pod in reported.held.values():
            for cpus in pod.values():
                if cpus & reported.default:
                    raise CrashLoopError("an entry overlaps the default set")
                everything |= cpus
        if self.strict and self.reserved & reported.default:
            raise CrashLoopError("some of strictly reserved cpus are present in defaultCpuSet")
        if not self.strict and not self.reserved <= reported.default:
            raise CrashLoopError("not all reserved cpus are present in defaultCpuSet")
        if everything != (self.online - self.reserved if self.strict else self.online):
            raise CrashLoopError("current set of available CPUs doesn't match with CPUs in state")

    def stop(self) -> None:
        self.runs = False

    def write(self) -> None:
        """Write the file from memory, as kubelet does after each change."""
        if self.policy == "none":
            text = none_state()
        else:
            text = static_state(self.online, self.held, reserved=self.reserved, strict=self.strict)
        self.path.write_text(text)

    def free(self) -> CpuSet:
        taken = self.reserved
        for pod in self.held.values():
            for cpus in pod.values():
                taken |= cpus
        return self.online - taken

    def admit(self, uid: str, count: int, name: str = "main") -> CpuSet:
        """Return the lowest free CPUs for a pod; none under policy none or if too few are free."""
        if self.policy == "none" or len(self.free()) <= count:
            return CpuSet()
        cpus = CpuSet(list(self.free())[:count])
        self.held.setdefault(uid, {})[name] = cpus
        self.write()
        return cpus

    def forget(self, uid: str) -> None:
        """Forget a removed pod."""
        if self.held.pop(uid, None) is not None:
            self.write()


@dataclass
class KubeletNode:
    """A runtime, ``topoproxy serve`` as a process in front of it, and a stand-in for kubelet."""

    directory: Path
    cgroups: FakeCgroups
    proxy: ProxyProcess
    kubelet: PlayedKubelet
    procfs: Path

    def kubelet_runs(self, *, runs: bool) -> None:
        """Show or hide kubelet's process."""
        entry = self.procfs / "4711"
        if runs:
            entry.mkdir(parents=True, exist_ok=True)
            (entry / "comm").write_text("kubelet\n")
            (entry / "stat").write_text("4711 (kubelet) S 1\n")
        else:
            for path in entry.glob("*"):
                path.unlink()
            if entry.exists():
                entry.rmdir()

    def client(self) -> CriClient:
        return CriClient(str(self.proxy.socket))

    def launch(self, name: str, count: int = 2) -> StartedPod:
        """Launch a Guaranteed pod with whole CPUs: admit it, then name its CPUs in the request."""
        with self.client() as client:
            spec = DemoPod(name, kube_qos=KubeQos.GUARANTEED, cpus=count)
            pod = client.run_pod(spec)
            named = self.kubelet.admit(pod.config.metadata.uid, count)
            self.create(client, pod, named)
            return pod

    def create(self, client: CriClient, pod: StartedPod, named: CpuSet) -> None:
        """Create and start a pod's container with the CPUs from kubelet, and then without a quota."""
        config = pb.ContainerConfig(metadata=pb.ContainerMetadata(name="main", attempt=next(pod.attempts)))
        config.image.image = "localhost/busybox:1"
        config.linux.resources.CopyFrom(
            pb.LinuxContainerResources(
                cpu_period=100_000,
                cpu_quota=-1 if named else 100_000 * pod.spec.cpus,
                cpu_shares=1024 * pod.spec.cpus,
                cpuset_cpus=str(named),
            )
        )
        request = pb.CreateContainerRequest(
            pod_sandbox_id=pod.pod_id, config=config, sandbox_config=pod.config
        )
        pod.container_id = client.call("CreateContainer", request).container_id
        client.start(pod.container_id)

    def end(self, pod: StartedPod) -> None:
        with self.client() as client:
            client.end_pod(pod)
        if self.kubelet.runs:
            self.kubelet.forget(pod.config.metadata.uid)

    def reconcile(self, *pods: StartedPod) -> None:
        """Update every container to kubelet's own CPUs, as kubelet does periodically under policy static."""
        with self.client() as client:
            for pod in pods:
                cpus = self.kubelet.held.get(pod.config.metadata.uid, {}).get("main", CpuSet([1]))
                client.update(pod.container_id, pb.LinuxContainerResources(cpuset_cpus=str(cpus)))

    def cpus(self, pod: StartedPod) -> str:
        """Return the CPUs of a pod's container in the kernel."""
        path = self.cgroups.find(pod.config.linux.cgroup_parent, pod.container_id)
        return "" if path is None else str(self.cgroups.read(path).cpus)


class LedgerInMemory:
    """A ledger that lives as long as the test; the end of a daemon does not change it."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, object]] = {}
        self.problem = ""

    def write(self, changes: Any) -> None:
        for key, value in changes.items():
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = json.loads(json.dumps(value))

    def close(self) -> None:
        pass


@pytest.fixture
def ledger() -> LedgerInMemory:
    return LedgerInMemory()


@pytest.fixture(scope="session")
def make_ledger() -> type[LedgerInMemory]:
    return LedgerInMemory


@pytest.fixture(scope="session")
def make_kubelet() -> type[PlayedKubelet]:
    """Return the class, for tests that create several or create one later."""
    return PlayedKubelet


@pytest.fixture
def played(tmp_path: Path) -> PlayedKubelet:
    """A kubelet on eight CPUs that reserves CPU 0."""
    return PlayedKubelet(tmp_path / "kubelet")


@pytest.fixture
def kubelet_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeletNode]:
    """A node of 16 CPUs on two sockets; kubelet runs with policy static, and the daemon serves its calls."""
    machine = regular_machine(2, 1, 4, 2)
    with tempfile.TemporaryDirectory(prefix="tp-") as short:
        directory = Path(short)
        write_sysfs(machine, directory / "machine")
        cgroups = FakeCgroups(directory / "cgroup", machine.online, machine.memory_nodes, 1)
        kubelet = PlayedKubelet(directory / "kubelet", machine.online, CpuSet([0, 1]))
        procfs = directory / "proc"
        procfs.mkdir()
        settings: dict[str, Any] = {
            "runtime": f"unix://{directory}/runtime.sock",
            "sysfsRoot": str(directory / "machine/sys"),
            "cgroupRoot": str(directory / "cgroup"),
            "procfsRoot": str(procfs),
            "reconcilePeriod": "300ms",
            "kubelet": {"stateDir": str(kubelet.directory)},
        }
        proxy = ProxyProcess(directory, settings)
        node = KubeletNode(directory, cgroups, proxy, kubelet, procfs)
        with StandInRuntime(directory / "runtime.sock", cgroups):
            kubelet.start()
            node.kubelet_runs(runs=True)
            proxy.start()
            end = time.monotonic() + 60
            while not query_admin(proxy.admin, "/status", 30)["ready"]:  # type: ignore[index]
                assert time.monotonic() < end
                time.sleep(0.02)
            try:
                yield node
            finally:
                proxy.stop()
