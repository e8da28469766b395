"""Read the Node object from a file of a bootstrap script or of a program that watches the API server.

The writer may be in the middle of a write when the file is read, and may stop working at any time. So an
unreadable file is read again a few times at short intervals; if it is still unreadable, the last good content
stays in effect, and the problem is reported. A removed file does not mean a Node object without labels; it
means that the current object is unknown.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from proxy.backends.kubelet.small_file import read_small_file
from proxy.model.kubelet import NodeMeta
from proxy.model.quoting import printable
from proxy.pools.node_meta import node_meta

FILE_LIMIT_BYTES = 4 << 20
"""The most bytes that the file may have; the API server keeps no object larger than about 1.5 MiB."""
TRIES = 3
PAUSE_S = 0.05


class NodeFile:
    """A Node object in a file; see ``proxy.executor.ports.NodeObject``."""

    def __init__(self, path: Path, pause: Callable[[float], None] = time.sleep) -> None:
        """Set the path of a file; it is read when it is requested.

        Args:
            path: The file.
            pause: Waits for some seconds.
        """
        self._path = path
        self._pause = pause
        self._digest = b""
        self._last: NodeMeta | None = None
        self._problem = ""

    @property
    def source(self) -> str:
        """The path of the file, for messages."""
        return str(self._path)

    @property
    def problem(self) -> str:
        """Why the last read of the file failed; empty if it succeeded."""
        return self._problem

    def read(self) -> NodeMeta | None:
        """Return the contents; if they cannot be read now, the last usable ones; None if there are none."""
        cause = ""
        for attempt in range(TRIES):
            if attempt:
                self._pause(PAUSE_S)
            try:
                self._load(read_small_file(str(self._path), FILE_LIMIT_BYTES)[0])
            except FileNotFoundError:
                cause = "there is no such file"
            except OSError as error:
                cause = error.strerror or str(error)
            except ValueError as error:
                cause = str(error)
            else:
                self._problem = ""
                return self._last
        stays = "" if self._last is None else " (its last content stays in effect)"
        self._problem = f"cannot read the Node object in {self._path}: {printable(cause)}{stays}"
        return self._last

    def close(self) -> None:
        """Nothing is open."""

    def _load(self, data: bytes) -> None:
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest != self._digest:
            self._last = node_meta(_decoded(data))
            self._digest = digest


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
