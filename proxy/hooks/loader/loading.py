"""Loading a hook file: from its text to a hook.

A file is run in a separate thread, with a deadline: a file that hangs delays no other file. While that
thread waits in C code it cannot be ended and keeps running; there is at most one such thread for each version
of a file. The module of a file has a name that no import statement can use, and it is in ``sys.modules`` only
as long as that version is in use. Nothing is written next to the file, and the files in its directory cannot
be imported.

A function whose name is almost that of a hook point is refused: a handler that is never called is worse than
one that fails.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import linecache
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from proxy.config.hooks import HooksConfig, HookSettings
from proxy.hooks import forks
from proxy.hooks.hook import Hook, HookFailurePolicy
from proxy.hooks.loader.contract import Contract, check_purity, contract_of
from proxy.hooks.loader.safe_read import read_stable
from proxy.model.errors import HookError

LOAD_TIMEOUT_S: Final = 5.0
"""How long a file may take to be run, seconds."""
_NO_SETTINGS: Final = HookSettings()
_generations = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """One version of a hook file, ready to be used.

    Attributes:
        hook: The hook, as the engine calls it.
        settings: The configuration as an object of the file's ``Settings``; None if the file has no such
            class.
        module: The module made of the file; None for a server.
        source: The text of the file.
    """

    hook: Hook
    settings: Any = None
    module: ModuleType | None = None
    source: bytes = b""

    def show_lines(self) -> None:
        """Make tracebacks show the lines of this version, even after the file has changed."""
        if self.module is not None:
            lines = self.source.decode("utf-8", "replace").splitlines(keepends=True)
            linecache.cache[self.hook.source] = (len(self.source), None, lines, self.hook.source)

    def unload(self) -> None:
        """Remove the module from ``sys.modules``; its running code continues."""
        if self.module is not None:
            sys.modules.pop(self.module.__name__, None)


def load(name: str, path: Path, data: bytes, config: HooksConfig, deadline: float = LOAD_TIMEOUT_S) -> Loaded:
    """Run a hook file and check it.

    Args:
        name: The hook's name.
        path: The file that the text was read from.
        data: The text.
        config: The configuration of hooks.
        deadline: Seconds.

    Raises:
        HookError: It does not run, takes too long, or is no hook.
    """
    attempt = LoadAttempt(name, path, data, config)
    attempt.start()
    try:
        return attempt.future.result(deadline)
    except TimeoutError:
        raise attempt.abandon(deadline) from None


def load_file(path: Path, config: HooksConfig | None = None, *, trusted: bool = True) -> Loaded:
    """Read and run a hook file; for commands and tests.

    Args:
        path: The file; its name is not checked.
        config: The configuration of hooks; None for the defaults.
        trusted: Refuse a file that a user other than root could have written.

    Raises:
        HookError: It cannot be read, cannot be trusted, or is no hook.
    """
    data = read_stable(path, trusted=trusted).data
    return load(path.name.removesuffix(".py"), path, data, config or HooksConfig())


class LoadAttempt:
    """A file being run in its thread. ``future`` has the result: a ``Loaded``, or a HookError."""

    def __init__(self, name: str, path: Path, data: bytes, config: HooksConfig) -> None:
        self.future: Future[Loaded] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._path = path
        self._make = functools.partial(_run_file, name, path, data, config)
        self._lock = threading.Lock()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"hook {name} loads", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        forks.install_fork_handlers()
        self._thread.start()

    def abandon(self, after: float) -> HookError:
        """Stop waiting for the file, and return the error that reports the time-out."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != str(self._path):
            frame = frame.f_back
        at = f" (line {frame.f_lineno})" if frame is not None else ""
        with self._lock:
            self._abandoned = True
            loaded = self.future.result() if self.future.done() and not self.future.exception() else None
        if loaded is not None:
            loaded.unload()
        else:
            raise_in_thread(self._thread, SystemExit)
        return HookError(f"cannot load hook {self._path}: it has not finished loading after {after:g} s{at}")

    def _run(self) -> None:
        try:
            loaded = self._make()
        except BaseException as error:  # noqa: BLE001 - a hook may raise anything
            forks.exit_if_child()
            self.future.set_exception(_refusal(self._path, error))
            return
        forks.exit_if_child()
        with self._lock:
            self.future.set_result(loaded)
            if self._abandoned:
                loaded.unload()


def _refusal(path: Path, error: BaseException) -> HookError:
    cause = str(error) if isinstance(error, HookError) else describe_error(error, str(path))
    refused = HookError(f"cannot load hook {path}: {cause}")
    refused.__cause__ = error.with_traceback(None)  # its frames would keep the whole module in memory
    return refused


def _run_file(name: str, path: Path, data: bytes, config: HooksConfig) -> Loaded:
    module = ModuleType(f"_topoproxy_hooks.{re.sub('[^a-z0-9]', '_', name)}_{next(_generations)}")
    module.__file__, module.__package__ = str(path), ""
    sys.modules[module.__name__] = module  # dataclasses and type hints look their module up
    try:
        # The file decides how its annotations are evaluated: this module's ``__future__`` imports do not
        # apply.
        code = compile(data, str(path), "exec", dont_inherit=True)
        exec(code, vars(module))  # noqa: S102 - this is what hooks are
        hook_settings = config.settings.get(name, _NO_SETTINGS)
        contract = contract_of(module, hook_settings.config, f"hooks.settings.{name}.config")
        if contract.pure:
            check_purity(data)
        hook = _hook(name, path, contract, hook_settings, config)
        return Loaded(hook, contract.settings, module, data)
    except BaseException:
        sys.modules.pop(module.__name__, None)
        raise


def _hook(
    name: str, path: Path, contract: Contract, hook_settings: HookSettings, config: HooksConfig
) -> Hook:
    handlers: Mapping[str, Callable[..., Any]] = contract.handlers
    timeout = next(t for t in (hook_settings.timeout, contract.timeout, config.timeout) if t is not None)
    policy = next(p for p in (hook_settings.policy, contract.policy, config.policy) if p is not None)
    return Hook(name, str(path), handlers, HookFailurePolicy(policy), timeout, pure=contract.pure)


_LONGEST_REASON = 300


def describe_error(error: BaseException, path: str) -> str:
    """Format an exception in one line: its type, its message, and the last line of the file in its trace."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    line = _line(error.__traceback__, path)
    return _message_of(error) + (f" (line {line})" if line else "")


def _message_of(error: BaseException) -> str:
    name = type(error).__name__
    try:
        message = str(error).strip()
    except BaseException:  # noqa: BLE001 - __str__ of an exception may be code of the hook
        return f"{name}, whose message cannot be read"
    first = message.splitlines()[0][:_LONGEST_REASON].rstrip() if message else ""
    return f"{name}: {first}" if first else name


def _line(traceback: TracebackType | None, path: str) -> int:
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def raise_in_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an exception in a thread as soon as it runs Python; do nothing if the thread has ended."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
