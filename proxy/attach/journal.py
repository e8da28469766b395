"""The journal of an attach: a durable copy of each file as it was before the attach changed it.

It is a directory of plain files, so that a shell script can undo the attach without anything else:

    state                one word: begun, changing (files, from now on) or attached
    unit                 the unit that runs kubelet
    endpoint, previous   the endpoint that was set, and the one before
    enabled              units that the attach enabled, one a line
    running              of these, the units that ran before, one a line; they are not stopped
    started              units that were enabled before, and that only the attach started, one a line
    1/path               the first file that is changed; the next ones are in 2, 3, ...
    1/before             its bytes with its mode, owner and time; missing if there was no file
    1/after              its bytes after the change
    1/made               directories that the attach made for it, the outermost first
    1/sums               SHA-256 of before and of after; - if there was no file
    complete             written last

It is written next to its place, synced, and renamed, so there is a whole journal or none. While a journal
replaces an older one, the older one is ``attach.old`` for a moment. A journal that is being removed is
``attach.gone``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from proxy.atomic_write import sync_directory, write_file
from proxy.attach.changes import FileChange
from proxy.attach.state_file import ATTACHED, BEGUN, CHANGING, NAME, directory_of
from proxy.model.errors import CannotCreateError, InputError, PermissionDeniedError, TopoproxyError


class AttachJournal(Struct, frozen=True):
    """The changes of an attach.

    Attributes:
        state: ``begun``, ``changing`` or ``attached``.
        unit: The unit that runs kubelet.
        endpoint: The endpoint that was set.
        previous: The endpoint before the attach.
        enabled: Units that the attach enabled.
        changes: The files.
        made: Directories that the attach made, the outermost first.
        running: Units of ``enabled`` that ran before the attach.
        started: Units that were enabled before the attach and did not run; an undo stops them.
    """

    state: str
    unit: str
    endpoint: str
    previous: str
    enabled: tuple[str, ...]
    changes: tuple[FileChange, ...]
    made: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    started: tuple[str, ...] = ()


def _denied(directory: Path, error: PermissionError) -> PermissionDeniedError:
    return PermissionDeniedError(f"cannot read the journal of the attach in {directory}: {error.strerror}")


def load(state: Path) -> AttachJournal | None:
    """Read the journal; None if there is none.

    Raises:
        InputError: It cannot be used.
        PermissionDeniedError: It is not readable for this user.
    """
    directory = directory_of(state)
    try:
        directory.stat()
    except PermissionError as error:
        raise _denied(directory, error) from error
    except OSError:
        return None
    try:
        (directory / "complete").read_bytes()
        lines = {
            name: (directory / name).read_text().splitlines()
            for name in ("state", "unit", "endpoint", "previous", "enabled")
        }
        for name in ("running", "started"):  # journals of earlier versions do not have them
            file = directory / name
            lines[name] = file.read_text().splitlines() if file.exists() else []
        entries = sorted((int(each.name), each) for each in directory.iterdir() if each.name.isdigit())
        changes = tuple(_entry(each) for _, each in entries)
        made = [line for _, each in entries for line in (each / "made").read_text().splitlines()]
        (stage,), (unit,), (endpoint,), (previous,) = (
            lines[k] for k in ("state", "unit", "endpoint", "previous")
        )
    except PermissionError as error:
        raise _denied(directory, error) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the journal of the attach in {directory}: {error}") from None
    if stage not in (BEGUN, CHANGING, ATTACHED) or not changes:
        raise InputError(f"cannot read the journal of the attach in {directory}: its state is {stage!r}")
    enabled = tuple(lines["enabled"])
    running_units = tuple(unit for unit in lines["running"] if unit in enabled)
    return AttachJournal(
        stage,
        unit,
        endpoint,
        previous,
        enabled,
        changes,
        tuple(made),
        running_units,
        tuple(lines["started"]),
    )


def _entry(entry: Path) -> FileChange:
    path = (entry / "path").read_text().removesuffix("\n")
    before = (entry / "before").read_bytes() if (entry / "before").exists() else None
    after = (entry / "after").read_bytes()
    if (entry / "sums").read_text().split() != [_sha256(before), _sha256(after)]:
        raise ValueError(f"the copies of {path} are damaged")
    if not path.startswith("/") or ".." in Path(path).parts:
        raise ValueError(f"{path!r} is not an absolute path")
    return FileChange(Path(path), before, after)


def _sha256(data: bytes | None) -> str:
    return "-" if data is None else hashlib.sha256(data).hexdigest()


def write(state: Path, journal: AttachJournal, root: Path, kept: Path | None = None) -> None:
    """Write a journal durably; it replaces an existing one.

    Args:
        state: topoproxy's state directory.
        journal: The changes that will be made.
        root: The directory that stands for ``/``.
        kept: The former journal; its copies of files that are still changed are taken over.

    Raises:
        CannotCreateError: It cannot be written.
    """
    draft = state / f"{NAME}.new"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        for number, change in enumerate(journal.changes, 1):
            _write_entry(draft / str(number), change, root, _find_unchanged(kept, change))
        for name, values in (
            ("state", [journal.state]),
            ("unit", [journal.unit]),
            ("endpoint", [journal.endpoint]),
            ("previous", [journal.previous]),
            ("enabled", journal.enabled),
            ("running", journal.running),
            ("started", journal.started),
        ):
            write_file(draft / name, "".join(f"{value}\n" for value in values).encode())
        write_file(draft / "complete", b"")
        _publish(state, draft)
    except OSError as error:
        raise CannotCreateError(
            f"cannot write the journal of the attach in {state}: {error.strerror}"
        ) from error


def _publish(state: Path, draft: Path) -> None:
    place, old = state / NAME, state / f"{NAME}.old"
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    draft.rename(place)
    sync_directory(state)
    shutil.rmtree(old, ignore_errors=True)


def _find_unchanged(kept: Path | None, change: FileChange) -> Path | None:
    """Find the entry of a file in the former journal, if it still has the file's original."""
    for entry in kept.iterdir() if kept is not None and kept.exists() else ():
        if entry.name.isdigit() and (entry / "path").read_text() == f"{change.path}\n":
            copy = entry / "before"
            if (copy.read_bytes() if copy.exists() else None) == change.before:
                return entry
    return None


def _write_entry(entry: Path, change: FileChange, root: Path, kept: Path | None) -> None:
    entry.mkdir(mode=0o700)
    source = root / change.path.relative_to("/")
    if kept is not None:
        made = (kept / "made").read_bytes()
        if change.before is not None:
            copy_as_is(kept / "before", entry / "before")
    else:
        missing = [str(p) for p in reversed(change.path.parents) if not (root / p.relative_to("/")).exists()]
        made = "".join(f"{line}\n" for line in missing).encode()
        if change.before is not None:
            copy_as_is(source, entry / "before")
    if change.before is not None and (entry / "before").read_bytes() != change.before:
        raise TopoproxyError(f"cannot change {change.path}: it changed meanwhile")
    for name, data in (
        ("path", f"{change.path}\n".encode()),
        ("after", change.after),
        ("made", made),
        ("sums", f"{_sha256(change.before)} {_sha256(change.after)}\n".encode()),
    ):
        write_file(entry / name, data)


def copy_as_is(source: Path, to: Path) -> None:
    """Copy a file with its mode, owner, time and security label; the copy replaces an old file at once."""
    status = source.stat()

    def finish(draft: int) -> None:
        with contextlib.suppress(OSError):
            os.setxattr(draft, "security.selinux", os.getxattr(source, "security.selinux"))
        os.chown(draft, status.st_uid, status.st_gid)
        os.utime(draft, ns=(status.st_atime_ns, status.st_mtime_ns))

    write_file(to, source.read_bytes(), mode=status.st_mode & 0o7777, finish=finish)


def set_stage(state: Path, stage: str) -> None:
    """Set the state of the journal.

    Raises:
        CannotCreateError: It cannot be written.
    """
    try:
        write_file(directory_of(state) / "state", f"{stage}\n".encode())
    except OSError as error:
        raise CannotCreateError(
            f"cannot write the journal of the attach in {state}: {error.strerror}"
        ) from error


def remove(state: Path) -> None:
    """Remove the journal; rename it first, so that there is a whole journal or none.

    Raises:
        CannotCreateError: It cannot be removed.
    """
    gone = state / f"{NAME}.gone"
    try:
        for name in (f"{NAME}.new", f"{NAME}.old", NAME):
            directory = state / name
            if gone.exists():  # a removal was interrupted
                shutil.rmtree(gone)
            if directory.exists():
                directory.rename(gone)
                sync_directory(state)
        shutil.rmtree(gone, ignore_errors=True)
    except OSError as error:
        raise CannotCreateError(
            f"cannot remove the journal of the attach in {state}: {error.strerror}"
        ) from error


def apply(change: FileChange, root: Path) -> None:
    """Write a file as it is after the attach.

    Raises:
        CannotCreateError: It cannot be written.
    """
    path = root / change.path.relative_to("/")
    try:
        if change.before is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
        write_file(path, change.after, mode=mode, keep_owner=True)
    except OSError as error:
        raise CannotCreateError(f"cannot write {path}: {error.strerror}") from error


def files_changed_by_others(journal: AttachJournal, root: Path) -> list[Path]:
    """Return the files that have neither their content before the attach nor that after it."""
    return [c.path for c in journal.changes if _present_content(c, root) not in (c.before, c.after)]


def _present_content(change: FileChange, root: Path) -> bytes | None:
    try:
        return (root / change.path.relative_to("/")).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        refusal = PermissionDeniedError if isinstance(error, PermissionError) else TopoproxyError
        raise refusal(f"cannot read {change.path}: {error.strerror}") from error


def restore(state: Path, journal: AttachJournal, root: Path) -> None:
    """Put every file back as it was; in a file that another program changed, restore only the endpoint.

    Raises:
        CannotCreateError: A file cannot be written.
    """
    for change, target in files_to_restore(journal, root):
        path = root / change.path.relative_to("/")
        try:
            if change.before is None:
                path.unlink(missing_ok=True)
            elif target == change.before:
                copy_as_is(_original(state, change), path)
            else:
                assert target is not None
                write_file(path, target, mode=path.stat().st_mode & 0o7777, keep_owner=True)
        except OSError as error:
            raise CannotCreateError(f"cannot restore {path}: {error.strerror}") from error
    for made in reversed(journal.made):
        with contextlib.suppress(OSError):
            (root / made.lstrip("/")).rmdir()


def files_to_restore(journal: AttachJournal, root: Path) -> list[tuple[FileChange, bytes | None]]:
    """Return the files that a detach changes, and the new content of each; None if it is removed."""
    targets = []
    for change in journal.changes:
        now = _present_content(change, root)
        if now == change.before:
            continue
        target = change.before
        if now is not None and change.before is not None and now != change.after:
            target = now.replace(journal.endpoint.encode(), journal.previous.encode())
        if target != now:
            targets.append((change, target))
    return targets


def _original(state: Path, change: FileChange) -> Path:
    for entry in directory_of(state).iterdir():
        if entry.name.isdigit() and (entry / "path").read_text() == f"{change.path}\n":
            return entry / "before"
    raise InputError(f"cannot restore {change.path}: the journal has no copy of it")


def merged(old: AttachJournal | None, changes: Sequence[FileChange], root: Path) -> tuple[FileChange, ...]:
    """Combine the changes of a journal with further ones.

    A file that is unchanged since the journal keeps its original. If another program has written a file since
    then, its present content becomes the original that a detach has to restore.
    """
    rest = {change.path: change for change in changes}
    kept = []
    for change in old.changes if old is not None else ():
        more = rest.pop(change.path, None)
        if more is None:
            kept.append(change)
        elif more.before == change.after:
            kept.append(FileChange(change.path, change.before, more.after))
        else:
            kept.append(more)
    return (*kept, *rest.values())
