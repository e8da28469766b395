"""One hook called with one event: its answer checked, whatever it does told in words."""

from __future__ import annotations

from proxy.hooks import forks
from proxy.hooks.answers import Veto
from proxy.hooks.engine import traces
from proxy.hooks.engine.checks import taken
from proxy.hooks.engine.claims import Said
from proxy.hooks.engine.tally import Tally
from proxy.hooks.engine.traces import Fault
from proxy.hooks.engine.words import pod_of
from proxy.hooks.hook import Hook
from proxy.hooks.points import Point

Answered = tuple[Said | Veto | None, Fault | None]
"""What a hook says, and why that is nothing, if it has failed."""


def function(hook: Hook, event: Point, tally: Tally) -> Answered:
    """Call a plain function. All that is the hook's own code is run here: also that of its answer."""
    try:
        handler = hook.handlers[event.NAME]
        answer = handler(event, tally.shown()) if hook.echoes else handler(event)
        return _checked(answer, event) if answer is not None else (None, None)
    except BaseException as error:  # noqa: BLE001 - a hook may raise what it likes
        return None, traces.fault(error, hook)
    finally:
        forks.leave()


async def coroutine(hook: Hook, event: Point, tally: Tally) -> Answered:
    """Call a coroutine function."""
    try:
        handler = hook.handlers[event.NAME]
        answer = await (handler(event, tally.shown()) if hook.echoes else handler(event))
        return _checked(answer, event)
    except BaseException as error:  # noqa: BLE001 - a hook may raise what it likes
        return None, traces.fault(error, hook)
    finally:
        forks.leave()


def _checked(answer: object, event: Point) -> Answered:
    try:
        return taken(answer, event), None
    except Exception as error:  # noqa: BLE001 - an answer may raise what it likes when it is read
        return None, Fault("answer", traces.said(error) or "its answer cannot be read")


def skips(hook: Hook, event: Point) -> bool:
    """Tell whether a hook is not asked about the pod of an event."""
    if hook.skip is None or (pod := pod_of(event)) is None:
        return False
    try:
        return hook.skip_in.admits(pod.namespace) and bool(hook.skip(pod.labels))
    except Exception:  # noqa: BLE001 - whatever it is: who cannot tell is asked
        return False
