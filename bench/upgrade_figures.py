"""Upgrades and downgrades a running daemon under 300 pods and a stream of calls.

    make upgrade-figures                                       three upgrades and downgrades
    .venv/bin/python bench/upgrade_figures.py --rounds 1 --pods 50

Two versions of the program lie next to each other, and a link names the installed one. The runtime and the
cgroup tree are imitated (``faulty_node``). Clients create, start, update and remove containers all the time,
without waiting for a connection: a connection that is refused is a failed call. During every upgrade a
container stops slowly. No call may fail, and no owner may move. The run prints the longest call (the create
of an owner moves all other containers, which takes time here) and for how long no call was accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash import progress
from faulty_node import KINDS, FaultyNode, new_node
from procs import BENCH, BenchError
from table import number, percentile, render

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import CriClient, DemoPod
from proxy.model.errors import TopoproxyError
from proxy.upgrade.replacement import replace_daemon

PODS, ROUNDS, CLIENTS = 300, 3, 4
SLOW_STOP_S = 3.0
"""Seconds that a container takes to stop, longer than an upgrade."""
LIMIT_S = 60.0
BAR_S = 2.0
"""The most seconds for which no call may be accepted."""
OWNERS = (KINDS[3], KINDS[4], KINDS[5])


class Versions:
    """Two versions of the program, of which one is installed."""

    def __init__(self, directory: Path) -> None:
        self.installed = directory / "installed"
        self.names = ("old", "new")
        for name in self.names:
            shutil.copytree(BENCH.parent / "proxy", directory / name / "proxy")
        self._link = directory
        init = directory / "new/proxy/__init__.py"
        text, count = re.subn(r'__version__ = ".*"', '__version__ = "99.0.0"', init.read_text())
        if count != 1:
            raise BenchError("cannot make a next version: proxy/__init__.py has no version")
        init.write_text(text)

    def install(self, name: str) -> None:
        """Replace one version by the other."""
        draft = self._link / "installed.new"
        draft.symlink_to(name)
        draft.rename(self.installed)


@dataclass
class Upgrades:
    """The results.

    Attributes:
        calls, failed: Calls of the clients, and the messages of those that failed.
        calm, busy: Seconds of calls without and during upgrades.
        took: Seconds of each upgrade.
        pauses_s: Seconds of each upgrade in which no call was accepted.
        wrong: Messages about violations.
    """

    pods: int = 0
    calls: int = 0
    failed: list[str] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def longest(self) -> float:
        return max(self.busy)

    @property
    def missed(self) -> bool:
        return bool(self.failed or self.wrong or not self.pauses_s) or max(self.pauses_s) > BAR_S


class FailFastClient(CriClient):
    """A client whose calls fail at once if no connection can be made."""

    def call(self, method: str, request: Any) -> Any:
        return self._calls[method](request, timeout=30.0)


class UpgradeLoad:
    """Threads that make calls, and measure them."""

    def __init__(self, node: FaultyNode, out: Upgrades) -> None:
        self.node, self.out = node, out
        self.latencies = out.calm
        self._end = threading.Event()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def _run(self, number: int) -> None:
        kind = (KINDS[0], KINDS[1], KINDS[2], KINDS[6])[number]
        with FailFastClient(str(self.node.socket)) as client:
            while not self._end.is_set():
                self._pod(client, kind)

    def _pod(self, client: CriClient, kind: DemoPod) -> None:
        pod = self.timed(lambda: self.node.pod(client, kind))
        if pod is None:
            return
        created = self.timed(lambda: self.node.create(client, pod, 0))
        if created is not None:
            self.timed(lambda: client.start(created))
            self.timed(lambda: client.update(created, pb.LinuxContainerResources(cpu_shares=64)))
            self.timed(lambda: client.call("ListContainers", pb.ListContainersRequest()))
            self.timed(lambda: client.remove(created))
        self.timed(lambda: client.end_pod(pod))

    def timed(self, call: Callable[[], Any]) -> Any:
        """Make a call; record it if it fails."""
        latencies, began = self.latencies, time.perf_counter()
        try:
            return call()
        except Exception as error:  # noqa: BLE001  every failure counts
            self.out.failed.append(repr(error)[:300])
            return None
        finally:
            with self._lock:
                self.out.calls += 1
                latencies.append(time.perf_counter() - began)


class UpgradedNode:
    """A node whose daemon is replaced."""

    def __init__(self, node: FaultyNode, out: Upgrades) -> None:
        self.node, self.out = node, out
        self.versions = Versions(node.directory)
        self.pid = 0
        self._first: Any = None
        node.runtime.before("StopContainer", self._stop_slowly)
        self._slow_id = ""

    def start(self) -> None:
        self.versions.install("old")
        file = self.node.directory / "config.yaml"
        slow = {"callTimeout": "30s", "log": {"level": "info"}}
        file.write_text(json.dumps({**json.loads(file.read_text()), **slow}))
        self.node.import_path = str(self.versions.installed)
        self.node.start()
        assert self.node.popen is not None
        self._first = self.node.popen
        self.pid = self.node.popen.pid

    def _stop_slowly(self, request: Any) -> None:
        if request.container_id == self._slow_id:
            time.sleep(SLOW_STOP_S)

    def upgrade(self, name: str, load: UpgradeLoad) -> None:
        """Install a version and replace the daemon, while a container stops slowly."""
        with FailFastClient(str(self.node.socket)) as client:
            pod = self.node.pod(client, KINDS[1])
            self._slow_id = self.node.create(client, pod, 0)
            client.start(self._slow_id)
            stopping = threading.Thread(target=self._timed_stop, args=(client, load))
            stopping.start()
            time.sleep(0.3)
            self.versions.install(name)
            began = time.perf_counter()
            load.latencies = self.out.busy
            self.pid = replace_daemon(self.node.admin, LIMIT_S).pid
            self.out.took.append(time.perf_counter() - began)
            time.sleep(0.5)
            load.latencies = self.out.calm
            stopping.join()
            client.end_pod(pod)
        if (first := self._first) is not None:  # a child process
            self.node.wait_until(lambda: first.poll() is not None, LIMIT_S, "the end of the former daemon")
            self._first = None
        page: Any = query_admin(self.node.admin, "/interface")
        if (page["version"] == "99.0.0") != (name == "new"):
            self.out.wrong.append(f"{page['version']} runs after the change to {name}")

    def _timed_stop(self, client: CriClient, load: UpgradeLoad) -> None:
        began = time.perf_counter()
        try:
            client.stop(self._slow_id)
        except Exception as error:  # noqa: BLE001
            self.out.failed.append(f"the slow stop: {error!r}"[:300])
        if time.perf_counter() - began < SLOW_STOP_S:
            self.out.wrong.append("the slow stop was not slow")
        self.out.calls += 1

    def owners(self) -> dict[str, str]:
        """Return the CPUs of owners that stay, as the kernel has them."""
        return {
            self.node.name(record): str(self.node.cgroups.read(record.cgroup).cpus)
            for record in self.node.runtime.containers.values()
            if record.state == pb.CONTAINER_RUNNING
            and self.node.runtime.pods[record.pod_id].config.metadata.name.startswith(
                tuple(f"{kind.name}-" for kind in OWNERS)
            )
        }

    def end(self) -> None:
        """End the last daemon, which is not a child process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.node.wait_until(lambda: not Path(f"/proc/{self.pid}").exists(), LIMIT_S, "the end of the daemon")


def measure(rounds: int = ROUNDS, pods: int = PODS) -> Upgrades:
    """Upgrade and downgrade this many times with this many pods."""
    out = Upgrades(pods=pods)
    with tempfile.TemporaryDirectory(prefix="up") as directory, new_node(Path(directory)) as node:
        upgraded, load = UpgradedNode(node, out), UpgradeLoad(node, out)
        upgraded.start()
        try:
            with CriClient(str(node.socket)) as client:
                for number in range(pods):
                    kind = OWNERS[number] if number < len(OWNERS) else KINDS[number % 3]
                    client.start(node.create(client, node.pod(client, kind), 0))
            out.wrong += node.wait_until_settled()
            before = upgraded.owners()
            progress(f"{pods} pods run, {len(before)} own CPUs")
            with load.at_work():
                time.sleep(2)
                for number, name in enumerate(["new", "old"] * rounds):
                    upgraded.upgrade(name, load)
                    took = f"{number + 1} upgrades, the last in {out.took[-1]:.2f} s"
                    progress(f"{took}, {out.calls} calls, {len(out.failed)} failed")
                    out.wrong += [f"overlap: {message}" for message in node.overlaps()]
            out.wrong += node.wait_until_settled()
            if (after := upgraded.owners()) != before:
                out.wrong.append(f"owners moved: {before} -> {after}")
        except (BenchError, TopoproxyError) as error:
            out.wrong.append(f"{error}: {node.log()}")
        finally:
            upgraded.end()
        log = (node.directory / "daemon.log").read_text(errors="replace")
        out.pauses_s += [float(text) for text in re.findall(r" replaced .*seconds=([0-9.]+)", log)]
    return out


HEAD = (
    "pods",
    "upgrades",
    "calls",
    "failed",
    "wrong",
    "upgrade",
    "call p50/p99",
    "during p50/p99",
    "longest",
    "none accepted",
    "bar",
)


def rows(out: Upgrades) -> list[list[str]]:
    """Return the rows of the table."""

    def percentile_ms(each: list[float], part: float) -> str:
        return number(percentile(each, part) * 1000) if each else "-"

    return [
        [
            str(out.pods),
            str(len(out.took)),
            str(out.calls),
            str(len(out.failed)),
            str(len(out.wrong)),
            f"{number(max(out.took))} s",
            f"{percentile_ms(out.calm, 0.5)}/{percentile_ms(out.calm, 0.99)} ms",
            f"{percentile_ms(out.busy, 0.5)}/{percentile_ms(out.busy, 0.99)} ms",
            f"{number(out.longest * 1000)} ms",
            f"{number(max(out.pauses_s, default=0.0) * 1000)} ms",
            f"0, 0, {BAR_S:g} s" + (" MISSED" if out.missed else ""),
        ]
    ]


def main() -> int:
    """Measure and print; return 1 if a promise is broken."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--pods", type=int, default=PODS)
    given = options.parse_args()
    out = measure(given.rounds, given.pods)
    print(render(HEAD, rows(out)))
    for message in [*out.failed[:10], *out.wrong[:10]]:
        print(message)
    return int(out.missed)


if __name__ == "__main__":
    sys.exit(main())
