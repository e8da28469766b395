"""Measures a start on a full node: 1,000 unrecorded containers, 200 of them of hostile pods

    .venv/bin/python bench/hostile_start.py                two minutes
    .venv/bin/python bench/hostile_start.py b3705ac        compared with another commit, in turn
    .venv/bin/python bench/hostile_start.py --hostile 0    only honest pods

The runtime is played by a process; groups are those of a directory with the kernel's rules; the machine has
64 CPUs. The first start of each turn finds no ledger, so all containers are adopted; the second one finds the
ledger that the first has written before it was killed. The loop's gap is the longest time between two signs
of life for systemd's watchdog, which come every 10 ms, minus these 10 ms. Other work of the machine is
included, so the least of all turns is shown as well. An answer is a Version call by a client that makes one
every 5 ms. A daemon that is not ready in a minute has "inf".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

from backend import Backend, RuntimeAnswers
from commit_comparison import sources
from frames import message
from hostile_day import CPUS, MACHINE, DescribedMachineDaemon
from hostile_pods import ATTACKS, NAMESPACE, QOS, STATUS, HostilePod, attacks, with_invalid_utf8
from load import run_load
from messages import identifier
from procs import BENCH, ROOT, BenchError, checkout, start
from table import number, render

from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.model.idset import CpuSet

CONTAINERS, HOSTILE, OWNERS = 1000, 200, 20
PING_MS = 10.0
TURNS = 3
SEED = 1
GAP_BAR_MS = 20.0
OWNED = CpuSet(range(CPUS // 2 - OWNERS, CPUS // 2))
HEAD = ("", "bar")


class CrowdedRuntime(RuntimeAnswers):
    """A runtime full of containers that run: owners first, then the hostile pods, then sharers."""

    def __init__(self, hostile: int, skip: Sequence[str] = ()) -> None:
        super().__init__()
        evil = attacks(hostile, SEED, CPUS, skip=skip)
        pods, running = pb.ListPodSandboxResponse(), pb.ListContainersResponse()
        self.cpus: dict[str, str] = {}
        for index in range(CONTAINERS):
            uid, own = f"uid-{index:05d}", sorted(OWNED)[index : index + 1]
            name, namespace = f"pod-{index}", "tenant-good"
            labels, annotations = dict[str, str](), dict[str, str]()
            if own:
                labels, annotations = {QOS: "LSR"}, {STATUS: json.dumps({"cpuset": str(own[0])})}
            elif index - OWNERS < hostile:
                pod = evil[index - OWNERS]
                labels, annotations = dict(pod.labels), dict(pod.annotations)
                namespace = NAMESPACE
            pod_labels = {"io.kubernetes.pod.name": name, "io.kubernetes.pod.uid": uid}
            sandbox = pb.PodSandbox(
                id=identifier(index + 700_000),
                metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace=namespace),
                state=pb.SANDBOX_READY,
                labels={**pod_labels, **labels},
                annotations=annotations,
            )
            pods.items.append(sandbox)
            container_id = identifier(index)
            running.containers.append(
                pb.Container(
                    id=container_id,
                    pod_sandbox_id=sandbox.id,
                    metadata=pb.ContainerMetadata(name="main"),
                    state=pb.CONTAINER_RUNNING,
                    labels=pod_labels,
                )
            )
            self.cpus[container_id] = str(own[0]) if own else str(MACHINE.online - OWNED)
        self.paths = {
            identifier(i): f"kubepods/{p}/poduid-{i:05d}/{identifier(i)}".replace("//", "/")
            for i, p in enumerate(_parents(evil))
        }
        self.pods, self.running = message(with_invalid_utf8(pods.SerializeToString())), running
        self.all = message(running.SerializeToString())

    def answer(self, method: bytes, body: bytes) -> bytes:
        """Answer one call."""
        if method == b"ListPodSandbox":
            return self.pods
        if method == b"ListContainers":
            wanted = pb.ListContainersRequest.FromString(body).filter.id
            found = [one for one in self.running.containers if one.id == wanted]
            return (
                message(pb.ListContainersResponse(containers=found).SerializeToString())
                if wanted
                else self.all
            )
        if method == b"ContainerStatus":
            return self._status(pb.ContainerStatusRequest.FromString(body))
        return super().answer(method, body)

    def _status(self, request: pb.ContainerStatusRequest) -> bytes:
        one = self.running.containers[int(request.container_id[:8], 16)]
        status = pb.ContainerStatus(id=one.id, metadata=one.metadata, state=one.state, labels=one.labels)
        owner = int(request.container_id[:8], 16) < OWNERS
        cpu = {"shares": 1024 if owner else 102, "period": 100_000, "cpus": self.cpus[one.id]}
        cpu |= {"quota": 100_000} if owner else {}
        spec = {"linux": {"cgroupsPath": f"/{self.paths[one.id]}", "resources": {"cpu": cpu}}}
        info = {"info": json.dumps({"runtimeSpec": spec})} if request.verbose else {}
        return message(pb.ContainerStatusResponse(status=status, info=info).SerializeToString())


def _parents(evil: Sequence[HostilePod]) -> list[str]:
    sharers = CONTAINERS - OWNERS - len(evil)
    return ["" for _ in range(OWNERS)] + [pod.parent for pod in evil] + ["burstable"] * sharers


@dataclass(frozen=True, slots=True)
class StartResult:
    """The results of one start: seconds, milliseconds and megabytes."""

    ready_s: float
    gap_ms: float
    answer_ms: float
    memory_mb: float
    known: int


class Caller:
    """A client that calls all the time."""

    def __init__(self, sock: Path) -> None:
        self.worst_ms = 0.0
        self._sock, self._over = sock, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.005):
            if self._sock.exists():
                begun = time.monotonic()
                found = run_load(str(self._sock), "Version", conc=1, n=1, dur=30, warm=0, stall=30)
                if not found.errors:
                    self.worst_ms = max(self.worst_ms, (time.monotonic() - begun) * 1000)

    def close(self) -> None:
        self._over.set()
        self._thread.join(40)


def one_start(daemon: DescribedMachineDaemon) -> StartResult:
    """Start the daemon on its own earlier files, watch it for some seconds, and kill it."""
    daemon.pings.worst = 0.0
    caller = Caller(daemon.socket)
    known: object = []
    try:
        ready = daemon.start()
        time.sleep(2)  # the work after the reconcile blocks the loop too
        known = daemon.page()["containers"]
    except BenchError as error:
        print(f"hostile_start: {str(error)[:200]}", file=sys.stderr)
        ready = math.inf
    finally:
        caller.close()
    memory = daemon.memory_mb()
    daemon.kill()
    gap = daemon.pings.worst * 1000 - PING_MS
    assert isinstance(known, list)
    return StartResult(ready, max(gap, 0.0), caller.worst_ms, memory, len(known))


@contextlib.contextmanager
def daemon_of(
    directory: Path, runtime: Path, root: Path, crowd: CrowdedRuntime
) -> Iterator[DescribedMachineDaemon]:
    """Return a daemon that has never run, with the groups of all containers."""
    daemon = DescribedMachineDaemon(directory, runtime, root, ping_usec=int(2 * PING_MS * 1000))
    tree = FakeCgroups(directory / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1)
    for container_id, path in crowd.paths.items():
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            with contextlib.suppress(FileExistsError):
                tree.mkdir("/".join(parts[:depth]))
        tree.write(path, CpuSet.parse(crowd.cpus[container_id]), None)
    try:
        yield daemon
    finally:
        daemon.close()


def measure(
    roots: Mapping[str, Path], hostile: int, skip: Sequence[str], turns: int
) -> dict[tuple[str, str], list[StartResult]]:
    """Start each daemon without and with a ledger, in turn."""
    found: dict[tuple[str, str], list[StartResult]] = {}
    crowd = CrowdedRuntime(hostile, skip)
    dice = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="ts") as name:
        sock = Path(name) / "runtime.sock"
        argv = [
            sys.executable,
            str(BENCH / "hostile_start.py"),
            "--runtime",
            str(sock),
            "--hostile",
            str(hostile),
        ]
        argv += ["--skip", ",".join(skip)]
        runtime = start("the runtime", argv, sock, malloc=True)
        try:
            for turn in range(turns):
                for which in dice.sample(sorted(roots), len(roots)):
                    print(f"turn {turn + 1} of {turns}: {which}", file=sys.stderr)
                    own = Path(name) / f"{which}-{turn}"
                    with daemon_of(own, sock, roots[which], crowd) as daemon:
                        for what in ("no ledger", "after kill -9"):
                            found.setdefault((what, which), []).append(one_start(daemon))
        finally:
            runtime.end()
    return found


def rows(found: Mapping[tuple[str, str], Sequence[StartResult]], which: Sequence[str]) -> list[list[str]]:
    lines = []
    for what in ("no ledger", "after kill -9"):
        for text, unit, attribute, bar in (
            ("ready", "s", "ready_s", ""),
            ("loop's gap", "ms", "gap_ms", ""),
            ("loop's gap, least of all turns", "ms", "gap_ms", f"{GAP_BAR_MS:g} ms"),
            ("slowest answer", "ms", "answer_ms", ""),
            ("memory at most", "MB", "memory_mb", ""),
            ("containers known", "", "known", str(CONTAINERS)),
        ):
            pick = min if "least" in text else statistics.median
            cells = [number(pick([getattr(s, attribute) for s in found[what, name]]), unit) for name in which]
            lines.append([f"{text}, {what}", *cells, bar])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", nargs="?", help="a commit, or a directory with another checkout")
    parser.add_argument("--hostile", type=int, default=HOSTILE, help="hostile pods among them (200)")
    parser.add_argument(
        "--skip", default="", metavar="A,B", help=f"attacks to leave out: {', '.join(ATTACKS)}"
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="turns (3)")
    parser.add_argument("--runtime", metavar="SOCKET", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    skip = [kind for kind in chosen.skip.split(",") if kind]
    if chosen.runtime:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        Backend(chosen.runtime, CrowdedRuntime(chosen.hostile, skip)).run()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        with sources(chosen.base or str(ROOT)) as (root, named):
            roots = {"now": ROOT} | ({named: root} if chosen.base else {})
            for each in roots.values():
                checkout("the daemon", each)
            found = measure(roots, chosen.hostile, skip, chosen.turns)
    except BenchError as error:
        print(f"hostile_start: {error}", file=sys.stderr)
        return 1
    which = sorted(roots, key=lambda name: name == "now")
    print(render([HEAD[0], *which, HEAD[1]], rows(found, which)))
    summary = f"{chosen.hostile} of them of hostile pods"
    print(f"\n{CONTAINERS} containers, {summary}; {chosen.turns} turns, {os.cpu_count()} CPUs.")
    return int(min(s.gap_ms for s in found["no ledger", "now"]) > GAP_BAR_MS)


if __name__ == "__main__":
    sys.exit(main())
