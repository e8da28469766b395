"""What is done about a hook that is past its deadline."""

from __future__ import annotations

from proxy.hooks.engine.pace import Target
from proxy.hooks.engine.runners import Runner
from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.shared import Errand, Shared

_FIRST_S = 0.005
_LONGEST_S = 5.0
_MOST = 24
_REACH_S = 0.25


def abandon(shared: Shared, seat: Seat, where: Runner | Errand) -> None:
    """Stop what a hook still does, where that can be; on the loop."""
    if isinstance(where, Errand):
        where.looper.cancel(where.tasks, where.heard)
        if shared.loop is not None:
            shared.loop.call_later(_REACH_S, _see, shared, where)
        return
    shared.runners.abandon(where)
    if not seat.hook.remote:  # gRPC has locks that others need, and a deadline of its own
        _chase(shared, where, 0)


def _see(shared: Shared, errand: Errand) -> None:
    """Look whether a loop has heard that a coroutine of it is cancelled; else it is blocked."""
    looper = errand.looper
    if errand.reached or looper.lost or looper.back:
        return
    looper.abandon()
    _chase(shared, looper, 0)


def _chase(shared: Shared, target: Target, count: int) -> None:
    """Throw into a thread until it comes back: at once, then with pauses that double, for two minutes."""
    if target.back or count >= _MOST or shared.loop is None or shared.loop.is_closed():
        return
    shared.runners.pace.throw(target)
    shared.loop.call_later(min(_FIRST_S * 2**count, _LONGEST_S), _chase, shared, target, count + 1)
