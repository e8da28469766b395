"""The daemon that runs, as its successor sees it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

from proxy.model.errors import CannotCreateError, UnavailableError
from proxy.sockets.unix_socket import Listener
from proxy.succession.messages import QUIET, READY, SERVING, SUCCEEDS, receive


class Predecessor:
    """The channel to the daemon that is to be replaced.

    Attributes:
        was_quiet: No call that decides where containers are was in flight when it handed over.
    """

    def __init__(self, channel: socket.socket) -> None:
        """Take the channel."""
        self._channel = channel
        self.was_quiet = False
        self._listener: Listener | None = None

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Predecessor | None:
        """Find the channel in the environment, from which it is removed; None where this is a plain start."""
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
            path: Where the configuration wants it.

        Raises:
            CannotCreateError: The configuration names another path, which needs a restart.
            UnavailableError: The predecessor is gone.
        """
        data, fds = receive(self._channel, 2)
        facts = json.loads(data)
        listener = Listener.received(Path(facts["path"]), facts["adopted"], facts["identity"], *fds)
        if not listener.adopted and listener.path != path:
            listener.hand_over()
            raise CannotCreateError(
                f"cannot succeed a daemon that listens on {listener.path}: the configuration says {path},"
                " which needs a restart"
            )
        self._listener = listener
        return listener

    def wait_for_turn(self) -> None:
        """Say that all is prepared, and wait until the state of the node is ours.

        Raises:
            UnavailableError: The predecessor is gone or has changed its mind.
        """
        self._say(json.dumps({**READY, "pid": os.getpid()}))
        data, _ = receive(self._channel, 0)
        if self._listener is not None:
            self._listener.claim()
        self.was_quiet = bool(json.loads(data)[QUIET])

    def serving(self) -> None:
        """Say that calls are answered; then the predecessor is on its own."""
        self._say(SERVING)
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _say(self, words: str) -> None:
        try:
            self._channel.send(words.encode())
        except OSError as error:
            raise UnavailableError(f"cannot succeed the daemon: it is gone: {error.strerror}") from error
