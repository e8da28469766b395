"""The daemon in namespaces, as in a container: the host's cgroups are mounted at another path.

The root of its cgroup namespace is a cgroup at the third level. ``/sys/fs/cgroup`` shows only that cgroup;
the host's hierarchies and ``/proc`` are mounted below another directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import daemon as daemons
import pytest
from cri import cgroup_of, cpuset_root, is_v2, online
from daemon import DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(is_v2(), reason="processes are moved on v1 only"),
]

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST

CONTAINED = """#!/bin/sh
# The program in namespaces of its own where it serves; else as it is.
[ "$1" = serve ] || exec {program} "$@"
echo $$ >{group}/cgroup.procs
exec unshare --cgroup --mount --propagation private sh -e -c '
mount --rbind /sys/fs/cgroup {host}/cgroup
mount --rbind /proc {host}/proc
umount -l /sys/fs/cgroup
mount -t tmpfs none /sys/fs/cgroup
mkdir /sys/fs/cgroup/cpuset
mount -t cgroup -o cpuset none /sys/fs/cgroup/cpuset
exec {program} "$@"' sh "$@"
"""


def make_cgroup(group: Path) -> Path:
    """Create a cgroup with the cpuset of its parent."""
    group.mkdir()
    for file in ("cpuset.cpus", "cpuset.mems"):
        (group / file).write_text((group.parent / file).read_text())
    return group


@pytest.fixture
def groups(runtime: PrivateRuntime) -> Iterator[list[Path]]:
    """The cgroups of a test, the outermost first; they are removed after it."""
    made = [make_cgroup(cpuset_root() / f"{runtime.cgroup.lstrip('/')}-contained")]
    yield made
    for group in reversed(made):
        if group.is_dir():
            wait_for(f"{group} to be empty", lambda group=group: group.rmdir() or True)


@pytest.fixture
def contained_daemon(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    groups: list[Path],
    start_daemon: Callable[..., DaemonProcess],
) -> DaemonProcess:
    """A daemon in its own namespaces."""
    for name in ("a", "b"):
        groups.append(make_cgroup(groups[-1] / name))
    for name in ("cgroup", "proc"):
        (tmp_path / "host" / name).mkdir(parents=True)
    wrapper = tmp_path / "contained"
    program = daemons.PROGRAM
    wrapper.write_text(CONTAINED.format(program=program, group=groups[-1], host=tmp_path / "host"))
    wrapper.chmod(0o755)
    monkeypatch.setattr(daemons, "PROGRAM", wrapper)
    return start_daemon(cgroupRoot=str(tmp_path / "host/cgroup"), procfsRoot=str(tmp_path / "host/proc"))


def where(pid: int) -> str:
    """Return the cgroup of a process, as seen from the host."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "cpuset")


def test_a_daemon_in_namespaces_finds_and_moves_containers(
    runtime: PrivateRuntime, contained_daemon: DaemonProcess, groups: list[Path]
) -> None:
    assert where(contained_daemon.pid) == f"/{groups[-1].relative_to(cpuset_root())}"
    own_view = Path(f"/proc/{contained_daemon.pid}/root/sys/fs/cgroup/cpuset")
    assert not (own_view / runtime.cgroup.lstrip("/")).exists(), (
        "the host's cgroups are only visible at the other path"
    )
    with contained_daemon.client() as client:
        node = ModeledNode(runtime, contained_daemon, client)
        shared = node.spawn("ls")
        lse = node.spawn("lse", LAST)
        node.check()
        node.remove(lse)
        node.wait_until_settled()

        # Now a cgroup with an unusual name: /proc/PID/cgroup shows it relative to the daemon's namespace.
        group = cgroup_of(shared)
        assert group is not None
        groups.append(make_cgroup(cpuset_root() / runtime.cgroup.lstrip("/") / "odd"))
        groups.append(make_cgroup(groups[-1] / shared))
        (pid,) = (group / "cgroup.procs").read_text().split()
        (groups[-1] / "cgroup.procs").write_text(pid)
        group.rmdir()
        wait_for(
            "the cgroup to be found",
            lambda: contained_daemon.status()["counters"].get("cgroups_located") == 1,
        )
        node.spawn("lse", LAST)
        assert CpuSet.parse((groups[-1] / "cpuset.cpus").read_text()) == REST
        problems = [problem["what"] for problem in contained_daemon.status()["problems"]]
        assert not [what for what in problems if "cannot find" in what], problems
        make_cgroup(group)  # the runtime expects this cgroup
        (group / "cgroup.procs").write_text(pid)
    runtime.clear()
