"""Forwards registrations to kubelet, for plugins whose sockets are in a directory of topoproxy.

kubelet joins the name of a plugin's socket to its own directory (kubernetes v1.36
pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, Register). So topoproxy makes a symbolic link with that
name in kubelet's directory, which leads to the socket. kubelet removes these links when it starts, with all
sockets, and topoproxy removes them when it starts. A link with that name that leads nowhere, such as a link
to a former ``shimDirectory``, is replaced.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.backends.kubelet.channel import UnixChannel
from proxy.backends.kubelet.settings import KubeletError

SOCKET_NAME: Final = "kubelet.sock"
REGISTER_METHOD: Final = "/v1beta1.Registration/Register"
CALL_S: Final = 25.0
"""Deadline of a registration at kubelet, which dials the plugin for 10 s and then waits for its options."""


class KubeletRegistration:
    """Registers plugins at kubelet; every method may block."""

    def __init__(self, directory: Path, links: Path) -> None:
        """Store the directories; nothing is changed yet.

        Args:
            directory: kubelet's directory of device plugins.
            links: The directory to which our links in ``directory`` lead.
        """
        self._directory = directory
        self._links = links
        self._channel = UnixChannel(str(directory / SOCKET_NAME), CALL_S)

    def forward(self, request: pb.RegisterRequest, path: Path) -> None:
        """Register a plugin at kubelet, with the request unchanged.

        Args:
            request: The plugin's request.
            path: The plugin's socket.

        Raises:
            KubeletError: kubelet refuses the request or does not answer, or the link cannot be made.
        """
        link = self._directory / path.name
        try:
            self._link(link, path)
        except OSError as error:
            message = f"cannot make the link {link} to a device plugin: {error.strerror or error}"
            raise KubeletError(message) from error
        self._channel.call("register a device plugin", REGISTER_METHOD, request, pb.Empty)

    def _link(self, link: Path, path: Path) -> None:
        if link.is_symlink() and (self._is_topoproxy_link(link) or not link.exists()):
            if link.readlink() == path:
                return
            link.unlink()
        link.symlink_to(path)

    def _is_topoproxy_link(self, link: Path) -> bool:
        with contextlib.suppress(OSError):
            return link.readlink().parent == self._links
        return False

    def remove_links(self) -> None:
        """Remove the links of an earlier run."""
        with contextlib.suppress(
            OSError
        ):  # kubelet may not have been started yet, or has its directory elsewhere
            for entry in self._directory.iterdir():
                if entry.is_symlink() and self._is_topoproxy_link(entry):
                    entry.unlink(missing_ok=True)

    def socket_identity(self) -> tuple[int, int, int] | None:
        """Return a value that changes when kubelet restarts and makes a new socket; None without a socket."""
        try:
            status = os.lstat(self._directory / SOCKET_NAME)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def close(self) -> None:
        """End running calls; later calls fail."""
        self._channel.close()
