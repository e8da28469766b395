"""Pods that our extender and schedulers of other projects bind: the same pods on the same fleet, in turns.

    make bench-scheduler CASES=peers

Only the scheduler whose turn it is runs. When its burst begins, it has bound a first pod, and the nodes
publish the one object that it reads, as the cluster agent does. All have the same limit of requests a second.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.model.options import Scope
from tests.cluster.api_client import Json
from tests.cluster.control_plane import ControlPlane, control_plane_skip_reason
from tests.cluster.extender_process import DEPLOY, SCHEDULER, ExtenderProcess, extender_config
from tests.cluster.fake_fleet import FakeFleet
from tests.cluster.scheduler_programs import (
    CLUSTER,
    KUBE_ARGUMENTS,
    ReaderScheduler,
    SchedulerProgram,
    koordinator,
    kube_scheduler_config,
    pod_groups,
    reader_skip_reason,
    topology_match,
    volcano,
)
from tests.cluster.scheduling_cluster import CPUS, SIZES
from tests.cluster.upstream_crds import crd

NODES = 50
PODS = (400, 460)
LIMIT = 1000
"""Requests a second of each scheduler: kube-scheduler's default of 50 would hide what a scheduler can do."""
CLIENT = {"qps": LIMIT, "burst": LIMIT}
QUIET_S = 40.0
"""kube-scheduler retries waiting pods every 30 seconds at the latest, as it is configured here."""
MOST_S = 300.0
RETRY = "--pod-max-in-unschedulable-pods-duration=5s"
NAMESPACE = "fleet"

Pods = Callable[[str, int], Json]
"""Makes a pod with a name and a request for CPUs."""
Turn = Callable[[ControlPlane], AbstractContextManager[tuple[Pods, list[int]]]]
"""Runs a scheduler; yields the function that makes its pods, and the processes whose time is counted."""


@dataclass(frozen=True)
class ComparedScheduler:
    """One row of the table.

    Attributes:
        title: What is printed.
        form: The object that it reads.
        program: The scheduler of another project; empty for the stock kube-scheduler.
        crds: The CRDs that it needs besides our own, by the names of upstream_crds.
        turn: Runs it.
    """

    title: str
    form: str
    program: str
    crds: str
    turn: Turn

    def skip_reason(self) -> str:
        """Return why it cannot be run here; empty if it can."""
        if (
            reason := reader_skip_reason(self.program)
            if self.program
            else control_plane_skip_reason("kube-scheduler")
        ):
            return reason
        try:
            if self.crds:
                crd(self.crds)
        except pytest.skip.Exception as error:
            return str(error)
        return ""


def kube_scheduler(plane: ControlPlane, name: str, profile: Json, **more: object) -> ReaderScheduler:
    config = {**kube_scheduler_config(plane, name, profile, CLIENT), **more}
    program = SchedulerProgram(plane, "kube-scheduler", config, *KUBE_ARGUMENTS, RETRY, directory=CLUSTER)
    return ReaderScheduler(name, program)


@contextmanager
def run(plane: ControlPlane, reader: ReaderScheduler) -> Iterator[tuple[Pods, list[int]]]:
    with reader.program.running() as process:
        yield lambda name, cpus: reader.pod(plane, NAMESPACE, name, cpus), [process]


def run_stock(plane: ControlPlane) -> AbstractContextManager[tuple[Pods, list[int]]]:
    return run(plane, kube_scheduler(plane, "default-scheduler", {}))


@contextmanager
def run_extender(plane: ControlPlane) -> Iterator[tuple[Pods, list[int]]]:
    extender = ExtenderProcess(plane)
    extender.start()
    try:
        config = extender_config(extender)
        del config["profiles"]
        with run(plane, kube_scheduler(plane, SCHEDULER, {}, **config)) as (pods, processes):
            assert extender.process is not None
            yield pods, [*processes, extender.process.pid]
    finally:
        extender.stop()


SCHEDULERS = (
    ComparedScheduler("kube-scheduler", "numatopology", "", "", run_stock),
    ComparedScheduler("kube-scheduler with our extender", "numatopology", "", "", run_extender),
    ComparedScheduler(
        "Volcano 1.10.0, numa-aware", "numatopology", "volcano-scheduler", "all of volcano",
        lambda plane: run(plane, volcano(plane, f"--kube-api-qps={LIMIT}", f"--kube-api-burst={LIMIT}")),
    ),
    ComparedScheduler(
        "Koordinator 1.8.0, NodeNUMAResource", "koordinator", "koord-scheduler", "all of koordinator",
        lambda plane: run(plane, koordinator(plane, RETRY, client=CLIENT)),
    ),
    ComparedScheduler(
        "NodeResourceTopologyMatch 0.34.7", "nfd", "nrt-scheduler", "all of koordinator",
        lambda plane: run(plane, topology_match(plane, RETRY, resync_s=0, client=CLIENT)),
    ),
    ComparedScheduler(
        "NodeResourceTopologyMatch with its cache", "nfd", "nrt-scheduler", "all of koordinator",
        lambda plane: run(plane, topology_match(plane, RETRY, resync_s=5, client=CLIENT)),
    ),
)  # fmt: skip


def install_crds(plane: ControlPlane, peers: list[ComparedScheduler]) -> None:
    """Install the kinds of other projects; that of Numatopology is ours, which Volcano reads as well."""
    for name in {peer.crds for peer in peers if peer.crds}:
        for manifest in sorted(crd(name).glob("*.yaml")):
            if "numatopologies" not in manifest.name:
                plane.install(manifest)


def processor_s(processes: list[int]) -> float:
    """Return the seconds of the processor that processes have used."""
    found = 0.0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def clear(fleet: FakeFleet, *, groups: bool) -> None:
    fleet.clear()
    if groups:
        fleet.plane.delete(pod_groups(NAMESPACE))


def row(fleet: FakeFleet, peer: ComparedScheduler, sizes: list[int], number: int) -> str:
    """Bind pods by one scheduler; return its row."""
    fleet.publish_as(peer.form)
    groups = peer.program == "volcano-scheduler"
    with peer.turn(fleet.plane) as (pods, processes):
        fleet.create(lambda _: pods(f"first-{number}", 2), 1)
        fleet.until_settled(1, quiet_s=90.0)
        assert fleet.admitted, f"{peer.title} has bound nothing"
        clear(fleet, groups=groups)
        time.sleep(2 * fleet.delay_s)
        began, used = time.monotonic(), processor_s(processes)
        fleet.create(lambda at: pods(f"p{number}-{at}", sizes[at]), len(sizes))
        fleet.until_settled(len(sizes) * 9 // 10, QUIET_S, MOST_S)
        each = (processor_s(processes) - used) / max(1, fleet.decided_count)
        fleet.until_settled(len(sizes), QUIET_S, MOST_S)
        known = fleet.admitted.keys() | fleet.rejected.keys()
        waiting = [size for at, size in enumerate(sizes) if f"p{number}-{at}" not in known]
        possible = len(fleet.admitted) + fleet.avoidable
        cells = (
            f"{len(known)}",
            f"{len(fleet.admitted)}",
            f"{fleet.rate(began):.0f}",
            f"{each * 1e3:.1f} ms",
            f"{fleet.aligned()} of {possible}",
            f"{len(fleet.rejected)}",
            f"{fleet.double_bookings()}",
            f"{fleet.room_for(waiting)} of {len(waiting)}",
        )
        clear(fleet, groups=groups)
    return f"| {peer.title} | {' | '.join(cells)} |"


COLUMNS = (
    "scheduler",
    "bound",
    "run",
    "pods a second",
    "processor time a pod",
    "on one NUMA node, where one had room",
    "rejected by the node",
    "CPUs given twice",
    "wait though a node has room",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


@contextmanager
def fleet_of(directory: Path, peers: list[ComparedScheduler]) -> Iterator[FakeFleet]:
    plane = ControlPlane(directory)
    try:
        plane.start_api()
        plane.install(DEPLOY / "rbac.yaml")
        install_crds(plane, peers)
        fleet = FakeFleet(plane, NODES, scope=Scope.POD)
        fleet.start()
        yield fleet
        fleet.stop()
    finally:
        plane.close()


def print_peers() -> None:
    """Print a table for each number of pods."""
    reasons = {peer.title: peer.skip_reason() for peer in SCHEDULERS}
    there = [peer for peer in SCHEDULERS if not reasons[peer.title]]
    if not there:
        print(f"peers: {reasons[SCHEDULERS[0].title]}")
        return
    number = 0
    with tempfile.TemporaryDirectory() as directory, fleet_of(Path(directory), there) as fleet:
        for count in PODS:
            chance = random.Random(3)
            sizes = [chance.choice(SIZES) for _ in range(count)]
            print(f"\n{NODES} nodes, {count} pods: {sum(sizes) / NODES / CPUS:.0%} of the CPUs\n\n{HEAD}")
            for peer in SCHEDULERS:
                if reasons[peer.title]:
                    print(f"| {peer.title} | skipped: {reasons[peer.title]} |")
                    continue
                number += 1
                print(row(fleet, peer, sizes, number), flush=True)
        print(f"load {os.getloadavg()[0]:.1f}")
