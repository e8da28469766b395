"""Living beside kubelet's CPU manager: what it gave is nobody else's.

Theory (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, Allocate). Under policy ``static``
kubelet gives CPUs when it admits a pod and writes them to its state file, before it asks for a sandbox; the
container comes later, with these CPUs in its request. Between the two only the file tells. So it is looked at
in each comparison, and before CPUs are chosen for anybody; a look costs a ``stat`` while the file is as it
was. What it holds goes into the state of the node (``NodeState.beside``): the pools lose these CPUs at once,
nobody else is given them, and whoever runs there moves away. When kubelet takes an entry back, the pools have
the CPUs again.

CPUs that somebody had here first stay his; kubelet, which knows nothing of that, may have given them away all
the same. Two cannot have them, so it is told, with both names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.controller.context import NodeContext
from proxy.controller.worker import Worker
from proxy.engine.node_events import KubeletAssigned
from proxy.engine.owners import NEVER_PINNED_BY_KUBELET
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import CpuManager, Held
from proxy.model.workload import Pod, Pool, Request
from proxy.pools.claims import STRICT, may_own, whole_cpus
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.controller.ports import KubeletCpuManager


UNLIKE_KUBELET = "kubelet's CPU manager cannot be followed"


class BesideKubelet:
    """Keeps a keeper's state true to what kubelet's CPU manager holds.

    Attributes:
        manager: What was seen last.
    """

    def __init__(self, context: NodeContext, port: KubeletCpuManager | None) -> None:
        """Prepare to look.

        Args:
            context: Whose state it is.
            port: Who finds out what kubelet does; None where nobody does.
        """
        self._context = context
        self._port = port
        self._worker = Worker("beside", context.broken)
        context.health.watch(self._worker)
        self._refreshing = asyncio.Lock()
        self._told: frozenset[str] = frozenset()
        self._checked: tuple[object, object] = (None, None)
        self.manager = CpuManager()
        self._counts: Callable[[Held], Held] = lambda held: held

    def count_only(self, counts: Callable[[Held], Held]) -> None:
        """Let only a part of what kubelet holds count, as a takeover does; ``counts`` gives it."""
        self._counts = counts

    def matters(self, pod: Pod, request: Request) -> bool:
        """Tell whether a container may be given CPUs of its own, so that kubelet's must be known."""
        if self._port is None:
            return False
        if pod.cpuset or pod.qos in STRICT:
            return True
        return may_own(pod) and (pod.asks is not None or whole_cpus(request) > 0)

    async def refresh(self, worker: Worker) -> None:
        """Find out kubelet's settings where that is due, in a worker whose thread may wait, then look."""
        if self._port is None:
            return
        try:
            async with self._refreshing:
                await worker.run(self._port.refresh)
        except Exception as error:  # noqa: BLE001 - what kubelet does is not worth a pass
            self._context.broken(error)
        await self.look()

    async def look(self) -> None:
        """Look at what kubelet holds, and have the state follow; what is known stands if that takes long."""
        if self._port is None:
            return
        context = self._context
        try:
            async with asyncio.timeout(context.options.call_timeout):
                manager = await self._worker.run(self._port.look)
        except TimeoutError:
            context.telemetry.problem("cannot read kubelet's state file: the file system does not answer")
        except Exception as error:  # noqa: BLE001 - a fault of ours must not stop the node
            context.broken(error)
        else:
            self._follow(manager)

    def _follow(self, manager: CpuManager) -> None:
        context, before = self._context, self._context.state
        after = before.beside(self._counts(manager.held))
        if after is not before:
            context.store.handle(KubeletAssigned(after.kubelet))
            context.telemetry.count(metrics.KUBELET_CPU_MANAGER_CHANGES)
            came, went = _change(before.kubelet, after.kubelet)
            context.telemetry.event("kubelet's CPU manager changed its assignments", came=came, went=went)
        if manager is not self.manager or self._checked != (manager, context.state.owners):
            self.manager, self._checked = manager, (manager, context.state.owners)
            told = frozenset((*manager.problems, *clashes(context.state)))
            for words in sorted(told - self._told):
                context.telemetry.problem(UNLIKE_KUBELET, reason=words)
            for words in self._told - told:
                context.telemetry.resolved(UNLIKE_KUBELET, reason=words)
            self._told = told

    def page(self) -> dict[str, object]:
        """Give what is known as plain data; empty where nobody looks."""
        if self._port is None:
            return {}
        manager, state = self.manager, self._context.state
        names = {pod.uid: pod.ref for pod in state.pods.values()}
        return {
            "cpuManagerPolicy": manager.policy,
            "cpuManagerPolicyOptions": dict(manager.options),
            "reservedSystemCPUs": str(manager.reserved),
            "topologyManagerPolicy": manager.topology_policy,
            "topologyManagerScope": manager.topology_scope,
            "default": str(manager.default),
            "held": [
                {"pod": names.get(uid, ""), "uid": uid, "container": name, "cpus": str(cpus)}
                for uid, containers in sorted(manager.held.items())
                for name, cpus in sorted(containers.items())
            ],
            "sources": dict(manager.sources),
            "problems": [*manager.problems, *clashes(state)],
        }

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def clashes(state: NodeState) -> list[str]:
    """Name those to whom kubelet gave CPUs that they cannot have here, and why."""
    if not state.kubelet:
        return []
    pods = {pod.uid: pod for pod in state.pods.values()}
    here = {(c.pod.uid, c.name) for c in state.containers.values() if c.pod.uid in state.kubelet}
    has, online, present = _has(state), state.node.machine.online, state.node.machine.present
    taken = union(cpus.bits for _, _, cpus in has)
    found: list[str] = []
    for uid, containers in sorted(state.kubelet.items()):
        pod = pods.get(uid)
        if pod is not None and (pod.qos in NEVER_PINNED_BY_KUBELET or pod.cpuset):
            continue
        # Containers of one pod may have CPUs in common: those of an init container are used again.
        its = union(
            o.cpus.bits for name in containers if (o := state.owners.get(f"{uid}/{name}")) is not None
        )
        for name, cpus in sorted(containers.items()):
            words: list[str] = []
            if cpus.bits & taken & ~its:
                others = [(ref, cpus & theirs) for whose, ref, theirs in has if whose != uid]
                words = [f"{clash} belong to {ref}" for ref, clash in others if clash]
            if gone := cpus - present:
                words.append(f"this machine has no CPUs {gone}")
            own = state.owners.get(f"{uid}/{name}")
            if not words and own is not None and not own.cpus <= cpus:
                words.append(f"it has {own.cpus} already")
            lacks = cpus.bits & online.bits & ~its
            if lacks and not words and (uid, name) not in here:
                words.append("the shared pool would be left empty")
            who = f"{pod.ref if pod else uid}/{name}"
            gave = f"cannot let {who} have CPUs {cpus} of kubelet's CPU manager"
            found += [f"{gave}: {cause}" for cause in words]
    return found


def _has(state: NodeState) -> list[tuple[str, str, CpuSet]]:
    """Give who has CPUs here: uid, name and CPUs of owners that are here, and of pods with CPUs set aside."""
    owners: dict[str, tuple[str, str, CpuSet]] = {}
    for container in state.containers.values():
        owner = state.owners.get(container.owner) if container.placement.pool is Pool.OWN else None
        if owner is not None:
            owners[container.owner] = (container.pod.uid, container.ref, owner.cpus)
    aside = [
        (pod.uid, pod.ref, pod.reserved_for_pod.cpus)
        for pod in state.pods.values()
        if pod.reserved_for_pod is not None
    ]
    return [*sorted(owners.values(), key=lambda one: one[1]), *aside]


def _change(before: Held, after: Held) -> tuple[CpuSet, CpuSet]:
    """Give the CPUs that kubelet has assigned and had not before, and the other way round."""
    return _all(after) - _all(before), _all(before) - _all(after)


def _all(held: Held) -> CpuSet:
    return CpuSet.from_bits(union(cpus.bits for containers in held.values() for cpus in containers.values()))
