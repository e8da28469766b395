"""Runs the extender as a process: assembles its parts, handles signals, sets up its log."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from proxy import logs
from proxy.agent.api_client import ApiClient
from proxy.agent.credentials import read_credentials
from proxy.backends.kubelet.small_file import FileStamp
from proxy.config.cluster import ClusterConfig
from proxy.executor.background import run_with_restarts
from proxy.extender.cluster_view import ClusterView
from proxy.extender.http_server import HttpServer
from proxy.extender.lease import Lease
from proxy.extender.retries import PodRetries
from proxy.extender.service import ExtenderService
from proxy.extender.tls_files import TlsFiles, follow_tls_files
from proxy.model.errors import UsageError
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.scores import Strategy
from proxy.telemetry.port import Telemetry

DRAIN_S = 10.0
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
Parts = tuple[Callable[[], Awaitable[None]], ...]
"""The parts that run while the lease is held."""
EXIT_LEASE_LOST = 75
"""The exit code if the lease was lost (sysexits EX_TEMPFAIL); docs/exit-codes.md lists it."""


@dataclass(frozen=True, slots=True)
class ExtenderOptions:
    """The options of the command line.

    Attributes:
        host, port: Where to listen.
        tls: Files of the certificates; None for plain HTTP.
        kubeconfig: The file with the credentials; None for the credentials of the pod.
        lease: Namespace and name of the Lease object.
        strategy: How nodes that fit are ordered.
        level, form: Of the log.
    """

    host: str
    port: int
    tls: TlsFiles | None
    kubeconfig: Path | None
    lease: tuple[str, str]
    strategy: Strategy
    level: str
    form: str


async def _run(options: ExtenderOptions) -> int:
    telemetry = logs.telemetry()
    tls = options.tls
    used = tls.stamps() if tls else []
    context = tls.context() if tls else None
    config = ClusterConfig(kubeconfig=options.kubeconfig)
    api = ApiClient(lambda: read_credentials(config))
    lease_api = ApiClient(lambda: read_credentials(config))
    identity = f"{socket.gethostname()}_{uuid.uuid4()}"
    lease = Lease(lease_api, *options.lease, identity, telemetry)
    table = NodeTable()
    view = ClusterView(api, table, telemetry)
    retries = PodRetries(api, table, *options.lease, telemetry)
    service = ExtenderService(api, table, view, lease, retries, telemetry, options.strategy)
    server = HttpServer(service.handle, telemetry)
    await server.start(options.host, options.port, context)
    following = [_start_following(tls, used, server, telemetry)] if tls else []
    telemetry.event("listening for kube-scheduler", path=f"{options.host}:{server.port}")
    try:
        return await _serve_until_end(lease, (view.run, retries.run), service, server, telemetry)
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await server.stop(0)
        await lease.release()
        await api.close()
        await lease_api.close()


def _start_following(
    tls: TlsFiles, used: list[FileStamp | None], server: HttpServer, telemetry: Telemetry
) -> asyncio.Future[None]:
    """Start to follow the files of the certificates."""
    part = partial(follow_tls_files, tls, used, server.use_tls, telemetry)
    return asyncio.ensure_future(run_with_restarts(part, telemetry.fault))


async def _serve_until_end(
    lease: Lease, parts: Parts, service: ExtenderService, server: HttpServer, telemetry: Telemetry
) -> int:
    """Wait for the lease, and answer requests for as long as it is held; return the exit code."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    ended = asyncio.ensure_future(end.wait())
    leading = asyncio.ensure_future(_while_held(lease, parts, telemetry))
    await asyncio.wait({ended, leading}, return_when=asyncio.FIRST_COMPLETED)
    service.draining = ended.done()
    if ended.done():
        await server.stop(DRAIN_S)
    leading.cancel()
    ended.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leading
    return 0 if service.draining else EXIT_LEASE_LOST


async def _while_held(lease: Lease, parts: Parts, telemetry: Telemetry) -> None:
    await lease.acquire()
    telemetry.event("acquired the lease")
    # Start after the lease was taken: the lists, which are consistent reads, then show other replicas' binds.
    running = [asyncio.ensure_future(run_with_restarts(part, telemetry.fault)) for part in parts]
    try:
        await lease.renew_until_lost()
        telemetry.warning("the lease is lost")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def run(options: ExtenderOptions) -> int:
    """Run the extender until SIGTERM or SIGINT, or until the lease is lost.

    Returns:
        The exit code.

    Raises:
        UsageError: The lease has no valid name.
    """
    if not all(map(_OBJECT_NAME.fullmatch, options.lease)):
        lease = "/".join(options.lease)
        raise UsageError(
            f"cannot start the extender: --lease must be NAMESPACE/NAME, as Kubernetes permits: {lease}"
        )
    logs.setup(options.level, options.form, logs.with_own_descriptor(sys.stderr))
    return asyncio.run(_run(options))
