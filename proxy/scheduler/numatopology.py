"""Read a Numatopology of Volcano (nodeinfo.volcano.sh/v1alpha1).

See volcano-sh/apis v1.12 pkg/apis/nodeinfo/v1alpha1/numatopo_types.go. A number in ``cpuDetail`` that is 0 is
left out of the object. Core ids are unique within a socket only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from proxy.model.idset import CpuSet
from proxy.model.quantity import parse_quantity
from proxy.pools.go_json import Fields
from proxy.pools.topology_keys import NAMESPACE_LIMIT
from proxy.scheduler.agent_policies import read_annotation
from proxy.scheduler.resource_topology import MOST_CPUS, CpuRows, namespaces_of

POD_ALLOCATIONS = "podAllocations"


class NumatopologyFacts(Struct, frozen=True):
    """The facts of a Numatopology.

    Attributes:
        cpus: Id, core, socket and NUMA node of each CPU, ascending by id.
        free: CPUs that are free, with those of ``reserve``.
        cpu_policy, policy: Of the CPU manager and of the topology manager.
        reserve: How many CPUs kubelet reserves; it chooses them itself.
        shown: CPUs of the pods that the object lists, by uid; None if it lists no pods at all.
        policies: The rules of the node that topoproxy's agent publishes, by name.
        namespaces: The namespaces of the pods, by uid, if one of these rules needs them.
    """

    cpus: CpuRows
    free: CpuSet
    cpu_policy: str = ""
    policy: str = ""
    reserve: int = 0
    shown: Mapping[str, CpuSet] | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    namespaces: Mapping[str, str] = field(default_factory=dict)


def read_numatopology(raw: Mapping[str, Any]) -> NumatopologyFacts:
    """Read the object.

    Raises:
        ValueError: A field has a wrong value; the text names it.
    """
    spec = Fields(raw.get("spec"), "spec")
    policies = Fields(spec.get("policies"), "policies")
    cpus = _cpus(spec.get("cpuDetail"))
    cpu = Fields(Fields(spec.get("numares"), "numares").get("cpu"), "numares.cpu")
    reserved = Fields(spec.get("resReserved"), "resReserved").get("cpu")
    reserve = 0 if reserved is None else -(-parse_quantity(reserved, milli=True) // 1000)
    if reserve < 0:
        raise ValueError("resReserved.cpu is negative")
    rules = read_annotation(Fields(raw.get("metadata"), "metadata").get("annotations"))
    return NumatopologyFacts(
        cpus,
        CpuSet.parse(cpu.text("allocatable")),
        policies.text("CPUManagerPolicy"),
        policies.text("TopologyManagerPolicy"),
        reserve,
        _shown(spec) if spec.get(POD_ALLOCATIONS) is not None else None,
        rules,
        namespaces_of(spec.objects(POD_ALLOCATIONS)) if NAMESPACE_LIMIT in rules else {},
    )


def _cpus(raw: object) -> CpuRows:
    if not isinstance(raw, dict) or not raw:
        raise ValueError("cpuDetail names no CPU")
    if len(raw) > MOST_CPUS:
        raise ValueError(f"cpuDetail names {len(raw)} CPUs; at most {MOST_CPUS} are read")
    return _rows(msgspec.json.encode(raw))


@functools.lru_cache(maxsize=64)
def _rows(text: bytes) -> CpuRows:
    """Read the CPUs; cached: most nodes of a cluster have the same, and each pod updates the object."""
    rows = []
    for name, value in msgspec.json.decode(text).items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 6):
            raise ValueError(f"cpuDetail: {name!r:.40} is not the id of a CPU")
        where = Fields(value, f"cpuDetail {name}")
        rows.append((int(name), where.number("core"), where.number("socket"), where.number("numa")))
    if any(min(row) < 0 for row in rows):
        raise ValueError("cpuDetail: a number is negative")
    return tuple(sorted(rows))


def _shown(spec: Fields) -> dict[str, CpuSet]:
    shown: dict[str, CpuSet] = {}
    for pod in spec.objects(POD_ALLOCATIONS):
        cpus = CpuSet()
        for container in pod.objects("containerAllocations"):
            text = Fields(container.get("allocations"), "allocations").text("cpu")
            cpus |= CpuSet.parse(text)
        shown[pod.text("uid")] = cpus
    return shown
