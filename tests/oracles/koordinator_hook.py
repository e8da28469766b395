"""The CPUs of a container, as Koordinator's hook decides them.

See Koordinator v1.8.0 pkg/koordlet/runtimehooks/hooks/cpuset/rule.go, getContainerCPUSet.

``rows`` says which row of the table decides. An answer has two sides. ``text`` is what Koordinator's own hook
would write, letter for letter: pools joined with bare commas, a list as the scheduler wrote it. ``cpus`` is
the set that may be applied; the daemon itself asks ``claims``. They name the same CPUs except in three
cases, in which the text would do harm:

- A BE pod that names CPUs (row 1) gets only those of them that are in the BE pools: it may not run on what an
  LSE pod owns.
- Pools of nodes where nothing is left (rows 3 and 4) would be an empty list, which runtimes take for all
  CPUs: then the container gets the whole pool, and the problem is reported.
- Row 7 leaves the container to the cgroups above it; its CPUs are those of the BE pools.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from proxy.model.idset import CpuSet
from proxy.model.phrases import listed
from proxy.model.workload import KubeQos, QosClass
from proxy.pools.annotations import ResourceStatus, resource_status
from proxy.pools.claims import DecisionRow, row_of
from proxy.pools.facts import QOS_LABEL, kube_qos, qos_class
from proxy.pools.published_pools import NodePool
from proxy.pools.topology_keys import STATIC
from tests.oracles.koordinator_pools import joined_text, on_nodes, union
from tests.oracles.koordinator_rule import NodeRule


class Action(enum.StrEnum):
    """What happens to the CPU list of a request."""

    LEAVE = "leave"
    SET = "set"
    ERASE = "erase"


@dataclass(frozen=True, slots=True)
class HookedPod:
    """A pod for which Koordinator's hook is called: what the table looks at.

    Attributes:
        problem: What is wrong with the annotation; then nothing is decided.
    """

    qos: QosClass = QosClass.NONE
    kube_qos: KubeQos = KubeQos.GUARANTEED
    status: ResourceStatus = field(default_factory=ResourceStatus)
    problem: str = ""

    @classmethod
    def of(cls, labels: Mapping[str, str], annotations: Mapping[str, str], cgroup_parent: str) -> HookedPod:
        """Read a pod's labels and annotations, and the class from its cgroup."""
        status, problem = resource_status(annotations)
        return cls(qos_class(labels.get(QOS_LABEL, "")), kube_qos(cgroup_parent), status, problem)


@dataclass(frozen=True, slots=True)
class HookAnswer:
    """The result of the table.

    Attributes:
        row: The row that decided; 0 if the annotation is faulty, or the table does not apply.
        action: What happens to the list of the request.
        text: What Koordinator's hook writes for SET and ERASE.
        cpus: The CPUs that we apply; empty for LEAVE, and if the node has no such CPUs.
        why: One sentence.
        problem: What could not be done as requested, in words.
    """

    row: int
    action: Action
    why: str
    text: str = ""
    cpus: CpuSet = field(default_factory=CpuSet)
    problem: str = ""

    @property
    def upstream(self) -> str | None:
        """What Koordinator's hook answers: a list, an empty text, or None for no answer."""
        return None if self.action is Action.LEAVE else self.text


def decide(rule: NodeRule | None, hooked_pod: HookedPod, *, be_manager: bool = False) -> HookAnswer:
    """Decide which CPUs a container of a pod runs on.

    Args:
        rule: The pools; None as long as they are not known.
        hooked_pod: The pod.
        be_manager: Whether BE pods may be bound to NUMA nodes (Koordinator's gate BECPUManager).
    """
    if hooked_pod.problem:
        return HookAnswer(0, Action.LEAVE, "the pod's annotation cannot be read", problem=hooked_pod.problem)
    nodes = hooked_pod.status.nodes
    bound = bool(nodes) and (be_manager or hooked_pod.qos is not QosClass.BE)
    row = row_of(hooked_pod.qos, hooked_pod.kube_qos, named=bool(hooked_pod.status.cpus), bound=bound)
    if row is DecisionRow.NAMED:
        return _named(rule, hooked_pod)
    if rule is None:
        return HookAnswer(2, Action.LEAVE, "the pools of the node are not known yet")
    if row is DecisionRow.SYSTEM and not rule.system:
        row = row_of(QosClass.NONE, hooked_pod.kube_qos)
    if row is DecisionRow.SHARED and rule.kubelet_policy == STATIC:
        return HookAnswer(
            8, Action.LEAVE, "kubelet's CPU manager is static, and the pod has no class of ours"
        )
    name = hooked_pod.qos or hooked_pod.kube_qos
    match row:
        case DecisionRow.BE_ON_NODES:
            return _bound(row, "BE", rule.be, nodes)
        case DecisionRow.SHARED_ON_NODES:
            return _bound(row, "shared", rule.shared, nodes)
        case DecisionRow.SYSTEM:
            why = "SYSTEM pod: the node keeps CPUs for its class"
            return HookAnswer(row, Action.SET, why, rule.system, rule.system_cpus)
        case DecisionRow.LS:
            return _all_shared(row, rule, "LS pod: shared pool")
        case DecisionRow.BEST_EFFORT:
            why = f"{name} pod: the cgroups above it hold the BE pool"
            return HookAnswer(row, Action.ERASE, why, "", union(rule.be))
        case _:
            return _all_shared(row, rule, f"{name} pod without CPUs of its own: shared pool")


def _named(rule: NodeRule | None, hooked_pod: HookedPod) -> HookAnswer:
    status = hooked_pod.status
    why = f"{hooked_pod.qos or hooked_pod.kube_qos} pod: its resource-status names CPUs {listed(status.cpus)}"
    if hooked_pod.qos is not QosClass.BE or rule is None:
        return HookAnswer(1, Action.SET, why, status.text, status.cpus)
    pool = union(rule.be)
    within = status.cpus & pool
    refused = status.cpus - pool
    problem = f"CPUs {refused} are not in the BE pool" if refused else ""
    return HookAnswer(1, Action.SET, why, status.text, within or pool, problem)


def _bound(row: int, name: str, pools: tuple[NodePool, ...], nodes: tuple[int, ...]) -> HookAnswer:
    parts = on_nodes(pools, nodes)
    cpus = union(parts)
    listed = ", ".join(map(str, nodes))
    why = f"bound to the {name} pool of NUMA nodes {listed}"
    if cpus:
        return HookAnswer(row, Action.SET, why, joined_text(parts), cpus)
    problem = f"nothing is left of the {name} pool on NUMA nodes {listed}; the whole pool is used"
    return HookAnswer(row, Action.SET, why, joined_text(parts), union(pools), problem)


def _all_shared(row: int, rule: NodeRule, why: str) -> HookAnswer:
    cpus = union(rule.shared)
    return HookAnswer(
        row, Action.SET, why, joined_text(rule.shared), cpus, "" if cpus else "the shared pool is empty"
    )


def decide_host_app(rule: NodeRule | None, name: str, qos: str) -> HookAnswer:
    """Decide for a process that runs on the host, outside pods: only class LS gets CPUs, all shared pools.

    Args:
        rule: The pools; None as long as they are not known.
        name: What the application is called.
        qos: Its class as it is written.
    """
    if rule is None:
        return HookAnswer(2, Action.LEAVE, "the pools of the node are not known yet")
    if qos_class(qos) is not QosClass.LS:
        problem = f"host application {name} is of class {qos or 'none'}; only LS can be given CPUs"
        return HookAnswer(0, Action.LEAVE, "not of class LS", problem=problem)
    return _all_shared(6, rule, f"host application {name}: shared pool")


@dataclass(frozen=True, slots=True)
class ChangedAnswer:
    """An answer that differs from the previous one.

    Attributes:
        key: The caller's key of the container.
    """

    key: str
    answer: HookAnswer


def changes(
    before: NodeRule | None,
    after: NodeRule,
    pods: Iterable[tuple[str, HookedPod]],
    *,
    be_manager: bool = False,
) -> tuple[ChangedAnswer, ...]:
    """Return the containers whose CPUs change with a rule, in the given order.

    A container with a faulty annotation does not change. Koordinator writes every container again. Here only
    containers that get other CPUs are written, however the lists of their pools are cut; if there was no rule
    before, all that have a set.
    """
    alike: dict[object, HookAnswer | None] = {}
    found = []
    for key, hooked_pod in pods:
        if hooked_pod.problem:
            continue
        status = hooked_pod.status
        # Most pods are alike, so few answers are computed.
        kind = (
            hooked_pod.qos,
            hooked_pod.kube_qos,
            status.text,
            status.nodes if status.shares else status.pools,
        )
        if kind not in alike:
            alike[kind] = _changed(before, after, hooked_pod, be_manager=be_manager)
        answer = alike[kind]
        if answer is not None:
            found.append(ChangedAnswer(key, answer))
    return tuple(found)


def _changed(
    before: NodeRule | None, after: NodeRule, hooked_pod: HookedPod, *, be_manager: bool
) -> HookAnswer | None:
    """Return the new answer if it differs from the previous one."""
    new = decide(after, hooked_pod, be_manager=be_manager)
    old = (
        HookAnswer(0, Action.LEAVE, "")
        if before is None
        else decide(before, hooked_pod, be_manager=be_manager)
    )
    return None if (new.action, new.cpus) == (old.action, old.cpus) else new
