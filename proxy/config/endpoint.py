"""Addresses: of unix sockets, as kubelet and crictl write them, and of kubelet itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

from proxy.model.errors import ConfigError

PATH_LIMIT = 107
"""Longest path of a unix socket in bytes: sun_path holds 108 with the closing zero (unix(7))."""

_HTTP = r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?):([0-9]{1,5})/?"  # compiled on use
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def parse_endpoint(text: str) -> Path:
    """Read ``unix:///run/x.sock``, ``unix:/run/x.sock`` or ``/run/x.sock``.

    Args:
        text: The address; blanks around it are ignored.

    Returns:
        The absolute path of the socket.

    Raises:
        ConfigError: Another scheme, a relative path, or a path that no unix socket can have.
    """
    body = text.strip()
    scheme = _SCHEME.match(body)
    if scheme is not None:
        if scheme[1].lower() != "unix":
            raise ConfigError(_words(text, f"only unix sockets are served, not {scheme[1]}:"))
        body = body[scheme.end() :]
        if body.startswith("//"):
            body = body[2:]
    if not body.startswith("/"):
        hint = f"; unix:///{body} has three slashes" if scheme is not None and body else ""
        raise ConfigError(_words(text, f"the path of the socket must be absolute{hint}"))
    if "\0" in body or body.endswith("/"):
        raise ConfigError(_words(text, "this cannot be the name of a socket"))
    path = Path(os.path.normpath("/" + body.lstrip("/")))
    if not path.name:
        raise ConfigError(_words(text, "this cannot be the name of a socket"))
    length = len(os.fsencode(path))
    if length > PATH_LIMIT:
        raise ConfigError(
            _words(text, f"the path is {length} bytes long, a unix socket's at most {PATH_LIMIT}")
        )
    return path


def show_endpoint(path: Path) -> str:
    """Return a socket's path in the form that kubelet takes."""
    return f"unix://{path}"


def parse_address(text: str) -> str:
    """Read ``https://HOST:PORT`` or ``http://HOST:PORT``.

    Args:
        text: The address; blanks around it and a trailing slash are ignored.

    Returns:
        The address in lower case.

    Raises:
        ValueError: It is not an endpoint; the message names what is missing.
    """
    body = text.strip().lower()
    match = re.fullmatch(_HTTP, body)
    if match is None:
        if not body.startswith(("https://", "http://")):
            cause = "it must begin with https:// or http://"
        elif "/" in body.partition("://")[2].rstrip("/"):
            cause = "no path belongs here, it is added"
        else:
            cause = "it must be a host and a port, such as https://127.0.0.1:10250"
        raise ValueError(f"{text!r}: {cause}")
    if not 1 <= int(match[3]) <= 65535:
        raise ValueError(f"{text!r}: ports are 1 to 65535")
    if match[2].startswith("["):
        import ipaddress

        try:
            ipaddress.IPv6Address(match[2][1:-1])
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from error
    return f"{match[1]}://{match[2]}:{int(match[3])}"


def _words(text: str, cause: str) -> str:
    return f"cannot use {text!r} as the address of a socket: {cause}"
