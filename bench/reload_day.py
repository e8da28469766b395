"""A thousand reloads under load; every second one has a bad configuration.

    make reload-day                                     a thousand; some minutes
    .venv/bin/python bench/reload_day.py --reloads 40   fewer

Four clients create, start, update and remove containers all the time through the real daemon. None of their
calls may fail. The configuration is written and reloaded, in turn by SIGHUP and by the admin socket. Each
good configuration must be in effect afterwards; each bad one must be refused, and the running settings must
not change. After every tenth bad one the clients pause and the same calls are made as before it: the bytes
that reach the runtime, and the errors, must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from churn import memory_mb
from crash import progress
from faulty_node import KINDS, FaultyNode, new_node
from procs import BenchError
from table import number, percentile, render

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import CriClient, DemoPod
from proxy.model.errors import RuntimeCallError
from proxy.model.workload import KubeQos

RELOADS, CLIENTS, PROBE_EVERY = 1000, 4, 10
WARM_UP_RELOADS, GROWTH_MB = 20, 5.0
"""Reloads before the daemon's memory is first measured, and how much it may grow after that."""
LIMIT_S = 60.0
PROBES = (
    DemoPod("probe-ls", "LS", KubeQos.BURSTABLE),
    DemoPod("probe-be", "BE", KubeQos.BEST_EFFORT),
    DemoPod("probe-lse", "LSE", KubeQos.GUARANTEED, "4-5", 2),
    DemoPod("probe-whole", "", KubeQos.GUARANTEED, "", 1),
    DemoPod("probe-wide", "", KubeQos.GUARANTEED, "", 15),
)
"""The last one is rejected."""
GOOD: tuple[dict[str, object], ...] = (
    {"koordinator": {"reservedCPUs": "15"}},
    {"admission": {"maxCPUsPerPod": 6}, "callTimeout": "4s"},
    {"koordinator": {"reservedCPUs": "13,15"}, "reconcilePeriod": "2s"},
    {"explainHistory": 50, "settle": {"perSecond": 20}, "log": {"level": "error", "format": "json"}},
    {"reservedSystemCPUs": "0-1", "onError": "refuse", "memoryNodes": "leave"},
    {},
)
BAD: tuple[Callable[[dict[str, Any]], str], ...] = (
    lambda values: json.dumps({**values, "callTimeout": "soon"}),
    lambda values: json.dumps({**values, "koordinator": {"reservedCPUs": "0-15"}}),
    lambda values: json.dumps({**values, "reservedSystemCPUs": "99", "callTimeout": "1s"}),
    lambda values: json.dumps({**values, "moed": "observe", "explainHistory": 1}),
    lambda values: json.dumps({**values, "log": {"level": "loud"}, "explainHistory": 1}),
    lambda values: json.dumps({**values, "callTimeout": "1s"})[:-9],
    lambda values: "\x00",
)


@dataclass
class ReloadDay:
    """The results.

    Attributes:
        calls, failed: Calls of the clients, and the messages of those that failed.
        calm, busy: Seconds of calls without and with reloads at the same time.
        took: Seconds of each reload.
        compared: How many bad reloads were compared byte for byte.
        memory: Megabytes of the daemon after some reloads and after all.
        wrong: Messages about violations.
    """

    calls: int = 0
    failed: list[str] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    compared: int = 0
    good: int = 0
    bad: int = 0
    memory: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        return self.memory[-1] - self.memory[0]

    @property
    def missed(self) -> bool:
        return bool(self.wrong or self.failed) or self.growth >= GROWTH_MB


class Clients:
    """Threads that make calls until they are ended, and pause on request."""

    def __init__(self, node: FaultyNode, day: ReloadDay) -> None:
        self.node, self.day = node, day
        self.latencies = day.calm
        self._going = threading.Event()
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._resting = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        self._going.set()
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._going.set()
            for thread in self._threads:
                thread.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let all clients end their pods and wait."""
        self._going.clear()
        for _ in self._threads:
            self._resting.acquire()
        yield
        self._going.set()

    def _run(self, number: int) -> None:
        kind = (KINDS[0], KINDS[1], KINDS[3], KINDS[6])[number]
        dice = random.Random(number)
        try:
            with CriClient(str(self.node.socket)) as client:
                while not self._end.is_set():
                    if not self._going.is_set():
                        self._resting.release()
                        self._going.wait()
                    self._pod(client, kind, dice)
        except Exception as error:  # noqa: BLE001 - any end of a client is a finding
            self.day.failed.append(repr(error))
            while not self._end.is_set():  # ``paused`` may wait for all clients
                self._resting.release()
                self._end.wait(0.1)

    def _pod(self, client: CriClient, kind: DemoPod, dice: random.Random) -> None:
        pod_id = self._timed(lambda: self.node.pod(client, kind))
        if pod_id is None:
            return
        for attempt in range(dice.randint(1, 2)):
            container_id = self._timed(lambda attempt=attempt: self.node.create(client, pod_id, attempt))
            if container_id is None:
                continue
            self._timed(lambda container_id=container_id: client.start(container_id))
            linux = pb.LinuxContainerResources(cpu_shares=64)
            self._timed(lambda container_id=container_id, linux=linux: client.update(container_id, linux))
            self._timed(lambda container_id=container_id: client.remove(container_id))
        self._timed(lambda: client.end_pod(pod_id))

    def _timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return call()
        except RuntimeCallError as error:
            self.day.failed.append(str(error))
            return None
        finally:
            with self._lock:
                self.day.calls += 1
                self.latencies.append(time.perf_counter() - began)


class CallProbe:
    """Repeats the same calls, and records the bytes that reach the runtime and the answers."""

    def __init__(self, node: FaultyNode) -> None:
        self.node = node
        self.seen: list[bytes] = []
        self._pods: list[Any] = []
        node.runtime.before("CreateContainer", self._record_request)

    def _record_request(self, request: Any) -> None:
        self.seen.append(request.SerializeToString(deterministic=True))

    def start(self, client: CriClient) -> None:
        self._pods = [client.run_pod(spec) for spec in PROBES]

    def run(self, client: CriClient) -> list[bytes]:
        """Make all calls; return the bytes of requests and errors."""
        self.seen.clear()
        found: list[bytes] = []
        for pod in self._pods:
            pod.attempts = itertools.count()  # the client numbers its attempts, and each must be the first
            try:
                container_id = client.create(pod)
            except RuntimeCallError as error:
                found.append(f"{error.code} {error}".encode())
                continue
            client.remove(container_id)
        return [*self.seen, *found, json.dumps(self._page(), sort_keys=True).encode()]

    def _page(self) -> list[Any]:
        page: Any = query_admin(self.node.admin, "/status", LIMIT_S)
        config = {key: page["config"][key] for key in ("source", "since", "restart")}
        return [config, page["settings"], page["nodePolicy"], page["pools"], page["violations"]]


def reload_once(node: FaultyNode, number: int) -> dict[str, Any]:
    """Reload by the admin socket or by SIGHUP; return how it ended."""
    if number % 4 < 2:
        page: Any = query_admin(node.admin, "/reload", LIMIT_S, act=True)
        return dict(page["reload"])
    assert node.popen is not None
    before = _last_reload(node)
    node.popen.send_signal(signal.SIGHUP)
    node.wait_until(lambda: _last_reload(node) != before, LIMIT_S, "the reload by SIGHUP")
    return _last_reload(node)


def _last_reload(node: FaultyNode) -> dict[str, Any]:
    page: Any = query_admin(node.admin, "/status", LIMIT_S)
    return dict(page["config"]["reload"])


def measure(reloads: int = RELOADS) -> ReloadDay:
    """Reload this many times."""
    day = ReloadDay()
    with tempfile.TemporaryDirectory(prefix="rl") as directory, new_node(Path(directory)) as node:
        file = node.directory / "config.yaml"
        base = json.loads(file.read_text())
        node.start()
        probe, clients = CallProbe(node), Clients(node, day)
        with CriClient(str(node.socket)) as client, clients.at_work():
            probe.start(client)
            time.sleep(2)
            clients.latencies = day.busy
            good = itertools.cycle(GOOD)
            values = base
            for turn in range(reloads):
                if turn == WARM_UP_RELOADS or (turn == 0 and reloads <= WARM_UP_RELOADS):
                    day.memory.append(memory_mb(node))
                if turn % 2 == 0:
                    values = {**base, **next(good)}
                    file.write_text(json.dumps(values))
                    _reload_good(node, turn, day)
                else:
                    file.write_text(BAD[turn // 2 % len(BAD)](values))
                    paused = clients.paused() if turn // 2 % PROBE_EVERY == 0 else contextlib.nullcontext()
                    with paused:
                        compared = probe if turn // 2 % PROBE_EVERY == 0 else None
                        _reload_bad(node, turn, day, compared, client)
                if turn % 100 == 99:
                    progress(f"{turn + 1} reloads, {day.calls} calls, {len(day.failed)} failed")
            day.memory.append(memory_mb(node))
        page = node.status() or {}
        day.wrong += [f"internal errors: {n}" for n in [page["counters"].get("internal_errors")] if n]
        day.wrong += page["violations"]
    return day


def _reload_good(node: FaultyNode, turn: int, day: ReloadDay) -> None:
    began = time.perf_counter()
    done = reload_once(node, turn)
    day.took.append(time.perf_counter() - began)
    day.good += 1
    if done["result"] != "applied":
        day.wrong.append(f"reload {turn} of a good file: {done['result']} {done['reason']}")


def _reload_bad(
    node: FaultyNode, turn: int, day: ReloadDay, probe: CallProbe | None, client: CriClient
) -> None:
    before = probe.run(client) if probe is not None else []
    done = reload_once(node, turn)
    day.bad += 1
    if done["result"] != "refused" or not done["reason"]:
        day.wrong.append(f"reload {turn} of a bad file: {done['result']}")
    if probe is None:
        return
    day.compared += 1
    for was, now in zip(before, after := probe.run(client), strict=False):
        if was != now:
            day.wrong.append(f"after reload {turn}, refused: {now[:300]!r}, before it {was[:300]!r}")
    if len(before) != len(after) or len(before) < len(PROBES):
        day.wrong.append(f"after reload {turn}: {len(after)} answers, before it {len(before)}")


HEAD = (
    "reloads",
    "good",
    "bad",
    "compared",
    "calls",
    "failed",
    "wrong",
    "reload",
    "call",
    "beside",
    "growth",
    "bar",
)


def rows(day: ReloadDay) -> list[list[str]]:
    def percentile_ms(each: list[float], part: float) -> float:
        return percentile(each, part) * 1000

    return [
        [
            f"{CLIENTS} clients at once",
            str(day.good),
            str(day.bad),
            str(day.compared),
            str(day.calls),
            str(len(day.failed)),
            str(len(day.wrong)),
            f"{number(statistics.median(day.took) * 1000)} ms",
            f"{number(percentile_ms(day.calm, 0.5))}/{number(percentile_ms(day.calm, 0.99))} ms",
            f"{number(percentile_ms(day.busy, 0.5))}/{number(percentile_ms(day.busy, 0.99))} ms",
            f"{day.growth:+.1f} MB",
            f"0, 0, {GROWTH_MB:g} MB" + (" MISSED" if day.missed else ""),
        ]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reloads", type=int, default=RELOADS)
    day = measure(parser.parse_args().reloads)
    print(render(HEAD, rows(day)))
    print("call: median and 99 % of a call without reloads; beside: with reloads beside it")
    for what in (*day.wrong, *day.failed[:20]):
        print(f"  {what}")
    return int(day.missed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(str(error))
