from __future__ import annotations

import pytest

from proxy.topology.device_files import below, device_file, device_path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/dev/a", "a"),
        ("//dev//a/./b/", "a/b"),
        ("dev/a", "a"),
        ("/dev", None),
        ("/dev/", None),
        ("/device/a", None),
        ("/dev/../a", None),
        ("/a/../dev/b", "b"),
        ("", None),
    ],
)
def test_only_paths_below_a_directory_have_a_name_there(path: str, name: str | None) -> None:
    assert below(path, "/dev") == name


@pytest.mark.parametrize(
    "path",
    [
        "/dev/nvidia0",
        "/dev/nvidia12",
        "/dev/vfio/7",
        "/dev/vfio",
        "/dev/vfio/devices/vfio0",
        "/dev/infiniband",
        "/dev/infiniband/uverbs0",
        "/dev/dri/renderD128",
        "/dev/nvme0n1",
        "/dev/mapper/vg-data",
        "/dev/sda",
        "/dev/dm-3",
        "/dev/accel/accel0",
        "/dev/uio0",
        "/dev/memory-card",
        "/sys/devices/pci0000:00/0000:00:01.0",
        "/sys/bus/pci/devices/0000:3b:00.0",
        "/sys/class/net/eth0",
        "/sys/block/sda",
    ],
)
def test_device_files_that_may_be_located(path: str) -> None:
    assert device_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "/dev",
        "/dev/null",
        "/dev/zero",
        "/dev/urandom",
        "/dev/shm",
        "/dev/shm/x",
        "/dev/hugepages",
        "/dev/hugepages-1Gi/y",
        "/dev/pts/3",
        "/dev/tty7",
        "/dev/fuse",
        "/dev/kvm",
        "/dev/net/tun",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/vfio/vfio",
        "/dev/infiniband/rdma_cm",
        "/dev/kfd",
        "/dev/mapper/control",
        "/dev/termination-log",
        "/sys",
        "/sys/class/net",
        "/sys/class",
        "/sys/devices/system",
        "/sys/devices/system/node",
        "/sys/devices/virtual/misc/kvm",
        "/sys/fs/cgroup",
        "/sys/kernel/mm/hugepages",
        "/etc/hosts",
    ],
)
def test_device_files_that_have_no_location_by_name(path: str) -> None:
    assert device_path(path) is None


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("/run/nvidia/driver/dev/nvidia0", "/dev/nvidia0"),
        ("/run/nvidia/driver/dev/nvidiactl", None),
        ("/dev/a/dev/b", "/dev/a/dev/b"),
        ("/sys/bus/pci/devices/x/dev/sda", "/sys/bus/pci/devices/x/dev/sda"),
        ("/run/nvidia0", None),
    ],
)
def test_a_dev_of_a_driver_in_a_container(path: str, file: str | None) -> None:
    assert device_file(path) == file
