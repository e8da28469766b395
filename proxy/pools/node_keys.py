"""Reading a node's labels and annotations (Koordinator v1.8.0 apis/extension/numa_aware.go).

Each reader returns a value and a problem as text, and never raises. If the spelling of a label differs
between Koordinator's code and its document, both are read, the code's first. Writers use the code's spelling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from msgspec import Struct, field, structs

from proxy.model.idset import CpuSet
from proxy.model.quoting import printable
from proxy.pools.annotations import E, one_of
from proxy.pools.go_json import Fields, amount, amounts, load

PREFIXES = ("node.koordinator.sh/", "node.koordator.sh/")
"""Prefixes of all labels and annotations of nodes that are read here; the second is the document's."""
BIND_POLICY = ("node.koordinator.sh/cpu-bind-policy", "node.koordator.sh/cpubind-policy")
"""Spellings of a label: the code's, then the document's."""
NUMA_STRATEGY = ("node.koordinator.sh/numa-allocate-strategy",)
NUMA_POLICY = (
    "node.koordinator.sh/numa-topology-policy",
    "node.koordinator.sh/numa-topology-alignment-policy",
)
NUMA_RESERVATION = "node.koordinator.sh/enable-numa-reservation"
RESERVATION = "node.koordinator.sh/reservation"
SYSTEM_QOS = "node.koordinator.sh/system-qos-resource"
AMPLIFICATION = "node.koordinator.sh/resource-amplification-ratio"
RAW_ALLOCATABLE = "node.koordinator.sh/raw-allocatable"
PLACEMENT_KEYS = frozenset((*BIND_POLICY, *NUMA_STRATEGY, *NUMA_POLICY, RESERVATION, SYSTEM_QOS))
"""The labels and annotations that decide where containers are placed."""

Texts = Mapping[str, str]


class NodeReservation(Struct, frozen=True):
    """The resources that are reserved on a node.

    Attributes:
        resources: Amounts as they are written.
        text: CPUs as they are written; they win over an amount.
        policy: ``applyPolicy`` as it is written.
    """

    resources: Mapping[str, str | float] = field(default_factory=dict)
    text: str = ""
    policy: str = ""

    @property
    def count(self) -> int:
        """How many CPUs to reserve if none are named: the amount, rounded up; never negative."""
        return 0 if self.text else max(0, -(-amount(self.resources, "cpu", milli=True) // 1000))

    @property
    def cpus(self) -> CpuSet:
        """The named CPUs; empty if there are none, or the list is invalid (see ``problem``)."""
        return parsed(self.text)[0]

    @property
    def problem(self) -> str:
        """What is wrong with the named CPUs, as text."""
        return parsed(self.text)[1]

    def with_cpus(self, cpus: CpuSet) -> NodeReservation:
        """Return the reservation with these CPUs named."""
        return structs.replace(self, text=str(cpus))

    def data(self) -> dict[str, object]:
        """Return the value as Koordinator writes it, without empty parts."""
        reported = {
            "resources": dict(self.resources),
            "reservedCPUs": self.text,
            "applyPolicy": self.policy,
        }
        return {name: value for name, value in reported.items() if value}


class SystemQos(Struct, frozen=True):
    """CPUs for pods of class SYSTEM.

    Attributes:
        text: CPUs as they are written.
        exclusive_field: Whether no other class may use them; None if it is not set.
    """

    text: str = ""
    exclusive_field: bool | None = None

    @property
    def exclusive(self) -> bool:
        """Whether no other class may use them; true unless set otherwise."""
        return self.exclusive_field is not False

    @property
    def cpus(self) -> CpuSet:
        """The CPUs; empty if there are none, or the list is invalid."""
        return parsed(self.text)[0]

    @property
    def exclusive_cpus(self) -> CpuSet:
        """The CPUs that no other class may use; empty if others may."""
        return self.cpus if self.exclusive else CpuSet()

    def data(self) -> dict[str, object]:
        """Return the value as Koordinator writes it, without empty parts."""
        reported: dict[str, object] = {"cpuset": self.text} if self.text else {}
        return (
            reported
            if self.exclusive_field is None
            else {**reported, "cpusetExclusive": self.exclusive_field}
        )


def parsed(text: str) -> tuple[CpuSet, str]:
    """Read a CPU list; return the set (empty for an invalid list) and what is wrong with the list."""
    try:
        return CpuSet.parse(text), ""
    except ValueError as error:
        return CpuSet(), printable(str(error))


def read_label(kind: type[E], keys: tuple[str, ...], labels: Texts) -> tuple[E, str, str]:
    """Read one label.

    Args:
        kind: The enum of its values.
        keys: Its spellings; the first that is set counts.
        labels: The labels of the node.

    Returns:
        The value (the empty one if the label is absent or invalid), the spelling of the key (empty in the
        same cases), and what is wrong with the value.
    """
    key = next((key for key in keys if labels.get(key)), "")
    try:
        return one_of(kind, labels.get(key, ""), f"label {key}:"), key, ""
    except ValueError as error:
        return kind(""), "", printable(str(error))


def reservation(annotations: Texts) -> tuple[NodeReservation, str]:
    """Read the node's reservation; an invalid CPU list is reported, and kept as text."""
    text = annotations.get(RESERVATION)
    if text is None:
        return NodeReservation(), ""
    try:
        fields = Fields.parse(text)
        parsed_reservation = NodeReservation(
            fields.amounts("resources"), fields.text("reservedCPUs"), fields.text("applyPolicy")
        )
    except ValueError as error:
        return NodeReservation(), printable(f"annotation {RESERVATION}: {error}")
    return (
        parsed_reservation,
        f"annotation {RESERVATION}: {parsed_reservation.problem}" if parsed_reservation.problem else "",
    )


def system_qos(annotations: Texts) -> tuple[SystemQos, str]:
    """Read the CPUs of class SYSTEM; an invalid CPU list is reported, and kept as text."""
    text = annotations.get(SYSTEM_QOS)
    if text is None:
        return SystemQos(), ""
    try:
        fields = Fields.parse(text)
        parsed_qos = SystemQos(fields.text("cpuset"), fields.flag("cpusetExclusive"))
    except ValueError as error:
        return SystemQos(), printable(f"annotation {SYSTEM_QOS}: {error}")
    problem = parsed(parsed_qos.text)[1]
    return parsed_qos, f"annotation {SYSTEM_QOS}: {problem}" if problem else ""


def amplification_ratios(annotations: Texts) -> tuple[dict[str, float] | None, str]:
    """Read the amplification ratio of each resource; None if it is not set."""
    text = annotations.get(AMPLIFICATION)
    if text is None:
        return None, ""
    try:
        fields = Fields.parse(text)
        return {name: _ratio(value, name) for name, value in fields.entries().items()}, ""
    except ValueError as error:
        return None, printable(f"annotation {AMPLIFICATION}: {error}")


def _ratio(value: object, name: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")  # noqa: TRY004 - one kind of error for all bad input
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is too large")
    return number


def with_ratios(annotations: Texts, ratios: Mapping[str, float]) -> dict[str, str]:
    """Return annotations with these ratios: two decimals, by name."""
    members = ",".join(f"{json.dumps(name)}:{ratio:.2f}" for name, ratio in sorted(ratios.items()))
    return {**annotations, AMPLIFICATION: f"{{{members}}}"}


def raw_allocatable(annotations: Texts) -> tuple[dict[str, str | float] | None, str]:
    """Read the allocatable amounts before amplification, as they are written; None if they are not set."""
    text = annotations.get(RAW_ALLOCATABLE)
    if text is None:
        return None, ""
    try:
        return amounts(load(text)), ""
    except ValueError as error:
        return None, printable(f"annotation {RAW_ALLOCATABLE}: {error}")
