"""Finds the NUMA nodes that the devices of a container are near.

A create request names devices by host paths and by CDI (Container Device Interface) names. A path is a device
file, or a directory, which stands for all device files in it. A CDI name stands for the device files that its
spec lists. ``device_location`` finds their location in sysfs. The answer leaves out paths whose name shows
that they have no location (``device_files``). A directory in which no device has a location is one entry.

Nothing here fails: if a device cannot be found, its NUMA nodes are unknown.
"""

from __future__ import annotations

import os
import re
import stat as modes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from proxy.model.workload import LocatedDevice
from proxy.telemetry.port import Report, silent
from proxy.topology.cdi import CDI_ROOTS, CdiSpecs
from proxy.topology.device_files import below, device_file, device_path
from proxy.topology.device_location import DeviceLocation, SysfsDeviceLookup, combined_location

_VFIO_GROUP = re.compile(r"vfio/(?:noiommu-)?(\d{1,6})")
_NVIDIA = re.compile(r"nvidia(\d{1,4})")
_MOST_FILES = 256
_MOST_ENTRIES = 1024
_DEPTH_LIMIT = 2


class DeviceRequest(Protocol):
    """The devices and host paths of a create request."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Device files of the host."""

    @property
    def cdi(self) -> tuple[str, ...]:
        """CDI device names."""

    @property
    def mounts(self) -> tuple[str, ...]:
        """Host paths below /dev or /sys."""


class SysfsDevices:
    """Finds devices in sysfs.

    Args:
        sysfs_root: The root of sysfs, usually ``/sys``.
        dev_root: The directory of device files, usually ``/dev``.
        cdi_roots: Directories of CDI specs; a later directory overrides an earlier one.
        procfs_root: The root of procfs, usually ``/proc``.
        stat: Returns the type of a file, as ``os.stat`` does.
        report_problem: Takes a message about an invalid CDI spec, once for each version of a file.
    """

    def __init__(
        self,
        sysfs_root: Path = Path("/sys"),
        dev_root: Path = Path("/dev"),
        cdi_roots: Sequence[Path] = CDI_ROOTS,
        procfs_root: Path = Path("/proc"),
        *,
        stat: Callable[[str], os.stat_result] = os.stat,
        report_problem: Report = silent,
    ) -> None:
        self._lookup = SysfsDeviceLookup(sysfs_root, procfs_root)
        self._dev = os.path.realpath(dev_root)
        self._cdi = CdiSpecs(cdi_roots, report_problem)
        self._stat = stat

    def locate(self, request: DeviceRequest) -> tuple[LocatedDevice, ...]:
        """Find the NUMA nodes of devices.

        Returns:
            One entry for each device, in the order of the request; no entry for paths without a location.
        """
        devices: dict[str, LocatedDevice] = {}
        for path in (*request.paths, *request.mounts):
            for name, location in self._path(path):
                devices.setdefault(name, LocatedDevice(name, "", location.nodes, location.source))
            if len(devices) >= _MOST_ENTRIES:
                break
        for name in request.cdi[:_MOST_ENTRIES]:
            location = self._named(name)
            devices[name] = LocatedDevice(name, "", location.nodes, location.source)
        return tuple(devices.values())

    def locate_device(self, name: str) -> DeviceLocation:
        """Find one device by a path below ``/dev`` or ``/sys``, or by its CDI name."""
        if not name.startswith("/"):
            return self._named(name)
        location = combined_location(location for _, location in self._path(name))
        return location or DeviceLocation(None, "the path is not that of a device with a location")

    def cdi_names(self) -> list[str]:
        """Return the CDI names of all specs."""
        return self._cdi.names()

    def _named(self, name: str) -> DeviceLocation:
        device = self._cdi.device(name)
        if device is None:
            return DeviceLocation(None, "no CDI spec names it")
        location = combined_location(location for path in device.paths for _, location in self._path(path))
        if location is None:
            return DeviceLocation(None, f"{device.spec} names no device file with a known location for it")
        return DeviceLocation(location.nodes, f"{location.source} (by {device.spec})", location.functions)

    def _path(self, path: str) -> list[tuple[str, DeviceLocation]]:
        """Find the devices of a path: the name and location of each."""
        file_path = device_file(path)
        if file_path is None:
            return []
        path = file_path
        inner = below(path, "/sys")
        if inner is not None:
            location = self._lookup.locate_path(inner)
            return [(path, location)] if location is not None else []
        name = below(path, "/dev") or ""
        file = self._file(name)
        if file is not None and modes.S_ISDIR(file.st_mode):
            return self._directory(name)
        return [(f"/dev/{name}", self._device(name, file))]

    def _directory(self, directory: str) -> list[tuple[str, DeviceLocation]]:
        files = [(n, f) for n, f in self._inside(directory) if device_path(f"/dev/{n}")]
        if not files:
            return []
        locations = [(f"/dev/{name}", self._device(name, file)) for name, file in files]
        located = [(name, location) for name, location in locations if location.nodes is not None]
        return located or [(f"/dev/{directory}", DeviceLocation(None, "no device in it has a NUMA node"))]

    def _inside(self, directory: str) -> list[tuple[str, os.stat_result]]:
        """List the device files in a directory and its subdirectories, without links."""
        device_files: list[tuple[str, os.stat_result]] = []
        for name in self._walk(directory, _DEPTH_LIMIT):
            file = self._file(name)
            if file is not None and _kind(file):
                device_files.append((name, file))
            if len(device_files) >= _MOST_FILES:
                break
        return device_files

    def _walk(self, directory: str, depth: int) -> Iterator[str]:
        try:
            with os.scandir(f"{self._dev}/{directory}") as entries:
                names = sorted(
                    (e.name, e.is_dir(follow_symlinks=False)) for e in entries if not e.is_symlink()
                )
        except (OSError, ValueError):
            return
        for name, is_directory in names:
            if not is_directory:
                yield f"{directory}/{name}"
            elif depth > 1:
                yield from self._walk(f"{directory}/{name}", depth - 1)

    def _file(self, name: str) -> os.stat_result | None:
        try:
            real = os.path.realpath(f"{self._dev}/{name}")
            return self._stat(real) if real.startswith(f"{self._dev}/") else None
        except (OSError, ValueError):
            return None

    def _device(self, name: str, file: os.stat_result | None) -> DeviceLocation:
        group = _VFIO_GROUP.fullmatch(name)
        if group:
            return self._lookup.locate_iommu_group(int(group[1])) or DeviceLocation(
                None, "its IOMMU group has no members"
            )
        location = None
        if file is not None and (kind := _kind(file)):
            location = self._lookup.locate_numbers(kind, os.major(file.st_rdev), os.minor(file.st_rdev))
        card = _NVIDIA.fullmatch(name)
        if card and (location is None or location.nodes is None):
            minor = os.minor(file.st_rdev) if file is not None and _kind(file) else int(card[1])
            location = self._lookup.locate_nvidia_card(minor) or location
        if location is not None:
            return location
        return DeviceLocation(
            None, "this host has no such device file" if file is None else "sysfs does not list it"
        )


def _kind(file: os.stat_result) -> str:
    """Return the word that sysfs uses for the kind of a device file; an empty string for other files."""
    return "char" if modes.S_ISCHR(file.st_mode) else "block" if modes.S_ISBLK(file.st_mode) else ""
