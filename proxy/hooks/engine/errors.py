"""Failures of hooks: their kinds, their text and traceback, and a rate-limited log of them.

A failure's text is one line; its traceback is cut to the hook's own frames, because the frames of the engine
before it and of libraries after it do not help the hook's author. Values of variables are never written: they
may be environment variables of a pod.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from types import TracebackType
from typing import Any, Final

from proxy.hooks.events import Point
from proxy.hooks.hook import Hook
from proxy.logs import log
from proxy.model.errors import HookError
from proxy.telemetry.port import HOOK_FAILED, Report

LONGEST_ERROR = 300
"""Characters of an exception's text."""
MOST_MESSAGES = 10
"""Messages about one hook in ``MESSAGE_PERIOD_S`` seconds; further ones are only counted."""
MESSAGE_PERIOD_S = 60.0
_MOST_FRAMES = 20
_DEEPEST_TRACEBACK = 2000
_ENGINE_DIRECTORY = str(PurePath(__file__).parent)
_CALL_PHRASES: Final = {
    "run_pod_sandbox": "run pod",
    "create_container": "create container",
    "start_container": "start container",
    "update_container_resources": "change the resources of container",
    "stop_container": "stop container",
    "remove_container": "remove container",
    "stop_pod_sandbox": "stop pod",
    "remove_pod_sandbox": "remove pod",
}


@dataclass(frozen=True, slots=True)
class HookFailure:
    """Why a hook gave no answer.

    Attributes:
        kind: ``error`` (an exception), ``answer`` (an invalid answer), ``conflict``, ``timeout``, ``hangs``
            (not called, because earlier calls never returned), ``queue`` (its turn never came).
        text: One line.
        trace: The traceback, cut; empty if there is none.
    """

    kind: str
    text: str
    trace: str = ""


def failure_of(error: BaseException, hook: Hook) -> HookFailure:
    """Describe an exception of a hook.

    It runs the exception's own ``__str__``, so call it within the hook's time.
    """
    message = text_of(error)
    if isinstance(error, HookError) or hook.remote:
        return HookFailure("error", message or type(error).__name__)
    head = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = _frames(error.__traceback__, hook.source)
    if not frames:
        return HookFailure("error", head)
    _, last_name, last_line, last_file = frames[-1]
    lines = ["Traceback, the hook's own part:"]
    lines += [f'  File "{file}", line {line}, in {name}' for _, name, line, file in frames[-_MOST_FRAMES:]]
    text = f"{head} ({PurePath(last_file).name}:{last_line} in {last_name})"
    return HookFailure("error", text, "\n".join([*lines, head]))


def text_of(error: BaseException) -> str:
    """Return an exception's text on one line; runs its own ``__str__``."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - this is the hook's code, too
        return "an exception that cannot be written"
    return text if len(text) <= LONGEST_ERROR and text.isprintable() else shown(text, LONGEST_ERROR)


def _frames(tb: TracebackType | None, source: str) -> list[tuple[bool, str, int, str]]:
    """Return the frames of a traceback that are in the hook's file, or all outside the engine if none are."""
    found: list[tuple[bool, str, int, str]] = []
    for _ in range(_DEEPEST_TRACEBACK):
        if tb is None:
            break
        code = tb.tb_frame.f_code
        if not code.co_filename.startswith(_ENGINE_DIRECTORY):
            found.append((code.co_filename == source, code.co_name, tb.tb_lineno, code.co_filename))
        tb = tb.tb_next
    own = [frame for frame in found if frame[0]]
    return own or found


# Sentences about events.


def pod_of(event: Point) -> Any:
    """Return the facts of the event's pod; None if the event is about no pod."""
    event = getattr(event, "event", event)  # an event of a validating point contains the original event
    return getattr(event, "pod", None)


def subject(event: Point) -> str:
    """Return what the event is about: ``namespace/pod``, ``namespace/pod/container``, or empty."""
    event = getattr(event, "event", event)
    pod = getattr(event, "pod", None)
    if pod is None:
        return ""
    container = getattr(event, "container", None)
    return f"{pod.ref}/{container.name}" if container is not None else str(pod.ref)


def call_description(event: Point) -> str:
    """Return what the call does: ``create container namespace/pod/name``, or the name of the point."""
    _, _, call = event.NAME.partition("_")
    phrase = _CALL_PHRASES.get(call)
    return f"{phrase} {subject(event)}" if phrase is not None else event.NAME


def shown(value: object, most: int = 100) -> str:
    """Format a value of a hook's answer, truncated and on one line."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - the value may be of a class of the hook
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= most and text.isprintable() else repr(text[:most])


def duration(seconds: float) -> str:
    """Format seconds: ``500 ms``, ``2 s``."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


class FailureLog:
    """Reports failures of hooks, with a rate limit for each hook."""

    def __init__(self, report: Report, clock: Callable[[], float]) -> None:
        self._report = report
        self._clock = clock
        self._recent: dict[str, tuple[float, int]] = {}

    def report_failure(self, hook: Hook, failure: HookFailure) -> None:
        """Report a failure."""
        if failure.trace:
            log.debug("hook failed", hook=hook.name, error=failure.text, trace=failure.trace)
        self.report_problem(hook.name, failure.text)

    def report_problem(self, hook: str, text: str) -> None:
        """Report a message about a hook."""
        now = self._clock()
        since, count = self._recent.get(hook, (now, 0))
        if now - since >= MESSAGE_PERIOD_S:
            if count > MOST_MESSAGES:
                self._report("failures of a hook were not reported", hook=hook, count=count - MOST_MESSAGES)
            since, count = now, 0
        self._recent[hook] = (since, count + 1)
        if count < MOST_MESSAGES:
            self._report(HOOK_FAILED, hook=hook, reason=text)

    def forget(self, names: set[str]) -> None:
        """Forget all hooks except these."""
        self._recent = {name: value for name, value in self._recent.items() if name in names}
