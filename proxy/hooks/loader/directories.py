"""Which hook files count: names, masks, links to /dev/null; checked twice a second, so it must be cheap.

A file in the first directory takes precedence over one of the same name in the second, whatever is in it.
Files that by name or type are not hook files (dot-files, directories, sockets, editor backups) are ignored.
In the directory of server files, every entry counts that is not a directory and whose name ends with ``json``
(Koordinator v1.8.0 pkg/runtimeproxy/config/config_manager.go, collectAllConfigs).
"""

from __future__ import annotations

import enum
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from proxy.config.hooks import HooksConfig
from proxy.model.errors import HookError
from proxy.model.quoting import escaped
from proxy.permissions import TrustCheck

_HOOK_FILE_NAME = re.compile(r"[0-9]{2}-[a-z0-9][a-z0-9-]*\.py")
_NAME_FORM = '(two digits, "-", then characters a-z, 0-9 and "-")'
_NULL_DEVICE = os.makedev(1, 3)


class HookFileState(enum.StrEnum):
    """The state of a file."""

    RUNNING = "running"
    OLD = "old version running"
    WAITING = "being read"
    BROKEN = "broken"
    UNTRUSTED = "untrusted"
    DISABLED = "disabled"
    MASKED = "masked"


@dataclass(frozen=True, slots=True)
class HookFileEntry:
    """One file.

    Attributes:
        name: The hook's name.
        path: The file.
        state: Its state.
        error: Why the file, or its present content, is not in use; empty if it is in use.
        points: The points that the version in use handles, sorted.
        policy: ``Fail`` or ``Ignore``; empty if no version is in use.
        timeout: Seconds for one answer; 0 if no version is in use.
        server: It names a server; otherwise it is Python.
    """

    name: str
    path: str
    state: HookFileState
    error: str = ""
    points: tuple[str, ...] = ()
    policy: str = ""
    timeout: float = 0.0
    server: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that is a hook, or would be one.

    Attributes:
        name: The hook's name.
        path: Its path.
        server: It names a server; otherwise it is Python.
        is_null_link: It is a link to /dev/null.
        distrust: Why it cannot be trusted, and the remedy; empty if it can.
        cause: Why it cannot be examined; empty if it can.
        signature: Changes whenever its content may have changed.
    """

    name: str
    path: Path
    server: bool = False
    is_null_link: bool = False
    distrust: str = ""
    cause: str = ""
    signature: tuple[object, ...] = ()


@dataclass(slots=True)
class HookFileScan:
    """The result of one scan.

    Attributes:
        candidates: By name, in order.
        masked: Files that do not count, and the file that takes precedence.
        ignored_files: Sentences about ignored files that were perhaps intended as hooks.
        unreadable: Directories whose content is unknown now.
        cpu_seconds: The CPU time that it took.
    """

    candidates: dict[str, Candidate] = field(default_factory=dict)
    masked: list[tuple[Candidate, Path]] = field(default_factory=list)
    ignored_files: list[str] = field(default_factory=list)
    unreadable: set[Path] = field(default_factory=set)
    cpu_seconds: float = field(default=0.0, compare=False)


def scan_directories(config: HooksConfig) -> HookFileScan:
    """Scan the three directories; each may be absent."""
    began = time.thread_time()
    found, trust = HookFileScan(), TrustCheck()
    if not config.enabled:
        return found
    for directory in dict.fromkeys((config.directory, config.vendor_directory)):
        for candidate in _python_candidates(directory, found, trust):
            _add(found, candidate)
    if config.server_directory is not None:
        for candidate in _server_candidates(config.server_directory, found, trust):
            _add(found, candidate)
    found.candidates = dict(sorted(found.candidates.items()))
    found.cpu_seconds = time.thread_time() - began
    return found


def candidate_of(path: Path) -> Candidate:
    """Examine one file as if it were in a directory of hooks; for commands.

    Raises:
        HookError: It would be ignored there because of its name or type.
    """
    server = path.name.endswith("json")
    if not server and not _HOOK_FILE_NAME.fullmatch(path.name):
        raise HookError(f"cannot use hook {path}: it is not named NN-name.py {_NAME_FORM}")
    name = path.name.removesuffix("json").rstrip(".") if server else path.name.removesuffix(".py")
    candidate = _examine(path, name or path.name, TrustCheck(), server=server)
    if candidate is None:
        cause = "it is not a file" if path.exists() else "there is no such file"
        raise HookError(f"cannot read {'hook server' if server else 'hook'} {path}: {cause}")
    return candidate


def _add(found: HookFileScan, candidate: Candidate) -> None:
    """Add a file, unless a file of that name was added before.

    A user with write access to an untrusted directory could mask a hook that forbids something, so such files
    do not take precedence.
    """
    taken = found.candidates.get(candidate.name)
    if taken is None:
        found.candidates[candidate.name] = candidate
        return
    if taken.distrust and not candidate.distrust:
        taken, candidate = candidate, taken
        found.candidates[taken.name] = taken
    found.masked.append((candidate, taken.path))
    if candidate.server:
        found.ignored_files.append(
            f"hook server {candidate.path} is not used: there is a hook of that name in {taken.path}"
        )


def _python_candidates(directory: Path, found: HookFileScan, trust: TrustCheck) -> Iterator[Candidate]:
    for name in _names(directory, found.unreadable, found.ignored_files):
        good = _HOOK_FILE_NAME.fullmatch(name)
        if not good and (not name.endswith(".py") or name.startswith(".")):
            continue
        candidate = _examine(directory / name, name.removesuffix(".py"), trust, server=False)
        if candidate is None:
            continue
        if good:
            yield candidate
        else:
            found.ignored_files.append(
                f"hook file {escaped(str(directory / name))} is not used: "
                f"it is not named NN-name.py {_NAME_FORM}"
            )


def _server_candidates(directory: Path, found: HookFileScan, trust: TrustCheck) -> Iterator[Candidate]:
    for name in _names(directory, found.unreadable, found.ignored_files):
        if not name.endswith("json"):
            continue
        candidate = _examine(
            directory / name, name.removesuffix("json").rstrip(".") or name, trust, server=True
        )
        if candidate is None:
            continue
        if _is_text(name):
            yield candidate
        else:
            found.ignored_files.append(
                f"hook server {escaped(str(directory / name))} is not used: its name is not UTF-8"
            )


def _is_text(name: str) -> bool:
    """Return whether the name of a file is UTF-8: metrics and answers contain it."""
    return name.isascii() or os.fsencode(name).decode(errors="ignore") == name


def _names(directory: Path, unreadable: set[Path], ignored_files: list[str]) -> list[str]:
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        ignored_files.append(f"cannot look for hooks in {directory}: {error.strerror}")
        return []
    except OSError as error:
        unreadable.add(directory)
        ignored_files.append(f"cannot look for hooks in {directory}: {error.strerror}")
        return []


def _examine(path: Path, name: str, trust: TrustCheck, *, server: bool) -> Candidate | None:
    """Examine an entry; return None if it is nothing that could be read."""
    try:
        own = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(own.st_mode) else ""  # noqa: PTH115 - texts
    except OSError:  # it has just disappeared
        return None
    try:
        status = path.stat() if link else own
        distrust = trust.directory_problem(path.parent)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL_DEVICE and link:
            return Candidate(
                name, path, server, is_null_link=True, distrust=distrust, signature=(path, link, distrust)
            )
        if not stat.S_ISREG(status.st_mode):
            return None
        distrust = distrust or trust.file_problem(path)
    except OSError as error:
        cause = f"it is a link to {link}, and nothing is there" if link else str(error.strerror or error)
        return Candidate(name, path, server, cause=cause, signature=(path, link, own.st_ino, cause))
    seen = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    signature = (path, link, own.st_ino, *seen, status.st_mode, status.st_uid, distrust)
    return Candidate(name, path, server, distrust=distrust, signature=signature)
