"""What observers of the node are notified of: changes of the state, and what becomes of containers."""

from __future__ import annotations

from collections.abc import Collection

from proxy.engine.node_effects import Change
from proxy.model.workload import Container, Phase, Pod


class Observer:
    """An observer that does nothing; subclasses do something about what matters to them.

    All methods run on the event loop, after the state has changed. ``NodeStore.subscribe`` adds an observer.
    """

    def changed(self, change: Change) -> None:
        """Pools, rules or the machine may differ from before."""

    def created(self, token: str, container: Container) -> None:
        """The runtime has made a container and named it.

        Args:
            token: The id that it had in the state until now.
            container: The container with its id.
        """

    def failed(self, token: str) -> None:
        """A create has failed; its container is not in the state any more."""

    def entered(self, container: Container, phase: Phase) -> None:
        """A container that was created is in another phase."""

    def given(self, container: Container) -> None:
        """A container may use other CPUs than before, by a hook or in place of CPUs that are offline."""

    def gone(self, container: Container) -> None:
        """A container has been removed."""

    def pod_stopped(self, pod: Pod) -> None:
        """A sandbox has been stopped."""

    def pod_gone(self, sandbox_id: str) -> None:
        """A sandbox has been removed, or was not there."""

    def listed(self, pods: Collection[str], containers: Collection[str], since: int) -> None:
        """The runtime has listed what it has.

        Args:
            pods: Ids of all sandboxes.
            containers: Ids of all containers.
            since: The number of the newest change when it was asked: the lists are stale for newer ones.
        """
