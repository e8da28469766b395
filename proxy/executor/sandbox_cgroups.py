"""The cgroups of sandboxes: the process that holds a pod's namespaces stays off CPUs that are owned.

Theory of operation. The runtime gives a sandbox a cgroup of its own next to those of the pod's containers,
and sets no CPUs: the sandbox may run wherever its pod may, even on CPUs of owners. Its process only sleeps
and, in a pod that shares its process namespace, reaps processes. So it is moved with as little effort as
possible:

* A sandbox belongs to the pool of its pod's class: the BE pool for BE pods, otherwise the shared pool
  (SYSTEM: the CPUs kept for that class). This includes the sandbox of an owner: owned CPUs are for the
  containers that requested them.
* Before CPUs are given away, sandboxes that have some of them (according to the last read or write) leave
  them. A sandbox that has none of them costs nothing. A new sandbox is read after it has been created, and
  before the next owner is admitted.
* A sandbox that leaves CPUs goes to those CPUs reserved for the system that are in its set and its pool: no
  owner is placed there, so it need not be moved again. Without such CPUs it keeps the rest of its set.
* As long as there is an owner, a sandbox need only be within its pool. Once there is none, all sandboxes get
  their whole pools again. A reconcile does that, never while a call waits, and no cgroup above is widened for
  it.
* A failed write is reported; no container is rejected because of a sleeping process.

A runtime may run a monitor for each container, in a cgroup next to the container's (``RuntimeQuirks``). It is
treated like the sandbox. Monitors are searched for only in pods whose sandbox shows that there are some.

If the cpusets in requests of BE containers are erased, ``best_effort.groups`` writes the cgroups of
BestEffort pods. A runtime may give a sandbox no cgroup (a virtual machine needs none): it is searched for
twice, and then seldom. Everything here runs in the kernel worker's thread.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator

from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.executor.kernel_ports import Cgroups
from proxy.executor.runtime_ports import RuntimeQuirks
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import KubeQos, Phase, Pod, Pool, QosClass
from proxy.pools.claims import pool_of

TRIES, RARE_EVERY = 2, 32
"""Searches for a missing cgroup; after these, one search in this many passes."""
_NO_MONITOR = (Phase.CREATING, Phase.EXITED)


class SandboxCgroups:
    """Keeps sandboxes on the pools of their pods' classes.

    Attributes:
        written: The number of writes to cgroups of sandboxes and monitors so far.
        monitored: Ids of the sandboxes whose containers have monitors in cgroups of their own.
    """

    def __init__(self, cgroups: Cgroups, quirks: RuntimeQuirks) -> None:
        self._cgroups = cgroups
        self._quirks = quirks
        self._observed: dict[str, tuple[str, CpuSet]] = {}
        self._missed: dict[str, int] = {}
        self.monitored: set[str] = set()
        self._passes = 0
        self.written = 0

    def move_off_owned_cpus(self, state: NodeState) -> list[str]:
        """Move sandboxes off CPUs that are outside of their pools.

        Returns:
            Messages about what could not be written.
        """
        errors: list[str] = []
        if not state.owners:
            return errors  # the pools have all CPUs
        for key, pod, pool in self._ours(state):
            known = self._observed.get(key)
            if known is None and self._missed.get(key, 0) < TRIES:
                known = self._read_cgroup(key, pod, errors)
            if known is not None and not known[1] <= pool:
                self._write(key, pod, known[0], _rest(known[1], pool, state.node.reserved), errors)
        return errors

    def write_all(self, state: NodeState) -> list[str]:
        """Compare all sandboxes and monitors with the CPUs that they should have, and write what differs.

        Returns:
            Messages about what could not be written.
        """
        self._passes += 1
        self.monitored &= state.pods.keys()
        existing = state.pods.keys() | {self._quirks.monitor(i) for i in state.containers if self.monitored}
        self._observed = {k: v for k, v in self._observed.items() if k in existing}
        self._missed = {k: v for k, v in self._missed.items() if k in existing}
        errors: list[str] = []
        for key, pod, pool in self._ours(state):
            known = self._observed.get(key)
            if state.owners or known is None or known[1] != pool:
                known = self._read_cgroup(key, pod, errors)
            if known is None or (known[1] <= pool and (state.owners or known[1] == pool)):
                continue
            path, has = known
            want = _rest(has, pool, state.node.reserved) if state.owners else pool & self._above(path)
            if want and want != has:
                self._write(key, pod, path, want, errors)
        return errors

    def _ours(self, state: NodeState) -> Iterator[tuple[str, Pod, CpuSet]]:
        """Yield sandboxes and monitors: the name by which each is found, its pod, its pool.

        Sandboxes come first: they show which pods have monitors.
        """
        pools = dict(self._pools(state))
        for sandbox_id, pool in pools.items():
            yield sandbox_id, state.pods[sandbox_id], pool
        if self.monitored:
            for container in state.containers.values():
                pod = container.pod
                if pod.sandbox_id in self.monitored and container.phase not in _NO_MONITOR:
                    pool = pools.get(pod.sandbox_id, CpuSet())
                    if pool:
                        yield self._quirks.monitor(container.id), pod, pool

    def _pools(self, state: NodeState) -> Iterator[tuple[str, CpuSet]]:
        """Yield the id and the pool of each sandbox."""
        erased = state.node.be_cpuset is BeCpuset.ERASE
        pools: dict[tuple[QosClass, KubeQos], CpuSet] = {}
        for pod in state.pods.values():
            key = pod.qos, pod.kube_qos
            pool = pools.get(key)
            if pool is None:
                name = pool_of(pod)[0]
                # The suppressed BE set changes every second, and a sleeping process need not follow it.
                pool = pools[key] = state.pools.be if name is Pool.BE else state.pools.cpus_of(name)
            if not applies_to(state, pod):
                continue
            if pod.cgroup_parent and not (erased and pod.kube_qos is KubeQos.BEST_EFFORT):
                yield pod.sandbox_id, pool

    def _read_cgroup(self, key: str, pod: Pod, errors: list[str]) -> tuple[str, CpuSet] | None:
        """Read the path and CPUs of the cgroup of a sandbox or a monitor; None if it has no cgroup."""
        known = self._observed.get(key)
        missed = self._missed.get(key, 0)
        if known is None and missed >= TRIES and self._passes % RARE_EVERY:
            return None
        path = known[0] if known is not None else self._cgroups.find(pod.cgroup_parent, key)
        if path is not None:
            try:
                found = self._observed[key] = path, self._cgroups.read(path).effective_cpus
            except CgroupError as error:
                self._failed(key, pod, path, error, errors)
            else:
                self._missed.pop(key, None)
                if key == pod.sandbox_id and self._quirks.has_monitors(path):
                    self.monitored.add(key)
                return found
        self._missed[key] = missed + 1
        return None

    def _write(self, key: str, pod: Pod, path: str, cpus: CpuSet, errors: list[str]) -> None:
        try:
            self.written += self._cgroups.write(path, cpus, None)
            self._observed[key] = path, cpus
        except CgroupError as error:
            self._failed(key, pod, path, error, errors)

    def _above(self, path: str) -> CpuSet:
        try:
            return self._cgroups.read(path.rpartition("/")[0]).effective_cpus
        except CgroupError:
            return CpuSet()

    def _failed(self, key: str, pod: Pod, path: str, error: CgroupError, errors: list[str]) -> None:
        self._observed.pop(key, None)
        is_left = error.errno == errno.EOPNOTSUPP and self._quirks.may_lose_controllers(path)
        if error.errno not in GONE and not is_left:
            kind = "sandbox" if key == pod.sandbox_id else "monitor of a container"
            errors.append(f"cannot move the {kind} of {pod.ref}: {error}")

    def groups(self, state: NodeState, pods: Iterable[Pod] | None = None) -> Iterator[str]:
        """Yield the cgroups of the sandboxes and monitors that exist, of some pods or of all."""
        find, quirks = self._cgroups.find, self._quirks
        monitored = set[str]()
        for pod in state.pods.values() if pods is None else pods:
            path = find(pod.cgroup_parent, pod.sandbox_id) if pod.sandbox_id else None
            if path is not None:
                yield path
                if quirks.has_monitors(path):
                    monitored.add(pod.sandbox_id)
        for container in state.containers.values():
            if container.pod.sandbox_id in monitored:
                path = find(container.pod.cgroup_parent, quirks.monitor(container.id))
                if path is not None:
                    yield path


def _rest(has: CpuSet, pool: CpuSet, reserved: CpuSet) -> CpuSet:
    """Return the CPUs of its pool that a sandbox keeps or gets when it has to leave others."""
    in_pool = has & pool
    return in_pool & reserved or in_pool or pool
