"""A hook as the engine sees it: a Python file or a server behind a socket."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.hooks.answers import NOTHING, Adjustment
from proxy.hooks.events import Point
from proxy.hooks.slot_init import slot_init
from proxy.model.admission import EVERYWHERE, Namespaces

DEFAULT_TIMEOUT_S = 0.5
"""The default timeout of one answer, in seconds."""
LONGEST_TIMEOUT_S = 100.0
"""The longest timeout that may be configured, and the most time that all hooks of one call have together:
kubelet waits two minutes for a call."""


class HookFailurePolicy(enum.StrEnum):
    """What happens to a call when a hook fails: it is refused, or continues without that hook."""

    FAIL = "Fail"
    IGNORE = "Ignore"


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """One hook, ready to be called.

    Attributes:
        name: The file's name without its ending: ``10-quota``, ``koordlet``. Hooks are called in this order.
        source: Its origin, for messages: a path, or a path and a socket.
        handlers: Point to the function that answers. A handler is called in a thread, or awaited on the
            hooks' own loop if it is a coroutine function. It should answer an ``Answer``; any other value is
            refused.
        policy: What happens to a call when it fails.
        timeout: Seconds for one answer.
        remote: It is a server: exceptions are its gRPC errors, and a traceback does not help.
        receives_earlier_changes: Its handlers are called with the event and the fields that hooks before it
            have set (Koordinator's servers need this: they answer with everything that they received).
        pure: It only computes, may be called twice, and is called on the event loop itself.
        skip: Decides by a pod's labels whether the hook is not called for this pod.
        skip_in: Namespaces in which ``skip`` counts. Without that limit any author of a pod could hide it
            from a hook.
    """

    name: str
    source: str
    handlers: Mapping[str, Callable[..., Any]]
    policy: HookFailurePolicy = HookFailurePolicy.IGNORE
    timeout: float = DEFAULT_TIMEOUT_S
    remote: bool = False
    receives_earlier_changes: bool = False
    pure: bool = False
    skip: Callable[[Mapping[str, str]], bool] | None = None
    skip_in: Namespaces = EVERYWHERE


@slot_init
@dataclass(frozen=True, slots=True)
class Outcome:
    """The combined result of all hooks of a point.

    Attributes:
        adjustment: The merged changes that they request.
        owners: Field to the hook that has set it; maps by key: ``envs[NAME]``, ``updates[id].cpus``.
        refusal: Why the call is refused, with the hook's name; empty if it continues.
        firm: Some of its fields were set by a hook without which the call must not continue (policy Fail).
    """

    adjustment: Adjustment = NOTHING
    owners: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    firm: bool = False


NO_CHANGE = Outcome()
"""No hook wants a change."""


class PendingOutcome(Protocol):
    """The outcome of a call, now or later; returned by ``HookCaller.call_hooks``."""

    outcome: Outcome | None

    async def wait(self) -> Outcome:
        """Wait for the outcome; never longer than the hooks' deadlines together."""


class _NoHooksCalled:
    outcome: Outcome | None = NO_CHANGE

    async def wait(self) -> Outcome:
        return NO_CHANGE


NO_HOOKS_CALLED: PendingOutcome = _NoHooksCalled()
"""The outcome at a point without hooks, or if hooks could not be called."""


class HookCaller(Protocol):
    """The interface that calls hooks; all methods are called on the event loop's thread."""

    points: frozenset[str]
    """Points that a hook handles now; changes when hooks are added or removed."""

    def call_hooks(self, event: Point) -> PendingOutcome:
        """Call all hooks of an event's point. ``outcome`` is available at once if all were quick."""

    def notify(self, event: Point) -> None:
        """Send an event to all hooks of its point in the background, and apply their updates."""
