"""The release without a daemon: the same steps, from the ledger, the kernel and the runtime.

The lock of the state directory keeps a daemon from starting during the release, and the release from running
next to a daemon. The ledger is reconciled with the runtime, as at a daemon's start. If the runtime does not
answer, the kernel's values are restored anyway, and the remaining work is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from proxy.assembly import executor_of, suppression_of
from proxy.backends.ledger import open_ledger
from proxy.backends.ledger.file_ledger import LEDGER_FILE
from proxy.config.schema import BeSuppressConfig, Config
from proxy.engine.suppression import SUPPRESSION_RECORD
from proxy.logs import telemetry
from proxy.model.errors import InputError, LockedError, PermissionDeniedError
from proxy.model.mode import NodeMode
from proxy.release.on_demand import RELEASE_RECORD
from proxy.release.service import RELEASED, Release
from proxy.sockets.instance_lock import InstanceLock
from proxy.topology.reader import read_machine

POLL_S = 0.2
NOT_RELEASED = "cannot undo the release: the node is not released"

Page = dict[str, object]


def release(config: Config, limit: float, report_progress: Callable[[Page], None]) -> Page:
    """Restore everything.

    Args:
        config: The paths.
        limit: Seconds after which it ends, even if it is not complete.
        report_progress: Takes progress messages.

    Returns:
        The same page as a daemon's answer to ``/release``.

    Raises:
        TopoproxyError: A daemon runs, or the state, the machine or its cgroups cannot be read.
    """
    if not _has_ledger(config):
        return {"stage": "", "nothing": f"there is nothing to release: {config.state_dir} has no ledger"}
    with _locked(config):
        return asyncio.run(_release(config, limit, report_progress))


def undo(config: Config) -> Page:
    """Let the next daemon place containers again.

    Raises:
        InputError: The node is not released.
        TopoproxyError: A daemon runs, or the state cannot be written.
    """
    if not _has_ledger(config):
        raise InputError(NOT_RELEASED)
    with _locked(config):
        machine = read_machine(config.sysfs_root, config.procfs_root)
        ledger, _ = open_ledger(config.state_dir, machine.fingerprint)
        try:
            if RELEASE_RECORD not in ledger.entries:
                raise InputError(NOT_RELEASED)
            ledger.write({RELEASE_RECORD: None})
        finally:
            ledger.close()
    return {"stage": ""}


def _has_ledger(config: Config) -> bool:
    try:
        (config.state_dir / LEDGER_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise PermissionDeniedError(
            f"cannot use the state directory {config.state_dir}: {error.strerror}"
        ) from error
    return True


@contextlib.contextmanager
def _locked(config: Config) -> Iterator[None]:
    try:
        lock = InstanceLock.acquire(config.state_dir / "lock", f"use the state directory {config.state_dir}")
    except LockedError as error:
        raise LockedError(f"{error} (without --offline, the command goes to the running daemon)") from None
    try:
        yield
    finally:
        lock.release()


async def _release(config: Config, limit: float, report_progress: Callable[[Page], None]) -> Page:
    machine = read_machine(config.sysfs_root, config.procfs_root)
    # Ignore today's mode: the ledger is from a time when containers were moved.
    config = dataclasses.replace(config, mode=NodeMode.ENFORCE, be_suppress=BeSuppressConfig())
    ledger, notes = open_ledger(config.state_dir, machine.fingerprint)
    entries = dict(ledger.entries)
    executor = executor_of(config, machine, None, ledger, entries, reread=False, telemetry=telemetry())
    for note in notes:
        executor.telemetry.problem("notice at start-up", reason=note)
    suppression = suppression_of(config, executor, entries.get(SUPPRESSION_RECORD))
    reconciler = executor.reconciler
    executor.recovery.recover(entries)
    release = Release(executor, lambda: suppression is None or not suppression.known.written)
    comparing: asyncio.Task[None] | None = None
    try:
        await release.begin()
        comparing = asyncio.get_running_loop().create_task(reconciler.run())
        if suppression is not None:
            await suppression.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while release.stage != RELEASED:
                    report_progress(release.page())
                    await asyncio.sleep(POLL_S)
        return release.page()
    finally:
        await release.stop()
        if comparing is not None:
            comparing.cancel()
            await asyncio.gather(comparing, return_exceptions=True)
        await executor.close()
        reconciler.close()
        executor.call_tracker.close()
        executor.runtime_sync.close()
        release.close()
        if suppression is not None:
            suppression.close()
        executor.runtime.close()
        ledger.close()
