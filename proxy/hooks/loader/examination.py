"""Examination of single hook files without a daemon: in this process, in a child process, or by text."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from proxy.config.hooks import HooksConfig
from proxy.hooks.loader.contract import check_version
from proxy.hooks.loader.directories import Candidate, HookFileEntry, HookFileState, candidate_of
from proxy.hooks.loader.loading import Loaded, describe_error, load
from proxy.hooks.loader.printing import printing_to_stderr
from proxy.hooks.loader.safe_read import UntrustedError, read_stable
from proxy.hooks.loader.schema import keys_of
from proxy.model.errors import HookError

LOADS = "loads"
"""The state of a hook that would run."""


@dataclass(frozen=True, slots=True)
class ExaminedFile:
    """The result of loading a file, and the hook's settings: ``name``, ``value``, ``wants``, ``help``."""

    entry: HookFileEntry
    settings: list[dict[str, str]] = field(default_factory=list)


def check_file_in_child(path: Path, config: HooksConfig, *, trusted: bool) -> dict[str, Any]:
    """Call ``check_file`` in a child process, because a file may end the process that loads it.

    What the file prints goes to standard error.

    Args:
        path: The file.
        config: The configuration of hooks.
        trusted: Refuse a file that a user other than root could have written.
    """
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with printing_to_stderr():
            _check_and_end(writing, path, config, trusted=trusted)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.readline()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer.endswith(b"\n"):
        page = json.loads(answer)
        assert isinstance(page, dict)
        return page
    how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    error = f"cannot load hook {path}: it ended the process {how}"
    return {"path": str(path), "name": "", "state": "broken", "error": error, "settings": []}


def _check_and_end(writing: int, path: Path, config: HooksConfig, *, trusted: bool) -> NoReturn:
    """Write the result to a pipe as a line of JSON, and end the child process."""
    try:
        page = json.dumps(check_file(path, config, trusted=trusted))
        with os.fdopen(writing, "w") as stream:
            stream.write(f"{page}\n")
    except Exception as error:  # noqa: BLE001  the parent reports that the child has failed
        print(f"topoproxy: internal error: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()  # the output of the file
        os._exit(1)


def check_file(path: Path, config: HooksConfig, *, trusted: bool) -> dict[str, Any]:
    """Describe what the daemon would do with a file.

    Args:
        path: The file.
        config: The configuration of hooks.
        trusted: Refuse a file that a user other than root could have written.

    Returns:
        ``path``, ``name``, ``state``, ``error`` (empty if the file is valid) and ``settings``; for a valid
        hook also ``points``, ``policy`` and ``timeout``.
    """
    page: dict[str, Any] = {"path": str(path), "name": "", "state": "broken", "error": "", "settings": []}
    try:
        examined_file = examine(candidate_of(path), config, trusted=trusted)
    except HookError as error:
        return page | {"error": str(error)}
    entry = examined_file.entry
    state = LOADS if entry.state is HookFileState.RUNNING else str(entry.state)
    page |= {"name": entry.name, "state": state, "error": entry.error, "settings": examined_file.settings}
    if entry.points:
        page |= {"points": list(entry.points), "policy": entry.policy, "timeout": entry.timeout}
    return page


def examine(candidate: Candidate, config: HooksConfig, *, trusted: bool = True) -> ExaminedFile:
    """Read and load one file, and return the result.

    Args:
        candidate: The file.
        config: The configuration of hooks.
        trusted: Refuse a file that a user other than root could have written.
    """
    entry = HookFileEntry(
        candidate.name, str(candidate.path), HookFileState.DISABLED, server=candidate.server
    )
    try:
        loaded = _load(candidate, config, trusted=trusted)
        settings = _settings(loaded) if loaded is not None else []
    except UntrustedError as error:
        return ExaminedFile(replace(entry, state=HookFileState.UNTRUSTED, error=str(error)))
    except HookError as error:
        return ExaminedFile(replace(entry, state=HookFileState.BROKEN, error=str(error)))
    if loaded is None:
        return ExaminedFile(entry)
    hook = loaded.hook
    points = tuple(sorted(hook.handlers))
    entry = replace(
        entry, state=HookFileState.RUNNING, points=points, policy=str(hook.policy), timeout=hook.timeout
    )
    loaded.unload()
    return ExaminedFile(entry, settings)


def _load(candidate: Candidate, config: HooksConfig, *, trusted: bool) -> Loaded | None:
    """Make a hook of a file; return None if the file disables hooks of its name, or names the daemon itself.

    Raises:
        HookError: It cannot be used.
    """
    path, what = candidate.path, "hook server" if candidate.server else "hook"
    if trusted and candidate.distrust:
        raise UntrustedError(f"cannot trust {what} {path}: {candidate.distrust}")
    if candidate.is_null_link:
        return None
    if candidate.cause:
        raise HookError(f"cannot read {what} {path}: {candidate.cause}")
    data = read_stable(path, what, trusted=trusted).data
    if candidate.server:
        from proxy.hooks.remote.servers import OwnServerError, server_of, socket_distrust

        if trusted and (reason := socket_distrust(path, data, config)):
            raise UntrustedError(f"cannot trust hook server {path}: {reason}")

        try:
            return Loaded(server_of(candidate.name, path, data, config))
        except OwnServerError:
            return None
    if not data:
        return None
    return load(candidate.name, path, data, config)


def _settings(loaded: Loaded) -> list[dict[str, str]]:
    """Return the settings that a hook has, and their values."""
    if loaded.settings is None:
        return []
    return [
        {
            "name": key.name,
            "value": _value(getattr(loaded.settings, key.name)),
            "wants": key.wants,
            "help": key.help,
        }
        for key in keys_of(type(loaded.settings))
    ]


def _value(value: Any) -> str:
    """Write a setting as in a configuration."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def static_error(path: Path, data: bytes) -> str:
    """Return why a hook file cannot be used, if its text alone shows it; none of its code is run.

    Args:
        path: The file.
        data: Its text.

    Returns:
        A syntax error, or an ``API_VERSION`` that is written as a literal and is not supported; otherwise
        empty.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(data, str(path))
            compile(tree, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return describe_error(error, str(path))
    for node in reversed(tree.body):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "API_VERSION" for target in targets):
            try:
                check_version({"API_VERSION": ast.literal_eval(node.value)} if node.value else {})
            except HookError as error:
                return str(error)
            except (ValueError, TypeError, RecursionError):
                return ""  # its value is known only after it is run
            return ""
    return ""
