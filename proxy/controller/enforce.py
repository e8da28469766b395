"""Making the kernel say what the state says. Everything here runs in the kernel worker's thread.

Each write asks for the newest state, not for the one that was planned when the job was queued: see
``proxy.controller.worker``. Memory nodes of a live container are left alone, because its memory may be there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from proxy.controller.be.groups import BeGroups
from proxy.controller.kernel_ports import Cgroups
from proxy.controller.runtime_ports import NO_QUIRKS, RuntimeQuirks
from proxy.controller.sandbox_cgroups import SELDOM, TRIES, SandboxCgroups
from proxy.engine.state import NodeState
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import Container, Phase, Pool

LIVE = (Phase.STARTING, Phase.RUNNING)
BULK = 8
"""From so many on containers are written together, by set."""


@dataclass(slots=True)
class Enforced:
    """What an enforcement did.

    Attributes:
        written: Ids of containers whose set was changed.
        drifted: Those of them that held the right set before, by our own account: somebody else wrote it.
        absent: Ids of containers that should have a cgroup and have none.
        lost: Those of them that had none the last time either.
        errors: What could not be written, in words.
        refused: Whose set that was, with what the kernel said.
        notes: What could not be either, and holds up nobody.
        found: What was in the groups of whom somebody else had written, where that was looked at.
        left: Those of them that were left so.
        seconds: How long it took.
    """

    written: list[str] = field(default_factory=list)
    drifted: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    refused: dict[str, CgroupError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    found: dict[str, CpuSet] = field(default_factory=dict)
    left: dict[str, CpuSet] = field(default_factory=dict)
    seconds: float = 0.0


class Enforcer:
    """Writes wanted sets to cgroups.

    Attributes:
        cgroups: Where.
        pauses: Writes the groups of sandboxes.
    """

    def __init__(
        self,
        cgroups: Cgroups,
        state: Callable[[], NodeState],
        busy: Callable[[str], bool] = lambda container_id: False,
        confined: Callable[[str], bool] = lambda container_id: False,
        paused: Callable[[], bool] = lambda: False,
        quirks: RuntimeQuirks = NO_QUIRKS,
    ) -> None:
        """Write nothing yet.

        Args:
            cgroups: Where.
            state: Gives the newest state; called in the kernel worker's thread, as all of this.
            busy: Tells whether the runtime is at a call that brings a set to a container: what is found in
                its group then is nobody's doing but ours.
            confined: Tells whether a container has a group before its start has been answered
                (``confinement``).
            paused: Tells whether nothing is to be written; jobs that are queued already ask, too.
            quirks: How the runtime names its groups.
        """
        self.cgroups = cgroups
        self._busy = busy
        self._confined = confined
        self._paused = paused
        self._state = state
        self._paths: dict[str, str] = {}
        self._missed: dict[str, int] = {}
        self._gone: dict[str, str] = {}
        self._held: dict[str, CpuSet] = {}
        self._passes = 0
        self._be_groups = BeGroups(cgroups)
        self.sandboxes = SandboxCgroups(cgroups, quirks)
        self._first: Callable[[], None] = lambda: None

    def do_first(self, job: Callable[[], None]) -> None:
        """Have a job done before any container is written, each time, in the same thread."""
        self._first = job

    def is_live(self, container: Container) -> bool:
        """Tell whether a container may have a group; callable from any thread."""
        return container.phase in LIVE or (container.phase is Phase.CREATED and self._confined(container.id))

    def enforce(self, ids: Iterable[str]) -> Enforced:
        """Write the sets of some containers.

        Those that are not live are passed over; those that hold the right set are not written.
        """
        state = self._state()
        some = [c for i in ids if (c := state.containers.get(i)) is not None]
        return self._enforce(state, *_sharers_first(state, some))

    def _enforce(self, state: NodeState, *parts: list[Container]) -> Enforced:
        """Write the sets of some containers, one part after the other."""
        done = Enforced()
        if self._paused():
            return done
        began = time.perf_counter()
        self._first()
        for some in parts:
            left = self._in_bulk(state, some, done) if len(some) >= BULK else [c.id for c in some]
            for container_id in left:
                container = self._state().containers.get(container_id)
                if container is not None and self.is_live(container):
                    self._one(container, done)
        state = self._state()
        if state.node.be_cpuset is BeCpuset.ERASE:
            done.errors += self._be_groups.follow(state, self._paths)
        done.seconds = time.perf_counter() - began
        return done

    def enforce_all(self, leave: Collection[str] = ()) -> Enforced:
        """Write the sets of all containers but some."""
        state = self._state()
        there = state.containers
        self._passes += 1
        self._paths = {k: v for k, v in self._paths.items() if k in there}
        self._held = {k: v for k, v in self._held.items() if k in there}
        self._missed = {k: v for k, v in self._missed.items() if k in there}
        self._gone = {k: v for k, v in self._gone.items() if k in there}
        some = [c for c in there.values() if not (c.id in leave or self._is_missing(c.id))]
        done = self._enforce(state, *_sharers_first(state, some))
        if not self._paused():
            done.notes += self.sandboxes.follow(self._state())
        return done

    def enforce_pools(self) -> Enforced:
        """Write the sets of all containers that share CPUs, and have sandboxes leave what is owned."""
        state, missed, own = self._state(), self._missed, Pool.OWN
        there = [c for c in state.containers.values() if c.placement.pool is not own or state.shares(c)]
        if missed:
            there = [c for c in there if missed.get(c.id, 0) < TRIES]
        done = self._enforce(state, there)
        done.notes += self.enforce_sandboxes().notes
        return done

    def enforce_sandboxes(self) -> Enforced:
        """Have sandboxes leave CPUs that are owned."""
        return Enforced(notes=[] if self._paused() else self.sandboxes.leave(self._state()))

    def enforce_groups(self) -> Enforced:
        """Give the groups of BestEffort what those in them are to have, also who is not started yet."""
        return Enforced(notes=[] if self._paused() else self._be_groups.follow(self._state(), self._paths))

    def make_room(self, container: Container) -> Enforced:
        """Have the groups above a container that could not start hold its CPUs, whoever has narrowed them.

        On cgroup v1 the kernel refuses a group more than the one above it has. The runtime makes a group and
        fills it in one go, so we see it only when the start has failed.
        """
        done = Enforced()
        path = self.cgroups.pod_group(container.pod.cgroup_parent)
        if self._paused() or self.cgroups.version != 1 or path is None:
            return done
        try:
            had, wanted = self.cgroups.cpus(path), self._state().wanted(container)
            if not wanted <= had:
                self.cgroups.write(path, had | wanted, None, inner=False)
        except CgroupError as error:
            done.notes.append(str(error))
        return done

    def _is_missing(self, container_id: str) -> bool:
        """Tell whether a pass passes over a container that has no cgroup of its own (in a VM, say).

        To look for it costs a search; it is looked for twice, and then seldom, and never before a create.
        """
        return self._missed.get(container_id, 0) >= TRIES and self._passes % SELDOM != 0

    def known_path(self, container: Container) -> str | None:
        """Give a container's group if a write has found it; callable from any thread."""
        known = self._paths.get(container.id) or container.cgroup
        # A group that is gone says nothing of where the container is now.
        return known if known and self._gone.get(container.id) != known else None

    def given(self, container_id: str) -> CpuSet | None:
        """Give what a container was last given; None where a call in flight may bring it something else."""
        return None if self._busy(container_id) else self._held.get(container_id)

    def forget(self) -> None:
        """Forget who had what: somebody else may have given them other sets, and be right."""
        self._held = {}

    def path_of(self, container: Container) -> str | None:
        """Give a container's group; None where it has none that can be found. For the kernel worker."""
        path = self.known_path(container)
        if path is None:
            path = self.cgroups.find(container.pod.cgroup_parent, container.id)
            if path is not None:
                self._paths[container.id] = path
        return path

    def _in_bulk(self, state: NodeState, some: list[Container], done: Enforced) -> list[str]:
        """Write those whose groups are known, one set after the other.

        As soon as the state is another one, what is not written yet is left.

        Returns:
            Ids of those who are left, to be written one by one.
        """
        left: list[str] = []
        sets: dict[tuple[int, int], tuple[CpuSet, CpuSet | None, list[str], list[str]]] = {}
        known, gone, held = self._paths, self._gone, self._held
        for container in some:
            if not self.is_live(container):
                continue
            container_id = container.id
            path = known.get(container_id) or container.cgroup
            if not path or (gone and gone.get(container_id) == path):
                left.append(container_id)
                continue
            want, has = state.wanted(container), held.get(container_id)
            key = want.bits, has.bits if has is not None else 0
            same = sets.get(key)
            if same is None:  # who holds the right set by our account is read: somebody else may have written
                same = sets[key] = want, has if has != want else None, [], []
            same[2].append(container_id)
            same[3].append(path)

        def is_same() -> bool:
            newest = self._state()
            same = newest.containers is state.containers and newest.pools is state.pools
            return same and newest.node is state.node

        for want, has, ids, paths in sets.values():
            results = self.cgroups.write_all(paths, want, has, is_same)
            for container_id, written in zip(ids, results, strict=True):
                if written is None:
                    left.append(container_id)
                else:
                    self._holds(container_id, want, done, written=written)
        return left

    def _holds(self, container_id: str, want: CpuSet, done: Enforced, *, written: bool) -> None:
        """Take note that a group holds what it should."""
        busy = self._busy(container_id)
        if written:
            done.written.append(container_id)
            if not busy and self._held.get(container_id) == want:
                done.drifted.append(container_id)
        if busy:
            self._held.pop(container_id, None)
        else:
            self._held[container_id] = want
        if self._missed or self._gone:
            self._missed.pop(container_id, None)
            self._gone.pop(container_id, None)

    def _one(self, container: Container, done: Enforced, *, again: bool = True) -> None:
        path = self.path_of(container)
        if path is None:
            self._miss(container, done)
            return
        want = self._state().wanted(container)
        self._missed.pop(container.id, None)
        try:
            written = self.cgroups.write(path, want, None)
            self._holds(container.id, want, done, written=written)
        except CgroupError as error:
            if error.errno not in GONE:
                done.errors.append(str(error))
                done.refused[container.id] = error
                return
            self._paths.pop(container.id, None)
            self._gone[container.id] = path
            if again:  # it has left, or its group is another one now
                self._one(container, done, again=False)
            else:
                self._miss(container, done)

    def _miss(self, container: Container, done: Enforced) -> None:
        self._missed[container.id] = self._missed.get(container.id, 0) + 1
        done.absent.append(container.id)
        if self._missed[container.id] > 1:
            done.lost.append(container.id)


def _sharers_first(state: NodeState, some: list[Container]) -> tuple[list[Container], ...]:
    """Divide containers into those that share CPUs and those that own some: what is owned is left first."""
    owners = [c for c in some if c.placement.pool is Pool.OWN and not state.shares(c)]
    if not owners or len(owners) == len(some):
        return (some,)
    own = {container.id for container in owners}
    return [c for c in some if c.id not in own], owners
