"""The runtime's lists: pods, containers, and ids of entries that could not be read."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.executor.runtime_ports import Runtime, RuntimeContainer, RuntimePod, unread_ids_of
from proxy.model.workload import Phase


class Listing(Struct, frozen=True):
    """The pods and containers that the runtime lists.

    Attributes:
        pods, containers: By id.
        unread_pods, unread_containers: Ids of entries that could not be read; see ``RuntimeList``.
    """

    pods: Mapping[str, RuntimePod]
    containers: Mapping[str, RuntimeContainer]
    unread_pods: frozenset[str] = frozenset()
    unread_containers: frozenset[str] = frozenset()

    def lacks_pod(self, sandbox_id: str) -> bool:
        """Return whether a sandbox is certainly not in the list."""
        return sandbox_id not in self.pods and not self.unread_pods & {sandbox_id, ""}

    def lacks_container(self, container_id: str) -> bool:
        """Return whether a container is certainly not in the list."""
        return container_id not in self.containers and not self.unread_containers & {container_id, ""}

    def is_dead(self, container: RuntimeContainer) -> bool:
        """Return whether a container was created in a sandbox that has ended, and so will never start."""
        pod = self.pods.get(container.sandbox_id)
        return container.phase is Phase.CREATED and pod is not None and not pod.ready


def listed(runtime: Runtime, container_id: str = "") -> Listing:
    """List all pods, and all containers or one; runs in a worker.

    Pods are listed first: a container without a listed pod waits for the next reconcile.
    """
    pods = runtime.list_pods()
    containers = runtime.list_containers(container_id)
    return Listing(
        {p.id: p for p in pods}, {c.id: c for c in containers}, unread_ids_of(pods), unread_ids_of(containers)
    )
