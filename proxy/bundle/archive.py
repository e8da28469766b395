"""A bundle as a file: a compressed tar archive, made in memory and put into place at once."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from proxy.atomic_write import write_file
from proxy.model.errors import CannotCreateError

MODE = 0o600


def pack(directory: str, members: Mapping[str, bytes], now: float) -> bytes:
    """Return the archive.

    Args:
        directory: The one directory in it, which holds all members.
        members: Contents by file name.
        now: The time of all files, in seconds since the epoch.
    """
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=int(now)) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in members.items():
            entry = tarfile.TarInfo(f"{directory}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), MODE, int(now)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_bundle(path: Path, data: bytes) -> None:
    """Put a bundle into place with mode 0600; a file that is there is not replaced.

    Raises:
        CannotCreateError: It cannot be written, or there is a file.
    """
    try:
        write_file(path, data, mode=MODE, overwrite=False)
    except FileExistsError as error:
        raise CannotCreateError(f"cannot write the bundle {path}: the file exists") from error
    except OSError as error:
        raise CannotCreateError(f"cannot write the bundle {path}: {error.strerror or error}") from error
