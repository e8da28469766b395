"""Fields that device plugins add to the request of a container."""

from __future__ import annotations

import re
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.device_suffix import device_suffix
from proxy.model.devices import AllocateAnswer, DeviceMount, DeviceNode
from proxy.model.errors import DeviceConflictError

NIC, GPU = "example.com/nic", "example.com/gpu"
FULL = AllocateAnswer(
    {"NIC": "a"},
    {"example.com/nic": "a"},
    (DeviceMount("/sys/nic", "/nic", read_only=True),),
    (DeviceNode("/dev/nic0", "/dev/nic", "rw"),),
    ("example.com/nic=a",),
)


def request(**config: Any) -> bytes:
    return pb.CreateContainerRequest(
        pod_sandbox_id="s", config=pb.ContainerConfig(command=["run"], **config)
    ).SerializeToString()


def added(body: bytes, **answers: AllocateAnswer) -> pb.ContainerConfig:
    suffix = device_suffix(body, {f"example.com/{name}": answer for name, answer in answers.items()}).suffix
    return pb.CreateContainerRequest.FromString(body + suffix).config


def test_everything_that_a_plugin_answers_is_appended() -> None:
    body = request(envs=[pb.KeyValue(key="A", value=b"1")], annotations={"x": "y"})
    config = added(body, nic=FULL)
    assert [(env.key, env.value) for env in config.envs] == [("A", b"1"), ("NIC", b"a")]
    assert dict(config.annotations) == {"x": "y", "example.com/nic": "a"}
    assert list(config.mounts) == [pb.Mount(container_path="/nic", host_path="/sys/nic", readonly=True)]
    device = pb.Device(container_path="/dev/nic", host_path="/dev/nic0", permissions="rw")
    assert list(config.devices) == [device]
    assert [cdi.name for cdi in config.CDI_devices] == ["example.com/nic=a"]
    assert list(config.command) == ["run"]
    fields = device_suffix(body, {NIC: FULL}).fields
    assert set(fields) == {"envs[NIC]", "annotations[example.com/nic]", "mounts[/nic]", "devices[/dev/nic]"}
    assert {field.plugin for field in fields.values()} == {"the device plugin of example.com/nic"}
    assert fields["mounts[/nic]"].value == ("/sys/nic", True)


def test_the_same_value_twice_is_no_conflict() -> None:
    body = request(
        envs=[pb.KeyValue(key="NIC", value=b"a")],
        mounts=[pb.Mount(container_path="//nic/", host_path="/sys/nic", readonly=True)],
        CDI_devices=[pb.CDIDevice(name="example.com/nic=a")],
    )
    found = device_suffix(body, {NIC: FULL, GPU: FULL})
    config = added(body, nic=FULL, gpu=FULL)
    assert [len(part) for part in (config.envs, config.mounts, config.devices, config.CDI_devices)] == [1] * 4
    assert set(found.fields) == {"annotations[example.com/nic]", "devices[/dev/nic]"}
    assert device_suffix(body, {}).suffix == b""


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"envs": [pb.KeyValue(key="NIC", value=b"b")]}, "envs[NIC]"),
        ({"annotations": {"example.com/nic": "b"}}, "annotations[example.com/nic]"),
        ({"mounts": [pb.Mount(container_path="/./nic/", host_path="/other")]}, "mounts[/nic]"),
        ({"mounts": [pb.Mount(container_path="/nic", host_path="/sys/nic")]}, "mounts[/nic]"),
        ({"devices": [pb.Device(container_path="/dev/nic", host_path="/dev/nic9")]}, "devices[/dev/nic]"),
    ],
)
def test_a_conflict_with_the_request_names_both(config: Any, field: str) -> None:
    message = f"the request and the device plugin of example.com/nic set {field} differently"
    with pytest.raises(DeviceConflictError, match=re.escape(message)):
        device_suffix(request(**config), {NIC: FULL})


def test_a_conflict_of_two_plugins_names_both() -> None:
    other = AllocateAnswer({"NIC": "b"})
    message = (
        "the device plugin of example.com/nic and the device plugin of example.com/gpu set envs[NIC]"
        " differently"
    )
    with pytest.raises(DeviceConflictError, match=re.escape(message)):
        device_suffix(request(), {NIC: FULL, GPU: other})


def test_the_last_of_two_values_in_the_request_is_compared() -> None:
    twice = [pb.KeyValue(key="NIC", value=b"b"), pb.KeyValue(key="NIC", value=b"a")]
    assert len(added(request(envs=twice), nic=FULL).envs) == 2


def test_strings_that_are_not_utf8_are_kept() -> None:
    broken = pb.Mount(container_path="/x", host_path="/y").SerializeToString().replace(b"/x", b"/\xff")
    config = b"\x3a" + bytes([len(broken)]) + broken
    body = b"\x12" + bytes([len(config)]) + config
    assert device_suffix(body, {NIC: FULL}).suffix
