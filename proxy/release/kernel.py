"""Restores cpusets in the kernel: from the top, and only wider. Runs in the kernel worker's thread.

A group's set lies within its parent's on cgroup v1, so ancestors are written first. The group of class
BestEffort, the groups of its pods and the groups in them come first, if they hold the BE (best effort) pool
(``beCpuset: erase``, also by an earlier configuration). Then come the groups of other pods that a fence may
have left narrow (v2), then sandboxes, monitors and containers. A container's target set is added to its
current one. On v2 a group without its own list already has that of its parent, and stays so.

No record says which lists are fences (``engine.pod_fence``); a daemon that is killed during a call leaves its
fence behind. A list that holds all CPUs that were planned for the pod's containers when the release began may
be a fence, even if later writes have widened it. So may any list of a pod whose containers had all ended. A
list that lacks one of these CPUs is not a fence: it comes from another program, and the release keeps to it.
The present plan does not count: an owner that has ended since the release began has made the pools larger,
but nothing was written for that.

The target is the cpuset that a container would have without topoproxy.

Theory (kubernetes v1.36 pkg/kubelet/cm/cpumanager/cpu_manager.go, reconcileState; runc v1.1). Three sources
decide where a container runs without topoproxy between kubelet and the runtime:

* kubelet's CPU manager under policy ``static``: the CPUs of the container's entry in its state file, or its
  default set for a container without an entry. It sends them with the create, and again in each of its
  reconcile periods.
* the request that created the container, and the last update that named a set. On most nodes, only a kubelet
  under ``static`` names CPUs; kubelet's memory manager names memory nodes.
* the group above it. A container without a named set runs on all that its pod's group has: on
  cgroup v1 runc copies it when it makes the group, on v2 an empty list means the same.

If a container was adopted after its create (``engine.adoption``), its request is the set that the runtime had
saved at that time, and the container gets this set back. So if the ledger was lost while containers were on
sets of topoproxy, these sets are all that is known of them.

In the kernel sets only grow: a container first gets its target in addition to its current CPUs, so that no
container ever has fewer CPUs than before. If the target is narrower, which only kubelet's static policy or a
named set can cause, the runtime's own update narrows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from proxy.engine.pod_fence import has_group
from proxy.engine.state import NodeState
from proxy.executor.best_effort.groups import CLASS
from proxy.executor.cpuset_writer import CpusetWriter
from proxy.executor.kernel_ports import Cgroups, CpusetValue
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BeCpuset
from proxy.model.kubelet import CpuManager
from proxy.model.machine import Machine
from proxy.model.workload import LIVE, Container, KubeQos, Pod, Request

KUBEPODS = ("kubepods", "kubepods.slice")
"""The groups above all pods, unless kubelet has a ``cgroupRoot``."""


class ReleaseTarget(Struct, frozen=True):
    """The target of a container.

    Attributes:
        cpus: The CPUs; None for those of the group above the container.
        mems: The memory nodes; None for those of the group above the container.
    """

    cpus: CpuSet | None
    mems: Mask | None


def target_of(container: Container, machine: Machine, manager: CpuManager) -> ReleaseTarget:
    """Return the target of a container.

    Args:
        container: The container.
        machine: The hardware.
        manager: The state of kubelet's CPU manager.
    """
    mems = named_mems(container.request, machine)
    if manager.policy == "static":
        held = manager.held.get(container.pod.uid, {}).get(container.name)
        if held and held <= machine.present:
            return ReleaseTarget(held, mems)
        if manager.default and manager.default <= machine.present:
            return ReleaseTarget(manager.default, mems)
    requested = named_cpus(container.request, machine)
    if requested is not None:
        return ReleaseTarget(requested, mems)
    return ReleaseTarget(None, mems)


def named_cpus(request: Request, machine: Machine) -> CpuSet | None:
    """Return the CPUs that a request names; None if it names none that exist on this machine."""
    try:
        requested = CpuSet.parse(request.cpuset_cpus)
    except ValueError:
        return None
    return requested if requested and requested <= machine.present else None


def named_mems(request: Request, machine: Machine) -> Mask | None:
    """Return the memory nodes that a request names; None if it names none that exist on this machine."""
    try:
        requested = Mask.parse(request.cpuset_mems)
    except ValueError:
        return None
    return requested if requested and requested <= Mask(machine.node_by_id) else None


class ReleasedCpuset(Struct, frozen=True):
    """The cpuset that one container must get, taking the group above it into account.

    Attributes:
        cpus, mems: The sets that the runtime must save.
        exact: Whether the kernel has no more than these.
    """

    cpus: CpuSet
    mems: Mask
    exact: bool = True


@dataclass(slots=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        due: The cpusets that containers must get, by id.
        written: Ids of containers, and paths of groups, that were widened.
        errors: Why something could not be widened, by the id of a container or the path of a group.
    """

    due: dict[str, ReleasedCpuset] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


def widen_cpusets(
    cpuset_writer: CpusetWriter,
    state: NodeState,
    targets: Iterable[tuple[Container, ReleaseTarget]],
    pods: Collection[Pod],
    planned: Mapping[str, CpuSet],
) -> SweepResult:
    """Widen each container to its target set.

    Args:
        cpuset_writer: Knows the groups.
        state: The node.
        targets: The target of each container.
        pods: The pods whose other groups are restored.
        planned: The CPUs that were planned for containers when the release began, by their cgroup parents.
    """
    done, cgroups = SweepResult(), cpuset_writer.cgroups
    if state.facts.be_groups or state.node.be_cpuset is BeCpuset.ERASE:
        _widen_be_groups(cgroups, state, pods, done)
    if cgroups.version != 1:
        _lift_fences(cgroups, pods, planned, done)
    for idle in cpuset_writer.sandbox_cgroups.groups(state, pods):
        _widen_to_parent(cgroups, idle, done)
    for container, target in targets:
        path = cpuset_writer.path_of(container) if container.phase in LIVE else None
        try:
            if path is None:
                done.due[container.id] = _initial_cpuset(cgroups, state.node.machine, container, target)
            else:
                done.due[container.id] = _widen(cgroups, state.node.machine, container.id, path, target, done)
        except CgroupError as error:
            if error.errno in GONE:
                done.due[container.id] = _initial_cpuset(cgroups, state.node.machine, container, target)
            else:
                done.errors[container.id] = str(error)
    return done


def _online_part(cgroups: Cgroups, machine: Machine, requested: CpuSet) -> CpuSet:
    """Leave out offline CPUs if the kernel refuses a list with such a CPU."""
    return requested & machine.online or machine.online if cgroups.version == 1 else requested


def _widen(
    cgroups: Cgroups, machine: Machine, container_id: str, path: str, target: ReleaseTarget, done: SweepResult
) -> ReleasedCpuset:
    """Widen the group of a container to its target cpuset; returns the cpuset that the runtime must save."""
    has, above = cgroups.read(path), _parent_cpuset(cgroups, path)
    cpus = above.effective_cpus if target.cpus is None else _online_part(cgroups, machine, target.cpus)
    mems = above.effective_mems if target.mems is None else target.mems
    more_cpus = has.cpus | cpus if has.cpus or target.cpus is not None else None
    more_mems = has.mems | mems if has.mems or target.mems is not None else None
    if cgroups.write(path, more_cpus, more_mems):
        done.written.append(container_id)
    return ReleasedCpuset(cpus, mems, has.cpus <= cpus and has.mems <= mems)


def _initial_cpuset(
    cgroups: Cgroups, machine: Machine, container: Container, target: ReleaseTarget
) -> ReleasedCpuset:
    """Return the cpuset with which a container without a group must start."""
    cpus, mems = machine.online, machine.memory_nodes
    pod = cgroups.pod_group(container.pod.cgroup_parent)
    if pod is not None:
        try:
            value = cgroups.read(pod)
            cpus, mems = value.effective_cpus or cpus, value.effective_mems or mems
        except CgroupError as error:
            if error.errno not in GONE:
                raise
    if target.cpus is not None:
        cpus = _online_part(cgroups, machine, target.cpus)
    return ReleasedCpuset(cpus, target.mems or mems)


def _parent_cpuset(cgroups: Cgroups, path: str) -> CpusetValue:
    return cgroups.read(path.rpartition("/")[0])


def _widen_to_parent(cgroups: Cgroups, path: str, done: SweepResult) -> None:
    """Set a group that is not a container's to the cpuset of its parent; on v2 it may have that already."""
    try:
        want, has = _parent_cpuset(cgroups, path).effective_cpus, cgroups.read(path).cpus
        if has and not want <= has and cgroups.write(path, has | want, None, adjust_below=False):
            done.written.append(path)
    except CgroupError as error:
        if error.errno not in GONE:
            done.errors[path] = str(error)


def _widen_be_groups(cgroups: Cgroups, state: NodeState, pods: Collection[Pod], done: SweepResult) -> None:
    """Set the groups above BE containers, and the groups in them, to the cpuset of the group above."""
    parents = {pod.cgroup_parent for pod in pods if pod.kube_qos is KubeQos.BEST_EFFORT}
    groups = {path for parent in parents if (path := cgroups.pod_group(parent))}
    roots = {path.rpartition("/")[0] for path in groups}
    is_partial = len(pods) < len(state.pods)
    if not is_partial:
        roots |= _class_groups(cgroups, state.pods.values())
    ids = {container.id for container in state.containers.values()}
    for root in sorted(root for root in roots if root.rpartition("/")[2].endswith(CLASS)):
        todo = [(root, 0)]
        while todo:
            path, depth = todo.pop(0)
            _widen_to_parent(cgroups, path, done)
            below = cgroups.children(path) if depth < 2 else ()
            # Known containers are restored separately, by their requests.
            groups_below = [f"{path}/{name}" for name in below if not _is_known_container(name, ids)]
            todo += [
                (group, depth + 1) for group in groups_below if depth or not is_partial or group in groups
            ]


def _lift_fences(
    cgroups: Cgroups, pods: Collection[Pod], planned: Mapping[str, CpuSet], done: SweepResult
) -> None:
    """Set the groups of pods that may still be as narrow as a fence to the cpuset of the group above."""
    for parent in sorted({pod.cgroup_parent for pod in pods if has_group(pod)}):
        path = cgroups.pod_group(parent)
        if path is None:
            continue
        try:
            if planned.get(parent, CpuSet()) <= cgroups.read(path).cpus:
                _widen_to_parent(cgroups, path, done)
        except CgroupError as error:
            if error.errno not in GONE:
                done.errors[path] = str(error)


def _pod_groups(cgroups: Cgroups, pods: Iterable[Pod]) -> set[str]:
    """Return the groups of those pods that have a group of their own."""
    parents = {pod.cgroup_parent for pod in pods if has_group(pod)}
    return {path for parent in parents if (path := cgroups.pod_group(parent))}


def _class_groups(cgroups: Cgroups, pods: Iterable[Pod]) -> set[str]:
    """Return the groups of class BestEffort, even if no pod of the class is left to name them."""
    tops = set(KUBEPODS)
    for path in _pod_groups(cgroups, pods):
        above = path.rpartition("/")[0]
        tops |= {above, above.rpartition("/")[0]}
    found = set()
    for top in filter(None, tops):
        try:
            found |= {f"{top}/{name}" for name in cgroups.children(top) if name.endswith(CLASS)}
        except CgroupError as error:
            if error.errno not in GONE:
                raise
    return found


def _is_known_container(name: str, ids: set[str]) -> bool:
    stem = name.removesuffix(".scope")
    return stem in ids or stem.rpartition("-")[2] in ids
