"""A tenant's worst day on a real containerd: hostile pods next to honest ones, and a kill of the daemon.

    make hostile-day                                             200 hostile, 50 honest pods; as root, Debian
    .venv/bin/python bench/hostile_day.py --hostile 40 --honest 12
    .venv/bin/python bench/hostile_day.py --of b3705ac           the daemon of another commit
    .venv/bin/python bench/hostile_day.py --kinds greedy,sparse  attacks by name (``hostile_pods.ATTACKS``)

The same honest day is played twice, the second time with hostile pods between all its steps. Sandboxes run,
and containers are created but not started, in a private containerd; the daemon is given a machine of 64
CPUs, so that there is something to own. Halfway the daemon is killed (SIGKILL) and restarted. The results:

* placements: the CPUs in the OCI spec of each honest container, and its facts in ``topoproxy status``,
  are the same on both days, and no hostile pod owns a CPU;
* ready: seconds from the start of the process after the kill until it has reconciled with the runtime and
  answered a call;
* ping gap: the longest time without a sign of life for systemd's watchdog, which is due every 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

from commit_comparison import sources
from cri import Cri, RpcError
from hostile_pods import ATTACKS, NAMESPACE, HonestPod, HostilePod, attack, attacks, with_invalid_utf8
from private_runtime import PrivateRuntime, skip_reason
from procs import ROOT, BenchError, checkout, environment
from table import number, render

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.model.errors import TopoproxyError
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

MACHINE = regular_machine(2, 2, 8, 2)
CPUS = len(MACHINE.online)
SIBLING = CPUS // 2
READY_S, GAP_S, GIVE_UP_S = 2.0, 1.0, 60.0
PING_USEC = 100_000
HEAD = ("", "without", "with hostile pods", "bar")
CALL_TIMEOUT_S = 30.0


def honest_pods(count: int) -> list[HonestPod]:
    """Make owners and sharers, mixed.

    Owners with named CPUs come first: chosen CPUs may be any that are still free.
    """
    found: list[HonestPod] = []
    top = SIBLING - 1
    sharers = {0: ("LS", "burstable"), 2: ("BE", "besteffort"), 3: ("", "burstable")}
    for index in range(count):
        kind, name, early = index % 8, f"honest-{index}", index < count // 2
        if kind in (1, 6) and early:
            found.append(HonestPod(name, "LSE", cpus=f"{top},{top + SIBLING}", whole=2))
        elif kind == 4 and early:
            found.append(HonestPod(name, "LSR", cpus=str(top), whole=1))
        elif kind in (1, 6):
            found.append(HonestPod(name, whole=2))
        else:
            found.append(HonestPod(name, *sharers.get(kind, ("", "besteffort"))))
        top -= bool(found[-1].cpus)
    return found


class Pings:
    """Takes systemd's place: listens to signs of life, and records their times."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.worst = 0.0
        self.count = 0
        self._last: float | None = None
        self._lock = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while data := self._sock.recv(4096):
            if b"WATCHDOG=1" in data.split(b"\n"):
                self._record(time.monotonic(), is_alive=True)

    def _record(self, now: float, *, is_alive: bool) -> None:
        with self._lock:
            if self._last is not None:
                self.worst = max(self.worst, now - self._last)
            self._last = now if is_alive else None
            self.count += is_alive

    def process_ended(self) -> None:
        """Called when the process ends: the time since its last sign of life is a gap too."""
        self._record(time.monotonic(), is_alive=False)

    def close(self) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._thread.join(5)
        self._sock.close()


class DescribedMachineDaemon:
    """A daemon with a described machine in front of a real runtime."""

    def __init__(self, directory: Path, runtime: Path, root: Path, ping_usec: int = PING_USEC) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.root, self.ping_usec = directory, root, ping_usec
        self.socket, self.admin = directory / "cri.sock", directory / "admin.sock"
        self.log = directory / "daemon.log"
        self.pings = Pings(directory / "notify.sock")
        self.popen: subprocess.Popen[bytes] | None = None
        machine = directory / "machine"
        write_sysfs(MACHINE, machine)
        cgroups = FakeCgroups(directory / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1)
        config = {
            "apiVersion": "topoproxy/v1",
            "kind": "TopoproxyConfiguration",
            "cpuManagerPolicy": "static",
            "reservedSystemCPUs": f"0,{SIBLING}",
            "listen": f"unix://{self.socket}",
            "adminSocket": f"unix://{self.admin}",
            "runtime": f"unix://{runtime}",
            "stateDir": str(directory / "state"),
            "kubelet": {"stateDir": str(directory / "kubelet")},
            "sysfsRoot": str(machine / "sys"),
            "procfsRoot": str(machine / "proc"),
            "cgroupRoot": str(cgroups.root),
        }
        self.config = directory / "config.yaml"
        self.config.write_text(json.dumps(config))  # JSON is YAML
        self.config.chmod(0o600)

    def start(self) -> float:
        """Start the daemon; returns the seconds until it has reconciled and answered a call."""
        variables = {
            "PYTHONPATH": str(self.root),
            "NOTIFY_SOCKET": str(self.pings.path),
            "WATCHDOG_USEC": str(self.ping_usec),
        }
        begun = time.monotonic()
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(  # the argument vector is ours
                [sys.executable, "-m", "proxy", "serve", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment(malloc=False) | variables,
            )
        while not self._is_ready():
            if self.popen.poll() is not None:
                raise BenchError(f"the daemon ended with {self.popen.returncode}: {self.tail()}")
            if time.monotonic() - begun > GIVE_UP_S:
                raise BenchError(f"the daemon is not ready within {GIVE_UP_S:g} s: {self.tail()}")
            time.sleep(0.01)
        with Cri(self.socket, "") as client:
            client.version(CALL_TIMEOUT_S)
        return time.monotonic() - begun

    def _is_ready(self) -> bool:
        with (
            contextlib.suppress(TopoproxyError, OSError, TimeoutError),
            socket.socket(socket.AF_UNIX) as probe,
        ):
            probe.connect(str(self.admin))  # without the retries of the command
            page = self.page()
            return bool(page.get("ready"))
        return False

    def page(self) -> dict[str, Any]:
        """Return the page of ``topoproxy status``."""
        answer = query_admin(self.admin, "/status", timeout=CALL_TIMEOUT_S)
        assert isinstance(answer, dict)
        return answer

    def kill(self) -> None:
        """End the daemon as a crash does."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()
            self.pings.process_ended()

    def close(self) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.kill()
        self.pings.close()

    def memory_mb(self) -> float:
        assert self.popen is not None
        for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
        return 0.0

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-600:]


@dataclass
class Day:
    """The results of a day.

    Attributes:
        honest: For each honest pod its placement and status, or the message of the rejection.
        owners: Namespaces of pods that own CPUs.
        ready_s: Seconds until the daemon was ready, after its kill.
        gap_s: The longest gap between two pings.
        calls_ms: How long the honest pods' calls took.
        refused: How many hostile pods were refused.
        memory_mb, log_kb, ledger_kb: The daemon's memory, log and ledger.
        longest: Characters of the longest message of a refusal, of the log and of ``topoproxy status``.
    """

    honest: dict[str, Any] = field(default_factory=dict)
    owners: set[str] = field(default_factory=set)
    ready_s: float = 0.0
    gap_s: float = 0.0
    calls_ms: list[float] = field(default_factory=list)
    refused: int = 0
    memory_mb: float = 0.0
    log_kb: float = 0.0
    ledger_kb: float = 0.0
    longest: int = 0


class _Raw:
    """A message that is already serialized."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def SerializeToString(self) -> bytes:  # noqa: N802 - as protobuf's
        return self.raw


class DayRun:
    """One day at a runtime."""

    def __init__(self, runtime: PrivateRuntime, daemon: DescribedMachineDaemon, tag: str) -> None:
        self.runtime, self.daemon, self.tag = runtime, daemon, tag
        self.day = Day()
        self.pods: list[str] = []
        self.containers: dict[str, str] = {}

    def _pod(self, pod: HonestPod | HostilePod, name: str, namespace: str, client: Cri) -> str:
        """Run a sandbox and create a container; gives its id, or raises the error of a call."""
        uid = f"{self.tag}-{name}"
        config = client.pod_config(
            name,
            uid=uid,
            labels=pod.labels,
            annotations=pod.annotations,
            cgroup_parent=f"/kubepods/{pod.parent}/pod{uid}".replace("//", "/"),
            resources=pod.resources,
        )
        config.metadata.namespace = namespace
        run = pb.RunPodSandboxRequest(config=config).SerializeToString()
        sandbox: str = client.method("RunPodSandbox")(
            _Raw(with_invalid_utf8(run)), timeout=CALL_TIMEOUT_S
        ).pod_sandbox_id
        self.pods.append(sandbox)
        client._configs[sandbox] = config
        resources: dict[str, Any] = dict(pod.resources)
        create = client.create_request(sandbox, **resources).SerializeToString()
        made = client.method("CreateContainer")(_Raw(with_invalid_utf8(create)), timeout=CALL_TIMEOUT_S)
        return str(made.container_id)

    def create_honest(self, pod: HonestPod, client: Cri) -> None:
        """Create an honest pod."""
        begun = time.monotonic()
        try:
            made = self._pod(pod, pod.name, pod.namespace, client)
            self.containers[pod.name] = made
        except RpcError as error:
            self.day.honest[pod.name] = f"refused: {error.details()}"
        self.day.calls_ms.append((time.monotonic() - begun) * 1000)

    def create_hostile(self, pod: HostilePod, name: str, client: Cri) -> None:
        """Create a hostile pod."""
        try:
            self._pod(pod, name, NAMESPACE, client)
        except RpcError as error:
            self.day.refused += 1
            self.day.longest = max(self.day.longest, len(str(error.details())))

    def collect_results(self) -> None:
        """Gather the results at the end."""
        page = self.daemon.page()
        rows = {row["id"]: row for row in page["containers"]}
        with self.runtime.client() as client:
            for name, container in self.containers.items():
                info = json.loads(client.status(container, verbose=True).info["info"])
                cpu = info["runtimeSpec"]["linux"]["resources"].get("cpu", {})
                row = rows.get(container, {})
                facts = {key: row.get(key) for key in ("ref", "qos", "pool", "cpus", "mems", "reason")}
                self.day.honest[name] = {"spec": cpu.get("cpus"), "mems": cpu.get("mems"), **facts}
        self.day.owners = {row["pod"].partition("/")[0] for row in page["exclusive"]}
        log = self.daemon.log.read_text(errors="replace")
        texts = [*log.splitlines(), *(str(p["what"]) for p in page["problems"]), *_texts(page["containers"])]
        self.day.longest = max(self.day.longest, *map(len, texts))
        self.day.memory_mb = self.daemon.memory_mb()
        self.day.log_kb = len(log) / 1000
        ledger = self.daemon.directory / "state/ledger.jsonl"
        self.day.ledger_kb = ledger.stat().st_size / 1000 if ledger.exists() else 0.0

    def clear(self) -> None:
        """Remove this day's pods; their list cannot be read if a name in it is not UTF-8."""
        with self.runtime.client() as client:
            for pod in self.pods:
                with contextlib.suppress(RpcError):
                    client.stop_pod(pod)
                    client.remove_pod(pod)


def _texts(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for row in rows:
        yield from map(str, row.values())


def play_day(
    runtime: PrivateRuntime,
    directory: Path,
    honest: Sequence[HonestPod],
    hostile: Sequence[HostilePod],
    root: Path = ROOT,
) -> Day:
    """Play the day: hostile pods are spread over the steps of the honest day; the daemon is killed halfway.

    Raises:
        BenchError: The daemon does not become ready, or ends by itself.
    """
    daemon = DescribedMachineDaemon(directory, runtime.socket, root)
    run = DayRun(runtime, daemon, directory.name)
    try:
        daemon.start()
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(Cri(daemon.socket, runtime.cgroup))
            for step, pod in enumerate(honest):
                for index in range(
                    step * len(hostile) // len(honest), (step + 1) * len(hostile) // len(honest)
                ):
                    run.create_hostile(hostile[index], f"evil-{index}", client)
                if step == len(honest) // 2:
                    daemon.kill()
                    run.day.ready_s = daemon.start()
                    known = client
                    client = stack.enter_context(Cri(daemon.socket, runtime.cgroup))
                    client.adopt(known)
                run.create_honest(pod, client)
        run.collect_results()
        daemon.kill()
        run.day.gap_s = daemon.pings.worst
    finally:
        daemon.close()
        run.clear()
    return run.day


def differences(quiet: Day, busy: Day) -> list[str]:
    """Name the honest pods whose results differ from those without hostile pods."""
    found = []
    for name in sorted(quiet.honest.keys() | busy.honest.keys()):
        before, after = quiet.honest.get(name), busy.honest.get(name)
        if before != after:
            found.append(f"{name}: {before} without, {after} with hostile pods"[:400])
    return found


def bars(quiet: Day) -> tuple[float, float]:
    """Return the most seconds until ready and between pings; more if the quiet day is slow too."""
    return max(READY_S, 3 * quiet.ready_s), max(GAP_S, 3 * quiet.gap_s)


def failures(quiet: Day, busy: Day) -> list[str]:
    """Name the results that are not as required."""
    found = [
        f"{name}: {seen} on the quiet day" for name, seen in quiet.honest.items() if isinstance(seen, str)
    ]
    found += differences(quiet, busy)
    if NAMESPACE in busy.owners:
        found.append(f"pods of {NAMESPACE} own CPUs")
    ready_s, gap_s = bars(quiet)
    if busy.ready_s > ready_s:
        found.append(f"ready after {busy.ready_s:.2f} s, not {ready_s:.3g} s")
    if busy.gap_s > gap_s:
        found.append(f"no ping for {busy.gap_s:.2f} s, not {gap_s:.3g} s")
    if busy.longest > 2_000:
        found.append(f"a message of {busy.longest} characters")
    return found


def rows(quiet: Day, busy: Day) -> list[list[str]]:
    def line(what: str, get: Any, bar: str = "") -> list[str]:
        return [what, get(quiet), get(busy), bar]

    def placed(day: Day) -> str:
        return str(sum(isinstance(seen, dict) for seen in day.honest.values()))

    ready_s, gap_s = bars(quiet)
    return [
        line("honest pods placed", placed),
        ["of them, placed otherwise", "", str(len(differences(quiet, busy))), "0"],
        line("hostile pods refused", lambda day: str(day.refused)),
        line("ready after kill -9", lambda day: number(day.ready_s, "s"), f"{ready_s:.3g} s"),
        line("longest gap between pings", lambda day: number(day.gap_s, "s"), f"{gap_s:.3g} s"),
        line("an honest pod's calls, median", lambda day: number(statistics.median(day.calls_ms), "ms")),
        line("an honest pod's calls, worst", lambda day: number(max(day.calls_ms), "ms")),
        line("longest message", lambda day: str(day.longest), "2000"),
        line("memory at most", lambda day: number(day.memory_mb, "MB")),
        line("log", lambda day: number(day.log_kb, "kB")),
        line("ledger", lambda day: number(day.ledger_kb, "kB")),
    ]


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--hostile", type=int, default=200, help="pods (200)")
    options.add_argument("--honest", type=int, default=50, help="pods (50)")
    options.add_argument("--seed", type=int, default=1, help="of the attacks (1)")
    options.add_argument(
        "--kinds", default="", metavar="A,B", help=f"only these attacks: {', '.join(ATTACKS)}"
    )
    options.add_argument(
        "--of", default=str(ROOT), metavar="COMMIT", help="a commit, or a directory with a checkout"
    )
    return options.parse_args()


def main() -> int:
    chosen = arguments()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if reason := skip_reason():
        print(f"hostile-day: {reason}", file=sys.stderr)
        return 2
    honest = honest_pods(chosen.honest)
    hostile = attacks(chosen.hostile, chosen.seed, CPUS)
    if chosen.kinds:
        dice, kinds = random.Random(chosen.seed), chosen.kinds.split(",")
        hostile = [attack(kinds[i % len(kinds)], dice, CPUS) for i in range(chosen.hostile)]
    with tempfile.TemporaryDirectory(prefix="th") as name, sources(chosen.of) as (root, named):
        checkout("the daemon", root)
        runtime = PrivateRuntime(Path(name) / "bed").start()
        try:
            print("hostile-day: without hostile pods", file=sys.stderr)
            quiet = play_day(runtime, Path(name) / "quiet", honest, (), root)
            print("hostile-day: with hostile pods", file=sys.stderr)
            busy = play_day(runtime, Path(name) / "busy", honest, hostile, root)
        except BenchError as error:
            print(f"FAILED: {error}")
            return 1
        finally:
            runtime.stop()
    print(render(HEAD, rows(quiet, busy)))
    print(f"\n{len(hostile)} hostile pods beside {len(honest)}, daemon of {named}, {os.cpu_count()} CPUs.")
    wrong = failures(quiet, busy)
    for failure in wrong:
        print(f"FAILED: {failure}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
