"""Determines the state of the hook directories without a daemon."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from proxy.config.schema import HooksConfig
from proxy.hooks.loader.directories import Candidate, HookFileEntry, State, survey
from proxy.hooks.loader.loading import Loaded, load
from proxy.hooks.loader.safe_read import UntrustedError, read_stable
from proxy.hooks.loader.schema import keys_of
from proxy.hooks.status_data import hooks_page
from proxy.model.errors import HookError

LOADS = "loads"
"""The state of a hook that would run."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of loading a file, and the hook's settings: ``name``, ``value``, ``wants``, ``help``."""

    entry: HookFileEntry
    settings: list[dict[str, str]] = field(default_factory=list)


def from_directories(config: HooksConfig) -> tuple[list[dict[str, Any]], list[str]]:
    """Look at all files as the daemon would, and run those that it would run; no hook is called.

    Returns:
        What there is, as the daemon gives it, and what else is strange in the directories.
    """
    surveyed = survey(config)
    entries = [examined(candidate, config).entry for candidate in surveyed.candidates.values()]
    entries += [
        HookFileEntry(c.name, str(c.path), State.MASKED, f"{by} is used instead", server=c.server)
        for c, by in surveyed.masked
    ]
    entries.sort(key=lambda entry: (entry.name, entry.state is State.MASKED))
    page = hooks_page(entries, ())
    for entry in page:
        entry["state"] = LOADS if entry["state"] == State.RUNNING else entry["state"]
    return page, list(surveyed.ignored_files)


def examined(candidate: Candidate, config: HooksConfig, *, trusted: bool = True) -> Examined:
    """Read and load one file, and return the result.

    Args:
        candidate: The file.
        config: What is configured for hooks.
        trusted: Only root may have written it.
    """
    entry = HookFileEntry(candidate.name, str(candidate.path), State.DISABLED, server=candidate.server)
    try:
        loaded = _loaded(candidate, config, trusted=trusted)
        settings = _settings(loaded) if loaded is not None else []
    except UntrustedError as error:
        return Examined(replace(entry, state=State.UNTRUSTED, error=str(error)))
    except HookError as error:
        return Examined(replace(entry, state=State.BROKEN, error=str(error)))
    if loaded is None:
        return Examined(entry)
    hook = loaded.hook
    points = tuple(sorted(hook.handlers))
    entry = replace(entry, state=State.RUNNING, points=points, policy=str(hook.policy), timeout=hook.timeout)
    loaded.unload()
    return Examined(entry, settings)


def _loaded(candidate: Candidate, config: HooksConfig, *, trusted: bool) -> Loaded | None:
    """Make a hook of a file; None where the file disables hooks of its name.

    Raises:
        HookError: It cannot be used.
    """
    path, what = candidate.path, "hook server" if candidate.server else "hook"
    if trusted and candidate.distrust:
        raise UntrustedError(f"cannot trust {what} {path}: {candidate.distrust}")
    if candidate.null:
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
    """Return what can be set for a hook, and what is."""
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
