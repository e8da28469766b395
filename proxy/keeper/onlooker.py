"""Who wants to know what becomes of containers, sandboxes and the node: hooks; most nodes have none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from proxy.model.workload import Container, Pod


class Onlooker(Protocol):
    """Is told by the keeper, on the loop's thread, after the state has changed; each of it once."""

    def created(self, token: str, container: Container) -> None:
        """The runtime has made a container and named it.

        Args:
            token: The id that it had in the state until now.
            container: The container with its id.
        """

    def failed(self, token: str) -> None:
        """A create has come to nothing."""

    def started(self, container: Container) -> None:
        """A container that was created runs."""

    def ended(self, container: Container) -> None:
        """A container runs no more."""

    def gone(self, container: Container) -> None:
        """A container is gone."""

    def pod_stopped(self, pod: Pod) -> None:
        """A sandbox has been stopped."""

    def pod_gone(self, sandbox_id: str) -> None:
        """A sandbox is gone, or was not there."""

    def listed(self, pods: Collection[str], containers: Collection[str], since: int) -> None:
        """The runtime has told what it has.

        Args:
            pods: Ids of all sandboxes.
            containers: Ids of all containers.
            since: The news' number when it was asked: it says nothing about those who have newer ones.
        """

    def stirred(self) -> None:
        """The machine, the pools or who owns CPUs may be others than before."""


class Nobody:
    """The onlooker of a node without hooks."""

    def created(self, token: str, container: Container) -> None:
        """See ``Onlooker``, as the rest."""

    def failed(self, token: str) -> None:
        """Nobody is told."""

    def started(self, container: Container) -> None:
        """Nobody is told."""

    def ended(self, container: Container) -> None:
        """Nobody is told."""

    def gone(self, container: Container) -> None:
        """Nobody is told."""

    def pod_stopped(self, pod: Pod) -> None:
        """Nobody is told."""

    def pod_gone(self, sandbox_id: str) -> None:
        """Nobody is told."""

    def listed(self, pods: Collection[str], containers: Collection[str], since: int) -> None:
        """Nobody is told."""

    def stirred(self) -> None:
        """Nobody is told."""


NOBODY = Nobody()
