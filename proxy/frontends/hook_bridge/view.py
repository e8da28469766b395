"""A message as hooks see it. Each front end has its own: ``UndecidedCall.hook_view``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from proxy.frontends.hook_bridge.object_cache import RememberedContainer
from proxy.hooks.answers import Adjustment
from proxy.hooks.facts import ContainerFacts, PodFacts, Resources
from proxy.model.workload import Pod


class HookView(Protocol):
    """A message, which never changes. Each method reads the message of one CRI method."""

    def sandbox(self, pod: Pod) -> tuple[PodFacts, Resources]:
        """Read a RunPodSandbox: the pod, and the sum of its containers' requests.

        Args:
            pod: The pod as the engine knows it.

        Returns:
            The facts. If the message cannot be read, reading a missing fact raises ``HookError``.
        """

    def pod(self, pod: Pod) -> PodFacts:
        """Read the pod of a CreateContainer."""

    def container(self) -> ContainerFacts:
        """Read the container of a CreateContainer."""

    def update(self) -> tuple[Resources, Mapping[str, str]]:
        """Read an UpdateContainerResources: the requested resources, and the annotations; as ``sandbox``."""

    def grace(self) -> int:
        """Read the grace period of a StopContainer, in seconds."""

    def adjusted(self, adjustment: Adjustment) -> Any:
        """Return the message with the changes of hooks; the message itself if there are none.

        CPUs and memory nodes are left to the engine.

        Raises:
            HookError: A field of the adjustment cannot be written, or the message cannot be read.
        """

    def remembered(self) -> RememberedContainer | Callable[[], RememberedContainer]:
        """Return the data to keep of a CreateContainer, or a function that reads it when it is needed."""
