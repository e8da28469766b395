"""The owners of exclusive CPUs that a hook is interested in, tracked from the events that it receives.

Pass it ``synchronize``, ``post_create_container``, ``post_start_container``, ``pools_changed``,
``post_stop_container`` and ``post_remove_container``; all of these are sent in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from proxy.hooks.events import (
    MachineChanged,
    Point,
    PoolsChanged,
    PostCreateContainer,
    PostRemoveContainer,
    PostStartContainer,
    PostStopContainer,
    Synchronize,
)
from proxy.hooks.facts import PodFacts
from proxy.model.idset import CpuSet

PodSettings = TypeVar("PodSettings")


class OwnerTracker(Generic[PodSettings]):
    """Containers that own CPUs and whose pods request settings from the hook.

    Args:
        settings: Returns the settings that a pod requests; None if it requests none.
    """

    def __init__(self, settings: Callable[[PodFacts], PodSettings | None]) -> None:
        self._settings = settings
        self._owners: dict[str, tuple[CpuSet, PodSettings]] = {}
        self._online = CpuSet()
        self._lock = threading.Lock()

    def handle(self, event: Point) -> None:
        """Process an event."""
        with self._lock:
            match event:
                case Synchronize():
                    self._online = event.machine.online
                    self._owners = {}
                    for container in event.containers:
                        if container.container.phase != "exited":
                            self._track(container.container.id, container.decision.own, container.pod)
                case MachineChanged():
                    self._online = event.after.online
                case PostCreateContainer() | PostStartContainer():
                    self._track(event.container.id, event.decision.own, event.pod)
                case PostStopContainer() | PostRemoveContainer():
                    self._owners.pop(event.container.id, None)
                case PoolsChanged():
                    self._update_cpus(event)

    hear = handle  # the former name, for one release

    def _track(self, container_id: str, own: CpuSet, pod: PodFacts) -> None:
        settings = self._settings(pod) if own else None
        if settings is None:
            self._owners.pop(container_id, None)
        else:
            self._owners[container_id] = (own, settings)

    def _update_cpus(self, event: PoolsChanged) -> None:
        """Update the CPUs of owners. An owner that is not listed may be newer than the event."""
        for container_id, (own, settings) in self._owners.items():
            now = event.after.owners.get(container_id, own & event.after.owned)
            self._owners[container_id] = (now, settings)

    @property
    def online(self) -> CpuSet:
        """The machine's online CPUs, from the last event."""
        return self._online

    def cpus(self, chosen: Callable[[PodSettings, CpuSet], CpuSet] = lambda _, own: own) -> CpuSet:
        """Return the CPUs of all owners together; ``chosen`` may select only some CPUs of each."""
        with self._lock:
            total = CpuSet()
            for own, settings in self._owners.values():
                total |= chosen(settings, own)
            return total

    def all(self) -> tuple[tuple[CpuSet, PodSettings], ...]:
        """Return the CPUs of each owner, and the settings that its pod requests."""
        with self._lock:
            return tuple(self._owners.values())


Owners = OwnerTracker
"""The former name, for one release: copies of a shipped hook on nodes import it."""
