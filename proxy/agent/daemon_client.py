"""Query the daemon at its admin socket, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from proxy.admin.client import ANSWER_LIMIT, read_answer, request_bytes
from proxy.model.errors import UnavailableError

CONNECT_S = 5.0


class DaemonClient:
    """Queries the daemon at an admin socket."""

    def __init__(self, path: Path) -> None:
        """Prepare to query; each request opens a connection of its own.

        Args:
            path: The admin socket.
        """
        self._path = path

    async def query(
        self,
        route: str,
        params: Mapping[str, str] | None = None,
        *,
        timeout: float = CONNECT_S,
        act: bool = False,
    ) -> object:
        """Query the daemon; see ``proxy.admin.client.query_admin``.

        Args:
            route: The route to request, such as ``/status``.
            params: Parameters of the question.
            timeout: Seconds for the whole exchange.
            act: The request changes something (POST).

        Raises:
            UnavailableError: The daemon does not answer, or answers with an error.
            InputError: The daemon refuses the request.
            PermissionDeniedError: The socket, or the action, is not permitted for this user.
        """
        request = request_bytes(route, params, act=act)
        try:
            async with asyncio.timeout(timeout):
                data = await self._exchange(request)
        except TimeoutError as error:
            raise UnavailableError(
                f"cannot query the daemon at {self._path}: no answer in {timeout:g} seconds"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"cannot query the daemon at {self._path}: {error.strerror or error}"
            ) from error
        return read_answer(self._path, route, data)

    async def _exchange(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        try:
            writer.write(request)
            data = bytearray()
            while piece := await reader.read(65536):
                data += piece
                if len(data) > ANSWER_LIMIT:
                    raise OSError(f"the answer is larger than {ANSWER_LIMIT} bytes")
            return bytes(data)
        finally:
            writer.transport.abort()
