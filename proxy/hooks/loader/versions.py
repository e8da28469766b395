"""From a file in a directory to a version that can be used; files that crash the daemon are left out.

Theory. A hook shares the process. One that ends it (``os._exit``, a crash in C code) while it is loaded,
configured or synchronized would do so again at each start, and the node would have no runtime. So the state
directory contains a mark as long as a file is being loaded. A file whose content was marked at two crashes is
left out. One crash is not enough, because the daemon may have been killed for another reason at that moment.
Files are loaded in parallel, so a file that has a mark at a start is *suspected* and loaded alone: a second
crash then has only one possible cause.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from proxy.config.hooks import HooksConfig
from proxy.executor.background import Worker
from proxy.hooks.hook import Hook
from proxy.hooks.loader.directories import Candidate
from proxy.hooks.loader.loading import LOAD_TIMEOUT_S, LoadAttempt, Loaded
from proxy.hooks.loader.safe_read import UntrustedError, read
from proxy.model.errors import HookError
from proxy.telemetry.port import Report

CRASH_LIMIT: Final = 2
"""After this many crashes with the same content, the file is not loaded any more."""


class CrashingHookError(HookError):
    """The daemon has crashed while this file was being brought into use."""


class CrashMarks:
    """Marks in a directory; a mark that cannot be written is skipped. All methods block."""

    def __init__(self, directory: Path | None) -> None:
        """Prepare; no mark is written yet.

        Args:
            directory: The directory of the marks, created with the first mark. None: no marks are written.
        """
        self._directory = directory

    def is_suspected(self, name: str) -> bool:
        """Return whether the daemon has ended while a hook was brought into use."""
        return self._directory is not None and os.path.lexists(self._directory / name)

    def mark(self, name: str, path: Path, data: bytes) -> None:
        """Write the mark of a file that is about to be loaded.

        Args:
            name: The hook's name.
            path: The file, for the message.
            data: The content of the file.

        Raises:
            CrashingHookError: The daemon has crashed with this content too often.
        """
        if self._directory is None:
            return
        mark, content = self._directory / name, hashlib.sha256(data).hexdigest()
        try:
            seen, _, count = mark.read_text(encoding="ascii").partition(" ")
            crashes = int(count) if seen == content else 0
        except (OSError, ValueError):
            crashes = 0
        if crashes >= CRASH_LIMIT:
            raise CrashingHookError(
                f"cannot load hook {path}: the daemon has ended {crashes} times while it was brought into "
                f"use: change the file, or remove {mark} to try it again"
            )
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            mark.write_text(f"{content} {crashes + 1}", encoding="ascii")
        except OSError:
            return

    def remove(self, name: str) -> None:
        """Remove the mark: the file is in use or was refused, and the daemon has not crashed."""
        if self._directory is not None:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError:
                return


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """One version of a file.

    Attributes:
        loaded: The hook.
        path: The file.
        content: Identifies the content of the file, and the settings of the hook.
    """

    loaded: Loaded
    path: Path
    content: tuple[object, ...]


class VersionBuilder:
    """Loads versions of hook files; the worker does blocking reads, and each file runs in its own thread.

    Attributes:
        config: The configuration of hooks.
    """

    def __init__(
        self, config: HooksConfig, worker: Worker, report_problem: Report, marks: CrashMarks
    ) -> None:
        self.config = config
        self._marks = marks
        self._worker = worker
        self._report_problem = report_problem

    async def build(self, name: str, candidate: Candidate, old: Version | None) -> Version | None:
        """Read and load a file.

        Args:
            name: The hook's name.
            candidate: The file.
            old: The version that is in use.

        Returns:
            ``old`` if nothing has changed; None if the hook is disabled, or is the daemon's own server.

        Raises:
            FileBeingWrittenError: It is being written.
            HookError: It cannot be used.
        """
        path, what = candidate.path, "hook server" if candidate.server else "hook"
        if candidate.distrust:
            raise UntrustedError(f"cannot trust {what} {path}: {candidate.distrust}")
        if candidate.is_null_link:
            return None
        if candidate.cause:
            raise HookError(f"cannot read {what} {path}: {candidate.cause}")
        content = await self._worker.run(read, path, what)
        version = (*content.version, *self._settings(name))
        if old is not None and (old.path, old.content) == (path, version):
            return old
        if candidate.server:
            loop = asyncio.get_running_loop()
            hook = await self._worker.run(self._server, name, path, content.data, loop)
            return None if hook is None else Version(Loaded(hook), path, version)
        if not content.data:
            return None
        await self._worker.run(self._marks.mark, name, path, content.data)
        return Version(await self._load(name, path, content.data), path, version)

    def _settings(self, name: str) -> tuple[object, ...]:
        """Return the configuration of a hook; if it changes, the hook counts as another version."""
        config = self.config
        users, label, where = config.server_users, config.skip_label, config.skip_namespaces
        return config.settings.get(name), config.timeout, config.policy, users, label, where

    def _server(self, name: str, path: Path, data: bytes, loop: asyncio.AbstractEventLoop) -> Hook | None:
        from proxy.hooks.remote.servers import OwnServerError, server_of

        def report(message: str, /, **keys: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(partial(self._report_problem, message, **keys))

        try:
            return server_of(name, path, data, self.config, report)
        except OwnServerError:
            return None

    async def _load(self, name: str, path: Path, data: bytes) -> Loaded:
        attempt = LoadAttempt(name, path, data, self.config)
        attempt.start()
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                return await asyncio.wrap_future(attempt.future)
        except TimeoutError:
            raise attempt.abandon(LOAD_TIMEOUT_S) from None
