"""State files of kubelet: checksums, versions, contents, and invalid files."""

from __future__ import annotations

import json

import pytest

from proxy.allocation.memory.state import ResourceTable
from proxy.backends.kubelet.checkpoints import (
    CheckpointError,
    fnv1a,
    held_cpus,
    read_cpu_checkpoint,
    read_memory_checkpoint,
)
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from tests.oracles.memory_manager_file import held_memory

CPU_TEXT = (
    "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0,6-7"
    " Entries:(map[string]map[string]string)map[a:map[x:1] b:map[y:2-3 z:4-5]] Checksum:(checksum.Checksum)0}"
)
CPU_FILE = {
    "policyName": "static",
    "defaultCpuSet": "0,6-7",
    "entries": {"b": {"z": "4-5", "y": "2-3"}, "a": {"x": "1"}},
}
NODE = {
    "numberOfAssignments": 2,
    "memoryMap": {"memory": {"total": 9, "systemReserved": 1, "allocatable": 8, "reserved": 3, "free": 5}},
    "cells": [0, 10],
}
MEMORY_FILE = {
    "policyName": "Static",
    "machineState": {"10": NODE, "2": {"memoryMap": None}},
    "entries": {"p": {"c": [{"numaAffinity": [0, 10], "type": "memory", "size": 3}]}},
}
MEMORY_TEXT = (
    "(*state.MemoryManagerCheckpoint){PolicyName:(string)Static MachineState:(state.NUMANodeMap)map["
    "2:<*>{NumberOfAssignments:(int)0 MemoryMap:(map[v1.ResourceName]*state.MemoryTable)<nil>"
    " Cells:([]int)<nil>} "
    "10:<*>{NumberOfAssignments:(int)2 MemoryMap:(map[v1.ResourceName]*state.MemoryTable)map[memory:<*>{"
    "TotalMemSize:(uint64)9 SystemReserved:(uint64)1 Allocatable:(uint64)8 Reserved:(uint64)3"
    " Free:(uint64)5}] Cells:([]int)[0 10]}]"
    " Entries:(state.ContainerMemoryAssignments)map[p:map[c:[{NUMAAffinity:([]int)[0 10]"
    " Type:(v1.ResourceName)memory Size:(uint64)3}]]] Checksum:(checksum.Checksum)0}"
)


def with_checksum(fields: dict[str, object], text: str) -> str:
    return json.dumps({**fields, "checksum": fnv1a(text)})


@pytest.mark.parametrize(("text", "value"), [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968)])
def test_the_hash_is_fnv_1a(text: str, value: int) -> None:
    assert fnv1a(text) == value


def test_a_cpu_state() -> None:
    result = read_cpu_checkpoint(with_checksum(CPU_FILE, CPU_TEXT))
    assert (result.version, result.text, result.policy) == (2, CPU_TEXT, "static")
    cpus = held_cpus(result)
    assert cpus.default == CpuSet([0, 6, 7])
    assert cpus.held == {"a": {"x": CpuSet([1])}, "b": {"y": CpuSet([2, 3]), "z": CpuSet([4, 5])}}


def test_versions_are_distinguished_by_their_checksums() -> None:
    old = {"policyName": "p", "DEFAULTCPUSET": "0", "entries": {"id": "1"}}
    text = (
        "(*state.CPUManagerCheckpoint){PolicyName:(string)p DefaultCPUSet:(string)0"
        " Entries:(map[string]string)map[id:1] Checksum:(checksum.Checksum)0}"
    )
    first = read_cpu_checkpoint(with_checksum(old, text))
    assert (first.version, held_cpus(first).held) == (1, {"": {"id": CpuSet([1])}})
    pods = {"podEntries": {"a": {"cpuSet": "10,2"}}}
    elements = "{CPUSet:(cpuset.CPUSet){elems:(map[int]struct {})map[2:{} 10:{}]}}"
    text = CPU_TEXT.replace(" Checksum", f" PodEntries:(state.PodCPUAssignments)map[a:{elements}] Checksum")
    assert read_cpu_checkpoint(with_checksum({**CPU_FILE, **pods}, text)).version == 3


def test_a_file_with_a_wrong_checksum_can_still_be_read() -> None:
    result = read_cpu_checkpoint(json.dumps({**CPU_FILE, "checksum": 5}))
    assert (result.version, result.text, result.checksum) == (None, "", 5)
    assert held_cpus(result).default == CpuSet([0, 6, 7])
    assert read_cpu_checkpoint(json.dumps(CPU_FILE)).checksum == 0


def test_a_memory_state() -> None:
    result = read_memory_checkpoint(with_checksum(MEMORY_FILE, MEMORY_TEXT))
    assert (result.version, result.text) == (1, MEMORY_TEXT)
    state = held_memory(result)
    assert list(state.nodes) == [2, 10]
    assert state.nodes[10].table("memory") == ResourceTable(9, 1, 8, 3, 5)
    assert (state.nodes[10].cells, state.nodes[10].assignments) == (Mask([0, 10]), 2)
    assert state.blocks("p", "c") == (Block(Mask([0, 10]), "memory", 3),)
    blocks = "[{NUMAAffinity:([]int)<nil> Type:(v1.ResourceName)memory Size:(uint64)1}]"
    more = {"podEntries": {"p": {"memoryBlocks": [{"type": "memory", "size": 1}]}}}
    entries = (
        f" PodEntries:(state.PodMemoryAssignments)map[p:{{MemoryBlocks:([]state.Block){blocks}}}] Checksum"
    )
    assert (
        read_memory_checkpoint(
            with_checksum({**MEMORY_FILE, **more}, MEMORY_TEXT.replace(" Checksum", entries))
        ).version
        == 2
    )


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "not JSON: Expecting value"),
        ("{", "not JSON: Expecting property name"),
        ("[" * 100_000, "not JSON: it is nested too deeply"),
        ("9" * 5000, "not JSON: a number in it has thousands of digits"),
        ("[]", "it is not a JSON object"),
        ("null", "it is not a JSON object"),
        ('{"checksum": "x"}', "its checksum is not a number"),
        ('{"checksum": [1]}', "its checksum is not a number"),
        ('{"checksum": 1e999}', "its checksum is not a number"),
    ],
    ids=["empty", "torn", "deep", "digits", "list", "null", "text", "array", "infinite"],
)
def test_an_invalid_file_is_refused_with_the_cause(content: str, cause: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^cannot read kubelet's cpu_manager_state: {cause}"):
        read_cpu_checkpoint(content)


def test_invalid_fields_are_refused_when_they_are_used() -> None:
    for fields in (
        {"defaultCpuSet": "1.3"},
        {"entries": {"a": {"b": "x"}}},
        {"entries": [1]},
        {"entries": {"a": 1}},
    ):
        result = read_cpu_checkpoint(json.dumps(fields))
        with pytest.raises(CheckpointError, match="cannot read kubelet's cpu_manager_state"):
            held_cpus(result)
    for fields in ({"entries": {"a": {"b": [{}]}}}, {"machineState": {"x": {}}}, {"machineState": {"0": 1}}):
        result = read_memory_checkpoint(json.dumps(fields))
        with pytest.raises(CheckpointError, match="cannot read kubelet's memory_manager_state"):
            held_memory(result)
