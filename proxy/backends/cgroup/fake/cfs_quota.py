"""The kernel's rules about CFS quotas, on files in an ordinary directory.

The rules, in the order in which the kernel checks them (kernel 6.18, v1 seen on a real mount): text that is
not a number, a quota or a period of less than a millisecond, and a period of more than a second fail with
EINVAL. Any negative quota means no quota. On v1 the root cannot be written, and a group's ratio of quota to
period must not be above that of its nearest ancestor with a quota, nor below that of a group below it
(EINVAL). On v2 quotas need not fit those of other groups. An imitated v1 tree has cpu and cpuset in one
hierarchy, like a mount of both controllers.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

QUOTA_FILE, PERIOD_FILE, MAX_FILE = "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max"
FILES = (QUOTA_FILE, PERIOD_FILE, MAX_FILE)
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_MIN_US, _MAX_PERIOD_US, _MAX_QUOTA_US = 1000, 1_000_000, 1 << 44


class FakeCpuFiles(Protocol):
    """The file operations that this module needs."""

    version: int

    def read(self, path: str, name: str) -> str:
        """Read one file of a group."""

    def children(self, path: str) -> Sequence[str]:
        """Return the names of the groups directly below."""


def new_files(path: str, version: int) -> dict[str, str]:
    """Return the files of a new group and their contents."""
    if version == 1:
        return {QUOTA_FILE: "-1", PERIOD_FILE: "100000"}
    return {MAX_FILE: "max 100000"} if path else {}


def content_after_write(tree: FakeCpuFiles, path: str, name: str, text: str) -> str:
    """Return the content of a file after a write.

    Raises:
        OSError: EINVAL, if the kernel would refuse the write.
    """
    if name == MAX_FILE:
        quota, _, period = text.strip().partition(" ")
        now = tree.read(path, MAX_FILE).split()[1]
        span = _number(period or now, _MIN_US, _MAX_PERIOD_US)
        return f"{'max' if quota == 'max' else _number(quota, _MIN_US, _MAX_QUOTA_US)} {span}"
    if not path:
        raise _invalid("the root is fixed")
    quota_text, period_text = tree.read(path, QUOTA_FILE), tree.read(path, PERIOD_FILE)
    if name == QUOTA_FILE:
        quota_text = text
    else:
        period_text = text
    value = _number(quota_text, -_MAX_QUOTA_US, _MAX_QUOTA_US)
    span = _number(period_text, _MIN_US, _MAX_PERIOD_US)
    if value < 0:
        return "-1" if name == QUOTA_FILE else str(span)
    _number(quota_text, _MIN_US, _MAX_QUOTA_US)
    above, below = list(_ratios(tree, _ancestors(path))), list(_ratios(tree, _descendants(tree, path)))
    if above and value / span > above[0]:
        raise _invalid("an ancestor allows less")
    if below and value / span < max(below):
        raise _invalid("a group below has more")
    return str(value if name == QUOTA_FILE else span)


def _ancestors(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _descendants(tree: FakeCpuFiles, path: str) -> Iterator[str]:
    for child in tree.children(path):
        yield f"{path}/{child}"
        yield from _descendants(tree, f"{path}/{child}")


def _ratios(tree: FakeCpuFiles, paths: Iterator[str]) -> Iterator[float]:
    for path in paths:
        quota = int(tree.read(path, QUOTA_FILE))
        if quota >= 0:
            yield quota / int(tree.read(path, PERIOD_FILE))


def _number(text: str, least: int, most: int) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not least <= int(match[0]) <= most:
        raise _invalid("not a number that is taken here")
    return int(match[0])


def _invalid(message: str) -> OSError:
    return OSError(errno.EINVAL, message)
