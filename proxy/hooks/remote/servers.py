"""Hook servers as Koordinator configures them (Koordinator v1.8.0 pkg/runtimeproxy/config/config.go).

Each has a JSON file::

    {"remote-endpoint": "/var/run/koordlet/koordlet.sock",
     "failure-policy": "Ignore",
     "runtime-hooks": ["PreRunPodSandbox", "PreCreateContainer"]}

A file of another form is refused with a reason; entries that Koordinator's proxy ignores are reported and
ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from proxy.config.endpoint import parse_endpoint
from proxy.config.hooks import HooksConfig
from proxy.hooks.events import Shutdown
from proxy.hooks.hook import Hook, HookFailurePolicy
from proxy.logs import log
from proxy.model.errors import ConfigError, HookError
from proxy.telemetry.port import Report

NEVER_CALLED: Final = frozenset({"PreRemoveRunPodSandbox"})
"""Points that Koordinator knows, but none of its proxies calls."""


class OwnServerError(HookError):
    """The server is this daemon: the file is meant for other clients of this directory."""


class _InvalidFileError(Exception):
    """A file of a hook server is invalid; the text says why."""


def _log(message: str, /, **keys: object) -> None:
    log.warning(message, **keys)


def server_of(name: str, path: Path, data: bytes, config: HooksConfig, report: Report = _log) -> Hook:
    """Make a hook of a server's file.

    Args:
        name: The hook's name.
        path: The file, for messages.
        data: The content of the file.
        config: The timeout, the label of pods that are skipped, and settings by hook's name, which take
            precedence over the file.
        report: Takes messages about ignored entries, now and later, from any thread.

    Raises:
        OwnServerError: It names our own socket.
        HookError: The file does not name a server that can be called.
    """
    # Only nodes that have such a file import this: grpc takes a while to import, and some megabytes.
    from proxy.hooks.remote.client import HookServerClient
    from proxy.hooks.remote.handlers import REMOTE_POINTS, RemoteHook

    try:
        entries = _read(data)
        endpoint = _endpoint(entries, config, path)
        policy = _text(entries, "failure-policy")
        wanted = _hooks(entries)
    except _InvalidFileError as error:
        raise HookError(f"cannot use the hook server of {path}: {error}") from None
    unknown_points = [hook for hook in wanted if hook not in REMOTE_POINTS and hook not in NEVER_CALLED]
    if unknown_points:
        unknown = ", ".join(map(repr, unknown_points))[:300]
        report("a hook server registers for unknown hook points", hook=name, path=path, points=unknown)
    if policy not in ("", *HookFailurePolicy):
        report(
            "unknown failure-policy of a hook server: Ignore is used",
            hook=name,
            path=path,
            value=repr(policy),
        )
    settings = config.settings.get(name)
    own = HookFailurePolicy.FAIL if policy == HookFailurePolicy.FAIL else HookFailurePolicy.IGNORE
    timeout = config.timeout if settings is None or settings.timeout is None else settings.timeout
    remote = RemoteHook(name, HookServerClient(endpoint, timeout, config.server_users), report, set())
    handlers = {
        REMOTE_POINTS[hook].NAME: remote.handler(REMOTE_POINTS[hook])
        for hook in wanted
        if hook in REMOTE_POINTS
    }
    return Hook(
        name=name,
        source=f"{path} ({endpoint})",
        handlers={**handlers, Shutdown.NAME: remote.shutdown},
        policy=own if settings is None or settings.policy is None else HookFailurePolicy(settings.policy),
        timeout=timeout,
        remote=True,
        receives_earlier_changes=True,
        skip=_skip(config.skip_label),
        skip_in=config.skip_namespaces,
    )


def socket_distrust(path: Path, data: bytes, config: HooksConfig) -> str:
    """Return why the socket that a server's file names is not trusted, if that is visible now; for commands.

    Returns:
        A sentence; empty if nothing is wrong, no process answers, or the file itself cannot be used.
    """
    from proxy.hooks.remote.client import HookServerSocket

    try:
        endpoint = _endpoint(_read(data), config, path)
        problem = HookServerSocket(endpoint, config.server_users).distrust_reason(config.timeout)
    except (_InvalidFileError, OwnServerError, OSError):
        return ""
    return problem and f"{endpoint}: {problem}"


def _read(data: bytes) -> Mapping[str, Any]:
    if not data.strip():
        raise _InvalidFileError("it is empty")
    try:
        entries = json.loads(data.decode())
    except UnicodeDecodeError:
        raise _InvalidFileError("it is not JSON: it is not UTF-8") from None
    except RecursionError:
        raise _InvalidFileError("it is not JSON: it is too deep") from None
    except ValueError as error:
        raise _InvalidFileError(f"it is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _InvalidFileError("it is JSON, but not an object with remote-endpoint")
    return {key.lower(): value for key, value in entries.items()}  # Go's JSON decoder ignores case in keys


def _text(entries: Mapping[str, Any], key: str) -> str:
    value = entries.get(key)
    if value is not None and not isinstance(value, str):
        raise _InvalidFileError(f"{key} must be a string, not {_shown(value)}")
    return value or ""


def _hooks(entries: Mapping[str, Any]) -> list[str]:
    value = entries.get("runtime-hooks")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _InvalidFileError(f"runtime-hooks must be a list of strings, not {_shown(value)}")
    return list(dict.fromkeys(value))


def _endpoint(entries: Mapping[str, Any], config: HooksConfig, file: Path) -> Path:
    text = _text(entries, "remote-endpoint")
    if not text.strip():
        raise _InvalidFileError("it has no remote-endpoint")
    try:
        path = parse_endpoint(text)
    except (ConfigError, ValueError) as error:  # a text that cannot be a path
        raise _InvalidFileError(f"remote-endpoint: {error}") from None
    if config.serve is not None and os.path.realpath(path) == os.path.realpath(config.serve):
        cause = f"remote-endpoint {path} is the socket of hooks.serve: topoproxy would call itself"
        raise OwnServerError(f"cannot use the hook server of {file}: {cause}")
    return path


def _shown(value: object) -> str:
    return json.dumps(value)[:60]


def _skip(label: str) -> Callable[[Mapping[str, str]], bool] | None:
    key, _, wanted = label.partition("=")
    if not key:
        return None
    return lambda labels: labels.get(key) == wanted
