"""Small text files, for the facts that ``topoproxy doctor`` reads."""

from __future__ import annotations

from pathlib import Path

from proxy.backends.kubelet.small_file import read_small_file

SMALL_FILE_BYTES = 1 << 20


def file_text(path: Path) -> str | None:
    """Read a small file; None if that is not possible."""
    try:
        return read_small_file(str(path), SMALL_FILE_BYTES)[0].decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
