"""What becomes of a container: created, failed, started, ended, removed.

What follows is decided in ``proxy.engine.lifecycle``. Here it is counted, and the history follows.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.controller.context import NodeContext
from proxy.engine.node_events import (
    ContainerCreated,
    ContainersRemoved,
    CreateFailed,
    CreateLost,
    PhaseChanged,
)
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase
from proxy.telemetry import metrics


class Lifecycle:
    """Takes containers from one phase to the next."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._store = context.store

    def created(self, token: str, container_id: str, sent: CpuSet | None = None) -> None:
        """The runtime has made the container and named it.

        Args:
            token: The id that the container had until now.
            container_id: Its id at the runtime.
            sent: The CPUs that the request named; None where that is not known.
        """
        self._context.history.renamed(token, container_id)
        self._store.handle(ContainerCreated(token, container_id, sent))

    def failed(self, token: str, *, again: bool = False) -> None:
        """The create failed, or is decided ``again``: the containers that moved for it go back."""
        context = self._context
        context.history.gone(token)
        if not again and token in context.state.containers:
            context.telemetry.count(metrics.CREATES_FAILED)
        self._store.handle(CreateFailed(token))

    def uncertain(self, token: str) -> None:
        """The create was cancelled under way: the runtime may have made the container or not. Ask it soon."""
        self._store.handle(CreateLost(token, self._context.clock()))

    def phase(self, container_id: str, phase: Phase) -> None:
        """A container has entered a phase; a container that has exited gives its CPUs back."""
        self._store.handle(PhaseChanged(container_id, phase))

    def removed(self, ids: Iterable[str]) -> None:
        """Containers are gone."""
        ids = tuple(ids)
        self._store.handle(ContainersRemoved(ids))
        for container_id in ids:
            self._context.history.gone(container_id)
