"""Messages of device plugins: which are accepted, and which are refused with a reason."""

from __future__ import annotations

import pytest

from proxy.allocation.devices.state import RegisteredDevice
from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.backends.device_plugins import messages
from proxy.backends.device_plugins.messages import PluginAnswerError
from proxy.model.devices import AllocateAnswer, DeviceMount, DeviceNode
from proxy.model.idset import Mask
from tests.testkit.device_plugin import device


def listed(*devices: pb.Device) -> bytes:
    return pb.ListAndWatchResponse(devices=devices).SerializeToString()


def test_devices_with_their_health_and_nodes() -> None:
    bare, empty = device("a"), device("b")
    empty.topology.SetInParent()
    found = messages.read_devices(
        listed(bare, empty, device("c", 0, 1, healthy=False), device("d", -1, 5000))
    )
    assert found == {
        "a": RegisteredDevice("a", None),
        "b": RegisteredDevice("b", Mask()),
        "c": RegisteredDevice("c", Mask((0, 1)), healthy=False),
        "d": RegisteredDevice("d", Mask()),
    }


def test_only_the_state_healthy_is_healthy() -> None:
    states = ("Healthy", "healthy", "", "Unknown")
    found = messages.read_devices(listed(*(pb.Device(ID=w or "none", health=w) for w in states)))
    assert [name for name, each in found.items() if each.healthy] == ["Healthy"]


def test_a_device_that_is_listed_twice_in_the_same_way_is_one() -> None:
    assert list(messages.read_devices(listed(device("a", 1), device("a", 1)))) == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (listed(device("a", 1), device("a", 0)), "twice, with different values"),
        (listed(device("")), "0 characters"),
        (listed(device("x" * 257)), "257 characters"),
        (listed(*(device(str(i)) for i in range(messages.DEVICES_LIMIT + 1))), "16385 devices"),
        (b"\xff\xff", "cannot be decoded as ListAndWatchResponse"),
        (b"\x0a\x04\x0a\x02\xff\xfe", "cannot be decoded as ListAndWatchResponse"),
    ],
)
def test_lists_that_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(PluginAnswerError, match=message):
        messages.read_devices(content)


def test_options_are_read_and_large_answers_refused() -> None:
    both = pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
    assert messages.read_options(both.SerializeToString()) == (True, True)
    assert messages.read_options(b"\x08\x01") == (False, True)
    assert messages.read_options(b"") == (False, False)
    with pytest.raises(PluginAnswerError, match="300000 bytes"):
        messages.read_options(b"\x00" * 300_000)


def preferred(*ids: str, times: int = 1) -> bytes:
    one = pb.ContainerPreferredAllocationResponse(deviceIDs=ids)
    return pb.PreferredAllocationResponse(container_responses=[one] * times).SerializeToString()


def test_preferences_are_asked_and_answered_within_a_size() -> None:
    request = pb.PreferredAllocationRequest.FromString(messages.preference_request({"b", "a"}, {"a"}, 2))
    assert request.container_requests[0].available_deviceIDs == ["a", "b"]
    assert request.container_requests[0].must_include_deviceIDs == ["a"]
    assert request.container_requests[0].allocation_size == 2
    assert messages.read_preference(preferred("b", "a"), {"a", "b"}, 2) == ("b", "a")
    assert messages.read_preference(preferred("b"), {"a", "b"}, 2) == ("b",)
    assert messages.read_preference(b"", {"a"}, 1) == ()
    long = [f"{number:0255}" for number in range(2000)]
    assert messages.read_preference(preferred(*long), long, 2000) == tuple(long)
    with pytest.raises(PluginAnswerError, match="bytes"):
        messages.read_preference(preferred(*long), long, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (preferred("c"), "'c', which was not offered"),
        (preferred("a", "a"), "a device twice"),
        (preferred("a", "b", "a"), "3 devices, and 2 were requested"),
        (preferred("a", times=2), "2 containers"),
    ],
)
def test_preferences_that_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(PluginAnswerError, match=message):
        messages.read_preference(content, {"a", "b"}, 2)


def answer(**parts: object) -> bytes:
    one = pb.ContainerAllocateResponse(**parts)  # type: ignore[arg-type]
    return pb.AllocateResponse(container_responses=[one]).SerializeToString()


def test_an_allocation_is_read_with_all_its_fields() -> None:
    content = answer(
        envs={"A": "1"},
        annotations={"cdi.k8s.io/x": "y"},
        mounts=[pb.Mount(container_path="/c", host_path="/h", read_only=True)],
        devices=[pb.DeviceSpec(container_path="/dev/c", host_path="/dev/h", permissions="rw")],
        cdi_devices=[pb.CDIDevice(name="example.com/dev=a")],
    )
    assert messages.read_allocation(content) == AllocateAnswer(
        {"A": "1"},
        {"cdi.k8s.io/x": "y"},
        (DeviceMount("/h", "/c", read_only=True),),
        (DeviceNode("/dev/h", "/dev/c", "rw"),),
        ("example.com/dev=a",),
    )
    assert messages.read_allocation(answer()) == AllocateAnswer()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 containers"),
        (answer() * 2, "2 containers"),
        (answer(envs={"A=B": "1"}), "environment variable"),
        (answer(envs={"": "1"}), "environment variable"),
        (answer(annotations={"": "1"}), "annotation"),
        (answer(mounts=[pb.Mount(container_path="c", host_path="/h")]), "mount at 'c'"),
        (answer(mounts=[pb.Mount(container_path="/c")]), "mount at ''"),
        (answer(devices=[pb.DeviceSpec(container_path="/c", host_path="h")]), "device at 'h'"),
        (answer(devices=[pb.DeviceSpec(container_path="/c", host_path="/h", permissions="rx")]), "'rx'"),
        (answer(cdi_devices=[pb.CDIDevice(name="nothing")]), "CDI name 'nothing'"),
        (answer(envs={"A": "x" * messages.ANSWER_LIMIT_BYTES}), "bytes"),
        (answer(cdi_devices=[pb.CDIDevice(name="a/b=c")] * 1025), "1025 cdi_devices"),
        (b"\xff", "cannot be decoded as AllocateResponse"),
    ],
)
def test_allocations_that_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(PluginAnswerError, match=message):
        messages.read_allocation(content)


def test_requests_name_the_devices_of_one_container() -> None:
    request = pb.AllocateRequest.FromString(messages.allocate_request(("b", "a")))
    assert [list(one.devices_ids) for one in request.container_requests] == [["b", "a"]]
    assert pb.PreStartContainerRequest.FromString(messages.pre_start_request(("a",))).devices_ids == ["a"]
