"""The CPUs of each container, tracked from the events that a hook receives.

Theory. A container's CPUs are exact whenever an event about it arrives (create, start, update, synchronize).
Between such events only the pools change. An owner is listed by its id. A container that had all of a pool
still has all of it. A container that had a part of one (aligned to a NUMA node, narrowed by a hook) has the
CPUs of that part that are still in the pool, or the whole pool if there are none.

Pass it ``synchronize``, ``post_create_container``, ``post_start_container``,
``post_update_container_resources``, ``pools_changed``, ``post_stop_container`` and ``post_remove_container``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from proxy.hooks.events import (
    Point,
    PoolsChanged,
    PostCreateContainer,
    PostRemoveContainer,
    PostStartContainer,
    PostStopContainer,
    PostUpdateContainerResources,
    Synchronize,
)
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Pools
from proxy.model.idset import CpuSet, Mask


@dataclass(frozen=True, slots=True)
class Member:
    """A container and its CPUs.

    Attributes:
            uid, name, attempt: Its pod's uid; its own name and attempt.
            pool: As in ``Decision``.
            cpus: Its current CPUs; ``own`` are the exclusive ones among them.
            mems: Its NUMA nodes for memory; None for any.
            part: The part of its pool that it had; None if it had all of it.
    """

    uid: str
    name: str
    attempt: int
    pool: str
    cpus: CpuSet
    own: CpuSet
    mems: Mask | None
    part: CpuSet | None


class ContainerTracker:
    """All containers that have not ended. Calls from several threads wait for each other."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._pools: Pools | None = None
        self._lock = threading.Lock()

    def handle(self, event: Point) -> list[Member]:
        """Process an event; return the containers that are new, have other CPUs, or are gone."""
        with self._lock:
            match event:
                case Synchronize():
                    self._pools, self._members = event.pools, {}
                    for container in event.containers:
                        if container.container.phase != "exited":
                            self._track(container.pod, container.container, container.decision)
                    return list(self._members.values())
                case PostCreateContainer() | PostStartContainer() | PostUpdateContainerResources():
                    return self._track(event.pod, event.container, event.decision)
                case PostStopContainer() | PostRemoveContainer():
                    gone = self._members.pop(event.container.id, None)
                    return [gone] if gone is not None else []
                case PoolsChanged():
                    return self._apply_pools(event.after)
        return []

    hear = handle  # the former name, for one release

    def of_pod(self, uid: str) -> list[Member]:
        """Return the containers of a pod; none for an empty uid, which identifies no pod."""
        with self._lock:
            return [member for member in self._members.values() if uid and member.uid == uid]

    def _track(self, pod: PodFacts, container: ContainerFacts, decision: Decision) -> list[Member]:
        pool = _pool(decision.pool, self._pools)
        whole = pool is None or pool == decision.cpus
        member = Member(
            pod.uid,
            container.name,
            container.attempt,
            decision.pool,
            decision.cpus,
            decision.own,
            decision.mems,
            None if whole else decision.cpus,
        )
        before = self._members.get(container.id)
        self._members[container.id] = member
        return [member] if member != before else []

    def _apply_pools(self, pools: Pools) -> list[Member]:
        self._pools = pools
        changed: list[Member] = []
        for container_id, member in self._members.items():
            now = _member_after(
                member, pools.owners.get(container_id), _pool(member.pool, pools), pools.shared
            )
            if now != member:
                self._members[container_id] = now
                changed.append(now)
        return changed


def _pool(name: str, pools: Pools | None) -> CpuSet | None:
    return {"shared": pools.shared, "be": pools.be}.get(name) if pools is not None else None


def _member_after(member: Member, own: CpuSet | None, pool: CpuSet | None, shared: CpuSet) -> Member:
    if pool is not None:
        part = member.part & pool if member.part is not None else None
        return replace(member, cpus=part or pool, own=CpuSet())
    if own is not None and own != member.own:
        shared_now = member.cpus - member.own if member.own else CpuSet()  # without own CPUs it shares
        return replace(member, cpus=shared_now | own or shared, own=own)
    return member
