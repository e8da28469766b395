"""CPUs that kubelet's CPU manager assigns: they are read from its state file and kept for its containers.

Theory (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, Allocate). Under policy ``static``
kubelet assigns CPUs when it admits a pod, and writes them to its state file before it requests a sandbox. The
create of the container follows later, with these CPUs in its request. In between only the file shows them. So
the file is read in each comparison, and before CPUs are chosen for any container; that costs a ``stat`` while
the file is unchanged. Its assignments become part of the state of the node
(``NodeState.with_kubelet_cpus``): the pools lose these CPUs at once, no other container is given them, and
containers that run there move away. When kubelet removes an entry, the pools get the CPUs back. CPUs that had
an owner here first stay with that owner (``engine.kubelet_cpus``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.engine.kubelet_cpus import clashes
from proxy.engine.node_effects import KubeletCpusChanged
from proxy.engine.node_events import KubeletCpusRead
from proxy.executor.context import NodeContext
from proxy.executor.worker import Worker
from proxy.model.kubelet import CpuManager, Held
from proxy.model.workload import Pod, Request
from proxy.pools.claims import STRICT, may_own, whole_cpus
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.ports import KubeletCpuManager


UNLIKE_KUBELET = "kubelet's CPU manager cannot be followed"


class KubeletCpus:
    """Makes the state follow the assignments of kubelet's CPU manager."""

    def __init__(self, context: NodeContext, port: KubeletCpuManager | None) -> None:
        """Read nothing yet.

        Args:
            context: Has the state.
            port: Reads kubelet's settings and state file; None where nothing reads them.
        """
        self._context = context
        self._port = port
        self._worker = Worker("kubelet", context.broken)
        context.health.watch(self._worker)
        self._refreshing = asyncio.Lock()
        self._reported: frozenset[str] = frozenset()
        self._checked: tuple[object, object] = (None, None)
        self._counts: Callable[[Held], Held] = lambda held: held

    @property
    def manager(self) -> CpuManager:
        """What was read last."""
        return self._context.state.facts.cpu_manager

    def count_only(self, counts: Callable[[Held], Held]) -> None:
        """Count only a part of kubelet's assignments, as a takeover does; ``counts`` returns it."""
        self._counts = counts

    def matters(self, pod: Pod, request: Request) -> bool:
        """Return whether a container may be given CPUs of its own, so that kubelet's must be known."""
        if self._port is None:
            return False
        if pod.cpuset or pod.qos in STRICT:
            return True
        return may_own(pod) and (pod.asks is not None or whole_cpus(request) > 0)

    async def refresh(self, worker: Worker) -> None:
        """Read kubelet's settings where that is due, in a worker that may block, then ``look``."""
        if self._port is None:
            return
        try:
            async with self._refreshing:
                await worker.run(self._port.refresh)
        except Exception as error:  # noqa: BLE001 - this must not cost the whole pass
            self._context.broken(error)
        await self.reread()

    async def reread(self) -> None:
        """Read kubelet's assignments and update the state; if that takes too long, the state stays."""
        if self._port is None:
            return
        context = self._context
        try:
            async with asyncio.timeout(context.options.call_timeout):
                manager = await self._worker.run(self._port.read)
        except TimeoutError:
            context.telemetry.problem("cannot read kubelet's state file: the file system does not answer")
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the node
            context.broken(error)
        else:
            self._follow(manager)

    def _follow(self, manager: CpuManager) -> None:
        context = self._context
        for effect in context.store.handle(KubeletCpusRead(manager, self._counts(manager.held))):
            if type(effect) is KubeletCpusChanged:
                context.telemetry.count(metrics.KUBELET_CPU_MANAGER_CHANGES)
                context.telemetry.event(
                    "kubelet's CPU manager changed its assignments", came=effect.came, went=effect.went
                )
        if self._checked != (manager, context.state.owners):
            self._checked = manager, context.state.owners
            before, self._reported = self._reported, frozenset((*manager.problems, *clashes(context.state)))
            for words in sorted(self._reported - before):
                context.telemetry.problem(UNLIKE_KUBELET, reason=words)
            for words in before - self._reported:
                context.telemetry.resolved(UNLIKE_KUBELET, reason=words)

    def page(self) -> dict[str, object]:
        """Return what is known as plain data; empty where nothing reads it."""
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
