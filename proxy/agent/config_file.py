"""Follow the files of the configuration: a part of the agent.

Of the keys that a reload of the daemon can change, the agent reads ``admission.namespaceSelector``,
``clusterConfig.allowed`` and ``log.level``. It takes them from the files, within seconds of a change. The
daemon may reload later, or refuse the reload: until then the agent may read or permit something that the
daemon does not use. All other keys keep their values from the start of the agent.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from proxy import logs
from proxy.agent.session import AgentSession
from proxy.config.cluster_config import cluster_config_file
from proxy.config.load import DEFAULT_FILE, drop_in_files, load
from proxy.config.origin import Origin
from proxy.config.schema import Config
from proxy.model.errors import TopoproxyError
from proxy.reload.reread import with_live_values

COMPARE_S = 5.0
"""Seconds between two comparisons of the files' times."""
_CANNOT = "cannot read the configuration again"

_Stamp = tuple[str, int, int, int]
"""The path of a file, and a stamp that changes with its content."""


async def follow_config_files(session: AgentSession) -> None:
    """Follow until cancelled; return at once if the configuration is from no file."""
    origin = session.config.origin
    if origin is None:
        return
    seen: list[_Stamp] = []
    while True:
        try:
            stamps = await asyncio.to_thread(_stamps, origin, session.config)
            if stamps != seen:
                _use_changed_keys(session, await asyncio.to_thread(load, origin.file, trusted=origin.trusted))
                seen = stamps
            session.telemetry.resolved(_CANNOT)
        except TopoproxyError as error:
            session.telemetry.problem(_CANNOT, err=error)
        await asyncio.sleep(COMPARE_S)


def _use_changed_keys(session: AgentSession, requested: Config) -> None:
    running = session.config
    config = with_live_values(running, requested)
    if config.log != running.log:
        logs.log.change(config.log.level, config.log.format)
    if config != running:
        session.use(config)


def _stamps(origin: Origin, config: Config) -> list[_Stamp]:
    """Return the times of the files that the configuration is read from.

    Raises:
        TopoproxyError: The directory of drop-ins cannot be read.
    """
    file = origin.file if origin.file is not None else DEFAULT_FILE
    of_cluster = cluster_config_file(config.cluster_facts.directory, config.cluster_config.allowed)
    return [_stamp(path) for path in (file, *drop_in_files(file), of_cluster) if path is not None]


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return str(path), 0, 0, 0
    return str(path), status.st_mtime_ns, status.st_size, status.st_ino
