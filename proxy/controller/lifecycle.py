"""What becomes of a container: created, failed, started, ended, removed.

Each transition changes the state, records it, and notifies the observers of the store. What the runtime has
saved, and the sequence of changes, follow in the same step.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.controller.context import NodeContext
from proxy.controller.journal import Record
from proxy.controller.observer import Observer
from proxy.engine.node_events import SavedCpusLearned
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase, Pool
from proxy.telemetry import metrics


class Lifecycle:
    """Takes containers from one phase to the next."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def created(self, token: str, container_id: str, sent: CpuSet | None = None) -> None:
        """The runtime has made the container and named it.

        Args:
            token: The id that the container had until now.
            container_id: Its id at the runtime.
            sent: The CPUs that the request named; None where that is not known.
        """
        context, store = self._context, self._context.store
        container = store.state.containers.get(token)
        if container is None:
            return
        container = container.in_phase(Phase.CREATED, container_id)
        records: dict[str, Record | None] = {f"c/{container_id}": container}
        if container.placement.pool is Pool.OWN or container.placement.hook_cpus is not None:
            records[f"i/{token}"] = None
        store.change(store.state.renamed(token, container), "container created", records=records)
        context.history.renamed(token, container_id)
        store.news.touch(container_id)
        saved = None if store.retries.settle(container) else sent
        store.handle(SavedCpusLearned(container_id, saved))
        store.notify(Observer.created, token, container)

    def failed(self, token: str, *, again: bool = False) -> None:
        """The create failed, or is decided ``again``: the containers that moved for it go back."""
        context, store = self._context, self._context.store
        store.lost.pop(token, None)
        context.history.gone(token)
        container = store.state.containers.get(token)
        if container is not None:
            store.retries.note(container)
            if not again:
                context.telemetry.count(metrics.CREATES_FAILED)
            store.change(store.state.changed(drop=(token,)), "create failed", records={f"i/{token}": None})
            store.notify(Observer.failed, token)

    def uncertain(self, token: str) -> None:
        """The create was cancelled under way: the runtime may have made the container or not. Ask it soon."""
        context, store = self._context, self._context.store
        if token in store.state.containers:
            store.retries.note(store.state.containers[token])
            store.lost[token] = context.clock()
            store.attention.set()

    def phase(self, container_id: str, phase: Phase) -> None:
        """A container has entered a phase; a container that has exited gives its CPUs back."""
        store = self._context.store
        container = store.state.containers.get(container_id)
        if container is None and phase is Phase.EXITED:
            store.news.left(container_id)
        if container is None or container.phase in (phase, Phase.EXITED):
            return  # a container that has exited stays so: what a runtime says later is taken in as new
        store.news.touch(container_id)
        changed = container.in_phase(phase)
        after = store.state.changed(put=(changed,))
        store.change(after, f"container {phase.value}", records={f"c/{container_id}": changed})
        if phase is Phase.RUNNING:
            sandbox_id, after = changed.pod.sandbox_id, store.state.started(changed)
            pod = after.pods.get(sandbox_id)
            renewed = pod is not None and pod is not store.state.pods.get(sandbox_id)
            records = {f"p/{sandbox_id}": pod} if renewed else {}
            store.change(after, "init containers let go of memory", records=records)
        store.notify(Observer.entered, changed, phase)

    def removed(self, ids: Iterable[str]) -> None:
        """Containers are gone."""
        context, store = self._context, self._context.store
        ids = list(ids)
        gone = {i: store.state.containers[i] for i in ids if i in store.state.containers}
        records: dict[str, Record | None] = {f"c/{container_id}": None for container_id in gone}
        store.change(store.state.changed(drop=gone), "container removed", records=records)
        for container_id in gone:
            store.handle(SavedCpusLearned(container_id, None))
            store.unsettled.pop(container_id, None)
            context.history.gone(container_id)
        for container_id in ids:
            store.news.left(container_id)
        for container in gone.values():
            store.notify(Observer.gone, container)
