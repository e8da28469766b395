"""Hooks as the calls see them. Most nodes have none: there only a look into an empty set is left of it.

Nothing here imports ``proxy.hooks``, which is in memory only where there are hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.call import HeldCall, Trip
from proxy.model.workload import Container, Pod

Go = Callable[[HeldCall], None]
"""Goes on with a call, whose message may be another one by now."""


class HookGateway(Protocol):
    """Who has hooks asked in the way of calls.

    Each method that takes ``go`` holds the call until the hooks have answered, mostly within the same turn of
    the loop; then it goes on, or is refused.

    Attributes:
        active: There are hooks: what passes is remembered.
    """

    @property
    def points(self) -> frozenset[str]:
        """Points that some hook handles now."""

    active: bool

    def run_pod(self, call: HeldCall, go: Callable[[HeldCall, pb.SandboxFacts, Pod], None]) -> None:
        """A sandbox is to be made; ``go`` is told how it is to be by then."""

    def ran(self, pod: Pod, body: bytes) -> None:
        """A sandbox has been made by a request."""

    def create(self, call: HeldCall, container: Container, go: Callable[[HeldCall, Container], None]) -> None:
        """A container has been placed; ``go`` is told how hooks want it."""

    async def create_elsewhere(self, call: HeldCall, container: Container) -> Container | None:
        """A container has been placed anew; gives how hooks want it, None where the call is over."""

    def leaves(self, token: str, body: bytes) -> None:
        """A create goes to the runtime."""

    def start(self, call: HeldCall, container_id: str, go: Go) -> None:
        """A container is to be started."""

    def update(self, call: HeldCall, container_id: str, go: Go) -> None:
        """A container's resources are to be changed."""

    def updated(self, trip: Trip) -> None:
        """A container's resources have been changed."""

    def leave(self, call: HeldCall, target: str, go: Go) -> None:
        """A container or a sandbox is to be stopped or removed, whatever hooks say."""


class _Nobody:
    """No hooks: nothing else of it is ever called."""

    points: frozenset[str] = frozenset()
    active = False


NOBODY: Final = cast("HookGateway", _Nobody())
LEAVING: Final = {
    "StopContainer": "pre_stop_container",
    "RemoveContainer": "pre_remove_container",
    "StopPodSandbox": "pre_stop_pod_sandbox",
    "RemovePodSandbox": "pre_remove_pod_sandbox",
}
"""Calls that cannot be refused, and where hooks are asked before them."""


def let_go(call: HeldCall) -> None:
    """Let a call go on as it is by now."""
    call.release()
