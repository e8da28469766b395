"""Reads a sysfs tree, file by file.

sysfs changes while it is read: the files of a CPU disappear when it goes offline. Old kernels have fewer
files, and the content of a file can be nonsense in a container or a virtual machine. So every read here
returns a value or None, and raises no exception. Content that cannot be understood is kept as a sentence in
``SysfsTree.problems``. The callers decide which missing files matter.

Sets have two formats, the mask (``ff,00000003``) and the list (``0-1,32-39``). Both become plain integers
(bit i is id i), because thousands of them are read, compared and discarded; only the few that remain become
``CpuSet``.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from proxy.model.errors import PermissionDeniedError, TopologyError
from proxy.model.idset import CpuSet

_CHUNK_BYTES = 65536
_FILE_LIMIT_BYTES = 1 << 20
_LONE_WORD = re.compile(r"(0[xX])?[0-9a-fA-F]+")
_WORD = re.compile(r"(0[xX])?[0-9a-fA-F]{1,8}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBERED = re.compile(r"[0-9]{1,6}")
_WORD_BITS = 32


class MachineDeniedError(TopologyError):
    """This user may not read the machine or its description."""

    exit_code = PermissionDeniedError.exit_code


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory.

    Raises:
        MachineDeniedError: A directory above it may not be searched.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except PermissionError as error:
        raise MachineDeniedError(f"cannot read the machine from {path}: {error.strerror}") from error
    except (OSError, ValueError):
        return False


def parse_mask(text: str) -> int:
    """Read a kernel bit mask: comma-separated 32-bit hexadecimal words, the highest first.

    The first word may be short and words may carry ``0x``; a mask without commas may be longer than a word.

    Raises:
        ValueError: The text is not a mask, or names an id beyond ``CpuSet.LIMIT``.
    """
    groups = text.strip().split(",")
    if len(groups) == 1 and _LONE_WORD.fullmatch(groups[0]):
        bits = int(groups[0], 16)
    else:
        bits = 0
        for group in groups:
            if not _WORD.fullmatch(group):
                raise ValueError(f"{text!r} is not a bit mask such as 'ff,00000003'")
            bits = bits << _WORD_BITS | int(group, 16)
    if bits.bit_length() > CpuSet.LIMIT:
        raise ValueError(f"a mask of {bits.bit_length()} bits is larger than any machine")
    return bits


class SysfsTree:
    """The files below one directory.

    Attributes:
        root: The directory.
        problems: Files that exist and could not be understood, as text.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self._prefix = f"{root}/"
        self._masks: dict[str, int] = {}
        self._lists: dict[str, int] = {}

    def text(self, path: str, most: int = _FILE_LIMIT_BYTES) -> str | None:
        """Return a file's text without blanks and NUL bytes at its ends, or None if it cannot be read.

        Args:
            path: The file.
            most: About the most bytes to read; reading stops after the first chunk that reaches this number.
        """
        try:
            # O_NONBLOCK: no type of file, such as a FIFO, may block the read.
            fd = os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            data = os.read(fd, min(_CHUNK_BYTES, most))
            while len(data) >= _CHUNK_BYTES and len(data) < most and (more := os.read(fd, _CHUNK_BYTES)):
                data += more
        except OSError:
            return None
        finally:
            os.close(fd)
        return data.decode("ascii", "replace").strip(" \t\r\n\0")

    def number(self, path: str) -> int | None:
        """Return the integer in a file; None if there is no file or no integer in it."""
        text = self.text(path)
        if not text:
            return None
        if _NUMBER.fullmatch(text):
            return int(text)
        self._report_problem(path, f"{text[:40]!r} is not a number")
        return None

    def mask(self, path: str) -> int | None:
        """Return the set in a mask file, as bits; None if there is no file or no mask in it."""
        text = self.text(path)
        if not text:
            return None
        try:
            if text not in self._masks:
                self._masks[text] = parse_mask(text)
            return self._masks[text]
        except ValueError:
            self._report_problem(path, f"{text[:40]!r} is not a bit mask")
            return None

    def id_list(self, path: str) -> int | None:
        """Return the set in a list file as bits; None if there is no file or no list in it.

        An empty file is the empty set.
        """
        text = self.text(path)
        if text is None:
            return None
        try:
            if text not in self._lists:
                self._lists[text] = CpuSet.parse(text).bits
            return self._lists[text]
        except ValueError:
            self._report_problem(path, f"{text[:40]!r} is not a list of ids")
            return None

    def id_set(self, path: str) -> int | None:
        """Return a set that the kernel writes as the mask ``path`` and as the list ``path_list``.

        The mask is preferred: the two never differ on a live kernel, and in an edited tree the mask is
        usually the one that was kept correct.
        """
        bits = self.mask(path)
        return self.id_list(f"{path}_list") if bits is None else bits

    def exists(self, path: str) -> bool:
        """Return whether a name exists, even if it is a link without a target."""
        return os.path.lexists(self._prefix + path)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory in ascending order; none if it cannot be listed."""
        try:
            return sorted(os.listdir(self._prefix + path))  # noqa: PTH208 - 1 us, not 10
        except (OSError, ValueError):
            return []

    def numbered(self, path: str, prefix: str) -> list[int]:
        """Return the numbers of the entries ``prefixN`` in a directory, ascending."""
        tails = (name.removeprefix(prefix) for name in self.names(path) if name.startswith(prefix))
        ids = (int(tail) for tail in tails if _NUMBERED.fullmatch(tail) and str(int(tail)) == tail)
        return sorted(i for i in ids if i < CpuSet.LIMIT)

    def _report_problem(self, path: str, problem: str) -> None:
        self.problems.append(f"{path}: {problem}")
