"""Finding the sandbox or container of a request in the runtime, where the request does not name it."""

from __future__ import annotations

import asyncio

from proxy.api.koordinator import hook_pb2 as pb
from proxy.engine.call_events import SavedCpusLearned
from proxy.executor.node_executor import NodeExecutor
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.executor.start_update import StartUpdate
from proxy.frontends.hookserver.pending_calls import PendingCalls
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase

RETRY, TRIES = Backoff(0.1, 0.4), 4
"""So often, and with such pauses in seconds, a sandbox is looked for that is not listed yet."""


class RuntimeLookup:
    """Queries the runtime for what a request does not name."""

    def __init__(self, executor: NodeExecutor, start_update: StartUpdate, pending: PendingCalls) -> None:
        self._executor = executor
        self._start_update = start_update
        self._pending = pending

    def sandboxes(self, uid: str) -> list[str]:
        """Return the sandboxes of a pod that are known by their ids."""
        executor = self._executor
        arriving = executor.state.runtime.arriving
        return [i for i, pod in executor.state.pods.items() if pod.uid == uid != "" and i not in arriving]

    async def sandbox(self, meta: pb.PodSandboxMetadata) -> tuple[str, int] | None:
        """Find the sandbox that a container is about to be created in: the pod's newest one that is ready.

        Returns:
            Its id and attempt; None where there is none.

        Raises:
            UnavailableError, RuntimeCallError: The runtime does not answer.
        """
        executor, new = self._executor, meta.uid in self._pending.pods
        known = self.sandboxes(meta.uid)
        if len(known) == 1 and not new:
            return known[0], executor.state.pods[known[0]].attempt
        name = (meta.uid, meta.namespace, meta.name)
        pauses = RetryDelays(RETRY)
        for last in range(TRIES - 1, -1, -1):
            listed = await self._start_update.lookups.run(executor.runtime.list_pods)
            existing = [pod for pod in listed if pod.ready and (pod.uid, pod.namespace, pod.name) == name]
            if existing:
                newest = max(existing, key=lambda pod: pod.attempt)
                self._pending.see_pod(newest)
                return newest.id, newest.attempt
            if last:
                await asyncio.sleep(pauses.next())
        return None

    async def name(self, container_id: str) -> None:
        """Identify the container that the peer names, if it was created after an answer of ours.

        The peer's own data show what the runtime has saved for it.
        """
        executor = self._executor
        if container_id not in executor.state.containers and self._pending.creates:
            for one in await self.seen(container_id) or ():
                self._pending.see_container(one)
        container = executor.state.containers.get(container_id)
        if container is None or container.phase is not Phase.CREATED:
            return
        if container_id in executor.state.runtime.saved:
            return
        try:
            detail = await self._start_update.lookups.run(executor.runtime.detail, container_id)
            saved = CpuSet.parse(detail.cpuset_cpus)
        except (UnavailableError, RuntimeCallError, ValueError):
            return  # the runtime gets the current set in any case
        executor.store.handle(SavedCpusLearned(container_id, saved))
        if detail.cpu_quota > 0 > executor.quotas.carried(container):
            executor.quotas.send((container_id,))

    async def seen(self, container_id: str) -> list[RuntimeContainer] | None:
        """Query the runtime for one container: none, or one; None if it does not answer."""
        executor = self._executor
        try:
            return list(await self._start_update.lookups.run(executor.runtime.list_containers, container_id))
        except (UnavailableError, RuntimeCallError) as error:
            self.look_later(error)
            return None

    def look_later(self, error: Exception) -> None:
        """The runtime does not answer: report it, and reconcile with it soon."""
        self._executor.telemetry.problem("cannot list what the runtime has", err=error)
        self._executor.attention.set()
