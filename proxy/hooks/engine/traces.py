"""Exceptions of hooks in words: one line, and a traceback cut to the hook's own frames.

What is between the engine and the hook, and what the hook called beyond its file, tells its author nothing
that the line of the file does not. Values of variables are never written: they may be an environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from types import TracebackType

from proxy.hooks.engine.words import shown
from proxy.hooks.hook import Hook
from proxy.model.errors import HookError

LONGEST = 300
"""Characters of an exception's text."""
_MOST_FRAMES = 20
_DEEPEST = 2000
_OURS = str(PurePath(__file__).parent)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a hook has not answered.

    Attributes:
        kind: ``error`` (an exception), ``answer`` (one that cannot be), ``conflict``, ``timeout``, ``hangs``
            (not asked, since calls before it never came back), ``queue`` (its turn never came).
        text: One line.
        trace: The traceback, cut; empty where there is none.
    """

    kind: str
    text: str
    trace: str = ""


def fault(error: BaseException, hook: Hook) -> Fault:
    """Say what a hook has raised. Runs the exception's own ``__str__``, so only in the hook's time."""
    words = said(error)
    if isinstance(error, HookError) or hook.remote:
        return Fault("error", words or type(error).__name__)
    head = f"{type(error).__name__}: {words}" if words else type(error).__name__
    frames = _frames(error.__traceback__, hook.source)
    if not frames:
        return Fault("error", head)
    _, last_name, last_line, last_file = frames[-1]
    lines = ["Traceback, the hook's own part:"]
    lines += [f'  File "{file}", line {line}, in {name}' for _, name, line, file in frames[-_MOST_FRAMES:]]
    text = f"{head} ({PurePath(last_file).name}:{last_line} in {last_name})"
    return Fault("error", text, "\n".join([*lines, head]))


def said(error: BaseException) -> str:
    """Give an exception's text on one line; runs its own ``__str__``."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - it is the hook's code, too
        return "an exception that cannot be written"
    return text if len(text) <= LONGEST and text.isprintable() else shown(text, LONGEST)


def _frames(tb: TracebackType | None, source: str) -> list[tuple[bool, str, int, str]]:
    """Walk a traceback: the frames of the hook's file, else all that are not the engine's."""
    found: list[tuple[bool, str, int, str]] = []
    for _ in range(_DEEPEST):
        if tb is None:
            break
        code = tb.tb_frame.f_code
        if not code.co_filename.startswith(_OURS):
            found.append((code.co_filename == source, code.co_name, tb.tb_lineno, code.co_filename))
        tb = tb.tb_next
    own = [frame for frame in found if frame[0]]
    return own or found
