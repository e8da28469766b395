from __future__ import annotations

import copy
import json

import pytest

from proxy.model.errors import TopologyError
from proxy.model.machine import Machine
from proxy.topology.description import load_machine, machine_from_json
from proxy.topology.facts import machine_to_json
from proxy.topology.reader import read_machine
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs


def minimal() -> dict:
    return {
        "cpu_columns": ["cpu", "core", "package", "llc", "numa"],
        "cpu_rows": [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [2, 2, 0, 2, 4], [3, 2, 0, 2, 4]],
        "numa": {
            "nodes": [
                {"id": 0, "cpus": "0-1", "mem_bytes": 102400, "distance": [10, 20]},
                {"id": 4, "cpus": "2-3", "hugepages": {"2048": {"nr": 3}}, "distance": [20, 10]},
            ]
        },
    }


def test_rows_and_nodes_are_enough() -> None:
    machine = machine_from_json(minimal())
    assert (str(machine.present), str(machine.possible)) == ("0-3", "0-3")
    assert [str(c) for c in machine.cores.values()] == ["0-1", "2-3"]
    assert {name: (str(c.cpus), c.level) for name, c in machine.caches.items()} == {
        0: ("0-1", 3),
        2: ("2-3", 3),
    }
    assert [(n.id, str(n.cpus), n.mem_bytes) for n in machine.nodes] == [(0, "0-1", 102400), (4, "2-3", None)]
    assert machine.nodes[1].hugepages[2048].nr == 3


def test_without_nodes_all_is_node_0() -> None:
    data = minimal() | {"memory": {"total_bytes": 77}}
    del data["numa"]
    (node,) = machine_from_json(data).nodes
    assert (node.id, str(node.cpus), node.mem_bytes, node.distance) == (0, "0-3", 77, (10,))


def edited(path: list, value: object) -> dict:
    data = copy.deepcopy(minimal())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "the description must be a JSON object"),
        (edited(["cpu_rows"], []), "one row per online CPU"),
        (edited(["cpu_rows", 1], [1, 0]), r"cpu_rows\[1\] must be a list of 5 values"),
        (edited(["cpu_rows", 1], [0, 0, 0, 0, 0]), r"cpu_rows\[1\] .* twice"),
        (edited(["cpu_rows", 1, 1], None), r"cpu_rows\[1\] has no CPU or no core"),
        (edited(["cpu_rows", 1, 1], "0"), "integers and null only"),
        (edited(["cpu_rows", 1, 1], True), "integers and null only"),
        (edited(["cpu_rows", 1, 2], None), "a package for every CPU or for none"),
        (edited(["cpu_rows", 3, 0], 70000), "outside"),
        (edited(["cpu_rows", 0, 1], 2), "core 0 has CPUs 1: a group is named by its lowest CPU"),
        (edited(["cpu_columns", 4], "node"), "cpu_columns must be"),
        (edited(["cpu_rows", 3, 4], 1), "CPU 3 is in node 1, which numa.nodes does not have"),
        (edited(["cpu_rows", 3, 4], 0), "node 0 has CPUs 0-1, cpu_rows put 0-1,3 there"),
        (edited(["cpus"], {"online": "0-4"}), "cpus.online is '0-4'"),
        (edited(["cpus"], {"isolated": 3}), "cpus.isolated must be a list"),
        (edited(["cores"], {"0": "0-3"}), "cores and the column core"),
        (edited(["llc"], {"0": {"cpus": "0-3", "level": 3}}), "llc and the column llc"),
        (edited(["llc"], {"0": {"cpus": "0-3"}}), "level must be a number"),
        (edited(["llc"], {"a": {"cpus": "0-3", "level": 3}}), "llc a: the key is not the id of a CPU"),
        (edited(["numa", "nodes"], []), "numa.nodes must be a list"),
        (edited(["numa", "nodes", 1, "id"], -4), "id must be a number"),
        (edited(["numa", "nodes", 0, "id"], 4), "ascending order"),
        (edited(["numa", "nodes", 1, "id"], 65536), "the id of node 65536 must be less than 65536"),
        (edited(["numa", "nodes", 1, "cpus"], "3-2"), "runs backwards"),
        (edited(["numa", "nodes", 1, "distance"], [10]), "node 4 must have as many distances"),
        (edited(["numa", "nodes", 1, "distance"], "10 20"), "distance must be a list"),
        (edited(["numa", "nodes", 1, "mem_bytes"], -1), "mem_bytes must be a number of bytes"),
        (edited(["numa", "nodes", 1, "hugepages"], {"2M": {"nr": 1}}), "'2M' is not a number of kB"),
        (edited(["numa", "nodes", 1, "hugepages"], {"64": {"nr": "1"}}), "nr must be a number"),
    ],
)
def test_contradictory_descriptions_are_refused(data: object, why: str) -> None:
    with pytest.raises(TopologyError, match=f"^cannot use the machine description: .*{why}"):
        machine_from_json(data)


def test_a_file_that_describes_no_machine_is_refused_with_its_name(tmp_path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(TopologyError, match=r"cannot read the machine description .*m.json: .*No such file"):
        load_machine(path)
    path.write_text("{")
    with pytest.raises(TopologyError, match=r"m.json: not JSON: Expecting"):
        load_machine(path)
    path.write_text('{"schema": 1, "numa": {"nodes": [], "nodes": []}}')
    with pytest.raises(TopologyError, match=r"m.json: the key 'nodes' is there twice in one object"):
        load_machine(path)
    path.write_text("{}")
    with pytest.raises(
        TopologyError, match=r"^cannot read the machine description .*m.json: cpu_rows must be"
    ):
        load_machine(path)
    path.write_text(json.dumps(minimal()))
    assert load_machine(path) == machine_from_json(minimal())


def shapes() -> list[Machine]:
    return [
        regular_machine(1, 1, 1, 1),
        regular_machine(2, 2, 4, 2, 1 << 30, True),
        regular_machine(2, 1, 3, 4, 1 << 20, False),
    ]


def test_a_described_machine_has_the_requested_parts() -> None:
    _, offset, adjacent = shapes()
    assert [str(c) for c in offset.packages.values()] == ["0-7,16-23", "8-15,24-31"]
    assert [str(n.cpus) for n in offset.nodes] == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert str(offset.cores[5]) == "5,21"
    assert offset.nodes[1].distance == (12, 10, 21, 21)
    assert offset.nodes[3].mem_bytes == 1 << 30
    assert offset.groups("llc") == {n.cpus.first(): n.cpus for n in offset.nodes}
    assert [str(c) for c in adjacent.cores.values()] == ["0-3", "4-7", "8-11", "12-15", "16-19", "20-23"]
    assert [str(c) for c in adjacent.packages.values()] == ["0-11", "12-23"]
    assert [c.core_id for c in adjacent.cpus][::4] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("counts", [(0, 1, 1, 1), (1, 1, 1, 0), (8, 8, 1024, 2)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(TopologyError, match="cannot describe a machine"):
        regular_machine(*counts)


@pytest.mark.parametrize("machine", shapes(), ids=["one", "offset", "adjacent"])
def test_a_described_machine_survives_json_and_sysfs(machine: Machine, tmp_path) -> None:
    assert machine_from_json(json.loads(json.dumps(machine_to_json(machine)))) == machine
    write_sysfs(machine, tmp_path / "m")
    assert read_machine(tmp_path / "m") == machine
    assert read_machine(tmp_path / "m").extra["problems"] == []


def test_offline_and_isolated_cpus_survive_sysfs(tmp_path) -> None:
    data = minimal() | {"cpus": {"present": "0-5", "possible": "0-7", "isolated": "3"}}
    machine = machine_from_json(data)
    write_sysfs(machine, tmp_path)
    result = read_machine(tmp_path)
    assert result == machine
    assert machine_to_json(result)["cpus"] == {
        "online": "0-3",
        "online_from": "file",
        "present": "0-5",
        "possible": "0-7",
        "isolated": "3",
        "nohz_full": None,
        "offline": "4-5",
        "absent": "6-7",
    }


def test_a_node_of_unknown_memory_is_not_without_memory() -> None:
    numa = machine_to_json(machine_from_json(minimal()))["numa"]
    assert (numa["cpu_only"], numa["memory_only"]) == ([], [])


def test_offline_cpus_are_written_in_the_kernels_format(tmp_path) -> None:
    write_sysfs(machine_from_json(minimal() | {"cpus": {"present": "0-4"}}), tmp_path)
    directory = tmp_path / "sys/devices/system/cpu"
    assert [(directory / f"cpu{cpu}/online").read_text() for cpu in (3, 4)] == ["1\n", "0\n"]
    assert [(directory / f"cpu{cpu}/topology").is_dir() for cpu in (3, 4)] == [True, False]
