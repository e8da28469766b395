"""A control plane, a fleet, an extender, and two stock kube-schedulers, of which one calls the extender."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.control_plane import ControlPlane
from tests.cluster.extender_process import DEPLOY, SCHEDULER, ExtenderProcess, extender_config
from tests.cluster.fake_fleet import FakeFleet

CPUS = 31
"""Allocatable CPUs of each node of the fleet."""
SIZES = (2, 3, 4, 4)


class SchedulingCluster:
    """The programs, and bursts of pods.

    Attributes:
        fitting: Sizes of pods of the last burst that wait although a node would admit them.
    """

    def __init__(self, plane: ControlPlane, fleet: FakeFleet, extender: ExtenderProcess) -> None:
        self.plane = plane
        self.fleet = fleet
        self.extender = extender
        self.fitting: set[int] = set()

    def pod_sizes(self, part: float) -> list[int]:
        """Return sizes of pods that together request a part of all CPUs."""
        chance, sizes = random.Random(3), list[int]()
        while sum(sizes) < part * len(self.fleet.nodes) * CPUS:
            sizes.append(chance.choice(SIZES))
        return sizes

    def burst(self, prefix: str, sizes: list[int], scheduler: str = SCHEDULER) -> tuple[int, int]:
        """Create pods at once; returns how many run, and how many their nodes have rejected."""
        self.fleet.create_pods(prefix, sizes, scheduler)
        self.fleet.until_settled(len(sizes), quiet_s=15)  # kube-scheduler's longest back-off is 10 seconds
        found = len(self.fleet.admitted), len(self.fleet.rejected)
        assert self.fleet.double_bookings() == 0
        known = self.fleet.admitted.keys() | self.fleet.rejected.keys()
        waiting = {size for number, size in enumerate(sizes) if f"{prefix}{number}" not in known}
        self.fitting = {size for size in waiting if self.fleet.fits_somewhere(size)}
        self.fleet.clear()
        return found

    def until_all_run(self, count: int, quiet_s: float = 30.0) -> None:
        """Wait until all pods run: none was rejected, and no CPU was given twice."""
        self.fleet.until_settled(count, quiet_s=quiet_s)
        rejected = dict(self.fleet.rejected)  # a copy for the message: pytest shows it after ``clear``
        try:
            assert not rejected, rejected
            assert len(self.fleet.admitted) == count, self.fleet.figures(count)
            assert self.fleet.double_bookings() == 0
        finally:
            self.fleet.clear()


@contextmanager
def scheduling_cluster(directory: Path, nodes: int) -> Iterator[SchedulingCluster]:
    """Start all of it; both schedulers are ready for pods.

    Args:
        directory: For files of the programs.
        nodes: Of the fleet.
    """
    with ExitStack() as stack:
        plane = ControlPlane(directory)
        stack.callback(plane.close)
        plane.start_api()
        plane.install(DEPLOY / "rbac.yaml")
        fleet = FakeFleet(plane, nodes)
        fleet.start()
        stack.callback(fleet.stop)
        extender = ExtenderProcess(plane)
        stack.callback(extender.kill)
        extender.start()
        plane.start_scheduler()
        plane.start_scheduler(**extender_config(extender))
        yield SchedulingCluster(plane, fleet, extender)
