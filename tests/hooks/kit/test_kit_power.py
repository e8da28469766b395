"""Idle latency and frequency of CPUs while they have an owner."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from proxy.hooks.kit.crio import CrioSettings
from proxy.hooks.kit.power import Power
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet

QUICK = CrioSettings(latency="n/a", governor="performance")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for cpu in range(4):
        directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        for name, text in (
            ("power/pm_qos_resume_latency_us", "0"),
            ("cpufreq/scaling_governor", "powersave"),
            ("cpufreq/scaling_available_governors", "performance powersave"),
        ):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(f"{text}\n")
    return tmp_path / "sys"


def values(sysfs: Path) -> list[tuple[str, str]]:
    cpus = [sysfs / f"devices/system/cpu/cpu{cpu}" for cpu in range(4)]
    names = ("power/pm_qos_resume_latency_us", "cpufreq/scaling_governor")
    return [tuple((cpu / name).read_text().strip() for name in names) for cpu in cpus]  # type: ignore[misc]


SLOW, FAST = ("0", "powersave"), ("n/a", "performance")


def test_owners_set_the_latency_and_their_end_restores_it(sysfs: Path, tmp_path: Path) -> None:
    power = Power(sysfs, tmp_path / "state")
    power.apply([(CpuSet((1, 2)), QUICK), (CpuSet((3,)), CrioSettings(latency="7"))])
    assert values(sysfs) == [SLOW, FAST, FAST, ("7", "powersave")]
    power.apply([(CpuSet((1,)), QUICK)])
    assert values(sysfs) == [SLOW, FAST, SLOW, SLOW]
    Power(sysfs, tmp_path / "state").apply(())
    assert values(sysfs) == [SLOW] * 4


def test_the_governor_of_a_frequency_domain_stays_until_its_last_owner_ends(
    sysfs: Path, tmp_path: Path
) -> None:
    cpus = sysfs / "devices/system/cpu"
    (cpus / "cpufreq").mkdir()
    (cpus / "cpu2/cpufreq").rename(cpus / "cpufreq/policy2")
    shutil.rmtree(cpus / "cpu3/cpufreq")
    for cpu in (2, 3):
        (cpus / f"cpu{cpu}/cpufreq").symlink_to("../cpufreq/policy2")
    governor = cpus / "cpufreq/policy2/scaling_governor"
    owners = [(CpuSet((cpu,)), CrioSettings(governor="performance")) for cpu in (2, 3)]
    for first, other in (owners, owners[::-1]):
        power = Power(sysfs, tmp_path / "state")
        power.apply([first])
        power.apply([first, other])
        power.apply([other])
        assert governor.read_text().strip() == "performance"
        Power(sysfs, tmp_path / "state").apply(())
        assert governor.read_text().strip() == "powersave"


def test_a_governor_that_an_earlier_version_stored_by_its_link_is_restored_once(
    sysfs: Path, tmp_path: Path
) -> None:
    cpus = sysfs / "devices/system/cpu"
    (cpus / "cpufreq").mkdir()
    (cpus / "cpu2/cpufreq").rename(cpus / "cpufreq/policy2")
    (cpus / "cpu2/cpufreq").symlink_to("../cpufreq/policy2")
    governor = cpus / "cpufreq/policy2/scaling_governor"
    governor.write_text("performance\n")
    stored = {str(cpus / "cpu2/cpufreq/scaling_governor"): ["powersave", "performance"]}
    (tmp_path / "state").write_text(json.dumps(stored))
    power = Power(sysfs, tmp_path / "state")
    power.apply([(CpuSet((2,)), CrioSettings(governor="performance"))])
    assert governor.read_text().strip() == "performance"
    power.apply(())
    assert governor.read_text().strip() == "powersave"


def test_missing_files_are_reported_and_other_settings_are_applied(sysfs: Path, tmp_path: Path) -> None:
    (sysfs / "devices/system/cpu/cpu1/power/pm_qos_resume_latency_us").unlink()
    (sysfs / "devices/system/cpu/cpu2/cpufreq/scaling_available_governors").unlink()
    power = Power(sysfs, tmp_path / "state")
    with pytest.raises(HookError, match=r"there is no .*cpu1"):
        power.apply([(CpuSet((1,)), CrioSettings(latency="5")), (CpuSet((0,)), QUICK)])
    assert first_values(sysfs) == FAST
    with pytest.raises(HookError, match="governor performance: cpu2 has none"):
        power.apply([(CpuSet((2,)), QUICK)])
    with pytest.raises(HookError, match="governor fast: cpu3 has performance powersave"):
        power.apply([(CpuSet((3,)), CrioSettings(governor="fast"))])


def first_values(sysfs: Path) -> tuple[str, str]:
    cpu = sysfs / "devices/system/cpu/cpu0"
    return (
        (cpu / "power/pm_qos_resume_latency_us").read_text().strip(),
        (cpu / "cpufreq/scaling_governor").read_text().strip(),
    )


def test_a_read_only_tree_names_the_drop_in(sysfs: Path, tmp_path: Path) -> None:
    def refuse(path: Path, value: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(HookError, match=r"30-irq-affinity\.conf"):
        Power(sysfs, tmp_path / "state", refuse).apply([(CpuSet((1,)), QUICK)])


def test_settings_are_not_applied_if_the_state_cannot_be_saved(sysfs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HookError, match="cannot remember"):
        Power(sysfs, tmp_path / "file/state").apply([(CpuSet((1,)), QUICK)])
    assert values(sysfs) == [SLOW] * 4
