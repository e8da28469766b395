from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.model.errors import InputError
from proxy.model.idset import Mask
from proxy.simulate.machines import (
    NamedMachine,
    check_plugins,
    copies,
    described_machines,
    load_plugins,
    sysfs_machine,
)
from proxy.topology.facts import machine_to_json
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

MACHINE = regular_machine(2, 1, 4, 2)
FACTS = json.loads(json.dumps(machine_to_json(MACHINE)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "big.json").write_text(json.dumps(FACTS))
    return tmp_path / "big.json"


def refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    facts = copy.deepcopy(FACTS)
    change(facts)
    (tmp_path / "bad.json").write_text(json.dumps(facts))
    with pytest.raises(InputError) as error:
        described_machines([str(tmp_path / "bad.json")])
    assert "\n" not in str(error.value)
    assert str(tmp_path / "bad.json") in str(error.value)
    return str(error.value)


def test_a_machine_has_the_name_of_its_file_or_the_given_one(file: Path) -> None:
    named = described_machines([str(file), f"small={file}"])
    assert [one.name for one in named] == ["big", "small"]
    assert named[0].machine == MACHINE


def test_a_file_name_may_hold_an_equals_sign(file: Path) -> None:
    odd = file.rename(file.with_name("a=b.json"))
    assert [one.name for one in described_machines([str(odd)])] == ["a=b"]


def test_a_path_may_hold_an_equals_sign_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"description [^ ]*rack=1/none\.json: No such file"):
        described_machines([f"{tmp_path}/rack=1/none.json"])


def test_copies_are_numbered_and_names_unique() -> None:
    one, two = NamedMachine("a", MACHINE), NamedMachine("b", MACHINE)
    assert [named.name for named in copies([one, two], 2)] == ["a-1", "a-2", "b-1", "b-2"]
    assert [named.name for named in copies([one], 1)] == ["a"]
    with pytest.raises(InputError, match="two machines are named a \\(use NAME=FILE"):
        copies([one, one], 1)
    with pytest.raises(InputError, match="cannot simulate 200000 machines"):
        copies([one, two], 100_000)


def test_a_machine_of_a_tree(tmp_path: Path) -> None:
    write_sysfs(MACHINE, tmp_path)
    assert sysfs_machine(tmp_path, None).machine.online == MACHINE.online
    with pytest.raises(InputError, match="cannot read the machine"):
        sysfs_machine(tmp_path / "none", None)


def test_nodes_that_overlap(tmp_path: Path) -> None:
    def overlap(facts: dict[str, Any]) -> None:
        nodes = facts["numa"]["nodes"]
        nodes[1]["cpus"] = nodes[0]["cpus"]

    def known_overlap(facts: dict[str, Any]) -> None:
        overlap(facts)
        facts["numa"]["overlapping"] = True

    assert "node 1 has CPUs 0-3,8-11, cpu_rows put 4-7,12-15 there" in refused(tmp_path, overlap)
    assert "NUMA nodes overlap: CPUs 0-3,8-11 are in node 0 and in node 1" in refused(tmp_path, known_overlap)


def test_a_cpu_in_no_node(tmp_path: Path) -> None:
    def homeless(facts: dict[str, Any]) -> None:
        facts["cpu_rows"][3][6] = None
        facts["numa"]["nodes"][0]["cpus"] = "0-2,8-11"

    assert refused(tmp_path, homeless).endswith("CPU 3 in no NUMA node")


def test_more_huge_pages_than_memory(tmp_path: Path) -> None:
    def pages(facts: dict[str, Any]) -> None:
        facts["numa"]["nodes"][1]["hugepages"] = {"1048576": {"nr": 65}}

    assert "node 1: huge pages of 69793218560 bytes, but memory of 68719476736" in refused(tmp_path, pages)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["numa"]["nodes"][1].update(mem_bytes=-5),
        lambda facts: facts["numa"]["nodes"][1].update(mem_bytes=1e30),
        lambda facts: facts["numa"]["nodes"][1].update(id=-1),
        lambda facts: facts["numa"]["nodes"][1].update(hugepages={"2048": {"nr": -1}}),
        lambda facts: facts["numa"]["nodes"][1].update(distance=[10, -1]),
        lambda facts: facts["numa"]["nodes"].append(facts["numa"]["nodes"][0]),
        lambda facts: facts["cpu_rows"][0].__setitem__(0, -1),
        lambda facts: facts["cpu_rows"][0].__setitem__(0, 10**9),
        lambda facts: facts["cpu_rows"].append(facts["cpu_rows"][0]),
        lambda facts: facts["cpu_rows"].clear(),
    ],
)
def test_amounts_that_cannot_be(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    refused(tmp_path, change)


@pytest.mark.parametrize("text", ["", "{nope", "[]", "[" * 100_000, "\0", '{"cpu_rows": 1}'])
def test_files_that_describe_no_machine(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(InputError, match=r"^cannot read the machine description [^\n]*$"):
        described_machines([str(tmp_path / "m.json")])


@pytest.mark.parametrize("word", ["=x.json", "a=", "nothing.json", "a=nothing.json", "."])
def test_arguments_that_name_no_file(tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^cannot [^\n]*$"):
        described_machines([word])


def plugins(tmp_path: Path, text: str) -> Any:
    (tmp_path / "d.yaml").write_text(text)
    return load_plugins(tmp_path / "d.yaml")


def test_devices_are_read_with_their_nodes_and_health(tmp_path: Path) -> None:
    read = plugins(
        tmp_path,
        "a.b/gpu:\n- {id: g0, numa: [0, 1]}\n- {id: 7, numa: 1, healthy: false}\n"
        "- id: x\n- {id: y, numa: []}\nc/d: []",
    )
    gpus = read["a.b/gpu"]
    assert {name: (device.nodes, device.healthy) for name, device in gpus.items()} == {
        "g0": (Mask([0, 1]), True),
        "7": (Mask([1]), False),
        "x": (None, True),
        "y": (Mask(), True),
    }
    assert read["c/d"] == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "it must be one mapping"),
        ("a/b: []\n---\na/b: []", "it must be one mapping"),
        ("cpu: []", "'cpu' is not a name of a device resource"),
        ("memory: []", "'memory' is not a name"),
        ("a/b: 4", "a/b must be a list of devices"),
        ("a/b: [4]", "a device of a/b is written as {id: gpu0"),
        ("a/b:\n- {id: x}\n- {id: y, where: 1}", "line 3: a device of a/b is written as"),
        ("a/b:\n- {numa: [0]}", "line 2: a device of a/b has no id"),
        ("a/b: [{id: ''}]", "has no id"),
        ("a/b: [{id: x, numa: [-1]}]", "a/b x: numa must be a list"),
        ("a/b: [{id: x, numa: [99999999]}]", "a/b x: numa must be a list"),
        ("a/b: [{id: x, numa: [zero]}]", "a/b x: numa must be a list"),
        ("a/b: [{id: x, healthy: maybe}]", "a/b x: healthy must be true or false"),
        ("a/b: [{id: x}, {id: x}]", "a/b has two devices of one id"),
        ("a/b: [", "not YAML"),
    ],
)
def test_a_file_with_an_invalid_device_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(InputError) as error:
        plugins(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_devices_are_near_to_nodes_that_there_are(tmp_path: Path) -> None:
    read = plugins(tmp_path, "a/b: [{id: x, numa: [1]}, {id: y, numa: [2]}]")
    with pytest.raises(InputError, match=r"a/b y is near NUMA node 2, and m has nodes 0-1"):
        check_plugins(read, [NamedMachine("m", MACHINE)], tmp_path / "d.yaml")
