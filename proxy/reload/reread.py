"""Reads the configuration again, in a separate process (``proxy.config.child``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from typing import Any

from proxy import __version__
from proxy.config.origin import Origin
from proxy.config.schema import Config
from proxy.config.transfer import from_plain
from proxy.model.errors import ConfigError

LIMIT_S, END_S = 30.0, 1.0
_START = "import sys; sys.path[:] = sys.argv[1:]; from proxy.config.child import main; main()"
"""Modules are found where the daemon has found its own, and nowhere else."""
_CANNOT = "cannot read the configuration again"


async def reread(origin: Origin) -> Config:
    """Read a configuration again and validate it.

    Args:
        origin: The file and the words of the command line.

    Raises:
        ConfigError: It is refused, cannot be read in ``LIMIT_S`` seconds, or another version has been
            installed since the daemon started.
    """
    request = {
        "file": str(origin.file) if origin.file is not None else "",
        "words": dict(origin.words),
        "trusted": origin.trusted,
    }
    answer = await _ask(json.dumps(request).encode())
    if answer["version"] != __version__:
        raise ConfigError(
            f"{_CANNOT}: version {answer['version']} is installed, and {__version__} runs: restart the daemon"
        )
    if "error" in answer:
        raise ConfigError(answer["error"])
    return replace(
        from_plain(answer["values"]),
        source=answer["source"],
        origin=origin,
        cluster_fault=answer["cluster_fault"],
    )


async def _ask(request: bytes) -> dict[str, Any]:
    command = (sys.executable, "-I", "-c", _START, *filter(os.path.isabs, sys.path))
    try:
        child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    except OSError as error:
        raise ConfigError(f"{_CANNOT}: no process can be started for it: {error.strerror}") from error
    try:
        async with asyncio.timeout(LIMIT_S):
            output, message = await child.communicate(request)
    except TimeoutError as error:
        raise ConfigError(f"{_CANNOT}: it takes longer than {LIMIT_S:g} s") from error
    finally:
        if child.returncode is None:
            child.kill()
            with contextlib.suppress(TimeoutError):  # one that waits for a disk ends later
                async with asyncio.timeout(END_S):
                    await child.communicate()
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError as error:
        last = (message.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{_CANNOT}: its process ended with {child.returncode}: {last[:300]}") from error
    return answer
