"""Writes the planned cpusets to the kernel. All writes run in the kernel worker's thread.

Each write uses the newest state, not the state from when the job was queued: see
``proxy.executor.background``. The memory nodes of a live container are not changed, because its memory may be
on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.executor.best_effort.groups import BeGroups
from proxy.executor.kernel_ports import Cgroups
from proxy.executor.runtime_ports import NO_QUIRKS, RuntimeQuirks
from proxy.executor.sandbox_cgroups import RARE_EVERY, TRIES, SandboxCgroups
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import LIVE, Container, Phase, Pool

BULK = 8
"""From this number on, containers with the same cpuset are written together."""


@dataclass(slots=True)
class WriteResult:
    """The result of writing cpusets.

    Attributes:
        written: Ids of containers with a cpuset that was changed.
        drifted: The containers in ``written`` that should have held the right cpuset already, according to
            our records: another program wrote to their cgroups.
        absent: Ids of containers that should have a cgroup and have none.
        lost: The containers in ``absent`` that had no cgroup the last time either.
        errors: Messages about what could not be written.
        group_errors: The messages in ``errors`` that are about groups above pods.
        refused: The kernel's error for each cpuset that could not be written, by container id.
        notes: Messages about what else could not be written; no call is refused or delayed for these.
        kernel_cpus: The cpusets in cgroups that another program had written to, by container id, if they were
            read.
        unrepaired: The cpusets in ``kernel_cpus`` that were not overwritten.
        seconds: How long the writes took.
    """

    written: list[str] = field(default_factory=list)
    drifted: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    group_errors: list[str] = field(default_factory=list)
    refused: dict[str, CgroupError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kernel_cpus: dict[str, CpuSet] = field(default_factory=dict)
    unrepaired: dict[str, CpuSet] = field(default_factory=dict)
    seconds: float = 0.0


class CpusetWriter:
    """Writes the planned cpusets to cgroups.

    Attributes:
        cgroups: The tree of cgroups.
        sandbox_cgroups: Writes the cgroups of sandboxes.
    """

    def __init__(
        self,
        cgroups: Cgroups,
        state: Callable[[], NodeState],
        quirks: RuntimeQuirks = NO_QUIRKS,
    ) -> None:
        """Write nothing yet.

        Args:
            cgroups: The tree of cgroups.
            state: Returns the newest state; called in any thread.
            quirks: How the runtime names its cgroups.
        """
        self.cgroups = cgroups
        self._state = state
        self._paths: dict[str, str] = {}
        self._missed: dict[str, tuple[Phase, int]] = {}
        """How often the cgroup of each container was not found in its phase."""
        self._removed: dict[str, str] = {}
        self._last_written: dict[str, CpuSet] = {}
        self._refused: set[str] = set()
        self._passes = 0
        self._be_groups = BeGroups(cgroups)
        self.sandbox_cgroups = SandboxCgroups(cgroups, quirks)
        self._first: Callable[[], None] = lambda: None
        self._ended = False

    def end(self) -> None:
        """Write nothing from now on; a running job leaves what it has not written.

        Such a job may have waited for the kernel so long that another process controls the node by now, with
        its own plan.
        """
        self._ended = True

    def do_first(self, job: Callable[[], None]) -> None:
        """Run a job before each pass that writes containers, in the same thread."""
        self._first = job

    def _is_paused(self) -> bool:
        """Return whether writes are paused or have ended; jobs that are already queued check this, too."""
        return self._ended or self._state().mode.in_release

    def is_live(self, container: Container) -> bool:
        """Return whether a container may have a cgroup, and should be written; callable from any thread."""
        state = self._state()
        # A container that is confined may have a cgroup before its start has been answered (``confinement``).
        may_have_cgroup = container.phase in LIVE or (
            container.phase is Phase.CREATED and state.inflight.is_confined(container.id)
        )
        return may_have_cgroup and applies_to(state, container.pod)

    def write(self, ids: Iterable[str]) -> WriteResult:
        """Write the cpusets of some containers.

        Containers that are not live are skipped; containers that hold the right cpuset are not written.
        """
        state = self._state()
        return self._write(state, *_sharers_first(state, state.existing(ids)))

    def _write(self, state: NodeState, *parts: list[Container]) -> WriteResult:
        """Write the cpusets of some containers, one part after the other."""
        done = WriteResult()
        if self._is_paused():
            return done
        began = time.perf_counter()
        self._first()
        for part in parts:
            remaining = self._in_bulk(state, part, done) if len(part) >= BULK else [c.id for c in part]
            for container_id in remaining:
                container = self._state().containers.get(container_id)
                if container is not None and not self._ended and self.is_live(container):
                    self._one(container, done)
        state = self._state()
        if not self._ended and state.node.be_cpuset is BeCpuset.ERASE:
            done.group_errors = self._be_groups.write(state, self._paths)
            done.errors += done.group_errors
        done.seconds = time.perf_counter() - began
        return done

    def write_all(self, skip: Collection[str] = ()) -> WriteResult:
        """Write the cpusets of all containers except those in ``skip``, then those of the sandboxes."""
        state = self._state()
        containers = state.containers
        self._passes += 1
        self._paths = {k: v for k, v in self._paths.items() if k in containers}
        self._last_written = {k: v for k, v in self._last_written.items() if k in containers}
        self._missed = {k: v for k, v in self._missed.items() if k in containers}
        self._removed = {k: v for k, v in self._removed.items() if k in containers}
        self._refused = {k for k in self._refused if k in containers}
        wanted = [c for c in containers.values() if not (c.id in skip or self._is_missing(c))]
        done = self._write(state, *_sharers_first(state, wanted))
        if not self._is_paused():
            done.notes += self.sandbox_cgroups.write_all(self._state())
        return done

    def write_pools(self) -> WriteResult:
        """Write the cpusets of all containers that share CPUs, and move sandboxes off CPUs that are owned.

        An owner is also written while its cgroup may hold other CPUs than its own: the owner shares CPUs
        while all of its own are offline, and a call in flight may delay the write that ends the sharing.
        """
        state, missed, own = self._state(), self._missed, Pool.OWN
        sharers = [
            c
            for c in state.containers.values()
            if c.placement.pool is not own or state.uses_shared_cpus(c) or self._may_exceed(state, c)
        ]
        if missed:
            sharers = [c for c in sharers if self._misses(c) < TRIES]
        done = self._write(state, sharers)
        done.notes += self.write_sandboxes().notes
        return done

    def _may_exceed(self, state: NodeState, owner: Container) -> bool:
        """Return whether an owner's cgroup is not known to hold its own CPUs."""
        return owner.phase is Phase.RUNNING and self._last_written.get(owner.id) != state.desired_cpus(owner)

    def write_sandboxes(self) -> WriteResult:
        """Move sandboxes off CPUs that are owned."""
        return WriteResult(
            notes=[] if self._is_paused() else self.sandbox_cgroups.move_off_owned_cpus(self._state())
        )

    def write_groups(self) -> WriteResult:
        """Write the cgroups of BestEffort pods, also for containers that are not started yet."""
        return WriteResult(
            notes=[] if self._is_paused() else self._be_groups.write(self._state(), self._paths)
        )

    def make_room(self, container: Container) -> WriteResult:
        """Widen a pod's cgroup to hold the CPUs of a container that is about to start, or failed to start.

        On cgroup v1 the kernel refuses a cgroup any CPU that its parent does not have, and another program
        may have narrowed the parent. The runtime creates the container's cgroup and writes its cpuset in one
        step, so a narrowed parent shows only when the start has failed. On v2 a cgroup that has no CPU of its
        parent runs on all CPUs of the parent, and they may have an owner: so the parent is widened before the
        start. Usually, the parent was narrowed by a fence that an earlier run of the daemon has left
        (``proxy.engine.pod_fence``).
        """
        done = WriteResult()
        path = self.cgroups.pod_group(container.pod.cgroup_parent)
        if self._is_paused() or not applies_to(self._state(), container.pod):
            return done
        if path is None:
            return done
        try:
            had, wanted = self.cgroups.cpus(path), self._state().desired_cpus(container)
            if not wanted <= had:
                self.cgroups.write(path, had | wanted, None, adjust_below=False)
        except CgroupError as error:
            done.notes.append(str(error))
        return done

    def _misses(self, container: Container) -> int:
        """Return how often a container's cgroup was not found in this phase: a start makes the cgroup."""
        phase, count = self._missed.get(container.id, (container.phase, 0))
        return count if phase is container.phase else 0

    def _is_missing(self, container: Container) -> bool:
        """Return whether a pass skips a container that has no cgroup of its own (in a VM, for example).

        Finding a cgroup takes a search. So it is searched for twice, then seldom, and never before a create.
        """
        return self._misses(container) >= TRIES and self._passes % RARE_EVERY != 0

    def known_path(self, container: Container) -> str | None:
        """Return the path of a container's cgroup if it is known; callable from any thread."""
        known = self._paths.get(container.id) or container.cgroup
        # The path of a cgroup that is gone does not show where the container is now.
        return known if known and self._removed.get(container.id) != known else None

    def last_written(self, container_id: str) -> CpuSet | None:
        """Return the cpuset last written for a container; None if a call in flight may write another one."""
        return None if self._state().inflight.is_busy(container_id) else self._last_written.get(container_id)

    def forget(self, ids: Collection[str] | None = None) -> None:
        """Drop the record of the last written cpusets (of all containers if None).

        A different value in the kernel is then no drift.
        """
        self._last_written = (
            {} if ids is None else {i: cpus for i, cpus in self._last_written.items() if i not in ids}
        )

    def path_of(self, container: Container) -> str | None:
        """Return the path of a container's cgroup; None if none can be found. For the kernel worker only."""
        path = self.known_path(container)
        if path is None:
            path = self.cgroups.find(container.pod.cgroup_parent, container.id)
            if path is not None:
                self._paths[container.id] = path
        return path

    def _in_bulk(self, state: NodeState, containers: list[Container], done: WriteResult) -> list[str]:
        """Write the containers with known cgroups, one cpuset after the other.

        It stops as soon as the state changes.

        Returns:
            Ids of the containers that are not written yet, to be written one by one.
        """
        remaining: list[str] = []
        sets: dict[tuple[int, int], tuple[CpuSet, CpuSet | None, list[str], list[str]]] = {}
        known, gone, held = self._paths, self._removed, self._last_written
        for container in containers:
            if not self.is_live(container):
                continue
            container_id = container.id
            path = known.get(container_id) or container.cgroup
            if not path or (gone and gone.get(container_id) == path):
                remaining.append(container_id)
                continue
            want, has = state.desired_cpus(container), held.get(container_id)
            key = want.bits, has.bits if has is not None else 0
            same = sets.get(key)
            if same is None:  # a set that is right by our records is read: another program may have written
                same = sets[key] = want, has if has != want else None, [], []
            same[2].append(container_id)
            same[3].append(path)

        def is_same() -> bool:
            newest = self._state()
            same = newest.containers is state.containers and newest.pools is state.pools
            return same and newest.node is state.node and not self._ended

        for want, has, ids, paths in sets.values():
            results = self.cgroups.write_all(paths, want, has, is_same)
            for container_id, written in zip(ids, results, strict=True):
                if written is None:
                    remaining.append(container_id)
                else:
                    self._record_cpuset(container_id, want, done, written=written)
        return remaining

    def _record_cpuset(self, container_id: str, want: CpuSet, done: WriteResult, *, written: bool) -> None:
        """Record that a container's cgroup holds the wanted cpuset."""
        # While the runtime executes a call that writes this cpuset, a different value is no drift.
        busy = self._state().inflight.is_busy(container_id)
        # A part of a refused write may be in effect: on the container's own group, but not yet on its pod's.
        if written or container_id in self._refused:
            done.written.append(container_id)
            self._refused.discard(container_id)
        if written and not busy and self._last_written.get(container_id) == want:
            done.drifted.append(container_id)
        if busy:
            self._last_written.pop(container_id, None)
        else:
            self._last_written[container_id] = want
        if self._missed or self._removed:
            self._missed.pop(container_id, None)
            self._removed.pop(container_id, None)

    def _one(self, container: Container, done: WriteResult, *, again: bool = True) -> None:
        path = self.path_of(container)
        if path is None:
            self._miss(container, done)
            return
        want = self._state().desired_cpus(container)
        self._missed.pop(container.id, None)
        try:
            written = self.cgroups.write(path, want, None)
            self._record_cpuset(container.id, want, done, written=written)
        except CgroupError as error:
            if error.errno not in GONE:
                done.errors.append(str(error))
                done.refused[container.id] = error
                self._refused.add(container.id)
                return
            self._paths.pop(container.id, None)
            self._removed[container.id] = path
            if again:  # the container has exited, or has another cgroup now
                self._one(container, done, again=False)
            else:
                self._miss(container, done)

    def _miss(self, container: Container, done: WriteResult) -> None:
        misses = self._misses(container) + 1
        self._missed[container.id] = container.phase, misses
        done.absent.append(container.id)
        if misses > 1:
            done.lost.append(container.id)


def _sharers_first(state: NodeState, containers: list[Container]) -> tuple[list[Container], ...]:
    """Divide containers into those that share CPUs and owners, so that the former leave owned CPUs first."""
    owners = [c for c in containers if c.placement.pool is Pool.OWN and not state.uses_shared_cpus(c)]
    if not owners or len(owners) == len(containers):
        return (containers,)
    own = {container.id for container in owners}
    return [c for c in containers if c.id not in own], owners
