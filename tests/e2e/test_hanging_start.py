"""A start that hangs in a mount, on a real containerd, while owners of CPUs are created.

The source of the mount is a file system that stops answering for a while (``stalling``). At that time runc
has created the container's cgroup, and its init process waits in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cri import cgroup_of, cpuset_of, online
from crio import DIRECTORY as CRIO
from private_runtime import wait_for
from stalling_file_system import StallingFileSystem

from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from daemon import ModeledNode
    from private_runtime import PrivateRuntime

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(CRIO), reason="CRI-O makes groups with the create"),
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs /dev/fuse"),
]

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
CALL_TIMEOUT_S = 5.0
RECORD_CPUS = "grep Cpus_allowed_list /proc/self/status > /first; sleep 3600"
"""A program that writes its allowed CPUs into a file when it begins."""


@pytest.fixture
def stalling(runtime: PrivateRuntime, tmp_path: Path) -> Iterator[StallingFileSystem]:
    there = StallingFileSystem(runtime, tmp_path / "stalling")
    yield there
    there.close()


class HangingStart(threading.Thread):
    """A thread that starts a sharer with its own client; the start hangs until the mount's source answers."""

    def __init__(self, node: ModeledNode, stalling: StallingFileSystem) -> None:
        super().__init__()
        self.node = node
        mounts = {"/data": str(stalling.path)}
        self.container = node.create(node.pod("ls"), mounts=mounts, command=["sh", "-c", RECORD_CPUS])
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.node.daemon.client() as client:
                client.start(self.container)
        except BaseException as error:
            self.error = error

    def group(self) -> Path:
        """Wait until runc has created the cgroup and moved its init process into it; returns the cgroup."""

        def inside() -> bool:
            directory = cgroup_of(self.container)
            return directory is not None and bool((directory / "cgroup.procs").read_text().split())

        wait_for("the start to hang", inside)
        directory = cgroup_of(self.container)
        assert directory is not None
        return directory

    def began_on(self) -> str:
        """Return the CPUs on which the container's program was allowed to run when it began."""
        pid = int((self.group() / "cgroup.procs").read_text().split()[0])
        first = Path(f"/proc/{pid}/root/first")
        wait_for("the container's program to begin", lambda: first.read_text().endswith("\n"))
        return first.read_text().split()[-1]


def test_owners_are_created_while_a_start_hangs(calm_node: ModeledNode, stalling: StallingFileSystem) -> None:
    node = calm_node
    start = HangingStart(node, stalling)
    with stalling.stalled():
        start.start()
        group = start.group()
        assert CpuSet.parse((group / "cpuset.cpus").read_text().strip()) == ALL
        begun = time.monotonic()
        owner = node.spawn("lse", LAST)
        took = time.monotonic() - begun
        assert start.is_alive(), "the start must hang for all of this time"
        assert CpuSet.parse((group / "cpuset.cpus").read_text().strip()) == REST
    start.join()
    assert start.error is None
    assert took < CALL_TIMEOUT_S
    node.containers[start.container].running = True
    assert CpuSet.parse(start.began_on()) == REST
    node.wait_until_settled()
    counters = node.daemon.status()["counters"]
    assert counters["creates_past_calls"] == 1
    print(f"an owner was created and started in {took * 1000:.0f} ms beside a start that hung")
    node.remove(owner)
    node.wait_until_settled()


def test_an_owner_keeps_its_cpus_if_the_daemon_is_killed_during_a_hanging_start(
    node: ModeledNode, stalling: StallingFileSystem
) -> None:
    """The restarted daemon does not know of the start; the owner still has its CPUs exclusively."""
    start = HangingStart(node, stalling)
    with stalling.stalled():
        start.start()
        group = start.group()
        node.spawn("lse", LAST)
        node.daemon.kill9()
        start.join()  # its connection is lost
        assert start.error is not None
        node.daemon.start()
        node.daemon.wait_for_reconciles()
        assert CpuSet.parse((group / "cpuset.cpus").read_text().strip()) == REST
    with node.daemon.client() as client:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            found = cgroup_of(start.container)
            if found is not None and client.status(start.container).status.state == 1:
                assert cpuset_of(start.container).cpus == REST
            time.sleep(0.01)
    node.wait_until_settled()
