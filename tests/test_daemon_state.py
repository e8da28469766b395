"""A daemon whose state directory is on a disk without writes: the node keeps working."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.ledger import open_ledger, read_entries
from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.model.errors import CannotCreateError, LockedError
from tests.testkit.daemon import MACHINE, DaemonNode, run, temporary_node

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """The disk below one directory, which may refuse all writes."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.state = directory / "state"
        self.refusal = 0
        self._open, self._mkdir = os.open, Path.mkdir
        patch.setattr(os, "open", self.open)
        patch.setattr(Path, "mkdir", lambda path, *more, **named: self.mkdir(path, *more, **named))

    def _look(self, path: Any, writes: bool) -> None:
        if self.refusal and writes and Path(path).is_relative_to(self.state):
            raise OSError(self.refusal, os.strerror(self.refusal), str(path))

    def open(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        self._look(path, bool(flags & WRITES))
        return self._open(path, flags, *more, **named)

    def mkdir(self, path: Path, *more: Any, **named: Any) -> None:
        self._look(path, not path.is_dir())
        self._mkdir(path, *more, **named)


@pytest.fixture
def node() -> Iterator[DaemonNode]:
    with temporary_node() as made:
        yield made


@pytest.fixture
def disk(node: DaemonNode, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(node.directory, monkeypatch)


def owned(daemon: Daemon) -> set[str]:
    assert daemon.executor is not None
    return {str(owner.cpus) for owner in daemon.executor.state.owners.values()}


def reported(daemon: Daemon) -> list[str]:
    assert daemon.executor is not None
    return [str(problem["what"]) for problem in daemon.executor.telemetry.problems()]


def test_the_ledger_on_a_read_only_disk_is_read(node: DaemonNode, disk: Disk) -> None:
    """The release of the node, which only the ledger records, is read too."""

    async def before() -> None:
        await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))

    run(node.daemon(), before, reconciled=True)
    ledger, _ = open_ledger(node.directory / "state", MACHINE.fingerprint)
    ledger.write({"x/known": {"n": 1}})
    ledger.close()
    disk.refusal = errno.EROFS
    assert read_entries(node.directory / "state", MACHINE.fingerprint)["x/known"] == {"n": 1}
    assert read_entries(node.directory / "state", "another machine") == {}
    daemon = node.daemon()

    async def after() -> None:
        assert owned(daemon) == {"2-3"}
        assert any("Read-only file system: placements are not kept" in what for what in reported(daemon))
        await node.launch(DemoPod("more", "LSE", cpuset="4-5"))
        assert owned(daemon) == {"2-3", "4-5"}
        with pytest.raises(LockedError, match="cannot use the state directory"):
            await node.daemon(name="other").start()

    run(daemon, after, reconciled=True)


def test_a_released_node_stays_released_on_a_read_only_disk(node: DaemonNode, disk: Disk) -> None:
    ledger, _ = open_ledger(node.directory / "state", MACHINE.fingerprint)
    ledger.write({"r/release": {"stage": "released", "since": 1.0}})
    ledger.close()
    (node.directory / "state/lock").touch()
    disk.refusal = errno.EROFS
    daemon = node.daemon()

    async def scenario() -> None:
        await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        assert owned(daemon) == set()
        assert daemon.parts.pages is not None
        assert daemon.parts.pages.status()["mode"] == "released"

    run(daemon, scenario, reconciled=True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("there", [True, False])
def test_a_daemon_starts_without_room_for_a_lock(
    node: DaemonNode, disk: Disk, number: int, there: bool
) -> None:
    if there:
        (node.directory / "state").mkdir()
    disk.refusal = number
    daemon = node.daemon()

    async def scenario() -> None:
        await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        assert owned(daemon) == {"2-3"}
        assert any(
            what.endswith('placements are not kept (a restart queries the runtime)"')
            for what in reported(daemon)
        )

    run(daemon, scenario, reconciled=True)


def test_a_state_path_that_cannot_be_a_directory_is_refused(node: DaemonNode) -> None:
    (node.directory / "state").write_text("a file")
    with pytest.raises(CannotCreateError, match="cannot make the state directory"):
        asyncio.run(node.daemon().start())
