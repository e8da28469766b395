"""Messages between a daemon and its successor: one in each packet of a socket pair.

``go`` names how many calls the predecessor still relays; each follows in a packet of its own. Behind
``serving``, the predecessor sends the name of each of them that is over.
"""

from __future__ import annotations

import socket
from typing import Final

from proxy.model.errors import UnavailableError

SUCCEEDS: Final = "TOPOPROXY_SUCCEEDS"
"""The environment variable with the successor's end of the socket pair, a file descriptor."""
READY: Final = {"ready": True}
QUIET: Final = "quiet"
"""The key of the message ``go``: no call that decides where containers are was in flight at the end."""
CALLS: Final = "calls"
"""The key of the message ``go``: how many calls the predecessor still relays."""
SERVING: Final = "serving"
FAILED: Final = "failed: "
"""Begins the page of the admin socket about a replacement that has failed."""
_BYTES: Final = 1 << 16
"""The longest message; those with CPUs take some bytes for each."""


def receive(channel: socket.socket, fds: int, expected: str = "") -> tuple[bytes, list[int]]:
    """Wait for a message.

    Args:
        channel: The socket, with the time limit that it has.
        fds: How many file descriptors come with it.
        expected: What it must be; anything if empty.

    Raises:
        UnavailableError: None came, or another one.
    """
    try:
        data, descriptors, flags, _ = socket.recv_fds(channel, _BYTES, fds)
    except TimeoutError as error:
        raise UnavailableError("cannot replace the daemon: no answer in time") from error
    except OSError as error:
        raise UnavailableError(f"cannot replace the daemon: {error.strerror}") from error
    if not data:
        raise UnavailableError("cannot replace the daemon: the other process has ended")
    if flags & socket.MSG_TRUNC:
        raise UnavailableError(f"cannot replace the daemon: a message is longer than {_BYTES} bytes")
    if len(descriptors) != fds or (expected and data != expected.encode()):
        raise UnavailableError(f"cannot replace the daemon: unexpected message {data[:100]!r}")
    return data, descriptors
