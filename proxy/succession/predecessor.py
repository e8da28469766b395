"""The running daemon, as its successor sees it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.model.errors import CannotCreateError, UnavailableError
from proxy.sockets.unix_socket import Listener
from proxy.succession.messages import CALLS, QUIET, READY, SERVING, SUCCEEDS, receive

if TYPE_CHECKING:
    from proxy.executor.former_calls import RelayedCall

LONGEST_NAME_BYTES = 1024
"""The most bytes of a call's name."""


class Predecessor:
    """The channel to the daemon that this process replaces.

    Attributes:
        was_quiet: Whether no call that places containers was in flight when it handed over.
        relayed: The calls that were in flight, and that it continues to relay.
    """

    def __init__(self, channel: socket.socket) -> None:
        """Store the channel."""
        self._channel = channel
        self.was_quiet = False
        self.relayed: list[RelayedCall] = []
        self._listener: Listener | None = None
        self._follows = False

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Predecessor | None:
        """Take the channel from the environment, and remove it there; None at an ordinary start."""
        text = environ.pop(SUCCEEDS, "")
        if not text.isdigit():
            return None
        try:
            channel = socket.socket(fileno=int(text))
            channel.set_inheritable(False)
        except OSError as error:
            raise CannotCreateError(f"cannot succeed a daemon: {error.strerror}") from error
        return cls(channel)

    def listener(self, path: Path) -> Listener:
        """Receive the socket that kubelet calls.

        Args:
            path: The path in the configuration.

        Raises:
            CannotCreateError: The configuration names another path, which needs a restart.
            UnavailableError: The predecessor is gone.
        """
        data, fds = receive(self._channel, 2)
        facts = json.loads(data)
        listener = Listener.from_descriptors(Path(facts["path"]), facts["adopted"], facts["identity"], *fds)
        if not listener.adopted and listener.path != path:
            listener.hand_over()
            raise CannotCreateError(
                f"cannot succeed a daemon that listens on {listener.path}: the configuration says {path},"
                " which needs a restart"
            )
        self._listener = listener
        return listener

    def wait_for_turn(self) -> None:
        """Report that everything is prepared, and wait for the state of the node.

        Raises:
            UnavailableError: The predecessor is gone, or has cancelled the replacement.
        """
        import msgspec

        from proxy.executor.former_calls import RelayedCall  # not for the early socket: it imports too much

        self._send(json.dumps({**READY, "pid": os.getpid()}))
        data, _ = receive(self._channel, 0)
        if self._listener is not None:
            self._listener.record_holder()
        go = json.loads(data)
        self.was_quiet = bool(go[QUIET])
        for _ in range(go.get(CALLS, 0)):  # older daemons name none
            data, _ = receive(self._channel, 0)
            self.relayed.append(msgspec.json.decode(data, type=RelayedCall))

    def report_serving(self) -> None:
        """Report that calls are answered."""
        self._send(SERVING)
        if not self._follows:
            self.close()

    def follow(self, over: Callable[[str], None], all_over: Callable[[], None]) -> None:
        """Follow the calls that the predecessor relays, from the event loop.

        Args:
            over: Called with the name of each call that is over.
            all_over: Called when the predecessor's process has ended.
        """
        import asyncio

        self._channel.setblocking(False)
        self._follows = True
        asyncio.get_running_loop().add_reader(self._channel, self._read, over, all_over)

    def _read(self, over: Callable[[str], None], all_over: Callable[[], None]) -> None:
        try:
            name = self._channel.recv(LONGEST_NAME_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            name = b""
        if name:
            over(name.decode())
            return
        self.close()
        all_over()

    def close(self) -> None:
        """Close the channel."""
        if self._follows:
            import asyncio

            self._follows = False
            asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()

    def _send(self, message: str) -> None:
        try:
            self._channel.send(message.encode())
        except OSError as error:
            raise UnavailableError(f"cannot succeed the daemon: it is gone: {error.strerror}") from error
