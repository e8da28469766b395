"""Idle states and frequency governors of CPUs while a container owns them.

The kernel's files (``/sys/devices/system/cpu/cpuN``): ``power/pm_qos_resume_latency_us`` holds the longest
time to wake up, 0 for no limit and ``n/a`` for no latency at all. ``cpufreq/scaling_governor`` holds one of
the governors that ``scaling_available_governors`` lists. The directory ``cpufreq`` of CPUs in one frequency
domain is a link to the same policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from proxy.hooks.kit.crio import CrioSettings
from proxy.hooks.kit.irqs import READ_ONLY
from proxy.hooks.kit.kernel_settings import KernelSettings, Put, put
from proxy.model.errnos import UNWRITABLE
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet


class Power:
    """Settings of a machine's CPUs that are applied for owners and restored afterwards.

    Args:
        sysfs: The directory where the kernel describes the hardware: ``/sys``.
        state: The file that stores the own values.
        put: Writes a file of the kernel.
    """

    def __init__(self, sysfs: Path, state: Path, put: Put = put) -> None:
        self._cpus = sysfs / "devices/system/cpu"
        self._settings = KernelSettings(state, put)

    def apply(self, owners: Iterable[tuple[CpuSet, CrioSettings]]) -> None:
        """Apply the settings of owners to their CPUs, and restore those of all other CPUs.

        Raises:
            HookError: Some files could not be written; all others have been.
        """
        wanted_values: dict[Path, str] = {}
        failures: list[str] = []
        for cpus, settings in owners:
            for cpu in cpus:
                self._add_wanted_values(self._cpus / f"cpu{cpu}", settings, wanted_values, failures)
        try:
            applied = self._settings.apply(wanted_values)
        except OSError as error:
            raise HookError(f"cannot remember how CPUs sleep: {error}") from error
        for file, refusal in applied.refused.items():
            more = f"; {READ_ONLY}" if refusal.errno in UNWRITABLE else ""
            failures.append(f"cannot write {file}: {refusal.strerror}{more}")
        if failures:
            raise HookError(failures[0])

    hold = apply  # the former name, for one release

    @staticmethod
    def _add_wanted_values(
        directory: Path, settings: CrioSettings, wanted_values: dict[Path, str], failures: list[str]
    ) -> None:
        latency = directory / "power/pm_qos_resume_latency_us"
        if settings.latency:
            if latency.exists():
                wanted_values[latency] = settings.latency
            else:
                failures.append(f"cannot limit the idle states of CPUs: there is no {latency}")
        if settings.governor:
            try:
                offered = (directory / "cpufreq/scaling_available_governors").read_text().split()
            except (OSError, ValueError):
                offered = []
            if settings.governor in offered:
                file = directory / "cpufreq/scaling_governor"
                wanted_values[file.resolve()] = settings.governor  # CPUs of one domain have one file
            else:
                has = " ".join(offered) or "none"
                failures.append(f"cannot set the governor {settings.governor}: {directory.name} has {has}")
