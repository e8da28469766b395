"""The daemon with the restrictions of ``systemd/topoproxy.service``, on a real runtime and real cgroups.

It has the capabilities of the unit, all file systems except its directory and the cgroups are read-only (like
ProtectSystem=strict and ProtectKernelTunables=), and it cannot gain privileges. Other restrictions of the
unit (system calls, namespaces) are not applied here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import daemon as daemons
import pytest
from cri import cgroup_of, cpuset_of, cpuset_root, is_v2, online
from daemon import DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed"),
]

SERVICE = Path(__file__).parents[2] / "systemd/topoproxy.service"
ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 60

HARDENED = """#!/bin/sh
# The program as the unit has it where it serves; else as it is.
[ "$1" = serve ] || exec {program} "$@"
exec unshare --mount --propagation private sh -e -c '
mount --bind {directory} {directory}
mount -o remount,bind,ro /sys
while read -r _ at _; do
    case $at in
        /dev|/dev/*|/proc|/proc/*|/sys|/sys/*|{directory}) ;;
        *) mount -o remount,bind,ro "$at" 2>/dev/null || : ;;
    esac
done </proc/self/mounts
exec setpriv --no-new-privs --bounding-set={capabilities} --inh-caps=-all {program} "$@"' sh "$@"
"""


def capabilities() -> str:
    """Return the capabilities of the unit in the syntax of setpriv."""
    (found,) = re.findall(r"^CapabilityBoundingSet=(.*)$", SERVICE.read_text(), re.MULTILINE)
    return ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in found.split())])


@pytest.fixture
def hardened_node(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    runtime: PrivateRuntime,
    start_daemon: Callable[..., DaemonProcess],
) -> Iterator[ModeledNode]:
    """A node whose daemon has the restrictions of the unit."""
    directory = tmp_path / "proxy"
    directory.mkdir()
    wrapper = tmp_path / "hardened"
    values = {"program": daemons.PROGRAM, "directory": directory, "capabilities": capabilities()}
    wrapper.write_text(HARDENED.format(**values))
    wrapper.chmod(0o755)
    monkeypatch.setattr(daemons, "PROGRAM", wrapper)
    daemon = start_daemon(directory)
    with daemon.client() as client:
        yield ModeledNode(runtime, daemon, client)
    runtime.clear()


def test_the_daemon_is_confined(hardened_node: ModeledNode) -> None:
    """The other tests depend on this."""
    root = Path(f"/proc/{hardened_node.daemon.pid}")
    status = (root / "status").read_text()
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    mounts = [line.split() for line in (root / "mounts").read_text().splitlines()]
    flags = {at: options.split(",")[0] for _, at, _, options, *_ in mounts}
    assert flags["/"] == flags["/sys"] == "ro"
    assert flags[str(hardened_node.daemon.directory)] == "rw"
    held = int(re.findall(r"^CapPrm:\s+(\w+)$", status, re.MULTILINE)[0], 16)
    assert held.bit_count() == len(capabilities().split(",")) - 1


def test_a_confined_daemon_places_watches_and_releases_containers(hardened_node: ModeledNode) -> None:
    node, daemon = hardened_node, hardened_node.daemon
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    node.check()
    if not is_v2():
        own = cgroup_of(owner, cpuset_root().with_name("cpu"))
        assert own is not None
        quota = own / "cpu.cfs_quota_us"
        wait_for("the owner's quota to be off", lambda: quota.read_text().strip() == "-1", LIMIT_S)
    wait_for("writes to be watched", lambda: daemon.status()["drift"]["watched"] == 2, LIMIT_S)
    wait_for(
        "the event stream",
        lambda: daemon.status()["runtime"]["events"] in ("connected", "not offered"),
        LIMIT_S,
    )
    group = cgroup_of(sharer)
    assert group is not None
    (group / "cpuset.cpus").write_text(str(ALL))
    wait_for("the cpuset to be repaired", lambda: cpuset_of(sharer).cpus == REST, LIMIT_S)
    wait_for("the repair to be counted", lambda: sum(daemon.status()["drift"]["by"].values()) == 1, LIMIT_S)
    assert daemon.status()["problems"] == []

    daemon.restart()
    wait_for("the daemon to be ready again", lambda: daemon.status()["ready"], LIMIT_S)
    with daemon.client() as client:
        client.adopt(node.cri)
        node.cri = client
        assert [entry["cpus"] for entry in daemon.status()["exclusive"]] == [str(LAST)]
        node.check()
        node.remove(owner)
        node.wait_until_settled(LIMIT_S)
        status = daemon.status()
        assert status["problems"] == status["violations"] == []
        assert status["drift"]["not_watched"] == ""


@pytest.mark.skipif(is_v2(), reason="on cgroup v2 groups inside a container follow by themselves")
def test_groups_of_another_user_inside_a_container_are_narrowed(hardened_node: ModeledNode) -> None:
    """This needs CAP_DAC_OVERRIDE: without it root may not write a file that it does not own."""
    node = hardened_node
    sharer = node.spawn("ls")
    group = cgroup_of(sharer)
    assert group is not None
    inner = group / "inner"
    inner.mkdir()
    (inner / "cpuset.mems").write_text((group / "cpuset.mems").read_text())
    cpus = inner / "cpuset.cpus"
    cpus.write_text((group / "cpuset.cpus").read_text())
    for path in (inner, *inner.iterdir()):
        os.chown(path, 1234, 1234)
    node.spawn("lse", LAST)
    assert CpuSet.parse(cpus.read_text()) == REST
    node.check()
    assert node.daemon.status()["problems"] == []
