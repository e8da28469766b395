"""Converts a ``Machine`` to JSON with the field names of the machine facts (schema ``machine-facts/1``).

Sets are Linux lists, groups are named by their lowest online CPU, sizes are bytes. A value that the kernel
did not report is null, although ``Machine`` has a usable default for it (one package, node 0): the JSON
shows the values that were read, ``Machine`` contains the values that placement uses.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.model import schema_ids
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine, NumaNode
from proxy.topology.reader import pages_json

COLUMNS = ("cpu", "core", "package", "die", "cluster", "llc", "numa", "core_id", "package_id")
"""The columns of ``cpu_rows``: ``Cpu``'s attributes in order, its id under the name ``cpu``."""


def section(extra: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a part of ``Machine.extra`` that is an object; an empty object if the part is missing."""
    part = extra.get(name)
    return part if isinstance(part, dict) else {}


def has_packages(machine: Machine) -> bool:
    """Return whether the kernel reported packages; otherwise one package with all CPUs is our assumption."""
    missing = machine.extra.get("missing")
    return not (isinstance(missing, list) and "package siblings" in missing)


def has_nodes(machine: Machine) -> bool:
    """Return whether the kernel reported NUMA nodes; otherwise node 0 is our assumption."""
    return section(machine.extra, "numa").get("source", "sysfs") != "none"


def machine_to_json(machine: Machine) -> dict[str, object]:
    """Describe a machine as JSON-ready values (read back by ``machine_from_json``)."""
    packages = _lists(machine.packages) if has_packages(machine) else {}
    levels = {"cores": _lists(machine.cores), "packages": packages}
    levels |= {f"{level}s": _lists(machine.groups(level)) for level in ("die", "cluster")}
    threads = sorted({len(core) for core in machine.cores.values()})
    facts: dict[str, object] = {
        "schema": schema_ids.MACHINE,
        "cpus": _cpus(machine),
        "counts": _counts(machine, levels),
        "smt": {
            "control": None,
            "active": None,
            **section(machine.extra, "smt"),
            "threads_per_core": threads,
        },
        "cpu_columns": list(COLUMNS),
        "cpu_rows": _rows(machine),
        **levels,
        "llc": {
            str(name): {"cpus": str(cache.cpus), "level": cache.level, "id": cache.id, "size": cache.size}
            for name, cache in machine.caches.items()
        },
        "numa": _numa(machine) if has_nodes(machine) else _no_numa(machine),
    }
    return {**facts, **{key: value for key, value in machine.extra.items() if key not in facts}}


def _lists(groups: Mapping[int, CpuSet]) -> dict[str, str]:
    return {str(name): str(cpus) for name, cpus in groups.items()}


def _cpus(machine: Machine) -> dict[str, object]:
    reported = {
        "online_from": "file",
        "present": str(machine.present),
        "possible": str(machine.possible),
        "isolated": str(machine.isolated),
        "nohz_full": None,
        **section(machine.extra, "cpus"),
    }
    offline = machine.present - machine.online
    absent = machine.possible - machine.present
    return {"online": str(machine.online), **reported, "offline": str(offline), "absent": str(absent)}


def _counts(machine: Machine, levels: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    nodes = machine.nodes if has_nodes(machine) else ()
    return {
        "cpus": len(machine.cpus),
        **{name: len(groups) for name, groups in levels.items()},
        "llc_groups": len(machine.caches),
        "numa_nodes": len(nodes),
        "numa_nodes_with_cpus": sum(1 for cpus in _claimed(machine).values() if cpus) if nodes else 0,
    }


def _rows(machine: Machine) -> list[list[int | None]]:
    packages, nodes = has_packages(machine), has_nodes(machine)
    return [
        [
            cpu.id,
            cpu.core,
            cpu.package if packages else None,
            cpu.die,
            cpu.cluster,
            cpu.llc,
            cpu.numa if nodes else None,
            cpu.core_id,
            cpu.package_id,
        ]
        for cpu in machine.cpus
    ]


def _claimed(machine: Machine) -> dict[int, str]:
    """Return the CPUs of each node from its map; they differ from ``NumaNode.cpus`` if maps overlap."""
    claimed = section(section(machine.extra, "numa"), "claimed")
    return {node.id: str(claimed.get(str(node.id), node.cpus)) for node in machine.nodes}


def _numa(machine: Machine) -> dict[str, object]:
    claimed = _claimed(machine)
    by_use: dict[str, list[int]] = {"memory_only": [], "cpu_only": [], "empty": []}
    for node in machine.nodes:
        use = _use(bool(claimed[node.id]), node.mem_bytes)
        if use:
            by_use[use].append(node.id)
    ids = [node.id for node in machine.nodes]
    raw = {key: value for key, value in section(machine.extra, "numa").items() if key != "claimed"}
    rows = [node.distance for node in machine.nodes]
    symmetric: dict[str, object] = {}
    if all(rows):
        symmetric["distance_symmetric"] = rows == list(zip(*rows, strict=True))
    return {
        "source": "sysfs",
        **raw,
        "distance_ids": ids,
        **by_use,
        "sparse": ids != list(range(len(ids))),
        "overlapping": "claimed" in section(machine.extra, "numa"),
        **symmetric,
        "nodes": [_node(node, claimed[node.id]) for node in machine.nodes],
    }


def _use(has_cpus: bool, mem_bytes: int | None) -> str:
    """Return the use of a node by what it lacks; a node of unknown memory size counts as having memory."""
    if has_cpus:
        return "cpu_only" if mem_bytes == 0 else ""
    return "empty" if mem_bytes == 0 else "memory_only"


def _node(node: NumaNode, cpus: str) -> dict[str, object]:
    return {
        "id": node.id,
        "cpus": cpus,
        "mem_bytes": node.mem_bytes,
        "hugepages": pages_json(None if node.hugepages is None else dict(node.hugepages)),
        "distance": list(node.distance) or None,
    }


def _no_numa(machine: Machine) -> dict[str, object]:
    assumed = [_node(node, str(node.cpus)) for node in machine.nodes]
    return {"source": "none", "fallback": assumed[0], "nodes": []}
