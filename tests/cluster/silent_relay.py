"""A TCP relay before the API server that can go silent, as a firewall that has forgotten a connection."""

from __future__ import annotations

import contextlib
import socket
import threading


class SilentRelay:
    """Forwards connections; after ``silence`` the existing ones carry nothing more, without end or reset.

    Attributes:
        server: The address for clients.
        opened: How many connections were opened.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.opened = 0
        self._current = threading.Event()
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Stop forwarding on the current connections; new ones work."""
        self._current.set()
        self._current = threading.Event()

    def forward_to(self, port: int) -> None:
        """Forward new connections to another port, and break the current ones."""
        self._port = port
        kept, self._kept = self._kept, []
        for each in kept:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        for each in (self._listener, *self._kept):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self.opened += 1
                self._kept += [client, server]
                for pair in ((client, server), (server, client)):
                    args = (*pair, self._current)
                    threading.Thread(target=self._forward, args=args, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not silent.is_set():
                    target.sendall(data)
            if not silent.is_set():
                target.shutdown(socket.SHUT_WR)
