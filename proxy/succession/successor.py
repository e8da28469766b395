"""The process that will replace this daemon, and the channel to it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from proxy.executor.former_calls import RelayedCall
from proxy.model.errors import TopoproxyError, UnavailableError
from proxy.sockets.unix_socket import Listener
from proxy.succession.messages import CALLS, QUIET, SERVING, SUCCEEDS, receive

PREPARE_S, SERVE_S = 300.0, 120.0
"""Seconds until a successor must have prepared, and seconds until it must serve after it has the state."""
RESEND_S = 0.1
"""Seconds until a message for which the channel had no room is sent again."""


class Successor:
    """A process that has prepared everything and waits for the state of the node.

    Attributes:
        pid: The id of the process.
    """

    def __init__(self, channel: socket.socket, pid: int) -> None:
        """Use a channel to a process that has prepared."""
        self._channel = channel
        self.pid = pid
        self._ended_calls: list[str] = []
        self._serves = False

    @classmethod
    def started(cls, listener: Listener) -> Successor:
        """Start a process with the command line of this one; runs in a thread until it has prepared.

        Args:
            listener: The socket that the process gets, with its lock; this process keeps its descriptors.

        Raises:
            UnavailableError: The process ended or does not answer in time; nothing has changed.
        """
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with child_end:
                own_end.settimeout(PREPARE_S)
                facts = {
                    "path": str(listener.path),
                    "adopted": listener.adopted,
                    "identity": listener.identity,
                }
                socket.send_fds(own_end, [json.dumps(facts).encode()], listener.descriptors())
                _start(child_end.fileno())
            data, _ = receive(own_end, 0)
            return cls(own_end, int(json.loads(data)["pid"]))
        except (TopoproxyError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            own_end.close()
            raise UnavailableError(
                f"cannot start the successor, this daemon continues: {error}; the log has its reasons"
            ) from error

    def is_alive(self) -> bool:
        """Return whether the process still waits for the state of the node."""
        self._channel.setblocking(False)
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the channel to the process, which has ended."""
        self._channel.close()

    def take_over(self, *, quiet: bool, calls: Sequence[RelayedCall] = ()) -> None:
        """Send the process the state of the node, and wait until it serves; runs in a thread.

        Args:
            quiet: Whether no call that places containers is in flight.
            calls: The calls in flight, which continue in this process.

        Raises:
            UnavailableError: The process does not serve.
        """
        self._channel.settimeout(SERVE_S)
        try:
            self._channel.send(json.dumps({QUIET: quiet, CALLS: len(calls)}).encode())
            for call in calls:
                self._channel.send(msgspec.json.encode(call))
        except OSError as error:
            raise UnavailableError(f"cannot hand over to process {self.pid}: {error.strerror}") from error
        receive(self._channel, 0, SERVING)

    def follow(self) -> None:
        """Report the ends of calls, past and future ones; called when the process serves."""
        self._channel.setblocking(False)
        self._serves = True
        self._send()

    def over(self, name: str) -> None:
        """Report that a call is over; on the event loop.

        Args:
            name: The name of the call.
        """
        self._ended_calls.append(name)
        if self._serves:
            self._send()

    def _send(self) -> None:
        try:
            while self._ended_calls:
                self._channel.send(self._ended_calls[0].encode())
                del self._ended_calls[0]
        except BlockingIOError:
            asyncio.get_running_loop().call_later(RESEND_S, self._send)
        except OSError:  # the process has ended; a later one is not the successor of this daemon
            self._ended_calls.clear()


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
