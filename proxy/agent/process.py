"""The agent as a process: its parts, its signals, its log."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from proxy import logs
from proxy.agent.api_client import ApiClient
from proxy.agent.cluster_config import follow_cluster_config
from proxy.agent.cluster_facts import write_facts
from proxy.agent.config_file import follow_config_files
from proxy.agent.credentials import read_credentials
from proxy.agent.daemon_client import DaemonClient
from proxy.agent.publisher import publish
from proxy.agent.rejections.ending import TerminationHistory, end_rejected_pods
from proxy.agent.session import AgentSession, Part, run_parts
from proxy.config.cluster import ClusterConfig
from proxy.config.schema import Config
from proxy.notify import SystemdNotifier


def _parts() -> tuple[Part, ...]:
    """Return the parts of the agent, which run concurrently."""
    history = TerminationHistory()
    return (
        follow_config_files,
        publish,
        write_facts,
        lambda session: end_rejected_pods(session, history),
        follow_cluster_config,
    )


def _node_name(config: ClusterConfig) -> str:
    """Return the name of the Node object."""
    return config.node or os.environ.get("NODE_NAME", "") or socket.gethostname().lower()


async def _run(config: Config) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    session = AgentSession(
        config,
        _node_name(config.cluster),
        DaemonClient(config.admin_path),
        ApiClient(lambda: read_credentials(config.cluster)),
        logs.telemetry(),
    )
    systemd = SystemdNotifier()
    systemd.ready(f"publishing node {session.node}")
    await run_parts(session, _parts(), end)
    systemd.stopping()


def run(config: Config) -> int:
    """Run the agent until SIGTERM or SIGINT.

    Returns:
        The exit code.
    """
    logs.setup(config.log.level, config.log.format, logs.with_own_descriptor(sys.stderr))
    asyncio.run(_run(config))
    return 0
