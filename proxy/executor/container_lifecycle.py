"""Records what happens to a container after the decision on its create: creation, failure, phases, removal.

``proxy.engine.container_lifecycle_rules`` decides what follows from a phase of a container; this module
counts it and updates the history.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.engine.container_events import (
    ContainerCreated,
    ContainersRemoved,
    CreateFailed,
    CreateLost,
    PhaseChanged,
)
from proxy.executor.context import NodeContext
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase
from proxy.telemetry import metrics


class ContainerLifecycle:
    """Takes containers from one phase to the next."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._store = context.store

    def created(self, token: str, container_id: str, sent: CpuSet | None = None) -> None:
        """Record that the runtime has created the container and given it an id.

        Args:
            token: The id that the container had until now.
            container_id: Its id at the runtime.
            sent: The CPUs that the request named; None if unknown.
        """
        self._context.history.renamed(token, container_id)
        self._store.handle(ContainerCreated(token, container_id, sent))

    def failed(self, token: str) -> None:
        """Record that the create failed at the runtime: the containers that moved for it go back."""
        if token in self._context.state.containers:
            self._context.telemetry.count(metrics.CREATES_FAILED)
        self.withdrawn(token)

    def withdrawn(self, token: str) -> None:
        """Record that a create that was placed is not sent to the runtime: containers that moved go back."""
        self._context.history.removed(token)
        self._store.handle(CreateFailed(token))

    def uncertain(self, token: str) -> None:
        """Record that a create was cancelled in flight; the runtime's list shows if the container exists."""
        self._store.handle(CreateLost(token, self._context.clock()))

    def phase(self, container_id: str, phase: Phase) -> None:
        """Record that a container has entered a phase; one that has exited releases its CPUs."""
        self._store.handle(PhaseChanged(container_id, phase))

    def removed(self, ids: Iterable[str]) -> None:
        """Record that containers are gone."""
        ids = tuple(ids)
        self._store.handle(ContainersRemoved(ids))
        for container_id in ids:
            self._context.history.removed(container_id)
