from __future__ import annotations

import pytest

from proxy.model.errors import TopologyError
from proxy.model.machine import HugePages
from proxy.topology.facts import machine_to_json
from proxy.topology.reader import read_machine

BASE = {"CPU/online": "0-3"}


def node(number: int, **files: str) -> dict[str, str]:
    return {f"NODE/node{number}/{name}": text for name, text in files.items()}


def test_no_node_directory_is_node_0_with_everything(sysfs) -> None:
    root = sysfs(BASE | {"kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "7"})
    (root.parent / "proc").mkdir()
    (root.parent / "proc/meminfo").write_text("MemFree: 1 kB\nMemTotal:       1000 kB\n")
    machine = read_machine(root)
    (only,) = machine.nodes
    assert (only.id, str(only.cpus), only.mem_bytes, only.distance) == (0, "0-3", 1024000, (10,))
    assert only.hugepages == {2048: HugePages(7)}
    assert {c.numa for c in machine.cpus} == {0}
    facts = machine_to_json(machine)
    assert (facts["numa"]["source"], facts["counts"]["numa_nodes"]) == ("none", 0)
    assert {row[6] for row in facts["cpu_rows"]} == {None}


def test_huge_pages_of_old_kernels_come_from_meminfo(sysfs) -> None:
    root = sysfs(BASE)
    (root.parent / "proc").mkdir()
    (root.parent / "proc/meminfo").write_text(
        "HugePages_Total:  4\nHugePages_Free:  3\nHugepagesize:  4096 kB\n"
    )
    memory = machine_to_json(read_machine(root))["memory"]
    assert memory == {
        "total_bytes": None,
        "hugepages": {"4096": {"nr": 4, "free": 3}},
        "hugepages_source": "proc/meminfo",
    }


def test_sparse_memory_only_and_memoryless_nodes(sysfs) -> None:
    files = BASE | node(0, cpumap="3", meminfo="Node 0 MemTotal: 4 kB", distance="10 20 30 40")
    files |= node(5, cpumap="c", meminfo="Node 5 MemTotal: 0 kB", distance="20 10 31 41")
    files |= node(9, cpulist="\n", meminfo="Node 9 MemTotal: 8 kB", distance="30 31 10 42")
    files |= node(70, cpumap="0", meminfo="Node 70 MemTotal: 0 kB", distance="40 41 43 10")
    machine = read_machine(sysfs(files))
    numa = machine_to_json(machine)["numa"]
    assert [n.mem_bytes for n in machine.nodes] == [4096, 0, 8192, 0]
    assert numa["distance_ids"] == [0, 5, 9, 70]
    assert (numa["memory_only"], numa["cpu_only"], numa["empty"]) == ([9], [5], [70])
    assert (numa["sparse"], numa["distance_symmetric"]) == (True, False)
    assert str(machine.memory_nodes) == "0,9"
    assert [c.numa for c in machine.cpus] == [0, 0, 5, 5]


def test_the_map_wins_over_a_stale_list_and_offline_cpus_are_left_out(sysfs) -> None:
    machine = read_machine(sysfs(BASE | node(0, cpumap="ff", cpulist="0-1")))
    assert str(machine.nodes[0].cpus) == "0-3"


def test_links_are_used_if_map_and_list_are_missing(sysfs) -> None:
    machine = read_machine(sysfs(BASE | node(0, cpu0="", cpu1="") | node(1, cpu2="", cpu3="", cpufreq="")))
    assert [str(n.cpus) for n in machine.nodes] == ["0-1", "2-3"]


def test_cpus_of_a_node_that_cannot_be_understood_are_an_error(sysfs) -> None:
    with pytest.raises(TopologyError, match="cannot read the CPUs of NUMA node 1: 'zzz'"):
        read_machine(sysfs(BASE | node(0, cpumap="3") | node(1, cpumap="zzz")))
    assert len(read_machine(sysfs(node(1, cpulist="2-3"))).nodes[1].cpus) == 2


def test_an_overlapping_cpu_belongs_to_the_only_linked_or_the_smaller_node(sysfs) -> None:
    files = BASE | node(0, cpumap="f", cpu0="", cpu1="") | node(1, cpumap="e", cpu1="", cpu2="", cpu3="")
    machine = read_machine(sysfs(files))
    assert [c.numa for c in machine.cpus] == [0, 1, 1, 1]
    assert [str(n.cpus) for n in machine.nodes] == ["0", "1-3"]
    numa = machine_to_json(machine)["numa"]
    assert numa["overlapping"] is True
    assert [n["cpus"] for n in numa["nodes"]] == ["0-3", "1-3"]
    assert "overlap" in machine.extra["problems"][0]


def test_a_link_has_precedence_over_the_size_of_the_node(sysfs) -> None:
    machine = read_machine(sysfs(BASE | node(0, cpumap="f", cpu3="") | node(1, cpumap="c")))
    assert [c.numa for c in machine.cpus] == [0, 0, 1, 0]


def test_cpu_in_no_node(sysfs) -> None:
    machine = read_machine(sysfs(BASE | node(0, cpumap="7")))
    assert [c.numa for c in machine.cpus] == [0, 0, 0, None]


@pytest.mark.parametrize("row", ["10", "10 20 30", "10 far", "10 -1", ""])
def test_distances_that_do_not_fit_are_ignored(sysfs, row: str) -> None:
    machine = read_machine(
        sysfs(BASE | node(0, cpumap="3", distance=row) | node(1, cpumap="c", distance="20 10"))
    )
    assert [n.distance for n in machine.nodes] == [(), (20, 10)]
    assert "distance_symmetric" not in machine_to_json(machine)["numa"]


def test_huge_pages_of_a_node(sysfs) -> None:
    files = BASE | node(0, cpumap="f")
    for name, text in (("nr", "5"), ("free", "4"), ("surplus", "1")):
        files[f"NODE/node0/hugepages/hugepages-2048kB/{name}_hugepages"] = text
    files["NODE/node0/hugepages/hugepages-1048576kB/nr_hugepages"] = "2"
    files["NODE/node0/hugepages/hugepages-64kB/nr_hugepages"] = "many"
    files["NODE/node0/hugepages/other/nr_hugepages"] = "9"
    machine = read_machine(sysfs(files))
    assert machine.nodes[0].hugepages == {2048: HugePages(5, 4, 1), 1048576: HugePages(2)}


def test_nodes_with_less_memory_than_the_machine_are_reported(sysfs) -> None:
    root = sysfs(BASE | node(0, cpumap="f", meminfo="Node 0 MemTotal: 102400 kB"))
    (root.parent / "proc").mkdir()
    (root.parent / "proc/meminfo").write_text("MemTotal: 409600 kB\n")
    assert read_machine(root).extra["problems"] == [
        "the nodes hold 100 MiB together, /proc/meminfo says 400 MiB"
    ]
