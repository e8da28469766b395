"""Generated fleets: nodes of some shapes, and pods of a mix that request a share of the CPUs of all nodes.

A document of kind ``Fleet`` says how many nodes of which shape there are, and which pods come in which
proportion (docs/simulate-cluster.md). Everything random comes from one random number generator.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from proxy.allocation.devices.state import RegisteredDevice
from proxy.config import Config, check_against
from proxy.config.schema import CpuManagerPolicy, ReserveConfig
from proxy.executor.rules_from_config import node_rules
from proxy.model.admission import AdmissionRules
from proxy.model.errors import ConfigError, InputError, TopologyError
from proxy.model.idset import Mask
from proxy.model.machine import Machine
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import MEMORY
from proxy.pools.pod_fields import (
    CPU,
    FieldError,
    below,
    read_amounts,
    read_list,
    read_name,
    read_object,
    shown,
)
from proxy.pools.pod_spec import pod_spec
from proxy.simulate import MAX_PODS
from proxy.simulate.documents import Document
from proxy.simulate.machines import MOST_MACHINES
from proxy.simulate.manifests import MOST_PODS
from proxy.simulate.nodes import SimulatedNode, reserve_of, simulated_node_of
from proxy.simulate.pods import PodTemplate, SimulatedPod, pod_template_of
from proxy.topology.regular_machine import regular_machine

KIND = "Fleet"
Choice = TypeVar("Choice", bound=enum.StrEnum)
_NODE_KEYS = (
    "name", "count", "sockets", "numaNodes", "cpus", "threadsPerCore", "memory", "devices",
    "reservedCPUs", "maxPods", "cpuManagerPolicy", "topologyManagerPolicy", "topologyManagerScope",
)  # fmt: skip
_POD_KEYS = ("name", "share", "resources", "labels", "annotations")
_KEYS = ("apiVersion", "kind", "metadata", "nodes", "pods", "fill", "count")


@dataclass(frozen=True, slots=True)
class PodShape:
    """A kind of pod in a mix.

    Attributes:
        pod_template: The template of its copies.
        share: How often such a pod arrives, compared with the other kinds.
    """

    pod_template: PodTemplate
    share: float


@dataclass(frozen=True, slots=True)
class Mix:
    """The pods to generate.

    Attributes:
        shapes: Their kinds.
        fill: The share of the CPUs of all nodes that they request together.
        count: How many there are; 0: as many as ``fill`` allows.
    """

    shapes: tuple[PodShape, ...]
    fill: float
    count: int


def is_fleet(value: object) -> bool:
    """Return whether a document describes a fleet."""
    return isinstance(value, dict) and value.get("kind") == KIND


def read_fleet(document: Document) -> tuple[list[SimulatedNode], Mix | None]:
    """Read a document of kind ``Fleet``: empty nodes, and the pods to generate.

    Raises:
        InputError: A field has an invalid value; one line with file, line and field.
    """
    try:
        raw = read_object(document.value, "")
        _known(raw, _KEYS, "")
        simulated_nodes: list[SimulatedNode] = []
        for at, entry in enumerate(read_list(raw.get("nodes"), "nodes")):
            simulated_nodes += _nodes(read_object(entry, f"nodes[{at}]"), f"nodes[{at}]", at)
        return simulated_nodes, _mix(raw)
    except FieldError as error:
        raise InputError(f"cannot read the fleet in {document.where()}: {error}") from None


def pods_of(mix: Mix, milli: int, chance: random.Random, before: int = 0) -> Iterator[SimulatedPod]:
    """Generate the pods of a mix.

    Args:
        mix: Their kinds, and how many to generate.
        milli: The CPUs of all nodes together, in thousandths.
        chance: Decides which kind comes next.
        before: How many pods there are already; numbers continue from there.
    """
    weights = list(itertools.accumulate(shape.share for shape in mix.shapes))
    requested, most = 0, mix.count or MOST_PODS
    for number in range(before + 1, before + most + 1):
        pod_template = chance.choices(mix.shapes, cum_weights=weights)[0].pod_template
        requested += pod_template.needs.get(CPU, 0)
        if not mix.count and requested > mix.fill * milli:
            return
        yield pod_template.copy(f"{pod_template.spec.name}-{number}", number)


def _nodes(raw: Mapping[str, Any], at: str, number: int) -> Iterator[SimulatedNode]:
    _known(raw, _NODE_KEYS, at)
    name = read_name(raw.get("name") or f"node{number + 1}", f"{at}.name", dots=True)
    count = _whole(raw, "count", at, 1, MOST_MACHINES)
    config, machine, devices = _config(raw, at), _machine(raw, at), _devices(raw, at)
    cpus = len(machine.online)
    if (config.reserved_cpu_amount or 0) >= cpus:
        raise FieldError(f"{at}.reservedCPUs", f"reserves all {cpus} CPUs; none are left for containers")
    spread = _spread(devices, len(machine.nodes))
    try:
        check_against(config, machine)
        node = replace(node_rules(config, machine, spread), admission=AdmissionRules())
    except (ConfigError, TopologyError) as error:
        raise FieldError(at, str(error)) from None
    reserve = reserve_of(config)
    most = _whole(raw, "maxPods", at, MAX_PODS, 1_000_000)
    for index in range(1, count + 1):
        yield simulated_node_of(f"{name}-{index}", node, reserve, most)


def _machine(raw: Mapping[str, Any], at: str) -> Machine:
    sockets = _whole(raw, "sockets", at, 1, 64)
    nodes = _whole(raw, "numaNodes", at, 2, 1024)
    threads = _whole(raw, "threadsPerCore", at, 2, 8)
    cpus = _whole(raw, "cpus", at, 64, 65536)
    if nodes % sockets:
        raise FieldError(f"{at}.numaNodes", f"{nodes} cannot be divided by {sockets} sockets")
    if cpus % (nodes * threads):
        raise FieldError(
            f"{at}.cpus", f"{cpus} cannot be divided by {nodes} NUMA nodes and {threads} threads"
        )
    memory = read_amounts({MEMORY: raw.get("memory", "256Gi")}, at)[MEMORY]
    try:
        return regular_machine(sockets, nodes // sockets, cpus // nodes // threads, threads, memory // nodes)
    except TopologyError as error:
        raise FieldError(at, str(error)) from None


def _config(raw: Mapping[str, Any], at: str) -> Config:
    reserved = _whole(raw, "reservedCPUs", at, 1, 65536)
    return replace(
        Config(),
        cpu_manager_policy=_choice(raw, "cpuManagerPolicy", CpuManagerPolicy, CpuManagerPolicy.STATIC, at),
        topology_manager_policy=_choice(
            raw, "topologyManagerPolicy", TopologyPolicy, TopologyPolicy.SINGLE_NUMA_NODE, at
        ),
        topology_manager_scope=_choice(raw, "topologyManagerScope", Scope, Scope.CONTAINER, at),
        kube_reserved=ReserveConfig(cpu=1000 * reserved),
    )


def _devices(raw: Mapping[str, Any], at: str) -> dict[str, int]:
    amounts = read_amounts(raw.get("devices"), f"{at}.devices")
    for name, amount in amounts.items():
        if "/" not in name or amount > 4096:
            raise FieldError(below(f"{at}.devices", name), "is not DOMAIN/NAME, or more than 4096")
    return amounts


def _spread(devices: Mapping[str, int], nodes: int) -> dict[str, dict[str, RegisteredDevice]]:
    """Distribute the devices of each kind over the NUMA nodes in turn, in blocks."""
    return {
        resource: {
            f"d{index}": RegisteredDevice(f"d{index}", Mask([index * nodes // amount]))
            for index in range(amount)
        }
        for resource, amount in devices.items()
    }


def _mix(raw: Mapping[str, Any]) -> Mix | None:
    entries = read_list(raw.get("pods"), "pods")
    if not entries:
        return None
    shapes = tuple(
        _shape(read_object(entry, f"pods[{at}]"), f"pods[{at}]", at) for at, entry in enumerate(entries)
    )
    fill = _number(raw, "fill", "", 0.9)
    count = _whole(raw, "count", "", 0, MOST_PODS, least=0)
    if not count and not any(shape.pod_template.needs.get(CPU) for shape in shapes):
        raise FieldError("count", "is missing, and no pod requests CPUs that could fill the nodes")
    return Mix(shapes, fill, count)


def _shape(raw: Mapping[str, Any], at: str, number: int) -> PodShape:
    _known(raw, _POD_KEYS, at)
    name = read_name(raw.get("name") or f"pod{number + 1}", f"{at}.name", dots=True)
    metadata = {"name": name, "labels": raw.get("labels"), "annotations": raw.get("annotations")}
    containers = [{"name": "main", "resources": raw.get("resources")}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    try:
        return PodShape(pod_template_of(pod_spec(pod, name)), _number(raw, "share", at, 1.0))
    except InputError as error:
        raise FieldError(at, str(error)) from None


def _known(raw: Mapping[str, Any], keys: Sequence[str], at: str) -> None:
    for name in raw:
        if name not in keys:
            where = below(at, name) if at else name
            raise FieldError(where, f"is not known, only {', '.join(keys)} are")


def _whole(raw: Mapping[str, Any], key: str, at: str, default: int, most: int, *, least: int = 1) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not least <= value <= most:
        cause = f"{shown(value)} is not a whole number from {least} to {most}"
        raise FieldError(f"{at}.{key}".lstrip("."), cause)
    return value


def _number(raw: Mapping[str, Any], key: str, at: str, default: float) -> float:
    value = raw.get(key, default)
    if type(value) not in (int, float) or not 0 < value <= 1_000_000:
        cause = f"{shown(value)} is not a number above 0, and at most 1000000"
        raise FieldError(f"{at}.{key}".lstrip("."), cause)
    return float(value)


def _choice(raw: Mapping[str, Any], key: str, kind: type[Choice], default: Choice, at: str) -> Choice:
    value = raw.get(key, default)
    if value not in tuple(kind):
        raise FieldError(f"{at}.{key}", f"{shown(value)} is not one of {', '.join(kind)}")
    return kind(value)
