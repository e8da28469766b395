from __future__ import annotations

import os

import pytest

from proxy.model.errors import TopologyError
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.topology.facts import machine_to_json
from proxy.topology.reader import read_machine


def cpu(number: int, **files: str) -> dict[str, str]:
    return {f"CPU/cpu{number}/topology/{name}": text for name, text in files.items()}


def two_by_two() -> dict[str, str]:
    """Two cores of two threads in one package, siblings side by side."""
    files = {"CPU/online": "0-3\n", "CPU/present": "0-3\n", "CPU/possible": "0-7\n"}
    for i in range(4):
        files |= cpu(
            i, core_cpus="3" if i < 2 else "c", package_cpus="f", core_id=str(i // 2), physical_package_id="0"
        )
    return files


def groups(machine: Machine, level: str) -> dict[int, str]:
    return {name: str(cpus) for name, cpus in machine.groups(level).items()}


def test_groups_and_cpu_lists(sysfs) -> None:
    machine = read_machine(sysfs(two_by_two()))
    assert groups(machine, "core") == {0: "0-1", 2: "2-3"}
    assert groups(machine, "package") == {0: "0-3"}
    assert [c.core_id for c in machine.cpus] == [0, 0, 1, 1]
    assert (str(machine.present), str(machine.possible), str(machine.isolated)) == ("0-3", "0-7", "")
    assert [c.die for c in machine.cpus] == [None] * 4


def test_offline_cpu_without_topology_directory_leaves_a_one_thread_core(sysfs) -> None:
    files = {name: text for name, text in two_by_two().items() if "/cpu1/" not in name}
    files |= {"CPU/online": "0,2-3", "CPU/cpu1/online": "0", "NODE/node0/cpumap": "f", "NODE/node0/cpu1": ""}
    machine = read_machine(sysfs(files))
    assert groups(machine, "core") == {0: "0", 2: "2-3"}
    assert str(machine.nodes[0].cpus) == "0,2-3"
    assert machine_to_json(machine)["cpus"]["offline"] == "1"


def test_without_an_online_file_the_directories_are_used(sysfs) -> None:
    files = {name: text for name, text in two_by_two().items() if name not in ("CPU/online", "CPU/present")}
    files = {name: text for name, text in files.items() if "/cpu3/topology" not in name}
    files |= {"CPU/cpu1/online": "0", "CPU/cpu2/online": "1", "CPU/cpu3/online": "1"}
    machine = read_machine(sysfs(files))
    assert str(machine.online) == "0,2"
    assert str(machine.present) == "0-3"
    facts = machine_to_json(machine)["cpus"]
    assert (facts["online_from"], facts["present"], facts["offline"]) == ("cpu directories", None, "1,3")


def test_garbage_in_the_online_file_falls_back_to_directories(sysfs) -> None:
    machine = read_machine(sysfs(two_by_two() | {"CPU/online": "all of them"}))
    assert str(machine.online) == "0-3"
    assert "online: 'all of them' is not a list of ids" in machine.extra["problems"][0]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"CPU/online": "\n", "CPU/cpu0/topology/core_id": "0"}, "names no CPU"),
        ({"CPU/possible": "0-3"}, "neither a file 'online' nor a directory"),
        ({"CPU/online": "x"}, "no CPU is known to be online .*'x' is not a list"),
        ({"CPU/online": "0-99999"}, "is not a list of ids"),
        ({"NODE/node0/cpumap": "f"}, "there is no directory devices/system/cpu"),
    ],
)
def test_a_machine_without_usable_cpus_is_refused_with_the_reason(
    sysfs, files: dict[str, str], why: str
) -> None:
    with pytest.raises(TopologyError, match=f"^cannot read the machine from .*{why}"):
        read_machine(sysfs(files))


def test_missing_root_is_refused(tmp_path) -> None:
    with pytest.raises(TopologyError, match="there is no directory"):
        read_machine(tmp_path / "nowhere")


def test_the_directory_above_sys_is_used_and_proc_is_beside_it(sysfs) -> None:
    root = sysfs(two_by_two())
    (root.parent / "proc").mkdir()
    (root.parent / "proc" / "meminfo").write_text("MemTotal:  2048 kB\n")
    above, direct = read_machine(root.parent), read_machine(root)
    assert above == direct
    assert direct.nodes[0].mem_bytes == 2048 * 1024
    other = root.parent / "other"
    other.mkdir()
    assert read_machine(root, other).nodes[0].mem_bytes is None


def test_old_names_and_lists_without_masks(sysfs) -> None:
    files = {"CPU/online": "0-3"}
    for i in range(4):
        files |= cpu(i, thread_siblings_list=f"{i % 2},{i % 2 + 2}", core_siblings="f")
    machine = read_machine(sysfs(files))
    assert groups(machine, "core") == {0: "0,2", 1: "1,3"}
    assert groups(machine, "package") == {0: "0-3"}


def test_new_names_win_and_the_mask_wins_over_the_list(sysfs) -> None:
    files = {"CPU/online": "0-1"}
    for i in range(2):
        files |= cpu(i, core_cpus="3", core_cpus_list=str(i), thread_siblings=str(1 << i))
    assert groups(read_machine(sysfs(files)), "core") == {0: "0-1"}


def test_package_id_minus_one_takes_the_sets(sysfs) -> None:
    files = {"CPU/online": "0-3"}
    for i in range(4):
        files |= cpu(i, core_siblings="3" if i < 2 else "c", physical_package_id="-1")
    machine = read_machine(sysfs(files))
    assert groups(machine, "package") == {0: "0-1", 2: "2-3"}
    assert machine.cpus[0].package_id == -1


def test_without_sets_the_package_id_groups_minus_one_included(sysfs) -> None:
    files = {"CPU/online": "0-3"}
    for i in range(4):
        files |= cpu(i, physical_package_id="-1" if i % 2 else "8442")
    assert groups(read_machine(sysfs(files)), "package") == {0: "0,2", 1: "1,3"}


def test_missing_facts_give_one_package_and_null_in_json(sysfs) -> None:
    machine = read_machine(sysfs({"CPU/online": "1-2"}))
    assert groups(machine, "package") == {1: "1-2"}
    assert groups(machine, "core") == {1: "1", 2: "2"}
    facts = machine_to_json(machine)
    assert facts["missing"] == ["thread siblings", "package siblings"]
    assert facts["packages"] == {}
    assert [row[2] for row in facts["cpu_rows"]] == [None, None]


@pytest.mark.parametrize(("die_id", "dies"), [("0", {0: "0-1"}), ("-1", {}), (None, {})])
def test_die_counts_with_a_valid_id_only(sysfs, die_id: str | None, dies: dict[int, str]) -> None:
    files = {"CPU/online": "0-1"}
    for i in range(2):
        files |= cpu(i, die_cpus="3", **({} if die_id is None else {"die_id": die_id}))
    assert groups(read_machine(sysfs(files)), "die") == dies


@pytest.mark.parametrize(("cluster_id", "clusters"), [("5", {0: "0-1"}), ("65535", {}), ("-1", {})])
def test_cluster_counts_with_a_valid_id_only(sysfs, cluster_id: str, clusters: dict[int, str]) -> None:
    files = {"CPU/online": "0-1"}
    for i in range(2):
        files |= cpu(i, cluster_cpus="3", cluster_id=cluster_id)
    assert groups(read_machine(sysfs(files)), "cluster") == clusters


def test_a_set_without_its_own_cpu_is_ignored(sysfs) -> None:
    files = {"CPU/online": "0-1", **cpu(0, core_cpus="2", thread_siblings="1"), **cpu(1, core_cpus="2")}
    assert groups(read_machine(sysfs(files)), "core") == {0: "0", 1: "1"}


def test_garbage_in_a_level_is_reported_and_counts_as_missing(sysfs) -> None:
    machine = read_machine(sysfs(two_by_two() | cpu(0, core_cpus="??") | cpu(1, core_cpus="??")))
    assert groups(machine, "core") == {0: "0", 1: "1", 2: "2-3"}
    assert [p.endswith("'??' is not a bit mask") for p in machine.extra["problems"]] == [True, True]


def test_isolated_and_nohz_full(sysfs) -> None:
    machine = read_machine(sysfs(two_by_two() | {"CPU/isolated": "2-3,9\n", "CPU/nohz_full": "  (null)\n"}))
    assert str(machine.isolated) == "2-3"
    facts = machine_to_json(machine)["cpus"]
    assert (facts["isolated"], facts["nohz_full"]) == ("2-3,9", "")


def test_a_cpu_that_goes_offline_during_the_read_is_detected(sysfs, monkeypatch) -> None:
    root = sysfs(two_by_two())
    online, real, count = root / "devices/system/cpu/online", os.read, 0

    def unplug(fd: int, size: int) -> bytes:
        nonlocal count
        count += 1
        if count == 5:
            online.write_text("0,2-3")
        return real(fd, size)

    monkeypatch.setattr(os, "read", unplug)
    machine = read_machine(root)
    assert machine.online == CpuSet([0, 2, 3])
    assert groups(machine, "core") == {0: "0", 2: "2-3"}


def test_a_machine_that_keeps_changing_is_read_nevertheless(sysfs, monkeypatch) -> None:
    root = sysfs(two_by_two())
    online, real, texts = root / "devices/system/cpu/online", os.read, ["0-2", "0-3"]

    def flap(fd: int, size: int) -> bytes:
        texts.reverse()
        online.write_text(texts[0])
        return real(fd, size)

    monkeypatch.setattr(os, "read", flap)
    assert len(read_machine(root).cpus) in (3, 4)


def test_kinds_of_cores_of_a_hybrid_cpu_are_read(sysfs) -> None:
    files = two_by_two() | {"devices/cpu_core/cpus": "0-1", "devices/cpu_atom/cpus": "2-3"}
    files |= {f"CPU/cpu{i}/cpu_capacity": "1024" if i < 2 else "446" for i in range(4)}
    files |= {f"CPU/cpu{i}/cpufreq/cpuinfo_max_freq": "3000000" for i in range(4)}
    assert read_machine(sysfs(files)).extra["kinds"] == {
        "device": {"cpu_core": "0-1", "cpu_atom": "2-3"},
        "cpu_capacity": {"1024": "0-1", "446": "2-3"},
    }


def test_hybrid_devices_have_kinds_only_if_there_are_two(sysfs) -> None:
    assert read_machine(sysfs(two_by_two() | {"devices/cpu_core/cpus": "0-3"})).extra["kinds"] is None


def test_sets_agree_when_they_differ_by_offline_cpus_only(sysfs) -> None:
    files = {"CPU/online": "0-1", **cpu(0, core_cpus="7"), **cpu(1, core_cpus="3")}
    assert groups(read_machine(sysfs(files)), "core") == {0: "0-1"}


def test_a_cpu_without_package_among_others_is_alone(sysfs) -> None:
    files = {"CPU/online": "0-2", **cpu(0, package_cpus="3"), **cpu(1, package_cpus="3")}
    assert groups(read_machine(sysfs(files)), "package") == {0: "0-1", 2: "2"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/kernel/arch": "x86_64\n", "cpuinfo": "CPU implementer\t: 0x41\n"}, "x86_64"),
        ({"cpuinfo": "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n"}, "aarch64"),
        ({"cpuinfo": "processor\t: 0\nvendor_id\t: AuthenticAMD\n"}, ""),
        ({"cpuinfo": "x" * 5000 + "CPU implementer"}, ""),
        ({}, ""),
    ],
)
def test_the_architecture_comes_from_the_kernel_or_its_cpus(sysfs, files, expected: str) -> None:
    root = sysfs(two_by_two())
    for name, text in files.items():
        path = root.parent / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_machine(root.parent).architecture == expected
