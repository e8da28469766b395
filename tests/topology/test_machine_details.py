from __future__ import annotations

from proxy.model.idset import CpuSet
from proxy.model.machine import Cache
from proxy.topology.reader import read_machine

BASE = {"CPU/online": "0-3"}


def cache(
    cpu: int, index: int, level: int, shared: str, kind: str = "Unified", **more: str
) -> dict[str, str]:
    files = {"level": str(level), "type": kind, "shared_cpu_map": shared, **more}
    return {f"CPU/cpu{cpu}/cache/index{index}/{name}": text for name, text in files.items()}


def test_highest_level_that_holds_data(sysfs) -> None:
    files = dict(BASE)
    for i in range(4):
        files |= cache(i, 0, 1, str(1 << i), "Data")
        files |= cache(i, 1, 4, "f", "Instruction")
        files |= cache(i, 2, 3, "3" if i < 2 else "c", size="512K", id=str(7 + i // 2))
        files |= cache(i, 10, 2, str(1 << i))
    machine = read_machine(sysfs(files))
    assert dict(machine.caches) == {
        0: Cache(CpuSet([0, 1]), 3, 7, "512K"),
        2: Cache(CpuSet([2, 3]), 3, 8, "512K"),
    }
    assert [c.llc for c in machine.cpus] == [0, 0, 2, 2]


def test_an_empty_map_means_the_core_and_a_map_without_the_cpu_is_ignored(sysfs) -> None:
    files = BASE | {f"CPU/cpu{i}/topology/core_cpus": "3" if i < 2 else "c" for i in range(4)}
    files |= cache(0, 3, 3, "0") | cache(1, 3, 3, "00000000")
    files |= cache(2, 3, 3, "3") | cache(2, 2, 2, "4") | cache(3, 3, 3, "8")
    machine = read_machine(sysfs(files))
    assert {name: (str(c.cpus), c.level) for name, c in machine.caches.items()} == {
        0: ("0-1", 3),
        2: ("2", 2),
        3: ("3", 3),
    }


def test_cpus_without_caches_and_offline_sharers(sysfs) -> None:
    machine = read_machine(sysfs(BASE | cache(0, 0, 3, "f0f") | cache(1, 0, 3, "f0f") | cache(2, 0, 3, "x")))
    assert [c.llc for c in machine.cpus] == [0, 0, None, None]
    assert str(machine.caches[0].cpus) == "0-1"


def test_the_list_is_used_if_there_is_no_map(sysfs) -> None:
    files = dict(BASE)
    for i in (0, 1):
        files |= cache(i, 0, 2, "", shared_cpu_list="0-1")
    machine = read_machine(sysfs(files))
    assert machine.caches == {0: Cache(CpuSet([0, 1]), 2)}


def test_maps_agree_when_they_differ_by_offline_cpus_only(sysfs) -> None:
    machine = read_machine(sysfs({"CPU/online": "0-1"} | cache(0, 0, 3, "7") | cache(1, 0, 3, "3")))
    assert machine.groups("llc") == {0: CpuSet([0, 1])}
