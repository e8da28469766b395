"""The interface between calls and hooks. Most nodes have no hooks: there it only tests an empty set.

Nothing here imports ``proxy.hooks``, which is in memory only where there are hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

from proxy.calls.undecided_call import CallContext, Handle, UndecidedCall
from proxy.model.workload import Container, Pod


class GoRunPod(Protocol):
    """Continues with a RunPodSandbox after hooks have answered."""

    def __call__(self, call: UndecidedCall, pod: Pod, *, is_changed: bool) -> None:
        """Continue.

        Args:
            call: The call.
            pod: The pod as hooks want it.
            is_changed: They have changed the request.
        """


class HookGateway(Protocol):
    """Calls hooks for calls that are held.

    Each method that takes ``go`` holds the call until the hooks have answered, mostly within the same turn of
    the loop; then it continues, perhaps with another message, or is refused.

    Attributes:
        active: There are hooks: what passes is remembered.
    """

    @property
    def points(self) -> frozenset[str]:
        """Points that some hook handles now."""

    active: bool

    def run_pod(self, call: UndecidedCall, go: GoRunPod) -> None:
        """A sandbox is to be created; ``go`` is called with the pod as hooks want it."""

    def ran(self, pod: Pod, call: UndecidedCall) -> None:
        """A sandbox has been created by a call."""

    def create(
        self, call: UndecidedCall, container: Container, go: Callable[[UndecidedCall, Container], None]
    ) -> None:
        """A container has been placed; ``go`` is called with the container as hooks want it."""

    async def create_elsewhere(self, call: UndecidedCall, container: Container) -> Container | None:
        """A container has been placed again; returns it as hooks want it, None where the call is over."""

    def leaves(self, token: str, call: UndecidedCall) -> None:
        """A create goes to the runtime."""

    def start(self, call: UndecidedCall, container_id: str, go: Handle) -> None:
        """A container is to be started."""

    def update(self, call: UndecidedCall, container_id: str, go: Handle) -> None:
        """A container's resources are to be changed."""

    def updated(self, container_id: str, call: UndecidedCall) -> None:
        """A container's resources have been changed by a call."""

    def leave(self, call: UndecidedCall, target: str) -> None:
        """A container or a sandbox is to be stopped or removed, whatever hooks answer."""


class _NoHooks:
    """No hooks: nothing else of it is ever called."""

    points: frozenset[str] = frozenset()
    active = False


NO_HOOKS: Final = cast("HookGateway", _NoHooks())
LEAVING: Final = {
    "StopContainer": "pre_stop_container",
    "RemoveContainer": "pre_remove_container",
    "StopPodSandbox": "pre_stop_pod_sandbox",
    "RemovePodSandbox": "pre_remove_pod_sandbox",
}
"""Calls that cannot be refused, and the point at which hooks are called before them."""


def leave(call: UndecidedCall, hooked: HookGateway) -> None:
    """Let a call that stops or removes something continue, after hooks where there are any."""
    target = call.target()
    call.state = CallContext(target=target)
    if LEAVING[call.method] in hooked.points:
        hooked.leave(call, target)
    else:
        call.release()
