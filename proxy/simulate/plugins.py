"""Simulated device plugins: which devices every machine has.

The file maps a resource to a list of devices::

    nvidia.com/gpu:
      - {id: gpu0, numa: [0]}
      - {id: gpu1, numa: [1], healthy: false}
      - {id: gpu2}                              # near to no NUMA node, or unknown
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Never

from proxy.allocation.devices.state import RegisteredDevice
from proxy.model.errors import InputError
from proxy.model.idset import Mask
from proxy.simulate.documents import Document, documents, read_bytes
from proxy.simulate.machines import Named

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_KEYS = {"id", "numa", "healthy"}


def load_plugins(path: Path) -> dict[str, dict[str, RegisteredDevice]]:
    """Read the devices of every machine, by resource and id.

    Raises:
        InputError: The file is not of that form; one line, with the line.
    """
    found = documents(read_bytes(path), str(path))
    if len(found) != 1 or not isinstance(found[0].value, dict):
        raise InputError(f"cannot read the devices of {path}: it must be one mapping of resources to devices")
    document = found[0]
    plugins: dict[str, dict[str, RegisteredDevice]] = {}
    for resource, listed in found[0].value.items():
        if not _NAME.fullmatch(resource):
            _fail(document, None, f"{resource!r} is not a name of a device resource, such as nvidia.com/gpu")
        if not isinstance(listed, list):
            _fail(document, None, f"{resource} must be a list of devices")
        devices = [_device(document, resource, entry) for entry in listed]
        plugins[resource] = {device.id: device for device in devices}
        if len(plugins[resource]) < len(devices):
            _fail(document, None, f"{resource} has two devices of one id")
    return plugins


def check_plugins(
    plugins: Mapping[str, Mapping[str, RegisteredDevice]], machines: list[Named], path: Path
) -> None:
    """Hold the devices against the machines.

    Raises:
        InputError: A device is near to a node that a machine does not have.
    """
    for named in machines:
        nodes = Mask(named.machine.node_by_id)
        for resource, devices in plugins.items():
            for device in devices.values():
                if device.nodes is not None and not device.nodes <= nodes:
                    raise InputError(
                        f"cannot use the devices of {path}: {resource} {device.id} is near to NUMA nodes "
                        f"{device.nodes}, and {named.name} has nodes {nodes}"
                    )


def _device(document: Document, resource: str, entry: object) -> RegisteredDevice:
    if not isinstance(entry, dict) or not entry.keys() <= _KEYS:
        _fail(document, entry, f"a device of {resource} is written as {{id: gpu0, numa: [0], healthy: true}}")
    name, numa, healthy = entry.get("id"), entry.get("numa"), entry.get("healthy", True)
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name:
        _fail(document, entry, f"a device of {resource} has no id")
    if not isinstance(healthy, bool):
        _fail(document, entry, f"{resource} {name}: healthy must be true or false")
    if numa is None:
        return RegisteredDevice(name, None, healthy)
    ids = numa if isinstance(numa, list) else [numa]
    if not all(type(node) is int and 0 <= node < Mask.LIMIT for node in ids):
        _fail(document, entry, f"{resource} {name}: numa must be a list of NUMA nodes such as [0], or null")
    return RegisteredDevice(name, Mask(ids), healthy)


def _fail(document: Document, entry: object, cause: str) -> Never:
    raise InputError(f"cannot read the devices of {document.where(entry)}: {cause}")
