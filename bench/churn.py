"""Twenty thousand creates, updates and removals, with a runtime and a kernel that fail now and then.

    make churn                                      the full number; some minutes
    .venv/bin/python bench/churn.py --calls 2000    fewer

Eight clients call the real daemon at the same time. The runtime (a stand-in) fails one call in twenty, and
one kernel write in fifty is refused. All the time the run checks whether a running container is on the CPUs
of a running owner; at the end, whether each container is on the CPUs where it belongs. The daemon's memory,
its ledger and the sizes of its objects are measured after a tenth of the calls and after all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from crash import CrashResult, overlaps_checked, progress
from faulty_node import KINDS, FaultyNode, new_node
from procs import BenchError
from table import render

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import CallRefused, CriClient
from proxy.model.errors import RuntimeCallError, TopoproxyError

CALLS, CLIENTS, REPORT_EVERY = 20_000, 8, 2000
RUNTIME_FAILS, WRITES_FAIL = 0.05, 0.02
GROWTH_MB, LEDGER_KB = 5.0, 1024
SIZE_LIMITS = {
    "proxy.executor.decision_history.DecisionHistory._removed": 500,
    "proxy.executor.decision_history.DecisionHistory._named": 500,
    "proxy.telemetry.port.Problems._known": 100,
    "proxy.telemetry.port.Problem.keys": 800,  # of all problems together
    "proxy.executor.bad_input.BadInput._reported": 4096,
    "proxy.engine.runtime_knowledge.RuntimeKnowledge.failed_creates": 256,
    "proxy.telemetry.port.Throttle._windows": 512,
    "proxy.backends.cgroup.search.GroupFinder._found": 1024,
    "proxy.frontends.cri.messages._create_suffixes": 256,
    "proxy.relay.streams.Streams.dead": 1024,  # refused calls of a connection that is still open
}
"""The objects that may grow while containers come and go, and their limits."""
SIZE_TOLERANCE = 64
"""All other objects of the daemon may differ by this much, because some calls are always in flight."""
COUNTED = ("CreateContainer", "UpdateContainerResources", "RemoveContainer")


@dataclass
class Churn:
    """The results: calls, memory (MB) and ledger (bytes) early and at the end, and violations."""

    calls: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)
    ledger: list[int] = field(default_factory=list)
    object_sizes: list[dict[str, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        return self.memory[-1] - self.memory[0]

    @property
    def missed(self) -> bool:
        return bool(self.wrong) or self.growth >= GROWTH_MB or max(self.ledger) >= LEDGER_KB * 1024


class ChurnClient(threading.Thread):
    """A client with its own pods, one after the other."""

    def __init__(self, node: FaultyNode, number: int, share: int, churn: Churn) -> None:
        super().__init__()
        self.node = node
        self.dice = random.Random(number)
        self.left = share
        self.churn = churn
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.client() as client:
                while self.left > 0:
                    self.pod(client)
        except BaseException as error:  # noqa: BLE001 - reported by the thread that joins this one
            self.error = error

    def client(self) -> CriClient:
        return CriClient(str(self.node.socket))

    def count(self, what: str) -> None:
        self.left -= 1
        self.churn.calls[what] += 1
        if sum(self.churn.calls.values()) % REPORT_EVERY == 0:
            progress(f"{sum(self.churn.calls.values())} calls")

    def pod(self, client: CriClient) -> None:
        """A pod's life: some containers, one after the other."""
        with contextlib.suppress(RuntimeCallError):
            pod_id = self.node.pod(client, self.dice.choice(KINDS))
            for attempt in range(self.dice.randint(1, 3)):
                with contextlib.suppress(RuntimeCallError):
                    self.container(client, pod_id, attempt)
            client.end_pod(pod_id)

    def container(self, client: CriClient, pod_id: str, attempt: int) -> None:
        self.count("create")
        container_id = self.node.create(client, pod_id, attempt)
        with contextlib.suppress(RuntimeCallError):
            client.start(container_id)
            for _ in range(self.dice.randint(0, 2)):
                self.count("update")
                client.update(container_id, pb.LinuxContainerResources(cpuset_cpus="0-15", cpu_shares=64))
        for _ in range(20):
            with contextlib.suppress(RuntimeCallError):
                self.count("remove")
                client.remove(container_id)
                return


def memory_mb(node: FaultyNode) -> float:
    assert node.popen is not None
    for line in Path(f"/proc/{node.popen.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise BenchError("cannot read the memory of the daemon")


def measure(calls: int = CALLS) -> Churn:
    """Make this many calls."""
    churn, found = Churn(), CrashResult()
    with tempfile.TemporaryDirectory(prefix="ch") as directory, new_node(Path(directory)) as node:
        dice, lock = random.Random(7), threading.Lock()

        def fail(_: object) -> None:
            with lock:
                fails = dice.random() < RUNTIME_FAILS
            if fails:
                import grpc

                raise CallRefused(grpc.StatusCode.UNKNOWN, "failed to do it: no reason is known")

        for method in (*COUNTED, "StartContainer"):
            node.runtime.before(method, fail)
        node.start(writes=WRITES_FAIL)
        with overlaps_checked(node, found):
            for share in (calls // 10, calls - calls // 10):
                clients = [
                    ChurnClient(node, share + number, share // CLIENTS, churn) for number in range(CLIENTS)
                ]
                for client in clients:
                    client.start()
                for client in clients:
                    client.join()
                churn.wrong += [repr(client.error) for client in clients if client.error is not None]
                end_remaining_pods(node)
                churn.wrong += node.wait_until_settled(30)
                churn.memory.append(memory_mb(node))
                churn.object_sizes.append(node.sizes())
                churn.ledger.append((node.directory / "state/ledger.jsonl").stat().st_size)
                with node.runtime._lock:
                    node.runtime._calls.clear()
        churn.wrong += [*found.overlaps, *leaks(*churn.object_sizes)]
        page = node.status() or {}
        churn.wrong += [f"internal errors: {n}" for n in [page["counters"].get("internal_errors")] if n]
    return churn


def leaks(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Name the objects that the daemon keeps for containers that are gone."""
    return [
        f"{what} holds {count}, after a tenth of the calls {before.get(what, 0)}"
        for what, count in after.items()
        if count > SIZE_LIMITS.get(what, before.get(what, 0) + SIZE_TOLERANCE)
    ]


def end_remaining_pods(node: FaultyNode) -> None:
    """End the pods that still exist because their end was refused."""
    with CriClient(str(node.socket)) as client:
        for pod_id in list(node.runtime.pods):
            with contextlib.suppress(TopoproxyError):
                client.end_pod(pod_id)


HEAD = ("churn", "creates", "updates", "removals", "broken", "memory", "growth", "ledger", "bar")


def rows(churn: Churn) -> list[list[str]]:
    return [
        [
            f"{CLIENTS} at once, runtime fails {RUNTIME_FAILS:.0%}, writes {WRITES_FAIL:.0%}",
            *(str(churn.calls[what]) for what in ("create", "update", "remove")),
            str(len(churn.wrong)),
            f"{churn.memory[-1]:.1f} MB",
            f"{churn.growth:+.1f} MB",
            f"{max(churn.ledger) / 1024:.0f} kB",
            f"0, {GROWTH_MB:g} MB, {LEDGER_KB} kB" + (" MISSED" if churn.missed else ""),
        ]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=CALLS)
    churn = measure(parser.parse_args().calls)
    print(render(HEAD, rows(churn)))
    for what in churn.wrong:
        print(f"  {what}")
    return int(churn.missed)


if __name__ == "__main__":
    sys.exit(main())
