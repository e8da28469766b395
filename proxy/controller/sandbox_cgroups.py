"""The groups of sandboxes: the process that holds a pod's namespaces stays off CPUs that are owned.

Theory of operation. The runtime gives a sandbox a group of its own beside those of the pod's containers, and
no CPUs: it may run wherever its pod may, on CPUs of owners too. All it does is to sleep and, in a pod that
shares its process namespace, to reap processes. So it is moved with as little effort as can be:

* It belongs to the pool of its pod's class: the BE pool for BE pods, else the shared pool (SYSTEM: the CPUs
  kept for that). That of an owner, too: what is owned is for the containers that asked for it.
* Before CPUs are given away, sandboxes that have some of them leave them, by what was read or written last;
  one that has none of them costs nothing. A new sandbox is read when it has been made, and before the next
  owner comes.
* A sandbox that leaves goes to the CPUs that are reserved for the system, as far as it may: no owner comes
  there, so it need not be moved again. Where none are reserved, it keeps what is left of its set.
* As long as there is an owner, being within the pool is enough. When there is none, all have their pools
  again; that is done when all is compared, never on the way of a call. No group above is widened for that.
* What cannot be written is reported; a sleeping process is no reason to refuse a container.

A runtime may run a monitor for each container, in a group beside it (``RuntimeQuirks``): it is treated as
the sandbox is. Monitors are searched for only in pods whose sandbox shows that the runtime has them.

Where requests of BE containers are erased, the groups of BestEffort are those of ``be.groups``. A runtime may
give a sandbox no group (a virtual machine needs none): it is looked for twice, and then seldom. Runs in the
kernel worker's thread.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from proxy.controller.kernel_ports import Cgroups
from proxy.controller.runtime_ports import RuntimeQuirks
from proxy.engine.state import NodeState
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import KubeQos, Phase, Pod, Pool, QosClass
from proxy.pools.claims import pool_of

TRIES, SELDOM = 2, 32
"""So often a group that is not there is looked for; then once in so many passes."""
_NO_MONITOR = (Phase.CREATING, Phase.EXITED)


class SandboxCgroups:
    """Keeps sandboxes where their pods' classes belong.

    Attributes:
        written: How many were written so far.
    """

    def __init__(self, cgroups: Cgroups, quirks: RuntimeQuirks) -> None:
        self._cgroups = cgroups
        self._quirks = quirks
        self._seen: dict[str, tuple[str, CpuSet]] = {}
        self._missed: dict[str, int] = {}
        self._monitored: set[str] = set()
        self._passes = 0
        self.written = 0

    def has_monitors(self, pod: Pod) -> bool:
        """Report whether a pod's containers have monitors in groups of their own."""
        return pod.sandbox_id in self._monitored

    def leave(self, state: NodeState) -> list[str]:
        """Have sandboxes leave CPUs that are outside of their pools.

        Returns:
            What could not be written, in words.
        """
        errors: list[str] = []
        if not state.owners:
            return errors  # the pools are all that there is
        for key, pod, pool in self._ours(state):
            known = self._seen.get(key)
            if known is None and self._missed.get(key, 0) < TRIES:
                known = self._look(key, pod, errors)
            if known is not None and not known[1] <= pool:
                self._write(key, pod, known[0], _rest(known[1], pool, state.node.reserved), errors)
        return errors

    def follow(self, state: NodeState) -> list[str]:
        """Compare all with what they should have, and write what differs.

        Returns:
            What could not be written, in words.
        """
        self._passes += 1
        self._monitored &= state.pods.keys()
        there = state.pods.keys() | {self._quirks.monitor(i) for i in state.containers if self._monitored}
        self._seen = {k: v for k, v in self._seen.items() if k in there}
        self._missed = {k: v for k, v in self._missed.items() if k in there}
        errors: list[str] = []
        for key, pod, pool in self._ours(state):
            known = self._seen.get(key)
            if state.owners or known is None or known[1] != pool:
                known = self._look(key, pod, errors)
            if known is None or (known[1] <= pool and (state.owners or known[1] == pool)):
                continue
            path, has = known
            want = _rest(has, pool, state.node.reserved) if state.owners else pool & self._above(path)
            if want and want != has:
                self._write(key, pod, path, want, errors)
        return errors

    def _ours(self, state: NodeState) -> Iterator[tuple[str, Pod, CpuSet]]:
        """Give sandboxes and monitors: the name to find each by, its pod, its pool.

        Sandboxes come first: they show which pods have monitors.
        """
        pools = dict(self._pools(state))
        for sandbox_id, pool in pools.items():
            yield sandbox_id, state.pods[sandbox_id], pool
        if self._monitored:
            for container in state.containers.values():
                pod = container.pod
                if pod.sandbox_id in self._monitored and container.phase not in _NO_MONITOR:
                    pool = pools.get(pod.sandbox_id, CpuSet())
                    if pool:
                        yield self._quirks.monitor(container.id), pod, pool

    def _pools(self, state: NodeState) -> Iterator[tuple[str, CpuSet]]:
        """Give the pools of sandboxes, by id."""
        erased = state.node.be_cpuset is BeCpuset.ERASE
        pools: dict[tuple[QosClass, KubeQos], CpuSet] = {}
        for pod in state.pods.values():
            key = pod.qos, pod.kube_qos
            pool = pools.get(key)
            if pool is None:
                name = pool_of(pod)[0]
                # Suppression changes every second, and what sleeps need not follow it.
                pool = pools[key] = state.pools.be if name is Pool.BE else state.pools.of(name)
            if pod.cgroup_parent and not (erased and pod.kube_qos is KubeQos.BEST_EFFORT):
                yield pod.sandbox_id, pool

    def _look(self, key: str, pod: Pod, errors: list[str]) -> tuple[str, CpuSet] | None:
        """Read what a sandbox or a monitor has now; None where it has no group."""
        known = self._seen.get(key)
        missed = self._missed.get(key, 0)
        if known is None and missed >= TRIES and self._passes % SELDOM:
            return None
        path = known[0] if known is not None else self._cgroups.find(pod.cgroup_parent, key)
        if path is not None:
            try:
                found = self._seen[key] = path, self._cgroups.read(path).effective_cpus
            except CgroupError as error:
                self._failed(key, pod, path, error, errors)
            else:
                self._missed.pop(key, None)
                if key == pod.sandbox_id and self._quirks.has_monitors(path):
                    self._monitored.add(key)
                return found
        self._missed[key] = missed + 1
        return None

    def _write(self, key: str, pod: Pod, path: str, cpus: CpuSet, errors: list[str]) -> None:
        try:
            self.written += self._cgroups.write(path, cpus, None)
            self._seen[key] = path, cpus
        except CgroupError as error:
            self._failed(key, pod, path, error, errors)

    def _above(self, path: str) -> CpuSet:
        try:
            return self._cgroups.read(path.rpartition("/")[0]).effective_cpus
        except CgroupError:
            return CpuSet()

    def _failed(self, key: str, pod: Pod, path: str, error: CgroupError, errors: list[str]) -> None:
        self._seen.pop(key, None)
        is_left = error.errno == errno.EOPNOTSUPP and self._quirks.is_left_behind(path)
        if error.errno not in GONE and not is_left:
            what = "sandbox" if key == pod.sandbox_id else "monitor of a container"
            errors.append(f"cannot move the {what} of {pod.ref}: {error}")

    def groups(self, state: NodeState) -> Iterator[str]:
        """Return the groups of all sandboxes, and of all monitors, that exist."""
        find, quirks = self._cgroups.find, self._quirks
        monitored = set[str]()
        for pod in state.pods.values():
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
    """Give the CPUs of its pool to which a sandbox goes that has to leave others."""
    left = has & pool
    return left & reserved or left or pool
