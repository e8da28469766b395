"""Check the claim of a pod (its namespace, class and annotation) against the admission rules of the node.

Labels and annotations are written by the author of the pod. Koordinator's node agent follows them as they are
(koordinator a7a1b76, pkg/koordlet/runtimehooks/hooks/cpuset takes the CPUs of ``resource-status`` first);
whether the scheduler wrote the annotation is not checked. The author cannot choose freely what the pod
requests: the scheduler has counted it, quotas limit it, and kubelet sends it over the CRI. So the annotation
may name at most as many CPUs as the pod requests, and a pod that owns CPUs by its class must request whole
CPUs, with limits equal to its requests.

The request of a pod is known from kubelet's ``/pods``, if that is read. Otherwise it comes from the
configuration of the sandbox, which since kubelet 1.23 carries the sum over the containers without overhead
(``LinuxPodSandboxConfig.resources``; init containers count if they need more than the containers that run
after them). If the sandbox has none either, the requests of the pod's existing containers are added up.

The decisions in this module depend only on the pod and the rules. Limits that count the CPUs of other owners
are in ``owners``.
"""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.cpu_request import NO_SHARES, requested_whole_cpus
from proxy.engine.node import Node
from proxy.model.admission import (
    SHARED_POOL_EXHAUSTED,
    AdmissionRule,
    BeyondLimit,
    Breach,
    ResourceStatusMode,
)
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.phrases import counted, cpus
from proxy.model.workload import CFS_PERIOD_US, MOST_CPU_SHARES, KubeQos, Pod, QosClass, Request, Verdict
from proxy.pools import claims
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.claims import STRICT, whole_cpus

RESTRICTED_CLASSES = (*STRICT, QosClass.SYSTEM)
"""Classes that not every namespace may use."""
EMPTY_SHARED_POOL = "the shared pool would be left empty"
NO_POOL_CPUS = "its pool has no CPUs: owners have all that are online and not reserved"
_SHARES = 1024


def permitted_claim(
    node: Node, pod: Pod, request: Request | None = None, owned: CpuSet | None = None
) -> tuple[Pod, Breach | None]:
    """Check the claim of a pod, and remove the part that the rules forbid.

    Args:
        node: The node with its rules.
        pod: The pod, as its labels and annotations describe it.
        request: The pod's request as the sum over its containers, used if neither kubelet nor the sandbox
            reports it. None if the request is unknown; then it is not checked.
        owned: CPUs that the pod owns already. It keeps them, even if they are reserved now.

    Returns:
        The pod with the permitted part of its claim (the same value if the whole claim is permitted), and the
        rule that forbids the rest, if any.
    """
    rules = node.admission
    if pod.qos is QosClass.SYSTEM and node.system and not rules.system.admits(pod.namespace):
        problem = _not_permitted(pod, "class SYSTEM", "systemNamespaces")
        return _without_claim(pod), Breach(AdmissionRule.SYSTEM_NAMESPACE, problem)
    listed = rules.owners.admits(pod.namespace)
    if not listed and pod.qos in STRICT:
        return _without_claim(pod), Breach(
            AdmissionRule.NAMESPACE, _not_permitted(pod, f"class {pod.qos}", _owners_key(node, pod))
        )
    if not listed or rules.resource_status is ResourceStatusMode.IGNORE:
        return _without_annotation(node, pod, listed=listed)
    if rules.resource_status is ResourceStatusMode.FOLLOW or not _claims_cpus(pod):
        return pod, None
    breach = _annotation_breach(node, pod, request, owned or CpuSet())
    return (pod, None) if breach is None else (_without_claim(pod), breach)


def assigned_cpus(node: Node, pod: Pod, request: Request | None = None) -> CpuSet | None:
    """Return the CPUs that were chosen for a pod, or those that its annotation names, if it may claim them.

    None if there are no such CPUs, as for a BE (best effort) pod, which owns nothing by its annotation.
    ``request`` is as for ``permitted_claim``. CPUs that are reserved now are not checked: they may have been
    assigned before they were reserved.
    """
    if pod.cpuset_chosen_locally:
        return pod.cpuset
    return permitted_claim(node, pod, request, pod.cpuset)[0].cpuset if _claims_cpus(pod) else None


def rejection_verdict(breach: Breach, action: str) -> Verdict:
    """Return the verdict for a claim beyond a rule.

    Args:
        breach: The rule.
        action: The action that fails, such as ``place ns/pod``.
    """
    return Verdict(GrpcStatus.FAILED_PRECONDITION, breach.rule.reason, f"cannot {action}: {breach.message}")


def exhausted_verdict(action: str, cause: str = EMPTY_SHARED_POOL) -> Verdict:
    """Return the verdict that the shared pool has no CPUs to give.

    Args:
        action: The action that fails, such as ``place ns/pod``.
        cause: Why the pool is exhausted.
    """
    return Verdict(GrpcStatus.FAILED_PRECONDITION, SHARED_POOL_EXHAUSTED, f"cannot {action}: {cause}")


def rejects_claims(node: Node) -> bool:
    """Return whether a claim beyond a rule is rejected; otherwise the pod shares CPUs."""
    return node.admission.beyond is BeyondLimit.REJECT


def sharing_problem(breach: Breach) -> InputDefect:
    """Return the defect to report for a pod that shares CPUs because its claim goes beyond a rule."""
    return InputDefect(f"it owns no CPUs ({breach.rule}): {breach.message}", DefectKind.ADMISSION)


def requested_cpus(pod: Pod, request: Request) -> int:
    """Return the whole CPUs that a pod requests.

    Args:
        pod: The pod, with the request that kubelet or its sandbox reports.
        request: The request that is known if neither reports one.
    """
    if pod.requests is not None:
        return requested_whole_cpus(pod.requests)
    total = pod.total or request
    if total.cpu_shares >= MOST_CPU_SHARES:  # the kernel accepts no more shares; above that the limit counts
        limit = total.cpu_quota // total.period_us
        return max(limit, MOST_CPU_SHARES // _SHARES)
    return total.cpu_shares // _SHARES


def sum_requests(requests: list[Request]) -> Request:
    """Add up the requests and limits of containers.

    If a quota is off, the limit is unknown, because the quota of owners is removed. Then the request counts
    as the limit.
    """
    shares = sum(request.cpu_shares for request in requests if request.cpu_shares > NO_SHARES)
    quotas = [request.cpu_quota * CFS_PERIOD_US // request.period_us for request in requests]
    quota = sum(quotas) if all(quota_us > 0 for quota_us in quotas) else shares * CFS_PERIOD_US // _SHARES
    return Request(cpu_shares=shares, cpu_quota=quota, cpu_period=CFS_PERIOD_US)


def ownership_problem(pod: Pod, total: Request) -> str:
    """Return why a pod may not own CPUs; empty if it may."""
    if pod.requests is not None:
        return claims.ownership_problem(pod.qos, pod.requests)
    limited = total.cpu_quota > 0 or pod.kube_qos is KubeQos.GUARANTEED
    if limited and whole_cpus(total):
        return ""
    limit_text = f"{total.limit_milli}m" if total.cpu_quota > 0 else "nothing"
    return (
        f"{pod.qos} pod: its containers request about {total.requested_milli}m CPU together"
        f" and are limited to {limit_text}; both must be the same number of whole CPUs"
    )


def _claims_cpus(pod: Pod) -> bool:
    """Return whether the annotation of a pod claims CPUs; for a BE pod, CPUs in it only limit its pool."""
    claims = bool(pod.cpuset) and not pod.cpuset_chosen_locally and pod.qos is not QosClass.BE
    return claims and not pod.problem


def _annotation_breach(node: Node, pod: Pod, request: Request | None, owned: CpuSet) -> Breach | None:
    claimed = pod.cpuset or CpuSet()
    reserved = (node.reserved | node.node_reservation | node.system) & claimed
    if reserved and not claimed <= owned:
        message = f"its resource-status annotation names {cpus(reserved)}, which this node reserves"
        return Breach(AdmissionRule.RESERVED_CPUS, message)
    total = pod.total or request
    if total is None and pod.requests is None:
        return None
    total = total or Request()
    requested = requested_cpus(pod, total)
    if len(claimed) > requested:
        message = (
            f"its resource-status annotation names {counted(len(claimed), 'CPU')}, and its containers request"
            f" {counted(requested, 'whole CPU')} together (admission.resourceStatus is bounded)"
        )
        return Breach(AdmissionRule.REQUEST, message)
    problem = ownership_problem(pod, total) if pod.qos in STRICT else ""
    return Breach(AdmissionRule.WHOLE_CPUS, problem) if problem else None


def _without_annotation(node: Node, pod: Pod, *, listed: bool) -> tuple[Pod, Breach | None]:
    """Return the pod as if it had no resource-status annotation."""
    breach = None
    if not listed and _claims_cpus(pod):
        breach = Breach(
            AdmissionRule.NAMESPACE,
            _not_permitted(pod, "the annotation resource-status", _owners_key(node, pod)),
        )
    names_cpus = pod.cpuset is not None and not pod.cpuset_chosen_locally
    names_nodes = pod.nodes is not None and not pod.aligned
    faulty = pod.problem.startswith(f"annotation {RESOURCE_STATUS}")
    if not names_cpus and not names_nodes and not faulty:
        return pod, breach
    return structs.replace(
        pod,
        cpuset=None if names_cpus else pod.cpuset,
        nodes=None if names_nodes else pod.nodes,
        defects=tuple(defect.as_decisive(decisive=False) for defect in pod.defects)
        if faulty
        else pod.defects,
    ), breach


def _without_claim(pod: Pod) -> Pod:
    """Return a pod without its claim: one that shares CPUs."""
    qos = QosClass.LS if pod.qos in RESTRICTED_CLASSES else pod.qos
    nodes = pod.nodes if pod.aligned else None
    return structs.replace(pod, qos=qos, cpuset=None, nodes=nodes, cpuset_chosen_locally=False)


def _owners_key(node: Node, pod: Pod) -> str:
    """Return the setting that excludes the namespace of a pod from owning CPUs."""
    return "namespaceSelector" if node.admission.owners.names(pod.namespace) else "namespaces"


def _not_permitted(pod: Pod, claim: str, key: str) -> str:
    return f"pods of namespace {pod.namespace!r} may not use {claim} (admission.{key})"
