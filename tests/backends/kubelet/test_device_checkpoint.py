"""The checkpoint of kubelet's device manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.backends.kubelet import device_checkpoint
from proxy.backends.kubelet.checkpoints import CheckpointError, lower_case_keys
from proxy.backends.kubelet.device_checkpoint import (
    DEVICE_STATE_FILE,
    KubeletDevicesReader,
    device_checksum_text,
    read_device_checkpoint,
)
from proxy.engine.held_devices import DeviceRecord
from proxy.executor.device_ports import DevicePluginError
from proxy.model.devices import AllocateAnswer
from proxy.telemetry.port import Telemetry
from tests.testkit.captured_log import CapturedLog

FILES = (
    (
        (
            '{"Data":{"PodDeviceEntries":[{"PodUID":"uid-1","ContainerName":"main","ResourceName":"exam'
            'ple.com/nic","DeviceIDs":{"0":["a","b"],"1":["b"]},"AllocResp":"CgoKA05JQxIDYSxi"},{"PodUI'
            'D":"uid-2","ContainerName":"init","ResourceName":"example.com/gpu","DeviceIDs":{"-1":["g0"'
            '],"10":["g1"],"2":["g2"]},"AllocResp":""},{"PodUID":"uid-3","ContainerName":"c","ResourceN'
            'ame":"example.com/gpu","DeviceIDs":{},"AllocResp":null}],"RegisteredDevices":{"example.com'
            '/gpu":null,"example.com/nic":["a","b","c"]}},"Checksum":2518957629}'
        ),
        (
            "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)[{PodUID:(strin"
            "g)uid-1 ContainerName:(string)main ResourceName:(string)example.com/nic DeviceIDs:(checkpo"
            "int.DevicesPerNUMA)map[0:[a b] 1:[b]] AllocResp:([]uint8)[10 10 10 3 78 73 67 18 3 97 44 9"
            "8]} {PodUID:(string)uid-2 ContainerName:(string)init ResourceName:(string)example.com/gpu "
            "DeviceIDs:(checkpoint.DevicesPerNUMA)map[-1:[g0] 2:[g2] 10:[g1]] AllocResp:([]uint8)[]} {P"
            "odUID:(string)uid-3 ContainerName:(string)c ResourceName:(string)example.com/gpu DeviceIDs"
            ":(checkpoint.DevicesPerNUMA)map[] AllocResp:([]uint8)<nil>}] RegisteredDevices:(map[string"
            "][]string)map[example.com/gpu:<nil> example.com/nic:[a b c]]}"
        ),
    ),
    (
        '{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}',
        (
            "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)<nil> Registere"
            "dDevices:(map[string][]string)map[]}"
        ),
    ),
    (
        '{"Data":{"PodDeviceEntries":[],"RegisteredDevices":null},"Checksum":3252601439}',
        (
            "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)[] RegisteredDe"
            "vices:(map[string][]string)<nil>}"
        ),
    ),
    (
        (
            '{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r/x","Devic'
            'eIDs":null,"AllocResp":"CgoKA05JQxIDYSxi"}],"RegisteredDevices":{"r/x":[]}},"Checksum":342'
            "9516836}"
        ),
        (
            "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)[{PodUID:(strin"
            "g)u ContainerName:(string)c ResourceName:(string)r/x DeviceIDs:(checkpoint.DevicesPerNUMA)"
            "<nil> AllocResp:([]uint8)[10 10 10 3 78 73 67 18 3 97 44 98]}] RegisteredDevices:(map[stri"
            "ng][]string)map[r/x:[]]}"
        ),
    ),
)
"""Files, and the texts that were hashed, as Go's json and spew write them for kubelet's types."""
NIC, GPU = "example.com/nic", "example.com/gpu"
ANSWER = AllocateAnswer({"NIC": "a,b"})


@pytest.mark.parametrize(("content", "text"), FILES)
def test_checksums_equal_those_of_go(content: str, text: str) -> None:
    data = lower_case_keys(json.loads(content)["Data"])
    assert device_checksum_text(data) == text
    assert read_device_checkpoint(content).has_correct_checksum
    wrong = content.replace('"Checksum":', '"Checksum":1')
    assert not read_device_checkpoint(wrong).has_correct_checksum


def test_entries_are_read_by_pod_container_and_resource() -> None:
    found = read_device_checkpoint(FILES[0][0])
    assert found.pods == {
        "uid-1": {"main": {NIC: DeviceRecord(("a", "b"), ANSWER)}},
        "uid-2": {"init": {GPU: DeviceRecord(("g0", "g1", "g2"), AllocateAnswer())}},
    }
    assert found.unread == ("an entry cannot be read: it has no devices",)


def entry(**values: object) -> str:
    one = {
        "PodUID": "u",
        "ContainerName": "c",
        "ResourceName": NIC,
        "DeviceIDs": {"0": ["a"]},
        "AllocResp": "",
    }
    return json.dumps({"Data": {"PodDeviceEntries": [{**one, **values}]}, "Checksum": 7})


def test_ids_of_kubelet_before_1_20_are_a_list() -> None:
    found = read_device_checkpoint(entry(DeviceIDs=["b", "a"]))
    assert found.pods["u"]["c"][NIC].ids == ("a", "b")
    assert not found.has_correct_checksum


@pytest.mark.parametrize(
    "values",
    [
        {"DeviceIDs": 3},
        {"AllocResp": "***"},
        {"AllocResp": "/////w=="},
        {"AllocResp": 5},
        {"DeviceIDs": {"0": None}},
    ],
)
def test_an_entry_that_cannot_be_read_costs_only_itself(values: dict[str, object]) -> None:
    found = read_device_checkpoint(entry(**values))
    assert not found.pods
    assert len(found.unread) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"Data": 3}', '{"Data": {"PodDeviceEntries": [3]}}'])
def test_an_invalid_checkpoint_is_refused(content: str) -> None:
    with pytest.raises(CheckpointError, match="cannot read kubelet's device-plugins"):
        read_device_checkpoint(content)


@pytest.mark.parametrize(("name", "refused"), [(NIC, {NIC}), (None, {NIC, GPU})])
def test_a_resource_whose_entry_cannot_be_read_is_not_taken_over(
    tmp_path: Path, name: str | None, refused: set[str]
) -> None:
    path = tmp_path / DEVICE_STATE_FILE
    path.parent.mkdir()
    content = json.loads(entry(AllocResp="***"))
    if name is None:
        del content["Data"]["PodDeviceEntries"][0]["ResourceName"]
    path.write_text(json.dumps(content))
    reader = KubeletDevicesReader(str(tmp_path), Telemetry(CapturedLog(), lambda: 0.0))
    for resource in (NIC, GPU):
        if resource in refused:
            with pytest.raises(DevicePluginError, match=f"cannot take over {resource}: "):
                reader.read(resource)
        else:
            assert reader.read(resource) == {}


def test_a_file_that_is_too_large_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checkpoint, "FILE_LIMIT_BYTES", 8)
    path = tmp_path / DEVICE_STATE_FILE
    path.parent.mkdir()
    path.write_text(entry())
    with pytest.raises(DevicePluginError, match="larger than"):
        KubeletDevicesReader(str(tmp_path), Telemetry(CapturedLog(), lambda: 0.0)).read(NIC)


def test_the_reader_reports_errors(tmp_path: Path) -> None:
    logged: list[str] = []
    reader = KubeletDevicesReader(str(tmp_path), Telemetry(CapturedLog(logged), lambda: 0.0))
    assert reader.read(NIC) == {}
    assert logged == [], "most nodes have no such file, or no plugin that ever registered with kubelet"
    path = tmp_path / DEVICE_STATE_FILE
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(DevicePluginError, match=f"cannot take over {NIC}: .* cannot be read: "):
        reader.read(NIC)
    path.write_text(FILES[0][0])
    assert set(reader.read(NIC)) == {"uid-1", "uid-2"}
    assert set(reader.read(GPU)) == {"uid-1", "uid-2"}, "an entry without devices belongs to no container"
    path.write_text(entry())
    assert set(reader.read(NIC)) == {"u"}
    assert len(logged) == 3
    assert ["cannot take over" in logged[0], "no devices" in logged[1], "checksum" in logged[2]] == [True] * 3
