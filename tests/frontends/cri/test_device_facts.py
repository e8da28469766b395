from __future__ import annotations

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.executor.ports import DeviceFacts
from proxy.frontends.cri.messages import device_facts_of

POD = "/var/lib/kubelet/pods/5f3c7c1e-9c0b-4d0e-8d0a-2f6a2b1f3c4d"


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of protobuf."""

    def varint(value: int) -> bytes:
        more = b""
        while value > 127:
            more, value = more + bytes([value & 127 | 128]), value >> 7
        return more + bytes([value])

    return varint(number << 3 | 2) + varint(len(payload)) + payload


def facts(config: bytes) -> pb.ContainerFacts:
    return pb.CreateContainerFacts.FromString(field(1, b"pod-1") + field(2, config)).config


def mount(container: str, host: str) -> bytes:
    return field(7, field(1, container.encode()) + field(2, host.encode()) + b"\x18\x01")


def device(host: str) -> bytes:
    return field(8, field(1, b"/dev/inside") + field(2, host.encode()) + field(3, b"rwm"))


def cdi(name: str) -> bytes:
    return field(17, field(1, name.encode()))


def annotation(key: str, value: str) -> bytes:
    return field(10, field(1, key.encode()) + field(2, value.encode()))


PLAIN = (
    field(1, field(1, b"app"))
    + field(6, field(1, b"LD_PRELOAD") + field(2, b"/dev/nvidia0"))
    + mount("/dev/termination-log", f"{POD}/containers/app/1234")
    + mount("/dev/shm", "/run/shm")
    + mount("/sys/fs/x", f"{POD}/volumes/dev/x")
    + annotation("io.kubernetes.container.hash", "8f3a")
)


def test_a_plain_container_has_no_device_facts() -> None:
    device_facts = device_facts_of(facts(PLAIN))
    assert device_facts == DeviceFacts()
    assert not device_facts
    assert device_facts_of(facts(b"")) == DeviceFacts()


def test_devices_cdi_names_and_mounts_are_read_once_and_in_order() -> None:
    config = (
        PLAIN
        + device("/dev/nvidia1")
        + device("/dev/nvidia0")
        + device("/dev/nvidiactl")
        + device("/dev/nvidia1")
        + cdi("nvidia.com/gpu=1")
        + cdi("intel.com/qat=a")
        + annotation("cdi.k8s.io/plugin_1", "nvidia.com/gpu=1, amd.com/gpu=7,")
        + annotation("note", "cdi.k8s.io/ is no key here")
        + mount("/dev/infiniband", "/dev/infiniband/")
        + mount("/host", "/sys/bus/pci/devices/0000:3b:00.0")
    )
    assert device_facts_of(facts(config)) == DeviceFacts(
        ("/dev/nvidia1", "/dev/nvidia0"),
        ("nvidia.com/gpu=1", "intel.com/qat=a", "amd.com/gpu=7"),
        ("/dev/infiniband", "/sys/bus/pci/devices/0000:3b:00.0"),
    )


@pytest.mark.parametrize("piece", ["device", "cdi", "annotation", "mount"])
def test_each_kind_of_entry_is_found_alone(piece: str) -> None:
    device_facts = {
        "device": (device("/dev/vfio/12"), DeviceFacts(paths=("/dev/vfio/12",))),
        "cdi": (cdi("a.com/b=c"), DeviceFacts(cdi=("a.com/b=c",))),
        "annotation": (annotation("cdi.k8s.io/x", "a.com/b=c"), DeviceFacts(cdi=("a.com/b=c",))),
        "mount": (mount("/x", "/dev/dri"), DeviceFacts(mounts=("/dev/dri",))),
    }
    config, expected = device_facts[piece]
    assert device_facts_of(facts(PLAIN + config)) == expected
    assert device_facts_of(facts(config + PLAIN)) == expected


@pytest.mark.parametrize("length", [10, 13, 18, 46, 47, 48, 127, 128, 300])
def test_a_mount_is_found_whatever_the_length_of_its_path_looks_like(length: int) -> None:
    """A length can be any byte, among them ``/`` (47), a line's end (10), and two bytes from 128 on."""
    host = "/dev/dri/".ljust(length, "x")
    assert device_facts_of(facts(mount("/x", host))).mounts == (host,)


@pytest.mark.parametrize(
    "host",
    [
        "/dev",
        "/dev/",
        "/sys",
        "/dev/null",
        "/dev/shm",
        "/dev/hugepages",
        "/dev/pts/0",
        "/dev/../etc",
        "/sys/fs/cgroup",
    ],
)
def test_mounts_without_a_device_are_ignored(host: str) -> None:
    assert not device_facts_of(facts(mount("/x", host) + device(host)))


def test_a_driver_in_a_container_has_its_own_dev_except_for_mounts() -> None:
    path = "/run/nvidia/driver/dev/nvidia0"
    assert device_facts_of(facts(device(path) + mount("/x", path))) == DeviceFacts(paths=("/dev/nvidia0",))
    assert not device_facts_of(facts(device(f"{POD}/volumeDevices/pvc")))


def test_entries_that_cannot_be_decoded_are_ignored() -> None:
    broken = (
        field(8, b"\x12\x20/dev/x")
        + field(17, field(1, b"\xff\xfe"))
        + field(7, b"\x12\x0c/dev/\xff\xfeaaaa")
    )
    assert device_facts_of(facts(broken + device("/dev/dri/card0"))) == DeviceFacts(paths=("/dev/dri/card0",))


def test_the_number_of_devices_is_limited() -> None:
    device_facts = device_facts_of(facts(b"".join(device(f"/dev/x{i}") for i in range(3000))))
    assert len(device_facts.paths) == 1024
    assert device_facts.paths[1023] == "/dev/x1023"


def test_names_that_are_not_paths_are_ignored() -> None:
    config = pb.ContainerConfig()
    for name in ("a.com/gpu=" + "x" * 4086, "a.com/gpu=" + "x" * 4087):
        config.CDI_devices.add(name=name)
    found = device_facts_of(pb.ContainerFacts.FromString(config.SerializeToString()))
    assert [len(name) for name in found.cdi] == [4096]


def test_facts_equal_those_of_the_whole_message() -> None:
    """The same bytes, read by the classes that declare every field."""
    config = pb.ContainerConfig()
    config.devices.add(host_path="/dev/nvme0n1")
    config.CDI_devices.add(name="a.com/b=c")
    config.annotations["cdi.k8s.io/p"] = "a.com/b=d"
    device_facts = device_facts_of(pb.ContainerFacts.FromString(config.SerializeToString()))
    assert device_facts == DeviceFacts(("/dev/nvme0n1",), ("a.com/b=c", "a.com/b=d"))
