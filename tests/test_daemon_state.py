"""A daemon whose state folder lies on a disk that takes nothing: the node goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.apply.folder import FolderCgroups
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.client import CriClient, PodSpec
from proxy.demo.runtime import StandInRuntime
from proxy.ledger import open_ledger, read_entries
from proxy.model.errors import CannotCreateError, LockedError
from proxy.topology.build import described

MACHINE = described(2, 1, 4, 2)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """The disk below one folder: it may refuse all that writes."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.state = folder / "state"
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
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp-") as name:
        yield Path(name)


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(folder, monkeypatch)


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Daemon]]:
    cgroups = FolderCgroups(folder / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1)
    runtime = StandInRuntime(folder / "runtime.sock", cgroups)
    runtime.start()

    def daemon(name: str = "cri") -> Daemon:
        text = f"""
listen: unix://{folder}/{name}.sock
adminSocket: unix://{folder}/{name}-admin.sock
runtime: unix://{folder}/runtime.sock
stateDir: {folder}/state
"""
        return Daemon(parse(text, "test"), machine=MACHINE, cgroups=cgroups)

    yield daemon
    runtime.stop()


def live(daemon: Daemon, day: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await daemon.start()
        try:
            assert daemon.keeper is not None
            await asyncio.wait_for(daemon.keeper.synced.wait(), 30)
            await day()
        finally:
            await daemon.stop()

    asyncio.run(whole())


async def launch(folder: Path, spec: PodSpec) -> None:
    def work() -> None:
        with CriClient(str(folder / "cri.sock")) as client:
            client.launch(spec)

    await asyncio.to_thread(work)


def owned(daemon: Daemon) -> set[str]:
    assert daemon.keeper is not None
    return {str(owner.cpus) for owner in daemon.keeper.state.owners.values()}


def told(daemon: Daemon) -> list[str]:
    assert daemon.keeper is not None
    return [str(problem["what"]) for problem in daemon.keeper.problems.page()]


def test_a_read_only_disk_is_read(folder: Path, disk: Disk, make: Callable[..., Daemon]) -> None:
    """Also that the node is released, which nobody but the ledger knows."""

    async def before() -> None:
        await launch(folder, PodSpec("lse", "LSE", cpuset="2-3"))

    live(make(), before)
    ledger, _ = open_ledger(folder / "state", MACHINE.fingerprint)
    ledger.write({"x/known": {"n": 1}})
    ledger.close()
    disk.refusal = errno.EROFS
    assert read_entries(folder / "state", MACHINE.fingerprint)["x/known"] == {"n": 1}
    assert read_entries(folder / "state", "another machine") == {}
    daemon = make()

    async def after() -> None:
        assert owned(daemon) == {"2-3"}
        assert any("Read-only file system: placements are not kept" in what for what in told(daemon))
        await launch(folder, PodSpec("more", "LSE", cpuset="4-5"))
        assert owned(daemon) == {"2-3", "4-5"}
        with pytest.raises(LockedError, match="cannot use the state folder"):
            await make("other").start()

    live(daemon, after)


def test_a_released_node_stays_released_on_a_read_only_disk(
    folder: Path, disk: Disk, make: Callable[..., Daemon]
) -> None:
    ledger, _ = open_ledger(folder / "state", MACHINE.fingerprint)
    ledger.write({"r/release": {"stage": "released", "since": 1.0}})
    ledger.close()
    (folder / "state/lock").touch()
    disk.refusal = errno.EROFS
    daemon = make()

    async def day() -> None:
        await launch(folder, PodSpec("lse", "LSE", cpuset="2-3"))
        assert owned(daemon) == set()
        assert daemon.pages is not None
        assert daemon.pages.status()["mode"] == "released"

    live(daemon, day)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("there", [True, False])
def test_no_room_for_a_lock(
    folder: Path, disk: Disk, make: Callable[..., Daemon], number: int, there: bool
) -> None:
    if there:
        (folder / "state").mkdir()
    disk.refusal = number
    daemon = make()

    async def day() -> None:
        await launch(folder, PodSpec("lse", "LSE", cpuset="2-3"))
        assert owned(daemon) == {"2-3"}
        assert any(
            what.endswith("placements are not kept (a restart asks the runtime)") for what in told(daemon)
        )

    live(daemon, day)


def test_a_folder_that_cannot_be_one_is_refused(folder: Path, make: Callable[..., Daemon]) -> None:
    (folder / "state").write_text("a file")
    with pytest.raises(CannotCreateError, match="cannot make the state folder"):
        asyncio.run(make().start())
