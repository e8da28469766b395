"""From observe to enforce on 200 running containers of a real containerd, and back.

A thread reads the kernel's files all the time. No container may have an empty cpuset; while the owner has its
CPU exclusively, no other container may have it; no more pods may change per step than configured; nothing may
change in a pause, even if the daemon is killed in it; and no container may change twice.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cri import cgroup_of, online
from daemon import PROGRAM, DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PODS, EACH = 50, 4
"""Pods, and containers of each; the owner has one, and the first other pods have one more: 200 in total."""
STEP, PERIOD_S = 2, 0.5
OWNED = CpuSet([max(online())])
REST = online() - OWNED
LIMIT_S = 240.0


def settings(mode: str, **enforce: object) -> dict[str, object]:
    return {
        "mode": mode,
        "enforce": {"podsPerStep": STEP, "stepPeriod": f"{round(PERIOD_S * 1000)}ms", **enforce},
        "settle": {"perSecond": 50},
    }


def command(daemon: DaemonProcess, *args: str) -> Any:
    """Run a topoproxy command for a daemon; returns its JSON output."""
    admin = f"unix://{daemon.directory / 'admin.sock'}"
    done = subprocess.run(
        [PROGRAM, *args, "--json", "--admin", admin], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def reconfigure(daemon: DaemonProcess, changed: dict[str, object]) -> None:
    """Change the configuration and reload it."""
    file = daemon.directory / "config.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    assert command(daemon, "reload")["reload"]["result"] == "applied"


def pods_of(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = command(daemon, "enforce", "status")["pods"]
    return found


def is_done(daemon: DaemonProcess, what: str) -> bool:
    """Return whether all pods are enforced, or observed, and no step is in progress."""
    found = pods_of(daemon)
    return found[what] == PODS and not found["inStep"]


@dataclass
class CpusetSampler:
    """Reads all cpusets repeatedly.

    Attributes:
        files: Container to its cpuset file.
        pods: Container to its pod.
        owner: The container that owns CPUs.
        changes: Time, container and new CPUs of each change.
        wrong: Violations.
        readings: How many readings there were.
        longest: Seconds of the longest reading.
        delay: Seconds by which a change was recorded late, at most: since the start of the reading before.
    """

    files: dict[str, Path]
    pods: dict[str, str]
    owner: str
    changes: list[tuple[float, str, CpuSet]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    readings: int = 0
    longest: float = 0.0
    delay: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _last: dict[str, CpuSet] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def read(self, container: str) -> CpuSet:
        return CpuSet.parse(self.files[container].read_text().strip())

    def sample(self) -> None:
        """Read all cpusets, the owner's first and last, because reading many files takes time."""
        began = time.monotonic()
        first, now = self.read(self.owner), {}
        for container in self.files:
            cpus = now[container] = self.read(container)
            if not cpus:
                self.wrong.append(f"{container[:12]} has no CPUs")
        if first == self.read(self.owner) == OWNED:
            there = [i[:12] for i, cpus in now.items() if i != self.owner and cpus & OWNED]
            if there:
                self.wrong.append(f"{len(there)} containers are on the owner's CPUs: {there[:3]}")
        at = time.monotonic()
        self.changes += [(at, i, cpus) for i, cpus in now.items() if self._last.get(i) != cpus]
        self._last = now
        self.readings += 1
        self.longest = max(self.longest, at - began)
        self.delay = max(self.delay, at - self._began)
        self._began = began

    def run(self) -> None:
        while not self._over.is_set():
            self.sample()
            time.sleep(0.005)

    def stop(self) -> None:
        self._over.set()

    def since(self, began: float) -> list[tuple[float, str, CpuSet]]:
        """Return the changes since a time."""
        return [change for change in self.changes if change[0] >= began]

    def has(self) -> dict[str, CpuSet]:
        return dict(self._last)


def check_rate(sampler: CpusetSampler, began: float, ended: float) -> float:
    """Check that the pods changed in bounded steps between two times; returns the pods per second."""
    first: dict[str, float] = {}
    for at, container, _ in sampler.since(began):
        if at <= ended:
            first.setdefault(sampler.pods[container], at)
    times = sorted(first.values())
    for i, early in enumerate(times):
        for j in range(i, len(times)):
            # The interval may begin and end within a step, and ``early`` may have been recorded late.
            most = STEP * ((times[j] - early + sampler.delay) / PERIOD_S + 2)
            assert j - i + 1 <= most, f"{j - i + 1} pods in {times[j] - early:.2f} s"
    return (len(times) - STEP) / max(times[-1] - times[0], PERIOD_S)


def check_single_changes(sampler: CpusetSampler, began: float, ended: float) -> None:
    """Check that no container has changed more than once between two times."""
    seen = [container for at, container, _ in sampler.since(began) if at <= ended]
    again = {container[:12] for container in seen if seen.count(container) > 1}
    assert not again, f"containers changed more than once: {again}"


@pytest.fixture
def loaded_daemon(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> Iterator[tuple[DaemonProcess, CpusetSampler]]:
    """A daemon that observes 200 running containers, one of which is to own a CPU."""
    daemon = start_daemon(**settings("observe"))
    with daemon.client() as client:
        node, pods = ModeledNode(runtime, daemon, client), dict[str, str]()
        sleep = {"command": ["sleep", "7200"]}
        owner = node.run(node.pod("lse", OWNED, name="owner"), **sleep)
        pods[owner] = "owner"
        for at in range(PODS - 1):
            pod = node.pod("ls", name=f"shares-{at}")
            for each in range(EACH + (at < EACH - 1)):
                pods[node.run(pod, f"c{each}", **sleep)] = f"shares-{at}"
        groups = {container: cgroup_of(container) for container in pods}
        files = {i: path / "cpuset.cpus" for i, path in groups.items() if path is not None}
        sampler = CpusetSampler(files, pods, owner)
        sampler.sample()
        thread = threading.Thread(target=sampler.run)
        thread.start()
        try:
            yield daemon, sampler
        finally:
            sampler.stop()
            thread.join()
    runtime.clear()


def test_200_containers_change_from_observe_to_enforce_and_back(
    loaded_daemon: tuple[DaemonProcess, CpusetSampler], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon, sampler = loaded_daemon
    figures: dict[str, object] = {"containers": len(sampler.files), "pods": len(set(sampler.pods.values()))}
    assert len(sampler.files) == 200
    assert set(sampler.has().values()) == {online()}, "in mode observe nothing is changed"
    began = time.monotonic()
    reconfigure(daemon, settings("enforce"))
    # -- pause, and a kill of the daemon in the pause
    wait_for("a third of the pods", lambda: pods_of(daemon)["enforced"] >= PODS // 3, limit=LIMIT_S)
    command(daemon, "enforce", "pause")
    wait_for("the step to end", lambda: not pods_of(daemon)["inStep"], limit=30)
    paused, there = time.monotonic(), pods_of(daemon)
    has = sampler.has()
    time.sleep(6 * PERIOD_S)
    daemon.kill9()
    daemon.start()
    wait_for("the daemon to be ready", lambda: daemon.status()["ready"], limit=60)
    time.sleep(6 * PERIOD_S)
    assert sampler.since(paused + 0.1) == [], "nothing changes in a pause"
    assert sampler.has() == has
    assert pods_of(daemon) == there
    figures["paused at"] = f"{there['enforced']} of {PODS} pods"
    # -- resume, and a kill of the daemon meanwhile
    resumed = time.monotonic()
    command(daemon, "enforce", "resume")
    wait_for("two thirds of the pods", lambda: pods_of(daemon)["enforced"] >= 2 * PODS // 3, limit=LIMIT_S)
    daemon.kill9()
    daemon.start()
    wait_for(
        "all pods",
        lambda: (
            daemon.status()["ready"] and pods_of(daemon)["enforced"] == PODS and not pods_of(daemon)["inStep"]
        ),
        limit=LIMIT_S,
    )
    wait_for("the owner to have its CPU", lambda: sampler.has()[sampler.owner] == OWNED, limit=30)
    ended = time.monotonic()
    assert {i: cpus for i, cpus in sampler.has().items() if i != sampler.owner} == {
        i: REST for i in sampler.files if i != sampler.owner
    }
    check_single_changes(sampler, began, ended)
    last = max(at for at, container, _ in sampler.since(began) if container != sampler.owner)
    own = next(at for at, container, _ in sampler.since(began) if container == sampler.owner)
    assert own >= last, "the owner was pinned before other containers had left its CPUs"
    figures["enforced in"] = f"{paused - began:.1f} s + {ended - resumed:.1f} s"
    figures["rate"] = (
        f"{check_rate(sampler, began, paused):.1f} and {check_rate(sampler, resumed, ended):.1f} pods/s"
    )
    # -- back to observe
    back = time.monotonic()
    reconfigure(daemon, settings("observe"))
    wait_for(
        "a third of the pods to be observed", lambda: pods_of(daemon)["observed"] >= PODS // 3, limit=LIMIT_S
    )
    daemon.kill9()
    daemon.start()
    wait_for(
        "all pods to be observed",
        lambda: (
            daemon.status()["ready"] and pods_of(daemon)["observed"] == PODS and not pods_of(daemon)["inStep"]
        ),
        limit=LIMIT_S,
    )
    wait_for("the last write", lambda: set(sampler.has().values()) == {online()}, limit=30)
    returned = time.monotonic()
    check_single_changes(sampler, back, returned)
    figures["restored in"] = f"{returned - back:.1f} s"
    figures["rate back"] = f"{check_rate(sampler, back, returned):.1f} pods/s"
    figures["readings"] = f"{sampler.readings}, at most {sampler.longest * 1000:.0f} ms each"
    assert sampler.wrong == []
    for container in [*list(sampler.files)[:3], sampler.owner]:  # an update does not undo it
        with daemon.runtime.client() as direct:
            direct.update(container, cpu_shares=512)
        assert sampler.read(container) == online()
    figures["overlaps, empty sets"] = "0, 0"
    with capsys.disabled():
        print(
            "\nobserve -> enforce -> observe:", ", ".join(f"{key}: {value}" for key, value in figures.items())
        )
