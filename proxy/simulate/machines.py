"""The machines of the command line: described in JSON files, as sysfs trees, or this one; and their devices.

The file of simulated device plugins gives the devices that every machine has, by resource::

    nvidia.com/gpu:
      - {id: gpu0, numa: [0]}
      - {id: gpu1, numa: [1], healthy: false}
      - {id: gpu2}                              # near no NUMA node, or unknown
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from proxy.allocation.devices.state import RegisteredDevice
from proxy.model.errors import InputError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.phrases import cpus as named
from proxy.model.phrases import numa_nodes_text
from proxy.simulate.documents import Document, documents, name_of, read_bytes
from proxy.topology.description import load_machine
from proxy.topology.facts import section
from proxy.topology.reader import read_machine

MOST_MACHINES = 100_000

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_KEYS = {"id", "numa", "healthy"}


def load_plugins(path: Path) -> dict[str, dict[str, RegisteredDevice]]:
    """Read the devices of every machine, by resource and id.

    Raises:
        InputError: The file is not of that form; one line, with the line.
    """
    read_documents = documents(read_bytes(path), name_of(path))
    if len(read_documents) != 1 or not isinstance(read_documents[0].value, dict):
        raise InputError(
            f"cannot read the devices of {name_of(path)}: it must be one mapping of resources to devices"
        )
    document = read_documents[0]
    plugins: dict[str, dict[str, RegisteredDevice]] = {}
    for resource, listed in read_documents[0].value.items():
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
    plugins: Mapping[str, Mapping[str, RegisteredDevice]], machines: list[NamedMachine], path: Path
) -> None:
    """Check the devices against the machines.

    Raises:
        InputError: A device is near to a node that a machine does not have.
    """
    for machine in machines:
        nodes = Mask(machine.machine.node_by_id)
        for resource, devices in plugins.items():
            for device in devices.values():
                if device.nodes is not None and not device.nodes <= nodes:
                    raise InputError(
                        f"cannot use the devices of {name_of(path)}: {resource} {device.id} is near "
                        f"{numa_nodes_text(device.nodes)}, and {machine.name} has nodes {nodes}"
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


@dataclass(frozen=True, slots=True)
class NamedMachine:
    """A machine and its name."""

    name: str
    machine: Machine


def described_machines(paths: Iterable[str]) -> list[NamedMachine]:
    """Read machine descriptions.

    Args:
        paths: ``FILE`` or ``NAME=FILE``; without a name the file's name without its ending is taken.

    Raises:
        InputError: A file cannot be read or does not describe a possible machine; one line.
    """
    machines: list[NamedMachine] = []
    for path_text in paths:
        name, sign, file = path_text.partition("=")
        if not sign or "/" in name or Path(path_text).exists():
            name, file = Path(path_text).stem, path_text
        if not name or not file:
            raise InputError(f"cannot use the machine {path_text!r}: write FILE or NAME=FILE")
        machine = load_machine(Path(file))
        _check_plausible(machine, file)
        machines.append(NamedMachine(name, machine))
    return machines


def sysfs_machine(root: Path, procfs: Path | None) -> NamedMachine:
    """Read the machine of a sysfs tree.

    Raises:
        InputError: The tree holds no machine.
    """
    return NamedMachine("machine", read_machine(root, procfs))


def copies(machines: Sequence[NamedMachine], count: int) -> list[NamedMachine]:
    """Return the machines of each kind, ``NAME-1`` and so on if there are several.

    Raises:
        InputError: Two machines would have one name, or there would be too many.
    """
    if len(machines) * count > MOST_MACHINES:
        raise InputError(f"cannot simulate {len(machines) * count} machines: at most {MOST_MACHINES}")
    result = [
        NamedMachine(f"{named.name}-{number}" if count > 1 else named.name, named.machine)
        for named in machines
        for number in range(1, count + 1)
    ]
    names = [named.name for named in result]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise InputError(f"cannot simulate: two machines are named {repeated} (use NAME=FILE)")
    return result


def _check_plausible(machine: Machine, file: str) -> None:
    """Reject a description that a real machine can only have by mistake.

    ``serve`` works with a machine whose firmware reports such things (it has no other); a description is
    meant to answer what would happen, and no answer about such a machine could be trusted.
    """
    if section(machine.extra, "numa").get("claimed"):
        raise _implausible(file, f"NUMA nodes overlap: {_overlap(machine)}")
    without_node = machine.online - machine.cpus_of(Mask(machine.node_by_id))
    if without_node:
        raise _implausible(file, f"{named(without_node)} in no NUMA node")
    for node in machine.nodes:
        pages = sum(kib * counts.nr for kib, counts in (node.hugepages or {}).items()) << 10
        if node.mem_bytes is not None and pages > node.mem_bytes:
            raise _implausible(
                file, f"node {node.id}: huge pages of {pages} bytes, but memory of {node.mem_bytes} bytes"
            )


def _implausible(file: str, cause: str) -> InputError:
    return InputError(f"cannot use the machine description {file}: {cause}")


def _overlap(machine: Machine) -> str:
    claimed = section(machine.extra, "numa").get("claimed")
    assert isinstance(claimed, dict)
    sets = [(node, CpuSet.parse(str(cpus))) for node, cpus in claimed.items()]
    for at, (node, cpus) in enumerate(sets):
        for other, others in sets[at + 1 :]:
            if cpus & others:
                return f"CPUs {cpus & others} are in node {node} and in node {other}"
    return "their CPUs are not those of the rows"
