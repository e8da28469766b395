"""What the node's pools are, as Koordinator hands them from its reporter to its hooks.

Theory (Koordinator v1.8.0 pkg/koordlet/runtimehooks/hooks/cpuset/rule.go, parseRule). The reporter writes
pools and kubelet's policy into annotations of the node's NodeResourceTopology; whoever sets CPUs reads them
from there. So the same texts are written by ``proxy.report.koordinator`` and read here: from another's
object, or from our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.model.idset import CpuSet
from proxy.pools.fields import Fields, load, objects, short
from proxy.pools.nodekeys import parsed, system_qos
from proxy.pools.shared import NodePool

SHARED_POOLS = "node.koordinator.sh/cpu-shared-pools"
BE_POOLS = "node.koordinator.sh/be-cpu-shared-pools"
MANAGER_POLICY = "kubelet.koordinator.sh/cpu-manager-policy"
MANAGER_POLICY_KEYS = (MANAGER_POLICY, "kubelet.koordinator.sh/cpu-manger-policy")
"""The code's spelling, and the document's."""
STATIC = "static"


@dataclass(frozen=True, slots=True)
class ManagerPolicy:
    """What kubelet's CPU manager does.

    Attributes:
        policy: ``none``, ``static``, or empty where it is not known.
        options: Its options.
        reserved: CPUs that it keeps back.
    """

    policy: str = ""
    options: tuple[tuple[str, str], ...] = ()
    reserved: str = ""

    def data(self) -> dict[str, object]:
        """Give it as Koordinator writes it: without what is empty."""
        told = {"policy": self.policy, "options": dict(self.options), "reservedCPUs": self.reserved}
        return {name: value for name, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class Rule:
    """What the decision table looks things up in.

    Attributes:
        kubelet_policy: ``static``, ``none``, or empty where it is not known.
        shared, be: The pools, part by part.
        system: CPUs of class SYSTEM as they are written; empty where it has none.
    """

    kubelet_policy: str = ""
    shared: tuple[NodePool, ...] = ()
    be: tuple[NodePool, ...] = ()
    system: str = ""

    @property
    def system_cpus(self) -> CpuSet:
        """CPUs of class SYSTEM."""
        return parsed(self.system)[0]


def parse_rule(annotations: Mapping[str, str]) -> tuple[Rule | None, str]:
    """Read the rule out of the annotations of a NodeResourceTopology.

    Returns:
        The rule, and empty words; or None and what is wrong, for half a rule would move pods to wrong CPUs.
    """
    system, problem = system_qos(annotations)
    if problem:
        return None, problem
    try:
        return (
            Rule(
                manager_policy(annotations).policy,
                read_pools(annotations, SHARED_POOLS),
                read_pools(annotations, BE_POOLS),
                system.text,
            ),
            "",
        )
    except ValueError as error:
        return None, short(str(error))


def updated(before: Rule | None, annotations: Mapping[str, str]) -> tuple[Rule | None, bool, str]:
    """Take over the rule of annotations.

    Returns:
        The rule from now on (the one before where the annotations are faulty), whether it is another than
        before, and what is wrong.
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
        options = tuple(sorted(fields.texts("options").items()))
        return ManagerPolicy(fields.text("policy"), options, fields.text("reservedCPUs"))
    except ValueError as error:
        raise ValueError(f"annotation {key}: {error}") from None


def read_pools(annotations: Mapping[str, str], key: str) -> tuple[NodePool, ...]:
    """Read pools; none without the annotation.

    Raises:
        ValueError: The annotation is not readable, or a CPU list in it is none.
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


def write_pools(pools: Iterable[NodePool]) -> str:
    """Write pools as the annotation has them; a part without CPUs has no list."""
    rows = []
    for pool in pools:
        row: dict[str, object] = {"socket": pool.socket, "node": pool.node}
        rows.append({**row, "cpuset": str(pool.cpus)} if pool.cpus else row)
    return json.dumps(rows or None, separators=(",", ":"))
