"""The notifications for observers of the node: changes of the state, and the lifecycle of containers."""

from __future__ import annotations

from collections.abc import Collection

from proxy.engine.node_effects import Change
from proxy.model.workload import Container, Phase, Pod


class Observer:
    """An observer that does nothing; subclasses override the methods that matter to them.

    All methods run on the event loop, after the state has changed. ``NodeStore.subscribe`` adds an observer.
    """

    def changed(self, change: Change) -> None:
        """Handle that pools, rules or the machine may have changed."""

    def created(self, token: str, container: Container) -> None:
        """Handle that the runtime has created a container and given it an id.

        Args:
            token: The id that it had in the state until now.
            container: The container with its id.
        """

    def failed(self, token: str) -> None:
        """Handle that a create has failed; its container is no longer in the state."""

    def entered(self, container: Container, phase: Phase) -> None:
        """Handle that an existing container has entered another phase."""

    def cpus_assigned(self, container: Container) -> None:
        """Handle that a container may use other CPUs than before, by a hook or instead of offline CPUs."""

    def removed(self, container: Container) -> None:
        """Handle that a container has been removed."""

    def pod_found(self, pod: Pod) -> None:
        """Handle that a sandbox has been made by a call that another process relayed."""

    def pod_stopped(self, pod: Pod) -> None:
        """Handle that a sandbox has been stopped."""

    def pod_removed(self, sandbox_id: str) -> None:
        """Handle that a sandbox has been removed, or did not exist."""

    def listed(self, pods: Collection[str], containers: Collection[str], since: int) -> None:
        """Handle the lists of the runtime.

        Args:
            pods: Ids of all sandboxes.
            containers: Ids of all containers.
            since: The number of the newest change when the runtime was queried; the lists are stale for newer
                changes.
        """
