"""How often a create waits for a start in flight, and what a hanging start leaves open: by itself, minutes

    .venv/bin/python bench/hanging_start_figures.py
    .venv/bin/python bench/hanging_start_figures.py --seconds 60 --sharers 32

The first table has the real daemon before the stand-in runtime. Clients create, start and remove containers
that share CPUs without a pause, and others create owners of CPUs, which stay until there are several. So each
owner meets starts in flight that carry its CPUs. The duration of a start has a log-normal distribution;
during its first third the runtime has not yet made the container's group. In the second row one start in
fifty hangs for 20 s, with a group. Creates of owners are counted: how many there were, how many waited for a
call in flight, how long they took, how many continued although a start was still in flight, and how many were
refused.

The second table has a real containerd with real cgroups (as the end-to-end tests have it; root, /dev/fuse). A
start hangs in a mount while an owner is created; then the mount answers, runc writes the container's cpuset
again, and the daemon narrows it again. ``open`` is the time for which the group held the owner's CPUs, with
only runc's init in it; ``until the program`` is how much later the container's program was executed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

from faulty_node import KINDS, FaultyNode, new_node
from procs import BenchError
from table import number, render

from proxy.demo.client import CriClient
from proxy.demo.runtime_records import ContainerRecord
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet

SHARER, OWNER = KINDS[0], next(kind for kind in KINDS if kind.name == "more")
DURATION_S, SHARERS, OWNERS, OWNERS_KEPT = 30.0, 16, 2, 5
MEDIAN_S, SIGMA, LONGEST_S = 0.2, 0.8, 4.0
HANGS, HANG_S = 0.02, 20.0
ROUNDS = 20
LOAD_HEAD = (
    "starts in flight",
    "owners",
    "waited",
    "share",
    "p50",
    "p99",
    "worst",
    "past a start",
    "refused",
)
WINDOW_HEAD = ("a hanging start continues (containerd, cgroup v1)", "median", "worst", "times")


@dataclass
class StartLoad:
    """The observations of the clients of one run.

    Attributes:
        seconds: How long each create of an owner took.
        refused: The errors with which creates of owners were refused.
        counters: The daemon's counters.
    """

    seconds: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def row(self, what: str) -> list[str]:
        owners = max(1, self.counters.get("owners_cleared", 0))
        waited = self.counters.get("creates_waited", 0)
        times = sorted(self.seconds) or [0.0]
        return [
            what,
            str(self.counters.get("owners_cleared", 0)),
            str(waited),
            f"{waited / owners:.0%}",
            *(number(times[int(share * (len(times) - 1))] * 1000, "ms") for share in (0.5, 0.99, 1)),
            str(self.counters.get("creates_past_calls", 0)),
            str(len(self.refused)),
        ]


class DelayedStarts:
    """Delays the starts of sharers at the runtime."""

    def __init__(self, node: FaultyNode, hangs: float) -> None:
        self._one, self._hangs = node, hangs
        self._dice, self._lock = random.Random(5), threading.Lock()
        self.over = threading.Event()

    def __call__(self, request: object) -> None:
        record = self._one.runtime.containers[request.container_id]  # type: ignore[attr-defined]
        with self._lock:
            whole = min(LONGEST_S, MEDIAN_S * self._dice.lognormvariate(0, SIGMA))
            hang = HANG_S if self._dice.random() < self._hangs else 0.0
        self.over.wait(whole / 3)
        self._make_group(record)
        self.over.wait(whole * 2 / 3 + hang)

    def _make_group(self, record: ContainerRecord) -> None:
        service = self._one.runtime._service
        with service.lock:
            init = next(service._pids)
            service._runc.start(record.cgroup, record.resources, init)
            self._one.cgroups.detach(init)


class PodClient(threading.Thread):
    """Creates, starts and ends pods of one kind until the time is over."""

    def __init__(self, node: FaultyNode, load: StartLoad, until: float, *, owns: bool) -> None:
        super().__init__()
        self.node, self.load, self.until, self.owns = node, load, until, owns
        self.kept: list[str] = []

    def run(self) -> None:
        try:
            with CriClient(str(self.node.socket)) as client:
                while time.monotonic() < self.until:
                    self.pod(client)
        except BaseException as error:  # noqa: BLE001 - reported by ``measure``
            self.load.errors.append(error)

    def pod(self, client: CriClient) -> None:
        pod_id = self.node.pod(client, OWNER if self.owns else SHARER)
        begun = time.monotonic()
        try:
            container_id = self.node.create(client, pod_id, 0)
            if self.owns:
                self.load.seconds.append(time.monotonic() - begun)
                time.sleep(0.2)
                self.kept.append(pod_id)
                if len(self.kept) < OWNERS_KEPT:
                    return
            else:
                client.start(container_id)
        except (RuntimeCallError, UnavailableError) as error:
            if self.owns:
                self.load.refused.append(str(error))
        for ended in {pod_id, *self.kept}:
            client.end_pod(ended)
        self.kept.clear()


def measure(seconds: float, sharers: int, hangs: float) -> StartLoad:
    """Make creates of owners and starts of sharers at the same time."""
    load = StartLoad()
    with tempfile.TemporaryDirectory(prefix="st") as directory, new_node(Path(directory)) as node:
        starts = DelayedStarts(node, hangs)
        node.runtime.before("StartContainer", starts)
        node.start()
        until = time.monotonic() + seconds
        clients = [PodClient(node, load, until, owns=n < OWNERS) for n in range(OWNERS + sharers)]
        for client in clients:
            client.start()
        for client in clients[:OWNERS]:
            client.join()
        page = node.status()
        starts.over.set()
        for client in clients:
            client.join()
        if page is None or load.errors:
            raise BenchError(f"cannot measure starts: {load.errors or node.log()}")
        load.counters = page["counters"]
    return load


# -- the window on a real containerd -----------------------------------------------------------------------


@contextlib.contextmanager
def real_node(directory: Path) -> Iterator[tuple[object, object]]:
    """Make a private runtime with a daemon and a file system that stops answering."""
    import daemon
    from private_runtime import PrivateRuntime
    from stalling_file_system import StallingFileSystem

    runtime = PrivateRuntime(directory / "bed").start()
    try:
        stalling = StallingFileSystem(runtime, directory / "stalling")
        there = daemon.DaemonProcess(directory / "proxy", runtime, {"reconcilePeriod": "1h"})
        there.start()
        with there.client() as client:
            yield daemon.ModeledNode(runtime, there, client), stalling
        there.stop()
        stalling.close()
    finally:
        runtime.stop()


def measure_one_start(found: object, stalling: object) -> tuple[float, float]:
    """Let one start hang; return how long its group was open, and the time from then until its program."""
    import daemon
    from cri import cgroup_of, online
    from private_runtime import wait_for

    def group_of(container: str) -> Path | None:
        directory = cgroup_of(container)
        return directory if directory is not None and (directory / "cgroup.procs").read_text() else None

    assert isinstance(found, daemon.ModeledNode)
    last = CpuSet([max(online())])
    command = ["sh", "-c", "sleep 3600"]
    mounts = {"/data": str(stalling.path)}  # type: ignore[attr-defined]
    sharer = found.create(found.pod("ls"), mounts=mounts, command=command)
    start = threading.Thread(target=found.cri.start, args=(sharer,))
    with stalling.stalled():  # type: ignore[attr-defined]
        start.start()
        wait_for("the start to hang", lambda: group_of(sharer))
        with found.daemon.client() as client:
            client.adopt(found.cri)
            other = daemon.ModeledNode(found.runtime, found.daemon, client, {}, found._pods)
            other.spawn("lse", last)
    group = group_of(sharer)
    assert group is not None
    init = Path("/proc", (group / "cgroup.procs").read_text().split()[0], "comm")
    narrow, opened, spent = str(online() - last), 0.0, 0.0
    while "runc" in init.read_text():
        now = time.perf_counter()
        wide = (group / "cpuset.cpus").read_text().strip() != narrow
        if wide:
            opened = opened or now
        elif opened:
            spent, closed, opened = spent + now - opened, now, 0.0
    executed = time.perf_counter()
    start.join()
    if opened:
        raise BenchError("a program was executed on CPUs of an owner")
    found.containers.clear()
    found.runtime.clear()
    return spent, executed - closed if spent else float("nan")


def measure_windows() -> list[list[str]]:
    """Measure on a real containerd; empty if there is none."""
    from private_runtime import skip_reason

    reason = skip_reason() or ("" if Path("/dev/fuse").exists() else "no /dev/fuse")
    if reason:
        print(f"hanging starts on containerd: not measured, {reason}")
        return []
    with tempfile.TemporaryDirectory(prefix="topoproxy-start-") as name, real_node(Path(name)) as there:
        seen = [measure_one_start(*there) for _ in range(ROUNDS)]
    seen = [(spent, left) for spent, left in seen if spent]  # others were too short to be seen
    if not seen:
        return [["open, with runc's init in it", "-", "-", "0"]]
    spent, left = [open_s for open_s, _ in seen], [left_s for _, left_s in seen]
    rows = (("open, with runc's init in it", spent, max), ("then, until the program", left, min))
    return [
        [what, number(statistics.median(s) * 1000, "ms"), number(worst(s) * 1000, "ms"), str(len(s))]
        for what, s, worst in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=DURATION_S)
    parser.add_argument("--sharers", type=int, default=SHARERS)
    given = parser.parse_args()
    spread = f"{MEDIAN_S * 1000:g} ms in the median"
    rows = [
        measure(given.seconds, given.sharers, 0.0).row(f"{given.sharers}, {spread}"),
        measure(given.seconds, given.sharers, HANGS).row(f"the same, {HANGS:.0%} hang for {HANG_S:g} s"),
    ]
    print(render(LOAD_HEAD, rows))
    if found := measure_windows():
        print()
        print(render(WINDOW_HEAD, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
