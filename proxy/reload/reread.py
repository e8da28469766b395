"""Reads the configuration again, in a separate process (``proxy.config.child``), and compares it by key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from proxy import __version__
from proxy.config.origin import Origin
from proxy.config.schema import Config
from proxy.config.setting import Setting, keys
from proxy.config.transfer import from_plain
from proxy.model.errors import ConfigError

READ_LIMIT_S, KILL_WAIT_S = 30.0, 1.0
_START = "import sys; sys.path[:] = sys.argv[1:]; from proxy.config.child import main; main()"
"""The child process finds its modules where the daemon found its own, and nowhere else."""
_CANNOT = "cannot read the configuration again"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One key with another value.

    Attributes:
        key: The key, with its section (``log.level``).
        before, after: The values as the file would have them; empty for lists and for keys with values.
        live: Whether a reload changes it in the running daemon.
    """

    key: str
    before: str
    after: str
    live: bool

    def __str__(self) -> str:
        """Return the change as text."""
        if not (self.before or self.after):
            return self.key
        return f"{self.key} {self.before or 'empty'} -> {self.after or 'empty'}"


def changes(before: Config, after: Config) -> list[KeyChange]:
    """Return the keys whose values differ, in the order of the schema."""
    return list(_changes(before, after, ""))


def _changes(before: Any, after: Any, prefix: str) -> Iterator[KeyChange]:
    for item, key, setting in keys(before):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if old == new:
            continue
        if setting is None:
            yield from _changes(old, new, f"{prefix}{key}.")
        else:
            live = setting.changes_live(old, new)
            yield KeyChange(f"{prefix}{key}", _shown(setting, old), _shown(setting, new), live)


def _shown(setting: Setting, value: object) -> str:
    return "" if setting.kind.nested else str(setting.kind.show(value))


def with_live_values(running: T, requested: T) -> T:
    """Return the running configuration with those values of another one that need no restart."""
    new: dict[str, Any] = {}
    for item, _, setting in keys(running):
        old, value = getattr(running, item.name), getattr(requested, item.name)
        if setting is None:
            new[item.name] = with_live_values(old, value)
        elif setting.changes_live(old, value):
            new[item.name] = value
    return replace(running, **new)  # type: ignore[type-var]  # T is a dataclass, which no bound can say


async def reread(origin: Origin) -> Config:
    """Read a configuration again and validate it.

    Args:
        origin: The file and the words of the command line.

    Raises:
        ConfigError: The configuration is refused or cannot be read in ``READ_LIMIT_S`` seconds, or another
            version has been installed since the daemon started.
    """
    request = {
        "file": str(origin.file) if origin.file is not None else "",
        "words": dict(origin.options),
        "trusted": origin.trusted,
    }
    answer = await _query(json.dumps(request).encode())
    if answer["version"] != __version__:
        raise ConfigError(
            f"{_CANNOT}: version {answer['version']} is installed, and {__version__} runs: restart the daemon"
        )
    if "error" in answer:
        raise ConfigError(answer["error"])
    former_keys = tuple(answer["former_keys"])
    own = None
    if "own" in answer:
        own = replace(
            from_plain(answer["own"]), source=answer["own_source"], origin=origin, former_keys=former_keys
        )
    return replace(
        from_plain(answer["values"]),
        source=answer["source"],
        origin=origin,
        cluster_fault=answer["cluster_fault"],
        former_keys=former_keys,
        without_cluster=own,
    )


async def _query(request: bytes) -> dict[str, Any]:
    command = (sys.executable, "-I", "-c", _START, *filter(os.path.isabs, sys.path))
    try:
        child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    except OSError as error:
        raise ConfigError(f"{_CANNOT}: no process can be started for it: {error.strerror}") from error
    try:
        async with asyncio.timeout(READ_LIMIT_S):
            output, message = await child.communicate(request)
    except TimeoutError as error:
        raise ConfigError(f"{_CANNOT}: it takes longer than {READ_LIMIT_S:g} s") from error
    finally:
        if child.returncode is None:
            child.kill()
            with contextlib.suppress(TimeoutError):  # a child that waits for a disk ends later
                async with asyncio.timeout(KILL_WAIT_S):
                    await child.communicate()
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError as error:
        last = (message.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{_CANNOT}: its process ended with {child.returncode}: {last[:300]}") from error
    return answer
