"""The interface between calls and hooks. On most nodes, which have no hooks, it only tests an empty set.

This module does not import ``proxy.hooks``, which is in memory only if there are hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

from proxy.calls.undecided_call import CallContext, CallHandler, UndecidedCall
from proxy.model.workload import Container, Pod


class ProceedWithPod(Protocol):
    """Continues with a RunPodSandbox after hooks have answered."""

    def __call__(self, call: UndecidedCall, pod: Pod, *, is_changed: bool) -> None:
        """Continue.

        Args:
            call: The call.
            pod: The pod with the changes of hooks.
            is_changed: Hooks have changed the request.
        """


class HookGateway(Protocol):
    """Calls hooks for calls that are held.

    Each method that takes ``proceed`` holds the call until the hooks have answered, usually within the same
    turn of the loop. Then the call continues, perhaps with another message, or is refused.

    Attributes:
        active: There are hooks, so the facts of calls are remembered.
    """

    @property
    def points(self) -> frozenset[str]:
        """Points that a hook handles now."""

    active: bool

    def run_pod(self, call: UndecidedCall, proceed: ProceedWithPod) -> None:
        """A sandbox is about to be created; ``proceed`` is called with the pod, changed by hooks."""

    def pod_created(self, pod: Pod, call: UndecidedCall) -> None:
        """A sandbox has been created by a call."""

    def create(
        self, call: UndecidedCall, container: Container, proceed: Callable[[UndecidedCall, Container], None]
    ) -> None:
        """A container has been placed; ``proceed`` is called with the container, changed by hooks."""

    async def create_again(self, call: UndecidedCall, container: Container) -> Container | None:
        """A container has been placed again; return it, changed by hooks, or None if the call is over."""

    def create_sent(self, token: str, call: UndecidedCall) -> None:
        """A create goes to the runtime."""

    def before(self, point: str, call: UndecidedCall, target: str, proceed: CallHandler) -> None:
        """A call is about an existing container or sandbox; ``proceed`` is called after the hooks.

        Args:
            point: The point: one of ``points``.
            call: The call.
            target: The id of the container or the sandbox.
            proceed: Continues with the call, unless the hooks have refused it.
        """

    def updated(self, container_id: str, call: UndecidedCall) -> None:
        """A container's resources have been changed by a call."""


class _NoHooks:
    """The gateway if there are no hooks; no other member is ever called."""

    points: frozenset[str] = frozenset()
    active = False


NO_HOOKS: Final = cast("HookGateway", _NoHooks())
END_POINTS: Final = {
    "StopContainer": "pre_stop_container",
    "RemoveContainer": "pre_remove_container",
    "StopPodSandbox": "pre_stop_pod_sandbox",
    "RemovePodSandbox": "pre_remove_pod_sandbox",
}
"""Calls that cannot be refused, and the point at which hooks are called before them."""


def forward_end_call(call: UndecidedCall, hooks: HookGateway) -> None:
    """Let a call that stops or removes a container or sandbox continue, after hooks if there are any."""
    target, point = call.target(), END_POINTS[call.method]
    call.context = CallContext(target=target)
    if point in hooks.points:
        hooks.before(point, call, target, _release)
    else:
        call.release()


def _release(call: UndecidedCall) -> None:
    call.release()
