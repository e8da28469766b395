"""The interface between calls and hooks. Most nodes have no hooks: there it only tests an empty set.

Nothing here imports ``proxy.hooks``, which is in memory only where there are hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

from proxy.calls.undecided_call import CallContext, Handle, UndecidedCall
from proxy.model.workload import Container, Pod


class ProceedWithPod(Protocol):
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

    Each method that takes ``proceed`` holds the call until the hooks have answered, mostly within the same
    turn of the loop; then it continues, perhaps with another message, or is refused.

    Attributes:
        active: There are hooks: what passes is remembered.
    """

    @property
    def points(self) -> frozenset[str]:
        """Points that some hook handles now."""

    active: bool

    def run_pod(self, call: UndecidedCall, proceed: ProceedWithPod) -> None:
        """A sandbox is to be created; ``proceed`` is called with the pod as hooks want it."""

    def ran(self, pod: Pod, call: UndecidedCall) -> None:
        """A sandbox has been created by a call."""

    def create(
        self, call: UndecidedCall, container: Container, proceed: Callable[[UndecidedCall, Container], None]
    ) -> None:
        """A container has been placed; ``proceed`` is called with the container as hooks want it."""

    async def create_elsewhere(self, call: UndecidedCall, container: Container) -> Container | None:
        """A container has been placed again; returns it as hooks want it, None where the call is over."""

    def leaves(self, token: str, call: UndecidedCall) -> None:
        """A create goes to the runtime."""

    def before(self, point: str, call: UndecidedCall, target: str, proceed: Handle) -> None:
        """A call is about something that exists; ``proceed`` is called when the hooks have answered.

        Args:
            point: The point: one of ``points``.
            call: The call.
            target: The id of the container or the sandbox.
            proceed: Continues with the call, unless the hooks have refused it.
        """

    def updated(self, container_id: str, call: UndecidedCall) -> None:
        """A container's resources have been changed by a call."""


class _NoHooks:
    """Stands in where there are no hooks; no other member is ever called."""

    points: frozenset[str] = frozenset()
    active = False


NO_HOOKS: Final = cast("HookGateway", _NoHooks())
ENDING: Final = {
    "StopContainer": "pre_stop_container",
    "RemoveContainer": "pre_remove_container",
    "StopPodSandbox": "pre_stop_pod_sandbox",
    "RemovePodSandbox": "pre_remove_pod_sandbox",
}
"""Calls that cannot be refused, and the point at which hooks are called before them."""


def end(call: UndecidedCall, hooks: HookGateway) -> None:
    """Let a call that stops or removes something continue, after hooks where there are any."""
    target, point = call.target(), ENDING[call.method]
    call.state = CallContext(target=target)
    if point in hooks.points:
        hooks.before(point, call, target, _release)
    else:
        call.release()


def _release(call: UndecidedCall) -> None:
    call.release()
