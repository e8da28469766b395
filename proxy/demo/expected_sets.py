"""Computes what the kernel's files must contain, from the rules alone and without the proxy's code.

LSE and LSR (Koordinator's latency-sensitive exclusive and reserved) and Guaranteed whole-CPU containers own
their CPUs. The shared pool is every CPU without an owner; the BE (best effort) pool is every CPU that neither
an LSE nor a Guaranteed container owns.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.demo.client import StartedPod
from proxy.demo.snapshot import DemoError, Snapshot
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine


class Expectation:
    """Tracks the expected owners of CPUs, and compares snapshots with them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._running: dict[str, StartedPod] = {}
        self.owned: dict[str, CpuSet] = {}

    def record_started(self, pod: StartedPod, own: CpuSet | None = None) -> None:
        """Record that a container runs, with the CPUs that it owns if any."""
        self._running[pod.spec.name] = pod
        if own is not None:
            self.owned[pod.spec.name] = own

    def record_ended(self, name: str) -> None:
        """Record that a container is gone."""
        self._running.pop(name, None)
        self.owned.pop(name, None)

    @property
    def shared_pool(self) -> CpuSet:
        """The shared pool."""
        return self._without_cpus_of(self.owned)

    @property
    def be_pool(self) -> CpuSet:
        """The BE pool."""
        return self._without_cpus_of([name for name in self.owned if self._running[name].spec.qos != "LSR"])

    def _without_cpus_of(self, names: Collection[str]) -> CpuSet:
        left = self._machine.online
        for name, cpus in self.owned.items():
            if name in names:
                left -= cpus
        return left

    def check(self, snapshot: Snapshot) -> None:
        """Compare the expected sets with the files.

        Raises:
            DemoError: The files differ from the expected sets, or break an invariant.
        """
        snapshot.check()
        if snapshot.names != tuple(self._running):
            raise DemoError(f"cgroups are there for {snapshot.names}, expected {tuple(self._running)}")
        for container in snapshot.containers:
            cpus, mems = self._expected_cpuset(container.name, container.uses_be_pool)
            if container.cpus != cpus:
                raise DemoError(f"the cgroup of {container.name} has CPUs {container.cpus}, expected {cpus}")
            if container.mems != mems:
                raise DemoError(
                    f"the cgroup of {container.name} has memory nodes {container.mems}, expected {mems}"
                )

    def _expected_cpuset(self, name: str, uses_be_pool: bool) -> tuple[CpuSet, Mask]:
        machine = self._machine
        if name in self.owned:
            near = machine.nodes_of(self.owned[name]) & machine.memory_nodes
            return self.owned[name], near or machine.memory_nodes
        return (self.be_pool if uses_be_pool else self.shared_pool), machine.memory_nodes
