"""The admin socket for the owner of the process: HTTP/1.1, one request a connection, GET reads, POST acts.

It shares the event loop with the relay, so everything about clients is bounded: their number, the time of
each client, how much it may send. If there are too many, the oldest client that has sent no complete request
gives way to a new one. ``curl --unix-socket /run/topoproxy/admin.sock http://x/status`` works, and so do
parameters after a ``?``. Actions need a POST, and are permitted only if the kernel reports that the client is
root or our own user: a wider mode of the socket permits reading, not acting.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl

from proxy.admin import QUERY_LIMIT
from proxy.logs import log
from proxy.model.errors import InputError, ReplacedFilesError
from proxy.model.quoting import message
from proxy.sockets.unix_socket import bind_at

CLIENT_SECONDS = 5.0
ACTION_SECONDS = 60.0
"""The limit is generous because an action may wait for a disk; an action that takes longer continues, and its
client is notified."""
CLIENT_LIMIT = 16
HEAD_LIMIT = 8192
FIELD_LIMIT = 8

Answer = object | Awaitable[object]
Params = Mapping[str, str]
Route = Callable[[], Answer] | Callable[[Params], Answer]
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {408: "Request Timeout", 414: "URI Too Long", 431: "Request Header Fields Too Large"}
_REASONS |= {500: "Internal Server Error", 503: "Service Unavailable", 504: "Gateway Timeout"}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with an HTTP status of its own."""

    status: int
    answer: object


class AdminServer:
    """Answers requests about the daemon on a unix socket with mode 0600."""

    def __init__(
        self,
        path: Path,
        routes: Mapping[str, Route],
        actions: Mapping[str, Route] | None = None,
        slow_routes: Collection[str] = (),
    ) -> None:
        """Prepare a server; nothing is opened until ``start``.

        Args:
            path: Where to listen.
            routes: Maps the path of the URL to a function that returns the answer: a text, or a value for
                JSON. The function is called on the event loop and must not block; it may be a coroutine
                function. If it takes an argument, it gets the URL's parameters, decoded; if it raises an
                InputError, the client gets status 400. ``/healthz`` and ``/livez`` always exist and report
                that the loop runs.
            actions: The same for POST. An action that has begun continues to its end even if its client
                leaves.
            slow_routes: Routes that may take as long as an action, because they query other programs.
        """
        self._path = path
        everything: dict[str, Route] = {"/healthz": lambda: "ok\n", "/livez": lambda: "ok\n", **routes}
        self._routes = {name: _with_params(route) for name, route in everything.items()}
        self._actions = {name: _with_params(route) for name, route in (actions or {}).items()}
        self._slow_routes = frozenset(slow_routes)
        self._server: asyncio.Server | None = None
        self._identity: tuple[int, int] | None = None
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._silent: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Clients without a complete request, in the order of their connections."""
        self._acting: set[asyncio.Future[object]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            CannotCreateError: A process answers at the path, or the path is not a socket.
            PermissionDeniedError: The process may not write there.
        """
        listening = bind_at(self._path, 0o600)
        status = self._path.stat(follow_symlinks=False)
        self._identity = (status.st_dev, status.st_ino)
        self._server = await asyncio.start_server(self._client, sock=listening, limit=HEAD_LIMIT)

    async def stop(self) -> None:
        """Stop listening, end clients, remove the socket; a second call does nothing."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        with contextlib.suppress(OSError):
            status = self._path.stat(follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self._identity:
                self._path.unlink()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await server.wait_closed()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._make_room()
        self._clients[task] = self._silent[task] = writer
        try:
            async with asyncio.timeout(2 * CLIENT_SECONDS + (ACTION_SECONDS if self._actions else 0)):
                writer.write(await self._answer(reader, writer))
            async with asyncio.timeout(2 * CLIENT_SECONDS):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # The client went away, or does not read.
        except asyncio.CancelledError:
            if self._server is not None:  # otherwise the server ends, and it cancels this task
                raise
        finally:
            self._clients.pop(task, None)
            self._silent.pop(task, None)
            writer.transport.abort()

    def _connected(self) -> int:
        return sum(not writer.is_closing() for writer in self._clients.values())

    def _make_room(self) -> None:
        """Let the oldest client without a complete request give way to a new one if there are too many."""
        if self._connected() >= CLIENT_LIMIT and self._silent:
            self._silent.pop(next(iter(self._silent))).transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        crowded = self._connected() > CLIENT_LIMIT
        try:
            async with asyncio.timeout(CLIENT_SECONDS / 10 if crowded else CLIENT_SECONDS):
                # Always read the request: a close with unread bytes would reset the connection before the
                # answer.
                head = await reader.readuntil(b"\r\n\r\n")
            self._silent.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)
        except TimeoutError:
            return _response(408, "the request took too long\n")
        except asyncio.LimitOverrunError:
            return _response(431, "the request is too large\n")
        except asyncio.IncompleteReadError:
            return _response(400, "the request is not complete\n")
        if crowded:
            return _response(503, "too many clients\n")
        fields = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(fields) != 3 or not fields[2].startswith("HTTP/1."):
            return _response(400, "this is not HTTP/1.1\n")
        path, _, query = fields[1].partition("?")
        if len(query) > QUERY_LIMIT:
            return _response(414, f"the parameters are longer than {QUERY_LIMIT} bytes\n")
        if fields[0] == "POST" and path in self._actions:
            if not _may_act(writer):
                return _response(403, "only root and the daemon's own user may act\n")
            action = self._actions[path]
            return await self._serve(
                lambda fields: self._to_its_end(action(fields)), path, query, ACTION_SECONDS
            )
        if fields[0] != "GET" or (path in self._actions and path not in self._routes):
            only = "POST" if path in self._actions else "GET"
            return _response(405, f"only {only} is answered\n", f"Allow: {only}\r\n")
        route = self._routes.get(path)
        if route is None:
            return _response(404, f"there is {', '.join(sorted(self._routes))}\n")
        seconds = ACTION_SECONDS if path in self._slow_routes else CLIENT_SECONDS
        return await self._serve(route, path, query, seconds)

    def _to_its_end(self, answer: Answer) -> Answer:
        """Let an action continue even if its client no longer waits: half an action must not remain."""
        if not inspect.isawaitable(answer):
            return answer
        acting: asyncio.Future[object] = asyncio.ensure_future(answer)
        self._acting.add(acting)
        acting.add_done_callback(self._acting.discard)
        return asyncio.shield(acting)

    async def _serve(self, route: Callable[[str], Answer], path: str, query: str, seconds: float) -> bytes:
        try:
            answer = route(query)
            if inspect.isawaitable(answer):
                try:
                    async with asyncio.timeout(seconds):
                        answer = await answer
                except TimeoutError:
                    return _response(504, f"no answer in {seconds:g} seconds\n")
            if isinstance(answer, Reply):
                return _response(answer.status, answer.answer)
            return _response(200, answer)
        except InputError as error:
            return _response(400, f"{error}\n")
        except ReplacedFilesError as error:
            return _response(503, f"{error}\n")
        except Exception as error:  # noqa: BLE001 - a fault in a page must not reach the relay's loop
            cause = message(f"{type(error).__name__}: {error}")  # not the repr: it may hold the whole page
            log.say_once(("admin", path), "error", "cannot answer on the admin socket", path=path, err=cause)
            return _response(500, f"cannot answer: {cause}\n")


def _may_act(writer: asyncio.StreamWriter) -> bool:
    """Return whether a client is root or our own user, according to the kernel."""
    peer = writer.get_extra_info("socket")
    size = struct.calcsize("3i")
    uid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return uid in (0, os.geteuid())


def _with_params(route: Route) -> Callable[[str], Answer]:
    """Let a route be called with the part of the URL behind the ``?``."""
    try:
        declared = inspect.signature(route).parameters.values()
    except ValueError:  # a built-in function without a signature
        declared = {}.values()
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in declared):
        answer_query = cast("Callable[[Params], Answer]", route)
        return lambda query: answer_query(parse_params(query))
    plain = cast("Callable[[], Answer]", route)
    return lambda query: plain()


def parse_params(query: str) -> dict[str, str]:
    """Read the parameters of a URL, percent-decoded.

    Raises:
        InputError: They are not ``name=value`` joined by ``&``, are too many, are not UTF-8, or contain a
            name twice.
    """
    try:
        fields = parse_qsl(
            query,
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
            max_num_fields=FIELD_LIMIT,
        )
    except ValueError as error:
        raise InputError(f"cannot read the parameters {query[:100]!r}: {error}") from error
    params = dict(fields)
    if len(params) != len(fields):
        raise InputError(f"cannot read the parameters {query[:100]!r}: one is there twice")
    return params


def _response(status: int, answer: object, more: str = "") -> bytes:
    if isinstance(answer, str):
        kind, body = "text/plain; charset=utf-8", answer.encode(errors="backslashreplace")
    else:
        kind, body = "application/json", json.dumps(answer, default=str).encode() + b"\n"
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode() + body
