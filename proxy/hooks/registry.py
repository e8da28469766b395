"""The registry of a node's hooks: files that appear, change and disappear while the daemon runs.

The directories are scanned periodically (inotify would be cheaper but is not enough: directories that are
created later, links to elsewhere, network file systems). Each changed file is loaded by its own task, so a
file that hangs does not delay others::

    read -> load -> configure -> synchronize -> use -> shut down the previous version

Until ``use`` the previous version is called; if a step fails the previous version stays in use, and the
file's entry contains the reason. A file that is being written is checked again shortly after. If the reason
may disappear without a change of the file (the machine lacks a resource, or a file that the hook needs does
not exist yet), loading is retried at growing intervals.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from proxy.config.hooks import HooksConfig
from proxy.config.nested_values import suggestion
from proxy.executor.background import Worker
from proxy.hooks.events import Configure, Point, Shutdown, Synchronize
from proxy.hooks.hook import Hook
from proxy.hooks.loader.directories import (
    Candidate,
    HookFileEntry,
    HookFileScan,
    HookFileState,
    scan_directories,
)
from proxy.hooks.loader.loading import LOAD_TIMEOUT_S
from proxy.hooks.loader.safe_read import FileBeingWrittenError, UntrustedError
from proxy.hooks.loader.versions import CrashingHookError, CrashMarks, Version, VersionBuilder
from proxy.model.backoff import Backoff
from proxy.model.errors import HookError
from proxy.telemetry.port import Report, silent

POLL_S: Final = 0.4
"""Seconds between two scans, so that a changed file is in use within a second."""
SHORT_POLL_S: Final = 0.1
CPU_SHARE: Final = 0.05
"""The largest share of one CPU that scans take; with thousands of files scans are less frequent."""
RETRY_DELAYS = Backoff(5.0, 300.0)
"""Seconds before a file that has failed is tried again."""
REPORT_AFTER_S: Final = 2.0
"""After this time a file that is still being written is reported."""
STOP_TIMEOUT_S: Final = 2.0
_THREADS: Final = 4
_CANNOT_LOAD: Final = "cannot load a hook"
_CANNOT_REPLACE: Final = "cannot load a hook: its last version stays in use"


class HandoverEngine(Protocol):
    """The part of the engine that the registry needs."""

    def use(self, hooks: Sequence[Hook]) -> None:
        """Use these hooks from now on."""

    def begin_notifying(self, hook: Hook) -> None:
        """Notify a hook of events from now on, although it is not in use yet."""

    def notify_one(self, hook: Hook, event: Point) -> Awaitable[object]:
        """Send an event to one hook, in use or not, within its deadline; return the error, or None."""


class Handover:
    """Sends hooks their first and last events."""

    def __init__(
        self,
        engine: HandoverEngine,
        synchronize: Callable[[], Synchronize | None],
        report_problem: Report,
    ) -> None:
        self._engine = engine
        self._synchronize = synchronize
        self._report_problem = report_problem

    async def configure(self, new: Version) -> None:
        """Configure a hook, and send it the whole state, now or as soon as the state is known.

        Raises:
            HookError: The hook cannot be configured.
        """
        hook = new.loaded.hook
        if Configure.NAME in hook.handlers:
            error = await self._engine.notify_one(hook, Configure(new.loaded.settings, hook.name))
            if error is not None:
                new.loaded.unload()
                raise HookError(f"cannot configure hook {hook.source}: {error}")
        if Synchronize.NAME in hook.handlers:
            event = self._synchronize_event()
            if event is None:
                self._engine.begin_notifying(hook)  # the state may be known before the hook is in use
            elif (error := await self._engine.notify_one(hook, event)) is not None:
                self._report_problem(
                    "cannot send a hook the state of the node", hook=hook.name, path=hook.source, err=error
                )

    async def shut_down(self, old: Version, reason: str) -> None:
        """Notify a version of a hook that it is removed, and forget it.

        Args:
            old: The version, which is not in use any more; calls of it may still be running.
            reason: As ``Shutdown.reason``.
        """
        hook = old.loaded.hook
        try:
            error = await self._engine.notify_one(hook, Shutdown(reason))  # the engine forgets it, too
            if error is not None:
                self._report_problem("cannot shut down a hook", hook=hook.name, path=hook.source, err=error)
        finally:
            old.loaded.unload()

    def _synchronize_event(self) -> Synchronize | None:
        try:
            return self._synchronize()
        except Exception as error:  # noqa: BLE001 - a hook without the state is better than no hook
            self._report_problem("cannot send hooks the state of the node", err=error)
            return None


@dataclass(slots=True)
class _FileRecord:
    """The state of a file at the last scan; ``retry_at``: the time at which the file is tried again."""

    candidate: Candidate
    config: HooksConfig
    state: HookFileState = HookFileState.WAITING
    error: str = ""
    changing_since: float | None = None
    retry_at: float | None = None
    failures: int = 0


class HookRegistry:
    """Gives the engine the hooks of the files in the directories; all methods on the event loop."""

    def __init__(
        self,
        config: HooksConfig,
        engine: HandoverEngine,
        synchronize: Callable[[], Synchronize | None],
        report_problem: Report,
        report_success: Report = silent,
        report_resolved: Report = silent,
        clock: Callable[[], float] = time.monotonic,
        marks: Path | None = None,
    ) -> None:
        """Prepare; no directory is scanned yet.

        Args:
            config: The directories and settings.
            engine: The engine that calls hooks.
            synchronize: Returns the whole state, or None as long as the state is not known.
            report_problem: Called with a message about a failure.
            report_success: Called with a message about a success.
            report_resolved: Called with the message and keys of a reported failure that is over.
            clock: Seconds.
            marks: The directory that records which files are being loaded (``loader.versions``); None: no
                record.
        """
        self._config = config
        self._engine = engine
        self._report_problem = report_problem
        self._report_success = report_success
        self._report_resolved = report_resolved
        self._clock = clock
        self._worker = Worker("hooks", lambda error: report_problem("cannot load hooks", err=error), _THREADS)
        self._marks = CrashMarks(marks)
        self._builder = VersionBuilder(config, self._worker, report_problem, self._marks)
        self._handover = Handover(engine, synchronize, report_problem)
        self._scan_lock = asyncio.Lock()
        self._suspect_lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._in_use: dict[str, Version] = {}
        self._records: dict[str, _FileRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._masked: list[tuple[Candidate, Path]] = []
        self._cpu_seconds = 0.0
        self._reported: set[tuple[str, str | None, str]] = set()  # message, hook, reason

    @property
    def entries(self) -> list[HookFileEntry]:
        """The state of each file, by name; files that are masked by another one come last."""
        entries = [self._entry(name, record) for name, record in self._records.items()]
        entries += [
            HookFileEntry(c.name, str(c.path), HookFileState.MASKED, f"{by} is used instead", server=c.server)
            for c, by in self._masked
        ]
        return sorted(entries, key=lambda entry: (entry.name, entry.state is HookFileState.MASKED))

    def reconfigure(self, config: HooksConfig) -> None:
        """Use other directories and settings: affected hooks are loaded again, like changed files."""
        self._config = self._builder.config = config
        self._reported.clear()
        self._wake.set()

    async def run(self) -> None:
        """Scan periodically until cancelled."""
        while True:
            try:
                await self._scan()
            except Exception as error:  # noqa: BLE001 - hooks that are in use continue
                self._report_problem("cannot look for hooks", err=error)
            changing = any(record.changing_since is not None for record in self._records.values())
            pause = max(SHORT_POLL_S if changing else POLL_S, self._cpu_seconds / CPU_SHARE)
            # Not wait_for: in Python 3.11 it loses a cancellation that comes as the event is set.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()

    async def scan_once(self, timeout: float = 2 * LOAD_TIMEOUT_S) -> None:
        """Scan, and wait until changed files are in use or have failed.

        It waits for a file that was just written, but not for a file that is written continuously.

        Args:
            timeout: Seconds; a file that takes longer is loaded in the background.
        """
        until = self._clock() + timeout
        while True:
            await self._scan()
            if self._tasks:
                await asyncio.wait(set(self._tasks.values()), timeout=max(until - self._clock(), 0.0))
            fresh = any(k.changing_since is not None and not k.error for k in self._records.values())
            if not fresh or self._clock() + SHORT_POLL_S > until:
                return
            await asyncio.sleep(SHORT_POLL_S)

    async def close(self) -> None:
        """Shut all hooks down and stop scanning."""
        if self._tasks:
            names = {task: name for name, task in self._tasks.items()}
            _, late = await asyncio.wait(set(names), timeout=STOP_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await self._remove_marks([names[task] for task in late])
        ending, self._in_use = self._in_use, {}
        self._records.clear()
        self._engine.use([])
        await asyncio.gather(*(self._handover.shut_down(old, "stop") for old in ending.values()))
        await asyncio.to_thread(self._worker.close)

    async def _remove_marks(self, names: list[str]) -> None:
        """Remove the marks of files whose loading a stop interrupts, because the daemon has not crashed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                for name in names:
                    await self._worker.run(self._marks.remove, name)

    async def _scan(self) -> None:
        async with self._scan_lock:
            found = await self._worker.run(scan_directories, self._config)
            began = time.thread_time()
            self._masked = found.masked
            for sentence in found.ignored_files:
                self._report_once("ignored a file", None, sentence)
            for name, candidate in found.candidates.items():
                record = self._records.get(name)
                if name not in self._tasks and (
                    record is None
                    or record.changing_since is not None
                    or record.candidate.signature != candidate.signature
                    or record.config is not self._config
                    or (record.retry_at is not None and record.retry_at <= self._clock())
                ):
                    self._start_task(name, self._load_and_use_in_turn(name, candidate))
            for name, record in list(self._records.items()):
                removed = (
                    name not in found.candidates and record.candidate.path.parent not in found.unreadable
                )
                if removed and name not in self._tasks:
                    self._start_task(name, self._forget(name))
            self._check_settings(found)
            self._cpu_seconds = found.cpu_seconds + time.thread_time() - began

    def _start_task(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"hook {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._on_task_end(name, done))

    def _on_task_end(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report_problem("cannot use a hook", hook=name, err=error)
        record = self._records.get(name)
        if record is None or record.changing_since is None:
            self._wake.set()  # the file may have changed during the load

    async def _load_and_use_in_turn(self, name: str, candidate: Candidate) -> None:
        """Load a file: in parallel with others, or alone if the file may have ended the daemon before."""
        if await self._worker.run(self._marks.is_suspected, name):
            async with self._suspect_lock:
                await self._load_and_use(name, candidate)
        else:
            await self._load_and_use(name, candidate)

    async def _load_and_use(self, name: str, candidate: Candidate) -> None:
        """Load the present content of a file, and use it."""
        before = self._records.get(name)
        state = before.state if before else HookFileState.WAITING
        record = self._records[name] = _FileRecord(candidate, self._config, state)
        old, is_loaded = self._in_use.get(name), False
        try:
            new = await self._builder.build(name, candidate, old)
            is_loaded = True
            if new is not None and new is not old:
                await self._handover.configure(new)
                await self._worker.run(self._marks.remove, name)
        except FileBeingWrittenError as error:
            self._postpone(record, before, error)
        except HookError as error:
            self._refuse(record, error, old)
            if is_loaded or isinstance(error.__cause__, OSError):
                self._retry_later(record, before)
        except Exception as error:  # noqa: BLE001 - other hooks, and the former version of this one, continue
            cause = f"{type(error).__name__}: {error}"
            self._refuse(record, HookError(f"cannot bring hook {candidate.path} into use: {cause}"), old)
            self._retry_later(record, before)
        else:
            record.state, record.error = HookFileState.DISABLED if new is None else HookFileState.RUNNING, ""
            self._end_problems(name)
            if new is not old:
                await self._use_version(name, new)

    async def _forget(self, name: str) -> None:
        """Shut down a hook whose file was removed."""
        del self._records[name]
        self._end_problems(name)
        await self._use_version(name, None)

    def _end_problems(self, name: str) -> None:
        """Report that a file's failures to load are over; the same failure is reported again if it recurs."""
        for message in (_CANNOT_LOAD, _CANNOT_REPLACE):
            self._report_resolved(message, hook=name)
        self._reported = {entry for entry in self._reported if entry[:2] != (_CANNOT_LOAD, name)}

    async def _use_version(self, name: str, new: Version | None) -> None:
        """Use another version of a hook, or none, and shut the previous version down."""
        old = self._in_use.pop(name, None)
        if new is not None:
            self._in_use[name] = new
            new.loaded.show_lines()
            self._report_success("hook loaded", hook=name, path=new.loaded.hook.source)
        elif old is not None:
            self._report_success("hook unloaded", hook=name)
        self._engine.use([self._in_use[name].loaded.hook for name in sorted(self._in_use)])
        if old is not None:
            await self._handover.shut_down(old, "removed" if new is None else "replaced")

    def _postpone(
        self, record: _FileRecord, before: _FileRecord | None, error: FileBeingWrittenError
    ) -> None:
        """Retry later: the file is being written."""
        now = self._clock()
        record.changing_since = (
            now if before is None or before.changing_since is None else before.changing_since
        )
        if now - record.changing_since > REPORT_AFTER_S:
            what = "hook server" if record.candidate.server else "hook"
            record.error = f"cannot read {what} {record.candidate.path}: {error}"
            self._report_once(_CANNOT_LOAD, record.candidate.name, record.error)

    def _retry_later(self, record: _FileRecord, before: _FileRecord | None) -> None:
        """Retry later: the file may be valid by then."""
        same = before is not None and before.candidate.signature == record.candidate.signature
        record.failures = 1 + (before.failures if before is not None and same else 0)
        record.retry_at = self._clock() + RETRY_DELAYS.delay(record.failures)

    def _refuse(self, record: _FileRecord, error: HookError, old: Version | None) -> None:
        """Record that a file cannot be used."""
        record.error = str(error)
        if not isinstance(error, CrashingHookError):
            self._worker.start(self._marks.remove, record.candidate.name)
        if old is not None:
            record.state = HookFileState.OLD
            self._report_problem(_CANNOT_REPLACE, hook=record.candidate.name, err=error)
            return
        record.state = HookFileState.UNTRUSTED if isinstance(error, UntrustedError) else HookFileState.BROKEN
        self._report_problem(_CANNOT_LOAD, hook=record.candidate.name, err=error)

    def _entry(self, name: str, record: _FileRecord) -> HookFileEntry:
        candidate, used = record.candidate, self._in_use.get(name)
        if used is None:
            return HookFileEntry(
                name, str(candidate.path), record.state, record.error, server=candidate.server
            )
        hook = used.loaded.hook
        return HookFileEntry(
            name,
            str(candidate.path),
            record.state,
            record.error,
            tuple(sorted(hook.handlers)),
            str(hook.policy),
            hook.timeout,
            candidate.server,
        )

    def _check_settings(self, found: HookFileScan) -> None:
        """Report settings that no hook reads."""
        if found.unreadable:
            return
        for name, settings in self._config.settings.items():
            candidate = found.candidates.get(name)
            if candidate is None:
                hint = suggestion(name, found.candidates)
                self._report_once(
                    "unused settings of a hook", name, f"hooks.settings.{name}: there is no such hook{hint}"
                )
            elif candidate.server and settings.config is not None:
                why = f"hooks.settings.{name}.config: it is a server, which is configured elsewhere"
                self._report_once("unused settings of a hook", name, why)

    def _report_once(self, message: str, hook: str | None, why: str) -> None:
        if (message, hook, why) not in self._reported and len(self._reported) < 1000:
            self._reported.add((message, hook, why))
            self._report_problem(message, hook=hook, err=why)
