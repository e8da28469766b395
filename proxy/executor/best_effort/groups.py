"""The cgroups above BE containers: that of the Kubernetes QoS class BestEffort, and those of its pods.

If the cpusets in requests of BE containers are erased (``beCpuset: erase``), a container starts with the
cpuset of its pod's group, so these groups hold the BE pool. Groups below them that have no cpuset of their
own, such as that of a pod's sandbox, follow the pool too. If a pod runs on other CPUs (class LS in a
BestEffort cgroup), the groups above it are as wide as it needs. The groups are compared with the kernel
whenever containers are written, and before a container below them starts: the groups of a new pod have all
CPUs at first, and on v1 no container can have a CPU that its groups lack. The order of writes is that of
``proxy.pools.write_order``. All of this runs in the kernel worker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.executor.kernel_ports import Cgroups
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos, Phase, Pod, Pool
from proxy.pools.write_order import CONTAINER, POD, ROOT, BeGroup, ordered_writes

CLASS = ("besteffort", "-besteffort.slice")
"""The name of the class's group with cgroupfs, and the end of its name with systemd."""


class BeGroups:
    """Keeps the groups of BestEffort pods at the BE pool."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups

    def write(self, state: NodeState, paths: Mapping[str, str]) -> list[str]:
        """Write the groups whose cpusets differ from the wanted ones.

        Args:
            state: The current state of the node.
            paths: The known groups of containers, by id.

        Returns:
            What could not be written, as text.
        """
        if not applies_to(state, None):
            return []
        pods = [pod for pod in state.pods.values() if pod.kube_qos is KubeQos.BEST_EFFORT]
        own = self._paths(pod for pod in pods if applies_to(state, pod))
        observed = self._paths(pod for pod in pods if not applies_to(state, pod))
        errors: list[str] = []
        for root in sorted({path.rpartition("/")[0] for path in own.values()}):
            if not root.rpartition("/")[2].endswith(CLASS):
                continue
            try:
                others = set(observed.values())
                groups = [group for group in self._groups(root) if not _is_in(group.path, others)]
                if not groups:
                    continue
                wanted = self._wanted(state, own, paths, groups)
                if any(path.startswith(f"{root}/") for path in others):
                    wanted[root] = state.node.machine.online  # it also bounds observed pods
                for step in ordered_writes(groups, wanted):
                    with _unless_gone():
                        self._cgroups.write(step.path, step.cpus, None, adjust_below=False)
            except CgroupError as error:
                errors.append(str(error))
        return errors

    def _paths(self, pods: Iterable[Pod]) -> dict[str, str]:
        """Return the groups of pods by their cgroup parents."""
        parents = sorted({pod.cgroup_parent for pod in pods})
        return {parent: path for parent in parents if (path := self._cgroups.pod_group(parent))}

    def _groups(self, root: str) -> list[BeGroup]:
        """Read a class's group, those of its pods, and the groups in them."""
        found, level = list[BeGroup](), [root]
        for depth in (ROOT, POD, CONTAINER):
            below: list[str] = []
            for path in level:
                with _unless_gone():
                    value = self._cgroups.read(path)
                    children = self._cgroups.children(path) if depth < CONTAINER else ()
                    found.append(BeGroup(path, depth, value.cpus or value.effective_cpus))
                    below += [f"{path}/{name}" for name in sorted(children)]
            level = below
        return found

    def _wanted(
        self, state: NodeState, own: Mapping[str, str], paths: Mapping[str, str], groups: list[BeGroup]
    ) -> dict[str, CpuSet]:
        """Return the wanted CPUs of each group."""
        pool = state.pools.cpus_of(Pool.BE)
        wanted = {group.path: pool for group in groups}
        root = groups[0].path
        for container in state.containers.values():
            pod = own.get(container.pod.cgroup_parent)
            if container.phase is Phase.EXITED or pod is None or not pod.startswith(f"{root}/"):
                continue
            want = state.desired_cpus(container)
            path = paths.get(container.id) or container.cgroup
            if not path and container.phase is Phase.CREATED and not state.node.erases(container.placement):
                # CRI-O makes the group with the create, and its name is not the id alone.
                path = self._cgroups.find(container.pod.cgroup_parent, container.id) or ""
            path = path or f"{pod}/{container.id}"
            if path in wanted:
                wanted[path] = want
            for above in (pod, root):
                if above in wanted:
                    wanted[above] |= want
        return wanted


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Skip a group that has gone in the meantime: the others must still be written."""
    try:
        yield
    except CgroupError as error:
        if error.errno not in GONE:
            raise


def _is_in(path: str, groups: set[str]) -> bool:
    """Return whether a group is one of these groups of pods, or is directly below one."""
    return path in groups or path.rpartition("/")[0] in groups
