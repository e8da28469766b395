"""A node under kubelet's reconcile traffic, while pods that own CPUs start and end.

kubelet's CPU manager periodically sends UpdateContainerResources for every container, with the CPUs that it
assumes for the container: the whole machine, or the CPUs that it pinned. Meanwhile a second thread reads the
cpuset file of each container and the affinity of its tasks as fast as it can. From the time at which the
StartContainer of an owner is sent until its stop is requested, no task of another container may run on its
CPU; and a cpuset may change only when its pool changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from cri import affinities, cgroup_of, code, cpuset_of, online
from daemon import KINDS, ONE_CPU, DaemonProcess, ModeledNode, PodKind
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
ROUND_S = 0.1
"""The period of the stand-in for kubelet's reconcile."""
HELD_ROUNDS = 4
"""The number of reconcile rounds for which an owner runs."""
SHARERS = ("ls", "burstable", "part", "system", "be", "besteffort")
BE_KINDS = ("be", "besteffort")
OWNERS = (("lse", True), ("lsr", True), ("lse", False), ("lsr", False), ("whole", False))
"""Kind, and whether an annotation names its CPU; otherwise the daemon chooses it."""


@dataclass
class CpusetSamples:
    """The samples of one container: begin and end of a reading, its cpuset, affinities of its tasks."""

    began: float
    samples: list[tuple[float, float, CpuSet, frozenset[CpuSet]]] = field(default_factory=list)

    def distinct_cpusets(self) -> list[str]:
        """Return the sequence of different cpusets."""
        found: list[str] = []
        for _, _, cpus, _ in self.samples:
            if not found or found[-1] != str(cpus):
                found.append(str(cpus))
        return found


class CpusetWatch(threading.Thread):
    """A thread that reads the cpusets of the added containers as fast as it can.

    Attributes:
        seen: The samples by container.
        fault: An error of this thread.
    """

    def __init__(self) -> None:
        super().__init__(name="watch")
        self.seen: dict[str, CpusetSamples] = {}
        self.fault: BaseException | None = None
        self._groups: dict[str, Path] = {}
        self._over = threading.Event()

    def add(self, container: str) -> None:
        directory = cgroup_of(container)
        assert directory is not None
        self.seen[container] = CpusetSamples(time.monotonic())
        self._groups[container] = directory

    def remove(self, container: str) -> None:
        self._groups.pop(container, None)

    def close(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        try:
            while not self._over.is_set():
                for container, directory in list(self._groups.items()):
                    # The cgroup of a removed container may vanish during the reading.
                    with suppress(FileNotFoundError, ProcessLookupError, OSError):
                        self._read(self.seen[container], directory)
                time.sleep(0)
        except BaseException as error:
            self.fault = error

    def _read(self, seen: CpusetSamples, directory: Path) -> None:
        before = time.monotonic()
        tasks = affinities(directory)
        cpus = CpuSet.parse((directory / "cpuset.cpus").read_text())
        seen.samples.append((before, time.monotonic(), cpus, tasks))


class Reconciler(threading.Thread):
    """A thread that periodically sends kubelet's updates for all containers of a node.

    Attributes:
        assumed: The CPUs that kubelet assumes for each container.
        sent: The number of successful updates.
        fault: An error of this thread or of an update.
    """

    def __init__(self, daemon: DaemonProcess) -> None:
        super().__init__(name="reconciler")
        self.assumed: dict[str, str] = {}
        self.sent = 0
        self.rounds = 0
        self.fault: BaseException | None = None
        self._client = daemon.client()
        self._over = threading.Event()

    def close(self) -> None:
        self._over.set()
        self.join()
        self._client.close()

    def run(self) -> None:
        try:
            while not self._over.is_set():
                begun = time.monotonic()
                for container, cpus in list(self.assumed.items()):
                    self._update(container, cpus)
                self.rounds += 1
                self._over.wait(max(0.0, begun + ROUND_S - time.monotonic()))
        except BaseException as error:
            self.fault = error

    def _update(self, container: str, cpus: str) -> None:
        try:
            self._client.update(container, cpuset_cpus=cpus)
        except grpc.RpcError as error:
            # As kubelet's updates, it may be for a container that is already stopped or not started yet.
            if container in self.assumed:
                raise AssertionError(f"{container[:12]}: {code(error)}: {error}") from error
        else:
            self.sent += 1


@contextmanager
def watched(node: ModeledNode) -> Iterator[tuple[CpusetWatch, Reconciler]]:
    """Watch a node under kubelet's traffic; errors of the threads are raised at the end."""
    watch, kubelet = CpusetWatch(), Reconciler(node.daemon)
    watch.start()
    kubelet.start()
    try:
        yield watch, kubelet
    finally:
        kubelet.close()
        watch.close()
    for fault in (kubelet.fault, watch.fault):
        if fault is not None:
            raise fault


@dataclass(frozen=True)
class OwnerPeriod:
    """The period in which an owner runs.

    Attributes:
        container: Its id.
        kind: Its class.
        cpus: The CPUs that it owns.
        start_sent, start_answered, stop_sent: Times of the monotonic clock, in seconds.
    """

    container: str
    kind: PodKind
    cpus: CpuSet
    start_sent: float
    start_answered: float
    stop_sent: float


class OwnersScenario:
    """A node with sharers of all classes, and owners that come and go."""

    def __init__(self, node: ModeledNode, watch: CpusetWatch, kubelet: Reconciler) -> None:
        self.node, self.watch, self.kubelet = node, watch, kubelet
        self.periods: list[OwnerPeriod] = []
        self.sharers: dict[str, str] = {}
        """Container to kind, for the containers that run from the beginning."""
        self.late: list[str] = []
        self.sandboxes: dict[str, str] = {}
        """Sandbox to kind, for the watched ones: their process must not run on owned CPUs either."""

    def add_sandbox(self, pod: str, kind: str) -> None:
        self.sandboxes[pod] = kind
        self.watch.add(pod)

    def run_sharer(self, kind: str, assumed: str = str(ALL)) -> str:
        container = self.node.spawn(kind)
        self.watch.add(container)
        self.kubelet.assumed[container] = assumed
        if not self.periods:
            self.add_sandbox(self.node.containers[container].pod, kind)
        return container

    def run_owner(self, kind: str, *, named: bool, pinned: str = "") -> None:
        """Run an owner and a further sharer, and remove both."""
        node, what = self.node, KINDS[kind]
        pod = node.pod(kind, LAST if named else None, total=None if named else ONE_CPU)
        self.add_sandbox(pod, "ls")
        owner = node.create(pod, **({"cpuset_cpus": pinned} if pinned else {}))
        sent = time.monotonic()
        node.cri.start(owner)
        answered = time.monotonic()
        cpus = node.containers[owner].own = cpuset_of(owner).cpus
        node.containers[owner].running = True
        assert len(cpus) == 1
        self.watch.add(owner)
        self.kubelet.assumed[owner] = pinned or str(cpus)
        late = self.run_sharer("ls")
        self.late.append(late)
        goal = self.kubelet.rounds + HELD_ROUNDS
        wait_for("kubelet's rounds", lambda: self.kubelet.fault or self.kubelet.rounds >= goal)
        node.check()
        for container in (late, owner):
            del self.kubelet.assumed[container]
        stop = time.monotonic()
        self.periods.append(OwnerPeriod(owner, what, cpus, sent, answered, stop))
        for container in (late, owner):
            node.remove(container)
            self.watch.remove(container)
        self.watch.remove(pod)
        node.cri.stop_pod(pod)
        node.wait_until_settled()

    def intrusions(self) -> list[tuple[float, str, OwnerPeriod]]:
        """Return the samples in which a task or cpuset of a sharer has an owner's CPU while the owner runs.

        Returns:
            Seconds since the owner's start was sent, the sharer and its cpuset, and the owner's period.
        """
        found = []
        for period in self.periods:
            for container, seen in self.watch.seen.items():
                kind = self.sharers.get(container) or self.sandboxes.get(container)
                if container == period.container or (kind is None and container not in self.late):
                    continue
                if kind in BE_KINDS and not period.kind.excludes_be:
                    continue
                for before, after, cpus, tasks in seen.samples:
                    inside = period.start_sent <= before and after <= period.stop_sent
                    if inside and any(not one.isdisjoint(period.cpus) for one in (cpus, *tasks)):
                        found.append((after - period.start_sent, f"{kind or 'late'}: {cpus}", period))
        return found

    def closest(self) -> float:
        """Return the shortest time between a sample with an owner's CPU and the owner's start, in seconds."""
        found = []
        for period in self.periods:
            for container in self.sharers:
                if self.sharers[container] in BE_KINDS and not period.kind.excludes_be:
                    continue
                found += [
                    period.start_sent - after
                    for _, after, cpus, _ in self.watch.seen[container].samples
                    if after <= period.start_sent and not cpus.isdisjoint(period.cpus)
                ]
        return min(found)


@pytest.fixture
def system_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        KINDS, "system", PodKind("SYSTEM", "/kubepods/burstable", KINDS["ls"].resources, "shared")
    )


def check_changes(scenario: OwnersScenario) -> None:
    """Check that each cpuset changed only because an owner of CPUs of its pool started or ended."""
    for container, kind in scenario.sharers.items():
        expected = [str(ALL)]
        for period in scenario.periods:
            if kind not in BE_KINDS or period.kind.excludes_be:
                # An update that was relayed before the owner ended carries the earlier cpuset. The runtime
                # may execute it after the pool has grown; it is corrected when the call has been answered.
                expected += [str(ALL - period.cpus), str(ALL)] * 2
        distinct_cpusets = scenario.watch.seen[container].distinct_cpusets()
        rest = iter(expected)
        # On a slow machine the watch may miss a change, but there must not be any other one.
        assert all(turn in rest for turn in distinct_cpusets), (kind, distinct_cpusets, expected)
        assert len(set(distinct_cpusets)) == len(set(expected)), (kind, distinct_cpusets)
    for period in scenario.periods:
        assert scenario.watch.seen[period.container].distinct_cpusets() == [str(period.cpus)], period.kind
    for container in scenario.late:
        assert len(scenario.watch.seen[container].distinct_cpusets()) == 1


@pytest.mark.usefixtures("system_kind")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("be", ["narrow", "erase"])
def test_cpusets_stay_correct_under_reconcile_traffic(
    runtime: PrivateRuntime,
    start_daemon: Callable[..., DaemonProcess],
    capsys: pytest.CaptureFixture[str],
    be: str,
) -> None:
    daemon = start_daemon(reconcilePeriod="1s", koordinator={"beCpuset": be})
    with daemon.client() as client:
        node = ModeledNode(runtime, daemon, client)
        with watched(node) as (watch, kubelet):
            scenario = OwnersScenario(node, watch, kubelet)
            scenario.sharers = {scenario.run_sharer(kind): kind for kind in SHARERS}
            wait_for("traffic", lambda: kubelet.rounds >= 2 or kubelet.fault)
            for kind, named in (*OWNERS, *OWNERS[:2]):
                scenario.run_owner(kind, named=named)
            wait_for("traffic", lambda: kubelet.rounds >= 20 or kubelet.fault, limit=60)
        node.check()
        counters = node.daemon.status()["counters"]
    runtime.clear()
    intrusions = scenario.intrusions()
    window = max((late for late, _, _ in intrusions), default=0.0)
    samples = sum(len(seen.samples) for seen in watch.seen.values())
    with capsys.disabled():
        print(
            f"\n  shared containers on a CPU whose owner is started: {window * 1000:.0f} ms ("
            f"{samples} samples, {len(scenario.periods)} owners, {kubelet.sent} updates from kubelet;"
            f" the last one had left {scenario.closest() * 1000:.0f} ms before the start was sent)"
        )
    assert intrusions == []
    check_changes(scenario)
    assert kubelet.sent >= 20 * len(SHARERS)
    assert counters.get("drift_repaired", 0) == 0, "only the daemon wrote cpusets"


@pytest.mark.usefixtures("system_kind")
@pytest.mark.timeout(240)
def test_cpus_pinned_by_kubelet_are_kept_beside_annotated_ones(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> None:
    """kubelet's CPU manager pins a container: its cpuset is adopted, but not those for other containers."""
    daemon = start_daemon(cpuManagerPolicy="none")
    with daemon.client() as client:
        node = ModeledNode(runtime, daemon, client)
        with watched(node) as (watch, kubelet):
            scenario = OwnersScenario(node, watch, kubelet)
            scenario.sharers = {scenario.run_sharer(kind, str(REST)): kind for kind in ("ls", "be")}
            scenario.run_owner("whole", named=False, pinned=str(LAST))
            scenario.run_owner("lse", named=True, pinned=str(ALL))
            scenario.run_owner("lsr", named=True, pinned=str(REST))
        node.check()
    runtime.clear()
    assert [str(period.cpus) for period in scenario.periods] == [str(LAST)] * 3
    assert scenario.intrusions() == []
    check_changes(scenario)
