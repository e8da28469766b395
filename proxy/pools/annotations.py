"""Reading a pod's annotations about its CPUs.

See Koordinator v1.8.0 apis/extension/numa_aware.go and Volcano v1.12
pkg/scheduler/plugins/numaaware/numaaware.go.

Each reader takes the annotations of a pod and returns a value and a defect that says what is wrong; it never
raises. A faulty annotation counts as absent; the caller then rejects a pod that requested CPUs of its own,
and lets any other run on its pool. An annotation that names a CPU or NUMA node that the machine cannot have
is faulty, so this module never returns such a set.

To read one more annotation, add a reader and a line in the table ``_READERS``: it names the annotation and
the fields of ``Pod`` that follow from it. The ledger keeps these fields without a change elsewhere.

Two spellings are read. Koordinator's code writes the NUMA nodes of a pod that shares CPUs as
``numaNodeResources``; its document calls them ``cpuSharedPools``, with a socket and a node each. The second
is read if the first has no amount of CPU.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct, field

from proxy.model.defects import DefectKind, InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NumaExclusive, NumaPolicy
from proxy.model.machine import ANY_MACHINE, Bounds
from proxy.model.options import TopologyPolicy
from proxy.model.quoting import printable, quoted
from proxy.pools.go_json import LARGEST_ANNOTATION, LARGEST_STATUS, Fields, amount

RESOURCE_STATUS = "scheduling.koordinator.sh/resource-status"
RESOURCE_SPEC = "scheduling.koordinator.sh/resource-spec"
NUMA_TOPOLOGY_SPEC = "scheduling.koordinator.sh/numa-topology-spec"
VOLCANO_POLICY = "volcano.sh/numa-topology-policy"
VOLCANO_DECISION = "volcano.sh/topology-decision"
CHOSEN_BY, THIS_NODE = "chosenBy", "topoproxy"
"""A key of ``resource-status``, and its value if the cluster agent wrote the annotation: the CPUs were chosen
on the node, and no scheduler named them. A later sandbox is decided as if the annotation were not there."""
BATCH_CPU = "kubernetes.io/batch-cpu"
"""Milli-CPUs that BE pods request, as a plain number."""

NO_FAULT = InputDefect("")
Annotations = Mapping[str, str]
PodFields = tuple[Mapping[str, object], tuple[InputDefect, ...]]
"""Fields of ``Pod`` by name, and what is wrong with the annotations that they follow from."""
E = TypeVar("E", bound=enum.StrEnum)
V = TypeVar("V")


class ResourceSpec(Struct, frozen=True):
    """How a pod wants its CPUs chosen.

    Attributes:
        required: A policy that must be followed; otherwise the pod is rejected.
        preferred: A policy that is followed if possible.
        exclusive: Which pods it prefers not to share cores or NUMA nodes with.
    """

    required: BindPolicy = BindPolicy.NONE
    preferred: BindPolicy = BindPolicy.NONE
    exclusive: ExclusivePolicy = ExclusivePolicy.NONE


class NodeShare(Struct, frozen=True):
    """The amounts that a pod was assigned on one NUMA node.

    Attributes:
        node: The node's id.
        cpu, batch_cpu: Milli-CPUs.
        others: Other resources as they are written.
    """

    node: int
    cpu: int = 0
    batch_cpu: int = 0
    others: Mapping[str, str | float] = field(default_factory=dict)


class ResourceStatus(Struct, frozen=True):
    """The CPUs and NUMA nodes that a scheduler assigned to a pod.

    Attributes:
        text: The CPU list as written; empty if there is none.
        cpus: The CPU list as a set.
        shares: Amounts by NUMA node, in their order.
        pools: NUMA nodes that the document's ``cpuSharedPools`` names, in their order.
    """

    text: str = ""
    cpus: CpuSet = field(default_factory=CpuSet)
    shares: tuple[NodeShare, ...] = ()
    pools: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes whose pools the pod is bound to, in their order; empty if it is bound to none.

        All listed nodes count once any of them gives CPU (``DecisionRow``, rows 3 and 4).
        """
        if any(share.cpu != 0 or share.batch_cpu > 0 for share in self.shares):
            return tuple(share.node for share in self.shares)
        return self.pools


class NumaSpec(Struct, frozen=True):
    """How a pod wants its resources aligned.

    Attributes:
        policy: The NUMA policy; NONE leaves it to the node.
        exclusive: Whether it keeps apart from pods that span nodes; REQUIRED by default with a policy.
    """

    policy: NumaPolicy = NumaPolicy.NONE
    exclusive: NumaExclusive = NumaExclusive.NONE


class VolcanoPreferences(Struct, frozen=True):
    """The preferences of Volcano's scheduler; they are followed if possible.

    Attributes:
        policy: The policy; None if none is given.
        nodes: NUMA nodes that it chose; None if it chose none.
        cpu: Milli-CPUs by node.
    """

    policy: TopologyPolicy | None = None
    nodes: Mask | None = None
    cpu: Mapping[int, int] = field(default_factory=dict)


class UnknownValueError(ValueError):
    """A text is not one of the permitted values."""


class CpuListError(ValueError):
    """A text is not a list of CPUs of the machine, or an id is not a NUMA node of it."""


_KINDS: Mapping[type[Exception], DefectKind] = {
    UnknownValueError: DefectKind.POLICY,
    CpuListError: DefectKind.CPU_LIST,
}


def resource_spec(annotations: Annotations) -> tuple[ResourceSpec, InputDefect]:
    """Read ``resource-spec``."""
    return _read(annotations, RESOURCE_SPEC, ResourceSpec(), _spec)


def resource_status(
    annotations: Annotations, bounds: Bounds = ANY_MACHINE
) -> tuple[ResourceStatus, InputDefect]:
    """Read ``resource-status``; ``bounds`` are the CPUs and NUMA nodes that it may name."""
    return _read(
        annotations, RESOURCE_STATUS, ResourceStatus(), lambda fields: _status(fields, bounds), LARGEST_STATUS
    )


def numa_topology_spec(annotations: Annotations) -> tuple[NumaSpec, InputDefect]:
    """Read ``numa-topology-spec``."""
    return _read(annotations, NUMA_TOPOLOGY_SPEC, NumaSpec(), _numa)


def volcano_preferences(
    annotations: Annotations, bounds: Bounds = ANY_MACHINE
) -> tuple[VolcanoPreferences, tuple[InputDefect, ...]]:
    """Read Volcano's two annotations; a fault in one does not affect the other.

    Args:
        annotations: The annotations of the pod.
        bounds: The NUMA nodes that may be named.
    """
    policy, policy_defect = None, NO_FAULT
    text = annotations.get(VOLCANO_POLICY, "")
    try:
        policy = TopologyPolicy(text) if text else None
    except ValueError:
        message = printable(
            f"annotation {VOLCANO_POLICY}: {quoted(text)} is not one of {', '.join(TopologyPolicy)}"
        )
        policy_defect = InputDefect(message, DefectKind.POLICY)
    cpu, decision_defect = _read(
        annotations, VOLCANO_DECISION, dict[int, int](), lambda fields: _decision(fields, bounds)
    )
    nodes = Mask(cpu) if cpu else None
    return VolcanoPreferences(policy, nodes, cpu), tuple(
        fault for fault in (policy_defect, decision_defect) if fault
    )


class AnnotationReader(Struct, frozen=True):
    """What follows for a pod from one annotation, or from some that belong together.

    Attributes:
        keys: The annotations.
        read: Returns the fields of ``Pod`` that they set, by name, and what is wrong with them.
        is_decisive: Whether a pod with a faulty annotation gets no CPUs of its own.
    """

    keys: tuple[str, ...]
    read: Callable[[Annotations, Bounds], PodFields]
    is_decisive: bool = True


def _status_fields(annotations: Annotations, bounds: Bounds) -> PodFields:
    status, defect = resource_status(annotations, bounds)
    return {"cpuset": status.cpus or None, "nodes": Mask(status.nodes) if status.nodes else None}, (defect,)


def _spec_fields(annotations: Annotations, bounds: Bounds) -> PodFields:
    spec, defect = resource_spec(annotations)
    return {
        "bind_required": spec.required,
        "bind_preferred": spec.preferred,
        "exclusive": spec.exclusive,
    }, (defect,)


def _numa_fields(annotations: Annotations, bounds: Bounds) -> PodFields:
    spec, defect = numa_topology_spec(annotations)
    return {"aligned": spec.policy, "numa_exclusive": spec.exclusive}, (defect,)


def _volcano_fields(annotations: Annotations, bounds: Bounds) -> PodFields:
    preferences, defects = volcano_preferences(annotations, bounds)
    return {"volcano_policy": preferences.policy, "volcano_nodes": preferences.nodes}, defects


_READERS = (
    AnnotationReader((RESOURCE_STATUS,), _status_fields),
    AnnotationReader((RESOURCE_SPEC,), _spec_fields),
    AnnotationReader((NUMA_TOPOLOGY_SPEC,), _numa_fields),
    AnnotationReader((VOLCANO_POLICY, VOLCANO_DECISION), _volcano_fields, is_decisive=False),
)
ANNOTATION_KEYS = tuple(key for reader in _READERS for key in reader.keys)
"""All annotations that are read."""


def annotation_fields(
    annotations: Annotations, bounds: Bounds = ANY_MACHINE
) -> tuple[dict[str, object], list[InputDefect]]:
    """Read all annotations of a pod.

    Args:
        annotations: The annotations of the pod.
        bounds: The CPUs and NUMA nodes that may be named.

    Returns:
        The fields of ``Pod`` that the annotations set, by name; and what is wrong with them. The first defect
        of a decisive annotation is marked as decisive.
    """
    fields: dict[str, object] = {}
    defects: list[InputDefect] = []
    has_decisive = False
    for reader in _READERS:
        values, faults = reader.read(annotations, bounds)
        fields.update(values)
        for fault in filter(None, faults):
            is_first = reader.is_decisive and not has_decisive
            has_decisive |= is_first
            defects.append(fault.as_decisive() if is_first else fault)
    return fields, defects


def _read(
    annotations: Annotations,
    key: str,
    absent: V,
    reader: Callable[[Fields], V],
    largest: int = LARGEST_ANNOTATION,
) -> tuple[V, InputDefect]:
    text = annotations.get(key)
    if not text:
        return absent, NO_FAULT
    try:
        return reader(Fields.parse(text, largest)), NO_FAULT
    except ValueError as error:
        kind = _KINDS.get(type(error), DefectKind.ANNOTATION)
        return absent, InputDefect(printable(f"annotation {key}: {error}"), kind)


def one_of(kind: type[E], text: str, name: str) -> E:
    """Return the enum value of a string; ``None`` is treated as an empty string.

    Raises:
        UnknownValueError: There is no such value; the message lists the values.
    """
    try:
        return kind("" if text == "None" else text)
    except ValueError:
        known = ", ".join(value for value in kind if value)
        raise UnknownValueError(f"{name} {quoted(text)} is not one of {known}") from None


def _spec(fields: Fields) -> ResourceSpec:
    def bind(name: str) -> BindPolicy:
        return one_of(BindPolicy, fields.text(name), name)

    exclusive = "preferredCPUExclusivePolicy"
    return ResourceSpec(
        bind("requiredCPUBindPolicy"),
        bind("preferredCPUBindPolicy"),
        one_of(ExclusivePolicy, fields.text(exclusive), exclusive),
    )


def _status(fields: Fields, bounds: Bounds) -> ResourceStatus:
    if fields.text(CHOSEN_BY) == THIS_NODE:
        return ResourceStatus()
    text = fields.text("cpuset")
    try:
        cpus = CpuSet.parse(text, bounds.cpus)
    except ValueError as error:
        raise CpuListError(f"cpuset: {error}") from None
    shares = tuple(_share(inner, bounds) for inner in fields.objects("numaNodeResources"))
    pools = tuple(_node(inner, bounds) for inner in fields.objects("cpuSharedPools"))
    return ResourceStatus(text, cpus, shares, tuple(dict.fromkeys(pools)))


def _share(fields: Fields, bounds: Bounds) -> NodeShare:
    resources = fields.amounts("resources")
    other_resources = {name: value for name, value in resources.items() if name not in ("cpu", BATCH_CPU)}
    return NodeShare(
        _node(fields, bounds),
        amount(resources, "cpu", milli=True),
        amount(resources, BATCH_CPU),
        other_resources,
    )


def _node(fields: Fields, bounds: Bounds) -> int:
    node = fields.number("node")
    if node < 0:
        raise ValueError(f"node {node} is not a NUMA node")
    return _on_machine(node, bounds, "")


def _on_machine(node: int, bounds: Bounds, where: str) -> int:
    try:
        bounds.nodes.require(node)
    except ValueError as error:
        raise CpuListError(f"{where}{error}") from None
    return node


def _numa(fields: Fields) -> NumaSpec:
    policy = one_of(NumaPolicy, fields.text("numaTopologyPolicy"), "numaTopologyPolicy")
    name = "singleNUMANodeExclusive"
    exclusive = one_of(NumaExclusive, fields.text(name), name)
    if policy and not exclusive:
        exclusive = NumaExclusive.REQUIRED
    return NumaSpec(policy, exclusive)


def _decision(fields: Fields, bounds: Bounds) -> dict[int, int]:
    cpu_by_node: dict[int, int] = {}
    numa = fields.fields("numa")
    for name in numa.names():
        if not (name.isascii() and name.isdigit() and len(name) < 6):
            raise ValueError(f"numa: {quoted(name)} is not a NUMA node")
        cpu_by_node[_on_machine(int(name), bounds, "numa: ")] = amount(numa.amounts(name), "cpu", milli=True)
    return cpu_by_node
