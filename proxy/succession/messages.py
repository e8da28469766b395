"""Messages between a daemon and its successor: one in each packet of a socket pair.

``go`` has the number of calls that the predecessor still relays; each call follows in its own packet. After
``serving``, the predecessor sends the name of each of these calls when it is over.
"""

from __future__ import annotations

import socket
from typing import Final

from proxy.model.errors import UnavailableError

SUCCEEDS: Final = "TOPOPROXY_SUCCEEDS"
"""The environment variable with the file descriptor of the successor's end of the socket pair."""
READY: Final = {"ready": True}
QUIET: Final = "quiet"
"""The key in the message ``go``: whether no call that places containers was in flight at the end."""
CALLS: Final = "calls"
"""The key in the message ``go``: how many calls the predecessor still relays."""
SERVING: Final = "serving"
FAILED: Final = "failed: "
"""The beginning of the admin socket's page about a replacement that has failed."""
_MESSAGE_BYTES: Final = 1 << 16
"""The longest message; messages with CPUs take some bytes for each CPU."""


def receive(channel: socket.socket, fds: int, expected: str = "") -> tuple[bytes, list[int]]:
    """Wait for a message.

    Args:
        channel: The socket, with its own time limit.
        fds: How many file descriptors come with it.
        expected: The message that it must be; any message if empty.

    Raises:
        UnavailableError: No message came, or an unexpected one.
    """
    try:
        data, descriptors, flags, _ = socket.recv_fds(channel, _MESSAGE_BYTES, fds)
    except TimeoutError as error:
        raise UnavailableError("cannot replace the daemon: no answer in time") from error
    except OSError as error:
        raise UnavailableError(f"cannot replace the daemon: {error.strerror}") from error
    if not data:
        raise UnavailableError("cannot replace the daemon: the other process has ended")
    if flags & socket.MSG_TRUNC:
        raise UnavailableError(f"cannot replace the daemon: a message is longer than {_MESSAGE_BYTES} bytes")
    if len(descriptors) != fds or (expected and data != expected.encode()):
        raise UnavailableError(f"cannot replace the daemon: unexpected message {data[:100]!r}")
    return data, descriptors
