"""The service of the pod-resources API, which the daemon starts and stops."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Final

from proxy.frontends.podresources.server import PodResourcesServer
from proxy.model.errors import CannotCreateError, PermissionDeniedError
from proxy.sockets.grpc_socket import open_with_retries

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.engine.state import NodeState
    from proxy.executor.context import NodeContext
    from proxy.frontends.podresources.server import KubeletAnswers

CANNOT_SERVE: Final = "cannot serve the pod-resources API"
DIRECTORY_MODE: Final = 0o750
"""Mode of the directory, as kubelet's: agents mount it."""


class PodResourcesService:
    """``run``, and then ``stop``."""

    def __init__(self, path: Path, executor: NodeContext, kubelet: KubeletAnswers | None) -> None:
        """Prepare; nothing is opened yet.

        Args:
            path: Where to listen. Its directory is created if the directory above it exists.
            executor: The node.
            kubelet: kubelet's own API; None if it is not queried.
        """
        self._path = path
        self._executor = executor
        self._server = PodResourcesServer(path, self._state, kubelet, executor.telemetry)

    def _state(self) -> NodeState | None:
        return self._executor.state if self._executor.reconciled.is_set() else None

    async def run(self) -> None:
        """Listen as soon as the socket can be bound; returns when it is bound."""
        path, telemetry = self._path, self._executor.telemetry
        await open_with_retries(
            functools.partial(asyncio.to_thread, self._open),
            lambda error: telemetry.problem(CANNOT_SERVE, path=path, err=error),
        )
        telemetry.resolved(CANNOT_SERVE, path=path)
        telemetry.event("serving the pod-resources API", path=path)

    def _open(self) -> None:
        directory = self._path.parent
        try:
            directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        except PermissionError as error:
            raise PermissionDeniedError(f"cannot make the directory {directory}: {error.strerror}") from error
        except OSError as error:
            raise CannotCreateError(f"cannot make the directory {directory}: {error.strerror}") from error
        self._server.socket.open()

    async def stop(self) -> None:
        """Stop listening."""
        # This also stops an attempt to open it that is in progress in a thread.
        self._server.socket.may_open = False
        await asyncio.to_thread(self._server.close)
