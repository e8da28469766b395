"""Decides which host paths can be devices with a location.

Most containers are given files below ``/dev`` or ``/sys`` that have no location: ``/dev/null``, ``/dev/shm``,
the control node of a driver (``/dev/nvidiactl``), the cgroup tree. They are recognized here by name, without
disk access. ``/dev`` and ``/sys`` themselves are not devices either: a (privileged) container that gets all
devices is near all of them, so they say nothing about its location.
"""

from __future__ import annotations

import posixpath
import re

_MEMORY = r"null|zero|full|u?random|mem|port|core|kmsg|nvram|shm|mqueue|hugepages[^/]*|userfaultfd|udmabuf"
_TERMINALS = r"tty.*|console|ptmx|pts|fd|std(?:in|out|err)|log|initctl|termination-log|vcs.*|u(?:input|hid)"
_VIRTUAL = r"fuse|cuse|kvm|vsock|vhost-(?:net|vsock)|loop.*|z?ram\d+|net(?:/tun)?|ppp|autofs|rfkill|snapshot"
_MACHINE = (
    r"cpu|cpu_dma_latency|hpet|hwrng|vga_arbiter|rtc\d*|watchdog\d*|cpuset|btrfs-control|mapper/control"
)
_CONTROL = (
    r"nvme-fabrics|nvidiactl|nvidia-(?:uvm|uvm-tools|modeset|nvlink|nvswitchctl|caps|caps-imex-channels)|gdrdrv"
    r"|vfio/vfio|iommu|infiniband/rdma_u?cm|kfd"
)
_WITHOUT_LOCATION = re.compile(rf"(?:{_MEMORY}|{_TERMINALS}|{_VIRTUAL}|{_MACHINE}|{_CONTROL})(?:/.*)?")
_IN_SYSFS = re.compile(
    r"devices/(?!system(?:/|$)|virtual(?:/|$)).+|bus/[^/]+/devices/.+|class/[^/]+/.+|block/.+|dev/(?:char|block)/.+"
)


def below(path: str, directory: str) -> str | None:
    """Return the part of a path below a directory (``/dev``), without dots; None if it is elsewhere."""
    plain = "/" + posixpath.normpath("/" + path).lstrip("/")
    return plain[len(directory) + 1 :] if plain.startswith(directory + "/") else None


def device_path(path: str) -> str | None:
    """Return a host path if it can be a device, or a directory of devices, with a location.

    Returns:
        The path, without dots, below ``/dev`` or ``/sys``; None if its name shows that it has no location.
    """
    name = below(path, "/dev")
    if name is not None:
        return None if _WITHOUT_LOCATION.fullmatch(name) else f"/dev/{name}"
    name = below(path, "/sys")
    return f"/sys/{name}" if name is not None and _IN_SYSFS.fullmatch(name) else None


def device_file(path: str) -> str | None:
    """Return ``device_path``, with ``/run/nvidia/driver/dev/nvidia0`` treated as ``/dev/nvidia0``.

    A driver that a container installed has its own ``/dev``, with the same names in it.
    """
    _, dev, name = path.rpartition("/dev/")
    is_host_path = below(path, "/dev") is not None or below(path, "/sys") is not None
    return device_path(path if is_host_path or not dev else f"/dev/{name}")
