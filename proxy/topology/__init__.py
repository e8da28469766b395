"""sysfs to ``Machine``, and back to people: the only reader of sysfs, from a root path given to it."""

from proxy.topology.build import described
from proxy.topology.description import load_machine, machine_from_json
from proxy.topology.facts import machine_to_json
from proxy.topology.picture import render
from proxy.topology.reader import read_machine
from proxy.topology.sysfs_tree import write_sysfs

__all__ = [
    "described",
    "load_machine",
    "machine_from_json",
    "machine_to_json",
    "read_machine",
    "render",
    "write_sysfs",
]
