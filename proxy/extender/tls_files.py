"""Follows the files of the extender's certificate, which are replaced before the certificate expires.

kubelet replaces all files of a Secret at once (kubernetes v1.36 pkg/volume/util/atomic_writer.go). If the
files do not match, because another program writes them one after the other, they are tried again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from msgspec import Struct

from proxy.backends.kubelet.small_file import FileStamp, readable_file_stamp
from proxy.extender.http_server import server_context
from proxy.model.errors import InputError
from proxy.telemetry.port import Telemetry

COMPARE_S = 5.0
"""Seconds between two comparisons."""
CANNOT = "cannot use the new TLS files: the former ones stay in use"


class TlsFiles(Struct, frozen=True):
    """The files of the server's certificate, of its key, and of the CA that signs clients' certificates."""

    certificate: str
    key: str
    client_ca: str

    def context(self) -> ssl.SSLContext:
        """Return the TLS settings of the server.

        Raises:
            InputError: A file cannot be read, or has invalid content.
        """
        return server_context(self.certificate, self.key, self.client_ca)

    def stamps(self) -> list[FileStamp | None]:
        """Return values that change with the files."""
        return [readable_file_stamp(file) for file in (self.certificate, self.key, self.client_ca)]


async def follow_tls_files(
    files: TlsFiles,
    used: list[FileStamp | None],
    use: Callable[[ssl.SSLContext], Awaitable[None]],
    telemetry: Telemetry,
) -> None:
    """Load the files again whenever they change, until cancelled.

    Args:
        files: The files.
        used: The stamps of the files, taken before they were read.
        use: Uses other settings for new connections.
        telemetry: The log.
    """
    while True:
        await asyncio.sleep(COMPARE_S)
        now = files.stamps()
        if now == used:
            continue
        try:
            context = await asyncio.to_thread(files.context)
        except InputError as error:
            telemetry.problem(CANNOT, err=error)
            continue
        await use(context)
        used = now
        telemetry.resolved(CANNOT)
        telemetry.event("using new TLS files", path=files.certificate)
