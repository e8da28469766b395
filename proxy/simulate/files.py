"""Finding and reading the files that a user names."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from proxy.model.errors import InputError
from proxy.simulate.documents import SIZE_LIMIT

STDIN = "-"
_ENDINGS = (".yaml", ".yml", ".json")


def found_files(words: Iterable[str]) -> list[Path]:
    """Return the files that are meant: files as named, directories as all their YAML and JSON files, sorted.

    Raises:
        InputError: Something is not there, or a directory holds no such file.
    """
    files: list[Path] = []
    for word in words:
        path = Path(word)
        if word != STDIN and path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in _ENDINGS and p.is_file())
            if not inside:
                raise InputError(f"cannot read pods from {word}: no file in it ends in {', '.join(_ENDINGS)}")
            files += inside
        else:
            files.append(path)
    return files


def read_bytes(path: Path) -> bytes:
    """Read a file, or standard input for ``-``; no more than is looked at.

    Raises:
        InputError: It cannot be read.
    """
    try:
        if str(path) == STDIN:
            if sys.stdin is None:
                raise InputError("cannot read standard input: it is closed")
            return sys.stdin.buffer.read(SIZE_LIMIT + 1)
        with path.open("rb") as stream:
            return stream.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
