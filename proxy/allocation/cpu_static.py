"""The static CPU policy: hints, allocation and release.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``GetTopologyHints``, ``Allocate``,
``allocateCPUs``. The CPUs of the default set may become exclusive, except reserved CPUs. A pod's ordinary
init container has ended when the next container starts, so its CPUs are *reusable* by the containers after
it: they are offered to these containers along with the free CPUs, and become free only when no container of
the pod uses them. Only one pod is being started at a time, so reusable CPUs are kept for one pod.

Under a hint, CPUs of its nodes are taken first (``align-by-socket``: of all nodes of its sockets), then CPUs
of any node. With ``full-pcpus-only`` a request must be a number of whole cores, and no more than are free
outside the cores with reserved CPUs; otherwise it is rejected before anything else is checked. The check
counts CPUs, because in kubelet's state only reserved CPUs leave a core half free. Here containers whose CPUs
a scheduler has named, and containers from before the option was set, leave cores half free too; such cores
are not offered (``in_whole_cores``).

Every function returns a new state; a rejection is an exception and changes nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from proxy.allocation import cpu_hints
from proxy.allocation.allocation_steps import nodes_of
from proxy.allocation.cpu_policy import Assignments, CpuPolicy, CpuState, SmtAlignmentError, take
from proxy.allocation.cpu_request import container_cpus, pod_cpus, pod_level_cpu_count
from proxy.model.hint import Hints
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.phrases import counted, numa_nodes_text
from proxy.model.requests import ContainerKind, PodRequests


def container_cpu_hints(
    policy: CpuPolicy, state: CpuState, pod: PodRequests, name: str, cores: int = 0
) -> Hints:
    """Return the hints for a container of a pod; ``cores`` as in ``cpu_hints.cpu_hints``."""
    return cpu_hints.container_request_hints(
        policy.topo,
        container_cpus(pod, pod.named(name)),
        state.owned_by(pod.uid, name),
        available(policy, state),
        state.reusable_by(pod.uid),
        by_socket=policy.options.align_by_socket,
        cores=cores,
    )


def pod_cpu_hints(policy: CpuPolicy, state: CpuState, pod: PodRequests, cores: int = 0) -> Hints:
    """Return the hints for a pod as a whole; ``cores`` as in ``cpu_hints.cpu_hints``."""
    owned_by_pod = state.pod_level_cpus.get(pod.uid)
    if owned_by_pod is not None:
        assigned = [(pod_level_cpu_count(pod), owned_by_pod)]
    else:
        pairs = ((container, state.owned_by(pod.uid, container.name)) for container in pod.containers)
        assigned = [(container_cpus(pod, container), cpus) for container, cpus in pairs if cpus is not None]
    return cpu_hints.pod_request_hints(
        policy.topo,
        pod_cpus(pod),
        assigned,
        available(policy, state),
        state.reusable_by(pod.uid),
        by_socket=policy.options.align_by_socket,
        cores=cores,
    )


def available(policy: CpuPolicy, state: CpuState) -> CpuSet:
    """Return the CPUs that may become exclusive."""
    return state.default - policy.reserved


def allocate(
    policy: CpuPolicy,
    state: CpuState,
    pod: PodRequests,
    name: str,
    affinity: Mask | None = None,
    steps: list[str] | None = None,
) -> CpuState:
    """Allocate CPUs for a container.

    Args:
        policy: The policy.
        state: Which containers own which CPUs now.
        pod: What the pod requests.
        name: The container. If it owns CPUs already, it keeps them.
        affinity: NUMA nodes of the hint; None for any.
        steps: Sentences about what was done are added here; None for no record.

    Raises:
        SmtAlignmentError: The request breaks ``full-pcpus-only``.
        NotEnoughCpus: Too few CPUs are available.
    """
    count = container_cpus(pod, pod.named(name))
    if count == 0:
        return state
    check_whole_cores(policy, state, count)
    owned = state.owned_by(pod.uid, name)
    if owned is None:
        owned = take_under(policy, state, count, affinity, state.reusable_by(pod.uid), steps)
    return with_assigned(state, pod, name, owned)


def with_assigned(state: CpuState, pod: PodRequests, name: str, cpus: CpuSet) -> CpuState:
    """Return the state in which a container of a pod owns these CPUs."""
    reusable = state.reusable_by(pod.uid)
    ends = pod.named(name).kind is ContainerKind.INIT
    return replace(
        state,
        default=state.default - cpus,
        assigned=with_entry(state.assigned, pod.uid, name, cpus),
        reusing=pod.uid,
        reusable=reusable | cpus if ends else reusable - cpus,
    )


def check_whole_cores(policy: CpuPolicy, state: CpuState, count: int) -> None:
    """Check a request against ``full-pcpus-only``.

    Raises:
        SmtAlignmentError: It is not a number of whole cores, or too few whole cores are free.
    """
    if not policy.options.full_pcpus_only:
        return
    threads = policy.threads_per_core
    if count % threads:
        raise SmtAlignmentError(
            f"SMT Alignment Error: requested {count} cpus not multiple cpus per core = {threads}"
        )
    free = len(state.default - policy.reserved_cores)
    if count > free:
        raise SmtAlignmentError(
            "SMT Alignment Error: not enough free physical CPUs: "
            f"available physical CPUs = {free}, requested CPUs = {count}, CPUs per core = {threads}"
        )


def in_whole_cores(policy: CpuPolicy, cpus: CpuSet) -> CpuSet:
    """Return the CPUs whose cores are wholly among the given CPUs, apart from the cores' reserved CPUs.

    kubelet, too, offers the siblings of reserved CPUs.
    """
    allowed = cpus.bits | policy.reserved.bits
    return cpus & CpuSet.from_bits(union(core for core in policy.topo.cores.values() if not core & ~allowed))


def in_equal_cores(
    policy: CpuPolicy, pool: CpuSet, chosen: CpuSet, steps: list[str] | None = None
) -> CpuSet | None:
    """Return the CPUs for a second choice if the first one splits a core despite ``full-pcpus-only``.

    Whole cores and single CPUs can add up to a multiple of the largest core's threads only if cores differ in
    size, for example because one has an offline thread. Then cores of the largest size are chosen.

    Args:
        policy: The policy.
        pool: The CPUs from which the choice was made.
        chosen: The choice.
        steps: A sentence about it is added here; None for no record.

    Returns:
        None if the choice splits no core. The siblings of reserved CPUs are whole cores by themselves.

    Raises:
        SmtAlignmentError: Too few CPUs of the pool are in cores of the largest size.
    """
    topo, reserved = policy.topo, policy.reserved.bits
    if not policy.options.full_pcpus_only or len({core.bit_count() for core in topo.cores.values()}) == 1:
        return None
    if not any(core & chosen.bits and core & ~reserved & ~chosen.bits for core in topo.cores.values()):
        return None
    equal = topo.largest_cores(pool)
    if len(equal) < len(chosen):
        raise SmtAlignmentError(
            "SMT Alignment Error: not enough free physical CPUs: "
            f"cores of {policy.threads_per_core} CPUs have {len(equal)}, requested CPUs = {len(chosen)}"
        )
    if steps is not None:
        steps.append("once more, with cores of one size only")
    return equal


def take_under(
    policy: CpuPolicy,
    state: CpuState,
    count: int,
    affinity: Mask | None,
    reusable: CpuSet,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose CPUs under a hint; sentences about what was done are added to ``steps``.

    Raises:
        NotEnoughCpus: Too few are available.
        SmtAlignmentError: Too few are in whole cores of one size (``full-pcpus-only``).
    """
    pool = available(policy, state) | reusable
    chosen = _take_from(policy, pool, count, affinity, steps)
    within = CpuSet.from_bits(_cpus_of(policy, affinity)) if affinity is not None else pool
    equal = in_equal_cores(policy, pool & within if chosen <= within else pool, chosen, steps)
    return chosen if equal is None else _take_from(policy, equal, count, affinity, steps)


def _take_from(
    policy: CpuPolicy, pool: CpuSet, count: int, affinity: Mask | None, steps: list[str] | None
) -> CpuSet:
    aligned_cpus = CpuSet()
    if affinity is not None:
        aligned = pool & CpuSet.from_bits(_cpus_of(policy, affinity))
        aligned_cpus = take(policy.topo, policy.options, aligned, min(len(aligned), count), steps)
    later: list[str] | None = None if steps is None else []
    other_cpus = take(policy.topo, policy.options, pool - aligned_cpus, count - len(aligned_cpus), later)
    if steps is not None:
        if affinity is not None and other_cpus:
            home = (
                f"the sockets of {numa_nodes_text(affinity)}"
                if policy.options.align_by_socket
                else numa_nodes_text(affinity)
            )
            free = f"only {counted(len(aligned_cpus), 'free CPU')}" if aligned_cpus else "no free CPUs"
            where = numa_nodes_text(nodes_of(policy.topo, other_cpus))
            steps.append(f"{home} had {free}, {len(other_cpus)} more from {where}")
        steps += later or ()
    return aligned_cpus | other_cpus


def remove(state: CpuState, uid: str, name: str) -> CpuState:
    """Return the state without a container; its CPUs are free unless other containers of its pod use them.

    If the pod owns CPUs as a whole, they become free with its last container.
    """
    containers = dict(state.assigned.get(uid, {}))
    if name not in containers:
        return state
    freed = containers.pop(name)
    of_pods = state.pod_level_cpus
    if uid in of_pods:
        freed = CpuSet() if containers else of_pods[uid]
        of_pods = of_pods if containers else {u: cpus for u, cpus in of_pods.items() if u != uid}
    for cpus in containers.values():
        freed -= cpus
    assigned = {u: entries for u, entries in state.assigned.items() if u != uid}
    if containers:
        assigned[uid] = containers
    return replace(state, default=state.default | freed, assigned=assigned, pod_level_cpus=of_pods)


def with_entry(assigned: Assignments, uid: str, name: str, cpus: CpuSet) -> Assignments:
    """Return assignments with one added."""
    return {**assigned, uid: {**assigned.get(uid, {}), name: cpus}}


def _cpus_of(policy: CpuPolicy, nodes: Mask) -> int:
    """Return the CPUs of nodes; with ``align-by-socket`` those of their sockets."""
    topo = policy.topo
    if not policy.options.align_by_socket:
        return union(topo.nodes.get(node, 0) for node in nodes)
    return union(topo.sockets[s] for node in nodes for s, _ in topo.node_sockets.get(node, ()))
