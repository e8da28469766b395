"""The CPUs that the scenario of the demonstration uses."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.demo.snapshot import DemoError
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine

_BIG = 4
"""From this number of cores on, all owners are on the node at the same time."""


@dataclass(frozen=True, slots=True)
class ScenarioCpus:
    """Which CPUs the story is about.

    Attributes:
        lse: CPUs that the LSE pod's annotation names.
        lsr: The same for the LSR pod.
        failed: The same for the pod whose create fails.
        count: Whole CPUs that the Guaranteed container requests.
        big: True where all of them fit at the same time.
        absent: CPUs that this machine does not have.
    """

    lse: CpuSet
    lsr: CpuSet
    failed: CpuSet
    count: int
    big: bool
    absent: CpuSet

    @classmethod
    def of(cls, machine: Machine) -> ScenarioCpus:
        """Choose them for a machine.

        Raises:
            DemoError: It has one CPU only.
        """
        if len(machine.online) < 2:
            raise DemoError("the demonstration needs at least two CPUs")
        last = max(machine.possible)
        absent = CpuSet((last + 1, last + 2))
        cores = list(machine.cores.values())
        if len(cores) < _BIG:
            one = CpuSet((max(machine.online),))
            return cls(one, one, one, 1, False, absent)
        return cls(cores[1], cores[2], cores[-1], 2 * len(cores[0]), True, absent)
