"""The topology of CPUs: cAdvisor's machine description in, counts and rows out.

The description is converted to a machine file and read by the code that reads machine files; the answer is
what the allocators see of it. topoproxy names sockets and caches by their lowest CPU, kubelet by the reported
numbers, so the names are converted to those numbers before the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from proxy.allocation.cpu_topology import CpuTopology, Units
from proxy.model.errors import TopologyError
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.topology.description import machine_from_json
from tests.conformance.cases import Case, Outcome, Topologies

_COLUMNS = ("cpu", "core", "package", "llc", "numa", "core_id", "package_id")


def check(case: Case, _: Topologies) -> Outcome:
    fails = case.optional("error", bool, default=False)
    expected: object = "refused" if fails else case.value("expected", dict)
    try:
        machine = machine_from_json(_described(case))
    except TopologyError:
        return Outcome(expected, "refused")
    got = _seen(machine)
    if isinstance(expected, dict):
        expected = {"counts": dict(expected["counts"]), "cpus": sorted(expected["cpus"])}
    return Outcome(expected, got)


def _described(case: Case) -> dict[str, object]:
    """Describe the machine of a case as our machine files do."""
    cores = [
        {"node": node["id"], **core}
        for node in case.optional("nodes", list, [])
        for core in node.get("cores") or ()
    ]
    sockets = _groups((core["socket"], core) for core in cores)
    caches = _groups((core["uncore"][0], core) for core in cores if core.get("uncore"))
    nodes = _groups((core["node"], core) for core in cores)
    rows = [
        [
            cpu,
            min(core["threads"]),
            min(sockets[core["socket"]]),
            min(caches[core["uncore"][0]]) if core.get("uncore") else None,
            core["node"],
            core["id"],
            core["socket"],
        ]
        for core in cores
        for cpu in core["threads"]
    ]
    reported = {} if case.value("num_cores_reported", int) else {"online": ""}
    return {
        "cpus": reported,
        "cpu_columns": list(_COLUMNS),
        "cpu_rows": rows,
        "cores": {str(min(c["threads"], default="none")): _list(c["threads"]) for c in cores},
        "llc": {
            str(min(cpus)): {"cpus": _list(cpus), "level": 3, "id": name} for name, cpus in caches.items()
        },
        "numa": {"nodes": [{"id": node, "cpus": _list(cpus)} for node, cpus in sorted(nodes.items())]},
    }


def _groups(cores: Iterator[tuple[int, Mapping[str, Any]]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name, core in cores:
        found.setdefault(name, []).extend(core["threads"])
    return {name: cpus for name, cpus in found.items() if cpus}


def _list(cpus: list[int]) -> str:
    return str(CpuSet(cpus))


def _seen(machine: Machine) -> dict[str, object]:
    """Write down what the allocators see, with the names that the case has."""
    topo = CpuTopology.of(machine)
    counts = topo.counts
    units = (topo.cores, topo.sockets, topo.nodes, topo.uncores)
    rows = []
    for cpu in topo.cpus:
        core, socket, node, uncore = (_unit(each, cpu) for each in units)
        number = machine.by_id[socket].package_id
        cache = machine.caches.get(uncore)
        rows.append([cpu, core, number, node, number if cache is None else cache.id])
    return {
        "counts": {
            "cpus": counts.cpus,
            "cores": counts.cores,
            "sockets": counts.sockets,
            "numa_nodes": counts.numa_nodes,
            "uncore_caches": counts.uncore_caches,
        },
        "cpus": rows,
    }


def _unit(units: Units, cpu: int) -> int:
    return next(name for name, bits in units.items() if bits >> cpu & 1)
