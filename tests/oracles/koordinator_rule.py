"""How Koordinator's hook server reads the rule out of a NodeResourceTopology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.model.idset import CpuSet
from proxy.model.quoting import printable
from proxy.pools.go_json import Fields, load, objects
from proxy.pools.node_keys import parsed, system_qos
from proxy.pools.published_pools import NodePool
from proxy.pools.topology_keys import BE_POOLS, MANAGER_POLICY, SHARED_POOLS, ManagerPolicy

MANAGER_POLICY_KEYS = (MANAGER_POLICY, "kubelet.koordinator.sh/cpu-manger-policy")
"""The code's spelling, and the document's."""


@dataclass(frozen=True, slots=True)
class NodeRule:
    """The rule by which the decision table decides.

    Attributes:
        kubelet_policy: ``static``, ``none``, or empty if it is not known.
        shared, be: The pools, part by part.
        system: CPUs of class SYSTEM as they are written; empty if there are none.
    """

    kubelet_policy: str = ""
    shared: tuple[NodePool, ...] = ()
    be: tuple[NodePool, ...] = ()
    system: str = ""

    @property
    def system_cpus(self) -> CpuSet:
        """CPUs of class SYSTEM."""
        return parsed(self.system)[0]


def parse_rule(annotations: Mapping[str, str]) -> tuple[NodeRule | None, str]:
    """Read the rule out of the annotations of a NodeResourceTopology.

    Returns:
        The rule and an empty text; or None and what is wrong: half a rule would move pods to wrong CPUs.
    """
    system, problem = system_qos(annotations)
    if problem:
        return None, problem
    try:
        return (
            NodeRule(
                manager_policy(annotations).policy,
                read_pools(annotations, SHARED_POOLS),
                read_pools(annotations, BE_POOLS),
                system.text,
            ),
            "",
        )
    except ValueError as error:
        return None, printable(str(error))


def updated(before: NodeRule | None, annotations: Mapping[str, str]) -> tuple[NodeRule | None, bool, str]:
    """Apply the rule of annotations.

    Returns:
        The rule from now on (the previous one if the annotations are faulty), whether it differs from the
        previous one, and what is wrong.
    """
    rule, problem = parse_rule(annotations)
    if rule is None:
        return before, False, problem
    return rule, rule != before, ""


def manager_policy(annotations: Mapping[str, str]) -> ManagerPolicy:
    """Read kubelet's policy; without the annotation nothing is known.

    Raises:
        ValueError: The annotation is not readable.
    """
    key = next((key for key in MANAGER_POLICY_KEYS if key in annotations), None)
    if key is None:
        return ManagerPolicy()
    try:
        fields = Fields.parse(annotations[key])
        given = fields.fields("options")
        options = tuple(sorted((name, given.text(name)) for name in given.names()))
        return ManagerPolicy(fields.text("policy"), options, fields.text("reservedCPUs"))
    except ValueError as error:
        raise ValueError(f"annotation {key}: {error}") from None


def read_pools(annotations: Mapping[str, str], key: str) -> tuple[NodePool, ...]:
    """Read pools; none without the annotation.

    Raises:
        ValueError: The annotation is not readable, or a CPU list in it is invalid.
    """
    if key not in annotations:
        return ()
    try:
        return tuple(
            NodePool(fields.number("socket"), fields.number("node"), CpuSet.parse(fields.text("cpuset")))
            for fields in objects(load(annotations[key]), "it")
        )
    except ValueError as error:
        raise ValueError(f"annotation {key}: {error}") from None
