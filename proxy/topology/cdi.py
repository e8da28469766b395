"""Finds the device files of a CDI (Container Device Interface) device from the CDI specs.

A vendor's tool, a device plugin or a DRA (Dynamic Resource Allocation) driver writes spec files (JSON or
YAML) into ``/etc/cdi`` (static) or ``/var/run/cdi`` (generated while the node runs). A spec has a kind,
``vendor.com/class``, and devices with names. A container requests ``vendor.com/class=name``, and the runtime
makes the edits that the spec lists for this device. Edits of the spec as a whole apply to each of its devices
(control nodes), so they say nothing about a location and are not read here. A device in a later directory
replaces a device of the same name in an earlier directory. The same name twice in one directory is a
conflict, and the name resolves to no device (CDI specification 1.1).

Specs are read on demand, if they have changed since the last time. The amount read is bounded. An invalid
spec is reported once and ignored: the runtime decides what such a spec means for the container.
"""

from __future__ import annotations

import json
import os
import stat as modes
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from proxy.telemetry.port import Report, silent
from proxy.topology.yaml_events import read_yaml

CDI_ROOTS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_MOST_FILES = 500
_MOST_BYTES = 1 << 20
_MOST_DEVICES = 2048
_MOST_NODES = 256
_Stamp = tuple[int, int, int]
_Devices = Mapping[str, tuple[str, ...]]


class CdiDevice(Struct, frozen=True):
    """A device that a spec describes.

    Attributes:
        paths: Its host paths: device files, and network interfaces as ``/sys/class/net/NAME``.
        spec: The file that defines it.
    """

    paths: tuple[str, ...]
    spec: str


class CdiSpecs:
    """The specs in some directories.

    Args:
        roots: The directories; a later directory overrides an earlier one.
        report_problem: Takes a message about an invalid file, once for each version of the file.
    """

    def __init__(self, roots: Sequence[Path], report_problem: Report = silent) -> None:
        self._roots = tuple(roots)
        self._report_problem = report_problem
        self._listing: dict[str, _Stamp] | None = None
        self._read: dict[str, tuple[_Stamp, _Devices]] = {}
        self._devices: dict[str, CdiDevice] = {}

    def device(self, name: str) -> CdiDevice | None:
        """Return the device of ``vendor.com/class=name``; None if no spec defines it."""
        self._refresh()
        return self._devices.get(name)

    def names(self) -> list[str]:
        """Return the names of all devices, sorted."""
        self._refresh()
        return sorted(self._devices)

    def _refresh(self) -> None:
        listing = self._list()
        if listing != self._listing:
            self._load(listing)
            self._listing = listing

    def _list(self) -> dict[str, _Stamp]:
        """List spec files, the last directory first, so that the bound cuts off the least important files."""
        files: dict[str, _Stamp] = {}
        for root in reversed(self._roots):
            try:
                with os.scandir(root) as entries:
                    names = sorted(e.path for e in entries if e.name.endswith((".json", ".yaml")))
            except OSError:
                continue
            for path in names[: _MOST_FILES - len(files)]:
                stamp = _stamp(path)
                if stamp is not None:
                    files[path] = stamp
            if len(files) >= _MOST_FILES:
                break
        return files

    def _load(self, listing: dict[str, _Stamp]) -> None:
        if len(listing) >= _MOST_FILES and len(self._listing or ()) < _MOST_FILES:
            self._report_problem("cannot read all CDI specs: there are too many", limit=_MOST_FILES - 1)
        specs: dict[str, tuple[_Stamp, _Devices]] = {}
        for path, stamp in listing.items():
            cached = self._read.get(path)
            specs[path] = cached if cached is not None and cached[0] == stamp else (stamp, self._open(path))
        self._read = specs
        devices: dict[str, CdiDevice] = {}
        for root in self._roots:
            devices.update(self._directory(root))
        self._devices = {name: device for name, device in devices.items() if device.spec}

    def _directory(self, root: Path) -> dict[str, CdiDevice]:
        """Return the devices of one directory; devices in conflict have an empty ``spec``."""
        device_of: dict[str, CdiDevice] = {}
        for path, (_, devices) in self._read.items():
            if os.path.dirname(path) != str(root):  # noqa: PTH120 - thousands of names, no files
                continue
            for name, paths in devices.items():
                earlier = device_of.get(name)
                if earlier is not None and earlier.spec:
                    self._report_problem(
                        "two CDI specs name the same device: it is ignored",
                        device=name,
                        path=path,
                        other=earlier.spec,
                    )
                device_of[name] = CdiDevice(paths, path) if earlier is None else CdiDevice((), "")
        return device_of

    def _open(self, path: str) -> _Devices:
        try:
            return _devices(_content(path))
        except (OSError, ValueError, RecursionError) as error:
            self._report_problem("cannot read a CDI spec", path=path, err=str(error))
            return {}


def _stamp(path: str) -> _Stamp | None:
    try:
        file = os.stat(path)  # noqa: PTH116 - called for each file at each lookup
    except OSError:
        return None
    return (file.st_mtime_ns, file.st_size, file.st_ino) if modes.S_ISREG(file.st_mode) else None


def _content(path: str) -> object:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    text = data.decode()
    return json.loads(text) if path.endswith(".json") else read_yaml(text)


def _devices(spec: object) -> _Devices:
    """Return the host paths of each device of a spec.

    Raises:
        ValueError: The value is not a CDI spec.
    """
    kind, devices = (spec.get("kind"), spec.get("devices")) if isinstance(spec, dict) else (None, None)
    if not isinstance(kind, str) or not all(kind.partition("/")) or not isinstance(devices, list):
        raise ValueError("it has no kind such as 'vendor.com/class', or no list of devices")
    device_of: dict[str, tuple[str, ...]] = {}
    for device in _dicts(devices, _MOST_DEVICES):
        name = device.get("name")
        if isinstance(name, str) and name:
            device_of[f"{kind}={name}"] = _paths(device.get("containerEdits"))
    return device_of


def _paths(edits: object) -> tuple[str, ...]:
    if not isinstance(edits, dict):
        return ()
    nodes = [node.get("hostPath") or node.get("path") for node in _dicts(edits.get("deviceNodes"))]
    cards = [card.get("hostInterfaceName") for card in _dicts(edits.get("netDevices"))]
    paths = [node for node in nodes if isinstance(node, str) and node.startswith("/")]
    paths += [f"/sys/class/net/{card}" for card in cards if isinstance(card, str) and card]
    return tuple(dict.fromkeys(paths))


def _dicts(value: object, most: int = _MOST_NODES) -> list[dict[str, object]]:
    return [item for item in value[:most] if isinstance(item, dict)] if isinstance(value, list) else []
