"""Our own gRPC channels to unix sockets: kubelet, the runtime, device plugins and hook servers.

grpc is imported at the first call. A server that comes back is detected within a second; by default, grpc
waits up to two minutes.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    import grpc

_UNCONNECTED = re.compile(r"failed to connect to all addresses; last error: .* error: ([^:]+)")
"""What grpc reports for a socket where no process answers; it ends with the kernel's error text."""
SINGLE_THREADED_STREAM = ("SingleThreadedUnaryStream", 1)
"""Option for streams: the caller's thread reads. If grpc does not know the option, another thread reads."""


class GrpcChannel:
    """A channel that is opened when it is needed; safe to use from several threads."""

    def __init__(self, path: str | os.PathLike[str], limit: int, *options: tuple[str, int]) -> None:
        """Store the address; the first call connects.

        Args:
            path: Path of the socket, with or without ``unix://``.
            limit: The largest message to receive, in bytes; -1 for no limit.
            options: More options of grpc; they take precedence over those of all our channels.
        """
        self.path = os.fspath(path).removeprefix("unix://")
        self._options: tuple[tuple[str, Any], ...] = (
            *options,
            ("grpc.default_authority", "localhost"),  # as kubelet's; some runtimes check it
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", limit),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
        )
        self._lock = threading.Lock()
        self._opened: grpc.Channel | None = None
        self._closed = False

    def open(self, connect_s: float | None = None) -> grpc.Channel:
        """Return the channel.

        Args:
            connect_s: Seconds that an attempt to connect may take, if the channel is not open yet.

        Raises:
            ValueError: It has been closed; a call on a closed channel raises the same.
        """
        import grpc

        with self._lock:
            if self._closed:
                raise ValueError("the channel is closed")
            if self._opened is None:
                options = self._options
                if connect_s is not None:
                    # This option, named after the pause between attempts, also limits the time of one
                    # attempt.
                    options += (("grpc.min_reconnect_backoff_ms", max(100, int(connect_s * 1000))),)
                self._opened = grpc.insecure_channel(f"unix:{quote(os.fsencode(self.path))}", options=options)
            return self._opened

    def close(self) -> None:
        """Close the channel; calls after that fail."""
        with self._lock:
            self._closed = True
            channel, self._opened = self._opened, None
        if channel is not None:
            channel.close()


def details_of(error: Any) -> str:
    """Return the details of a gRPC error in one line: those of runc contain line ends."""
    text = " ".join((error.details() or "no reason given").split())
    match = _UNCONNECTED.match(text)
    return match[1] if match else text
