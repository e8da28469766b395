"""Measures the daemon's CPU time for a kubelet that reconciles: by itself, best as root on cgroup v1

    .venv/bin/python bench/reconcile_figures.py               two minutes
    .venv/bin/python bench/reconcile_figures.py --seconds 10  rougher

Three hundred containers run. A kubelet older than 1.22 with the static policy names the CPUs of each of them
in every period, here every five seconds, one call after the other. Later versions name only those that have
changed: all at the start, then none. Both list pods and containers every second, request the status of some,
and the runtime's status every five seconds. The result is the CPU time of the daemon (all threads) in a span,
minus that of a span without a kubelet. If the kernel has cgroup v1 and permits it, the groups are real, each
container has a process, and the runtime writes the CPUs of an update, as runc does. Otherwise the groups are
those of a directory with the kernel's rules, which costs more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend import Backend, RuntimeAnswers
from frames import message
from messages import container, identifier
from procs import BENCH, TOPOPROXY, BenchError, Process, ended, start, wait_until
from table import number, render

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.cpuset import KernelCgroups, open_cgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.client import CriClient
from proxy.model.errors import CgroupError, TopoproxyError
from proxy.model.idset import CpuSet, Mask
from proxy.observe.json_access import as_list

CONTAINERS, PERIOD_S, SECONDS, BAR = 300, 5.0, 30.0, 3.0
START_RECONCILES = 3  # on cgroup v1, these look for processes that the kernel has moved away
WRITTEN = "cpusets_written"
STATUSES = 5  # status calls per second
GROUP, V1 = f"topoproxy-reconcile-{os.getpid()}", "cgroup v1"
ONLINE = Path("/sys/devices/system/cpu/online")
HEAD = (
    "300 containers, every 5 s",
    "updates",
    "CPU of it",
    "less idle",
    "bar",
    "an update",
    "cpusets written",
)


class RuntimeWithContainers(RuntimeAnswers):
    """A runtime with containers that run and never end."""

    def __init__(self, root: Path | None, top: str, count: int = CONTAINERS) -> None:
        """Create containers. Their groups are below ``top`` in ``root``; without a root none is written."""
        super().__init__()
        self.root, self.top = root, top
        pods = pb.ListPodSandboxResponse()
        running = pb.ListContainersResponse()
        for number_ in range(count):
            one = container(number_)
            running.containers.append(one)
            metadata = pb.PodSandboxMetadata(
                name=one.labels["io.kubernetes.pod.name"],
                uid=one.labels["io.kubernetes.pod.uid"],
                namespace=one.labels["io.kubernetes.pod.namespace"],
            )
            pods.items.append(
                pb.PodSandbox(
                    id=one.pod_sandbox_id, metadata=metadata, state=pb.SANDBOX_READY, labels=one.labels
                )
            )
        self.pods, self.running = message(pods.SerializeToString()), running
        self.all = message(running.SerializeToString())

    def answer(self, method: bytes, body: bytes) -> bytes:
        """Answer one call."""
        if method == b"ListPodSandbox":
            return self.pods
        if method == b"ListContainers":
            wanted = pb.ListContainersRequest.FromString(body).filter.id
            if not wanted:
                return self.all
            found = [one for one in self.running.containers if one.id == wanted]
            return message(pb.ListContainersResponse(containers=found).SerializeToString())
        if method == b"ContainerStatus":
            return self._status(pb.ContainerStatusRequest.FromString(body))
        if method == b"UpdateContainerResources" and self.root is not None:
            self._update(self.root, pb.UpdateContainerResourcesRequest.FromString(body))
        return super().answer(method, body)

    def _update(self, root: Path, request: pb.UpdateContainerResourcesRequest) -> None:
        one = self.running.containers[int(request.container_id[:8], 16)]
        (root / paths_of(one, self.top)[1] / "cpuset.cpus").write_text(request.linux.cpuset_cpus)

    def _status(self, request: pb.ContainerStatusRequest) -> bytes:
        one = self.running.containers[int(request.container_id[:8], 16)]
        status = pb.ContainerStatus(id=one.id, metadata=one.metadata, state=one.state, labels=one.labels)
        cpu = {"shares": 512, "cpus": ONLINE.read_text().strip()}
        spec = {"linux": {"cgroupsPath": f"/{paths_of(one, self.top)[1]}", "resources": {"cpu": cpu}}}
        info = {"info": json.dumps({"runtimeSpec": spec})} if request.verbose else {}
        return message(pb.ContainerStatusResponse(status=status, info=info).SerializeToString())


def paths_of(one: pb.Container, top: str = GROUP) -> tuple[str, str, str]:
    """Return the groups of a container's pod, of the container, and of its sandbox."""
    pod = f"{top}/burstable/pod{one.labels['io.kubernetes.pod.uid']}"
    return pod, f"{pod}/{one.id}", f"{pod}/{one.pod_sandbox_id}"


@contextlib.contextmanager
def processes(directories: list[Path]) -> Iterator[None]:
    """Run a process in each group: without one, the daemon would search the system for the container's."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for directory in directories:
            running.append(subprocess.Popen(["sleep", "infinity"]))
            (directory / "cgroup.procs").write_text(str(running[-1].pid))
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


@contextlib.contextmanager
def groups(directory: Path) -> Iterator[tuple[Path, str]]:
    """Make the groups; gives the root for the daemon, and its description."""
    paths = [GROUP, f"{GROUP}/burstable"]
    paths += [path for number_ in range(CONTAINERS) for path in paths_of(container(number_))]
    root = Path("/sys/fs/cgroup")
    try:
        kernel = open_cgroups(root)
    except CgroupError:
        kernel = KernelCgroups(directory, 0)
    if kernel.version == 1 and os.geteuid() == 0:
        try:
            for path in paths:
                (kernel.root / path).mkdir()
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (kernel.root / path / name).write_text((kernel.root / name).read_text())
            with processes([kernel.root / paths_of(container(number_))[1] for number_ in range(CONTAINERS)]):
                yield root, V1
        finally:
            for path in reversed(paths):
                with contextlib.suppress(FileNotFoundError):
                    (kernel.root / path).rmdir()
        return
    online = CpuSet.parse(ONLINE.read_text())
    tree = FakeCgroups(directory / "groups", online, Mask([0]), 2)
    for path in paths:
        tree.mkdir(path)
    yield tree.root, "a directory with its rules"


class ReconcilingKubelet:
    """Makes calls as kubelet does."""

    def __init__(self, client: CriClient, cpus: str, *, always: bool) -> None:
        self.client = client
        self.always = always
        self.resources = pb.LinuxContainerResources(cpuset_cpus=cpus)
        self.updated: set[str] = set()
        self.next_container = 0
        self.updates = 0

    def live(self, seconds: float) -> None:
        """Make calls for this many seconds."""
        begun = time.monotonic()
        for second in range(int(seconds)):
            time.sleep(max(0.0, begun + second - time.monotonic()))
            self.client.call("ListPodSandbox", pb.ListPodSandboxRequest())
            self.client.call("ListContainers", pb.ListContainersRequest())
            for _ in range(STATUSES):
                self.next_container = (self.next_container + 1) % CONTAINERS
                request = pb.ContainerStatusRequest(container_id=identifier(self.next_container))
                self.client.call("ContainerStatus", request)
            if second % int(PERIOD_S) == 0:
                self.client.call("Status", pb.StatusRequest())
                self.reconcile()
        time.sleep(max(0.0, begun + seconds - time.monotonic()))

    def reconcile(self) -> None:
        """Send the CPUs of all containers, or of those that have not been sent yet."""
        for number_ in range(CONTAINERS):
            container_id = identifier(number_)
            if self.always or container_id not in self.updated:
                self.client.update(container_id, self.resources)
                self.updated.add(container_id)
                self.updates += 1


def page(daemon: Process) -> dict[str, object]:
    """Return the daemon's status."""
    shown = query_admin(daemon.sock.parent / "admin.sock", "/status")
    assert isinstance(shown, dict)
    return shown


def knows_all_containers(daemon: Process) -> bool:
    """Return whether the daemon knows all containers."""
    try:
        return len(as_list(page(daemon).get("containers"))) == CONTAINERS
    except (TopoproxyError, OSError):
        return False


def counter(daemon: Process, name: str) -> int:
    counters = page(daemon)["counters"]
    assert isinstance(counters, dict)
    return int(counters.get(name, 0))


def measure(seconds: float, reconciles: int = START_RECONCILES) -> tuple[list[list[str]], bool]:
    """Return the rows, and whether a bar was missed; the start of the daemon is not measured."""
    rows: list[list[str]] = []
    missed = False
    cpus = ONLINE.read_text().strip()
    with (
        tempfile.TemporaryDirectory(prefix="tr") as name,
        groups(Path(name)) as (root, what),
        ended([]) as all_,
    ):
        directory = Path(name)
        sock = directory / "runtime.sock"
        argv = [sys.executable, str(BENCH / "reconcile_figures.py"), "--runtime", str(sock), "--top", GROUP]
        argv += ["--groups", str(open_cgroups(root).root)] if what == V1 else []
        all_.append(start("the runtime", argv, sock, malloc=True))
        own = directory / "daemon"
        own.mkdir()
        listen = own / "cri.sock"
        argv = TOPOPROXY.argv(own, listen, sock)
        argv[argv.index("--cgroup-root") + 1] = str(root)
        daemon = start("topoproxy", argv, listen, malloc=False)
        all_.append(daemon)
        wait_until(
            lambda: knows_all_containers(daemon), 60, "the daemon does not know all containers", daemon
        )
        wait_until(
            lambda: counter(daemon, "reconciles") >= reconciles, 60, "the daemon does not reconcile", daemon
        )
        time.sleep(2)  # the last of them may still have work in a worker thread

        def span(work: Callable[[float], object]) -> float:
            before, begun = daemon.cpu_ms(), time.monotonic()
            work(seconds)
            return (daemon.cpu_ms() - before) / 10 / (time.monotonic() - begun)

        spans: list[tuple[str, ReconcilingKubelet, float, int]] = []
        with CriClient(str(listen)) as client:
            for label, always in (
                ("kubelet before 1.22: all", True),
                ("kubelet now: the changed ones", False),
            ):
                kubelet, before = ReconcilingKubelet(client, cpus, always=always), counter(daemon, WRITTEN)
                share = span(kubelet.live)
                spans.append((label, kubelet, share, counter(daemon, WRITTEN) - before))
        idle = span(time.sleep)  # the last one, when all work of the start is done
        for label, kubelet, share, writes in spans:
            less = share - idle
            missed |= less >= BAR
            each = less / 100 * seconds / kubelet.updates * 1e6
            bar = f"{BAR:g} %" + (" MISSED" if less >= BAR else "")
            cells = [str(kubelet.updates), f"{share:.2f} %", f"{less:.2f} %", bar, number(each, "us")]
            rows.append([label, *cells, str(writes)])
        rows.append([f"no calls ({what})", "0", f"{idle:.2f} %", "", "", "", ""])
    return rows, missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each span (30)")
    parser.add_argument("--runtime", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    parser.add_argument("--containers", type=int, default=CONTAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--top", metavar="GROUP", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.runtime:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        Backend(chosen.runtime, RuntimeWithContainers(chosen.groups, chosen.top, chosen.containers)).run()
    try:
        rows, missed = measure(chosen.seconds)
    except BenchError as error:
        print(f"reconcile: {error}", file=sys.stderr)
        return 1
    print(render(HEAD, rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
