"""The process that is to replace this daemon, as this daemon sees it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from proxy.model.errors import TopoproxyError, UnavailableError
from proxy.sockets.unix_socket import Listener
from proxy.succession.messages import QUIET, SERVING, SUCCEEDS, receive

PREPARE_S, SERVE_S = 300.0, 120.0
"""Seconds until a successor has prepared, and until it serves once it has the state."""


class Successor:
    """A process that has prepared everything and waits.

    Attributes:
        pid: Its process.
    """

    def __init__(self, channel: socket.socket, pid: int) -> None:
        """Take the channel to it."""
        self._channel = channel
        self.pid = pid

    @classmethod
    def started(cls, listener: Listener) -> Successor:
        """Start a process with the command line of this one; runs in a thread until it has prepared.

        Args:
            listener: The socket that it gets, with its lock; ours stay open.

        Raises:
            UnavailableError: It ended or does not answer in time; nothing has changed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                ours.settimeout(PREPARE_S)
                facts = {
                    "path": str(listener.path),
                    "adopted": listener.adopted,
                    "identity": listener.identity,
                }
                socket.send_fds(ours, [json.dumps(facts).encode()], listener.descriptors())
                _start(theirs.fileno())
            data, _ = receive(ours, 0)
            return cls(ours, int(json.loads(data)["pid"]))
        except (TopoproxyError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            ours.close()
            raise UnavailableError(
                f"cannot start the successor, this daemon continues: {error}; the log has its reasons"
            ) from error

    def take_over(self, *, quiet: bool) -> None:
        """Let it continue with the state of the node, and wait until it serves; runs in a thread.

        Args:
            quiet: No call that decides where containers are is in flight.

        Raises:
            UnavailableError: It does not.
        """
        self._channel.settimeout(SERVE_S)
        try:
            self._channel.send(json.dumps({QUIET: quiet}).encode())
        except OSError as error:
            raise UnavailableError(f"cannot hand over to process {self.pid}: {error.strerror}") from error
        receive(self._channel, 0, SERVING)
        self._channel.close()


def _start(fd: int) -> None:
    """Start a process that continues as a child of the service manager, not of this process."""
    environ = {key: value for key, value in os.environ.items() if key != "WATCHDOG_PID"}
    subprocess.run(  # noqa: S603  our own command line
        [sys.executable, *sys.orig_argv[1:]],
        check=True,
        stdin=subprocess.DEVNULL,
        env={**environ, SUCCEEDS: str(fd)},
        pass_fds=[fd],
        timeout=PREPARE_S,
    )
