"""The rules of a node that topoproxy's agent publishes, as attributes of its objects or as an annotation.

Other programs write none of these rules, and an earlier agent only some: a rule that is absent does not
apply. If the floor of the shared pool is published, the CPUs that it keeps can be distinguished from
reserved ones. The engine then keeps them as on the node: it keeps their number, whichever CPUs they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct

from proxy.model.admission import AdmissionRules, Namespaces
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NodeBindPolicy, NumaStrategy
from proxy.pools.go_json import load
from proxy.pools.topology_keys import (
    AUTO,
    BIND,
    CPU_OPTIONS,
    FLOOR,
    FLOOR_CPUS,
    NAMESPACE_LIMIT,
    NODE_LIMIT,
    NUMA_FLOOR,
    OWNER_NAMESPACES,
    POD_LIMIT,
    POLICIES,
    STRATEGY,
    TOPOLOGY_OPTIONS,
    TOPOLOGY_SCOPE,
    WITHHELD_CPUS,
)

T = TypeVar("T")

CPU_COUNT_LIMIT = 100_000
"""More CPUs than any machine has."""


class AgentPolicies(Struct, frozen=True):
    """The rules of a node.

    Attributes:
        scope: Of the topology manager; empty if it is not published.
        options: Options of the CPU manager.
        bind, strategy, closest: As those of ``proxy.engine.node.Node``.
        admission: Which pods may own CPUs, and how many. Labels that namespaces must have are not published.
        knows_floor: Whether the floor is known apart from reserved CPUs.
        floor_cpus: CPUs that are not free only because the shared pool needs some.
        withheld: Reserved CPUs that the shared pool does not have either.
    """

    scope: str = ""
    options: tuple[tuple[str, str], ...] = ()
    bind: NodeBindPolicy = NodeBindPolicy.NONE
    strategy: NumaStrategy = NumaStrategy.NONE
    closest: bool = False
    admission: AdmissionRules = AdmissionRules()
    knows_floor: bool = False
    floor_cpus: CpuSet = CpuSet()
    withheld: CpuSet = CpuSet()


def read_annotation(annotations: object) -> dict[str, str]:
    """Return the policies that an annotation has, by name.

    Raises:
        ValueError: It is not a JSON object.
    """
    text = annotations.get(POLICIES) if isinstance(annotations, dict) else None
    policies = load(str(text)) if text else {}
    if not isinstance(policies, dict):
        raise ValueError(f"annotation {POLICIES} is not a JSON object")  # noqa: TRY004  one kind of error
    return {str(name): str(value) for name, value in policies.items()}


def read_policies(everywhere: Mapping[str, str], by_id: Mapping[str, str]) -> AgentPolicies:
    """Read policies.

    Args:
        everywhere: Those of all objects of the node.
        by_id: Those of the object that names the CPUs of the node and of its pods; empty if no object does.

    Raises:
        ValueError: A policy has a wrong value; the text names it.
    """
    knows_floor = FLOOR_CPUS in by_id
    return AgentPolicies(
        everywhere.get(TOPOLOGY_SCOPE, ""),
        _options(everywhere, CPU_OPTIONS),
        _read(NodeBindPolicy, everywhere, BIND),
        _read(NumaStrategy, everywhere, STRATEGY),
        dict(_options(everywhere, TOPOLOGY_OPTIONS)).get("prefer-closest-numa-nodes") == "true",
        AdmissionRules(
            owners=_read(_namespaces, everywhere, OWNER_NAMESPACES),
            pod_limit=_number(everywhere, POD_LIMIT),
            namespace_limit=_number(by_id, NAMESPACE_LIMIT) if knows_floor else None,
            node_limit=_number(by_id, NODE_LIMIT) if knows_floor else None,
            floor=_floor(by_id, FLOOR) if knows_floor else 0,
            numa_floor=_floor(by_id, NUMA_FLOOR) if knows_floor else 0,
        ),
        knows_floor,
        _read(CpuSet.parse, by_id, FLOOR_CPUS),
        _read(CpuSet.parse, by_id, WITHHELD_CPUS),
    )


def _read(read: Callable[[str], T], policies: Mapping[str, str], name: str) -> T:
    """Read one policy; an error names it."""
    try:
        return read(policies.get(name, ""))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _options(policies: Mapping[str, str], name: str) -> tuple[tuple[str, str], ...]:
    """Return options as topoproxy writes them: NAME=VALUE, with commas between."""
    parts = (option.partition("=") for option in policies.get(name, "").split(",") if option)
    return tuple(sorted({name: value for name, _, value in parts}.items()))


def _namespaces(text: str) -> Namespaces:
    """Read namespaces, as a JSON list of patterns; all if the text is empty."""
    patterns = load(text) if text else ["*"]
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{text!r:.40} is no list of namespaces")
    return Namespaces(tuple(patterns))


def _floor(policies: Mapping[str, str], name: str) -> int | None:
    return None if policies.get(name) == AUTO else _number(policies, name) or 0


def _number(policies: Mapping[str, str], name: str) -> int | None:
    text = policies.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= CPU_COUNT_LIMIT):
        raise ValueError(f"{name} is {text!r:.40}, no number of CPUs")
    return int(text)
