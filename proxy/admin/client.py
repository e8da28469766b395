"""The client of the admin socket, for commands: it uses blocking sockets, without an event loop."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from proxy.admin import QUERY_LIMIT
from proxy.model.errors import InputError, PermissionDeniedError, TopoproxyError, UnavailableError

ANSWER_LIMIT = 64 << 20
TEXT_ROUTES = frozenset({"/healthz", "/livez", "/metrics", "/readyz", "/successor"})
"""The routes that the daemon answers with text; it answers all others with JSON."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,18})(?=\r|$)", re.IGNORECASE)


def query_admin(
    path: Path,
    route: str,
    timeout: float = 5.0,
    params: Mapping[str, str] | None = None,
    *,
    act: bool = False,
) -> object:
    """Query the daemon that listens at an admin socket.

    Args:
        path: The admin socket.
        route: The route to request, such as ``/status``.
        timeout: Seconds for the whole exchange.
        params: Query parameters; they are encoded here.
        act: Whether this requests an action (POST); otherwise it only reads (GET).

    Returns:
        The decoded JSON, or the text if the answer is text.

    Raises:
        UnavailableError: The daemon does not answer, or answers with an error.
        InputError: The daemon refuses the request, or its parameters are too long.
        PermissionDeniedError: This user may not use the socket, or may not request the action.
    """
    request = request_bytes(route, params, act=act)
    try:
        data = _exchange(path, request, time.monotonic() + timeout)
    except TimeoutError as error:
        raise UnavailableError(
            f"cannot query the daemon at {path}: no answer in {timeout:g} seconds"
        ) from error
    except OSError as error:
        raise query_error(path, error) from error
    return read_answer(path, route, data)


def query_error(path: Path, error: OSError) -> TopoproxyError:
    """Return the error for a socket that cannot be used, with its cause."""
    if isinstance(error, PermissionError):
        return PermissionDeniedError(f"cannot query the daemon at {path}: {error.strerror} (it answers root)")
    cause = error.strerror or str(error)
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        cause = "it is not a socket" if path.exists() and not path.is_socket() else "no process listens there"
    return UnavailableError(f"cannot query the daemon at {path}: {cause}")


def request_bytes(route: str, params: Mapping[str, str] | None = None, *, act: bool = False) -> bytes:
    """Write a request for the admin socket; see ``query_admin``.

    Raises:
        InputError: The parameters are longer than a daemon reads.
    """
    query = urlencode(params or {}, errors="replace")
    if len(query) > QUERY_LIMIT:
        raise InputError(
            f"cannot query the daemon for {route}: the parameters are longer than {QUERY_LIMIT} bytes"
        )
    target = f"{route}?{query}" if query else route
    verb = "POST" if act else "GET"
    return f"{verb} {target} HTTP/1.1\r\nHost: topoproxy\r\nConnection: close\r\n\r\n".encode()


def read_answer(path: Path, route: str, data: bytes) -> object:
    """Read the whole answer of an admin socket; see ``query_admin``."""
    head, gap, body = data.partition(b"\r\n\r\n")
    fields = head.split(b" ", 2)
    if not gap or len(fields) < 3 or not fields[0].startswith(b"HTTP/1.") or not fields[1].isdigit():
        raise UnavailableError(
            f"cannot query the daemon at {path}: what answers there is not an admin socket"
        )
    if fields[1] != b"200":
        text, kinds = _error_text(body), {b"400": InputError, b"403": PermissionDeniedError}
        if fields[1] in kinds and text.startswith("cannot "):
            raise kinds[fields[1]](text)  # the daemon refuses the request
        kind = InputError if fields[1] == b"414" else kinds.get(fields[1], UnavailableError)
        raise kind(f"cannot query the daemon at {path} for {route}: {text}")
    length = _LENGTH.search(head)
    if length and len(body) < int(length[1]):
        raise UnavailableError(f"cannot query the daemon at {path}: the answer is cut off")
    if b"content-type: application/json" not in head.lower():
        if route not in TEXT_ROUTES:
            raise UnavailableError(f"cannot query the daemon at {path}: the answer is not JSON")
        return body.decode(errors="replace")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(f"cannot query the daemon at {path}: the answer is not JSON") from error


def _error_text(body: bytes) -> str:
    return body[:500].decode(errors="replace").strip()


def _exchange(path: Path, request: bytes, deadline: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_remaining_s(deadline))
        client.connect(str(path))
        client.sendall(request)
        data = bytearray()
        while True:
            client.settimeout(_remaining_s(deadline))
            piece = client.recv(65536)
            if not piece:
                return bytes(data)
            data += piece
            if len(data) > ANSWER_LIMIT:
                raise OSError(f"the answer is larger than {ANSWER_LIMIT} bytes")


def _remaining_s(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
