"""Exits of containers without a call, on a real containerd: its events release the CPUs, not a reconcile.

The daemon reconciles once an hour here, so it learns of an exit only from an event, or from the reconcile
after a lost event stream. The tests print how long it took (``pytest -s``), and check that an event was the
cause.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from cri import CREATED, EXITED, RUNNING, UNTIL_PROCEED, cgroup_of, cpuset_of, online
from crio import DIRECTORY as CRIO
from daemon import MIB, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

needs_events = pytest.mark.skipif(bool(CRIO), reason="CRI-O has no such events")
pytestmark = [pytest.mark.e2e, needs_events]

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 30


def wait_until_subscribed(node: ModeledNode) -> dict[str, int]:
    """Wait until the daemon receives events and its counters are stable; returns the counters."""

    def steady() -> bool:
        before = node.daemon.status()
        time.sleep(1)
        after = node.daemon.status()
        is_connected = after["runtime"]["events"] == "connected"
        return is_connected and before["counters"] == after["counters"]

    wait_for("the daemon to receive events", steady, LIMIT_S)
    counters: dict[str, int] = node.daemon.status()["counters"]
    return counters


def init_of(container: str) -> int:
    directory = cgroup_of(container)
    assert directory is not None
    return int((directory / "cgroup.procs").read_text().split()[0])


def wait_for_all_cpus(sharer: str) -> float:
    """Wait until a sharer has all CPUs again; returns the time of day."""
    wait_for("the CPUs to be released", lambda: cpuset_of(sharer).cpus == ALL, LIMIT_S, pause=0.002)
    return time.time()


ENDS = {
    "by itself": UNTIL_PROCEED,
    "by a signal": "sleep 3600",
    # tail reads /dev/zero into memory until the OOM killer ends it.
    "by its memory": f"{UNTIL_PROCEED}; exec tail /dev/zero",
}


@pytest.mark.parametrize("how", ENDS)
def test_an_exit_event_releases_the_cpus(calm_node: ModeledNode, how: str) -> None:
    node = calm_node
    sharer, pod = node.spawn("ls"), node.pod("lse", LAST)
    owner = node.run(pod, command=["sh", "-c", ENDS[how]], memory_limit_in_bytes=16 * MIB)
    assert cpuset_of(sharer).cpus == REST
    before = wait_until_subscribed(node)
    if how == "by a signal":
        os.kill(init_of(owner), signal.SIGKILL)
    else:
        node.cri.proceed(owner)
    end = wait_for_all_cpus(sharer)
    wait_for("the runtime to report the exit", lambda: node.cri.status(owner).status.state == EXITED, LIMIT_S)
    status = node.cri.status(owner).status
    print(f"{how}: CPUs released {(end - status.finished_at / 1e9) * 1000:.0f} ms after the exit")
    after = node.daemon.status()
    assert after["counters"]["exits_by_event"] - before.get("exits_by_event", 0) == 1
    assert (owner, "exited") in {(c["id"], c["phase"]) for c in after["containers"]}
    del node.containers[owner]
    node.wait_until_settled(limit=LIMIT_S)
    if how == "by its memory":
        assert status.exit_code == 137


def test_remaining_processes_of_an_exited_owner_are_killed(calm_node: ModeledNode) -> None:
    """All processes of a container end with its first one: none stays on the released CPUs."""
    node = calm_node
    sharer = node.spawn("ls")
    owner = node.run(node.pod("lse", LAST), command=["sh", "-c", "sleep 3600 & sleep 3600 & sleep 3600"])
    wait_until_subscribed(node)
    directory = cgroup_of(owner)
    assert directory is not None
    pids = (directory / "cgroup.procs").read_text().split()
    assert len(pids) > 1
    os.kill(int(pids[0]), signal.SIGKILL)
    wait_for_all_cpus(sharer)
    wait_for("its processes to be gone", lambda: not [pid for pid in pids if alive(pid)], LIMIT_S)


def alive(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_exit_of_an_exec_is_not_counted_as_an_exit_of_its_container(calm_node: ModeledNode) -> None:
    node = calm_node
    owner = node.spawn("lse", LAST)
    sharer = node.spawn("ls")
    before = wait_until_subscribed(node)
    for _ in range(3):
        node.cri.execute(owner, "true")
    ended = node.run(node.pod("be"), command=["true"])  # its exit event follows those of the three execs
    del node.containers[ended]
    wait_for(
        "the exit of the last container",
        lambda: node.daemon.status()["counters"].get("exits_by_event", 0) > before.get("exits_by_event", 0),
        LIMIT_S,
    )
    assert node.daemon.status()["counters"]["exits_by_event"] - before.get("exits_by_event", 0) == 1
    assert cpuset_of(sharer).cpus == REST
    node.wait_until_settled(limit=LIMIT_S)


def test_a_container_that_exits_at_once_releases_its_cpus(calm_node: ModeledNode) -> None:
    """The exit event of a container may arrive before the response to its start."""
    node = calm_node
    sharer = node.spawn("ls")
    wait_until_subscribed(node)
    for round_ in range(5):
        owner = node.run(node.pod("lsr", LAST, name=f"short-{round_}"), command=["true"])
        del node.containers[owner]
        wait_for_all_cpus(sharer)
        # The runtime updates its state after it sends the event: it may still report the container as
        # running.
        wait_for(
            "the runtime to report the exit",
            lambda owner=owner: node.cri.status(owner).status.state == EXITED,  # type: ignore[misc]
            LIMIT_S,
        )
        node.cri.remove(owner)
    assert node.daemon.status()["violations"] == []
    node.wait_until_settled(limit=LIMIT_S)


def test_an_exit_while_the_runtime_is_down_is_found_after_its_restart(
    calm_node: ModeledNode, runtime: PrivateRuntime
) -> None:
    node = calm_node
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    before = wait_until_subscribed(node)
    pid = init_of(owner)
    runtime.kill9()
    os.kill(pid, signal.SIGKILL)
    wait_for("the process to end", lambda: not alive(str(pid)), LIMIT_S)
    try:
        wait_for(
            "the status to report the lost stream",
            lambda: node.daemon.status()["runtime"]["events"] == "waiting",
        )
        assert cpuset_of(sharer).cpus == REST
    finally:
        runtime.restart()
    began = time.time()
    print(
        f"CPUs released {(wait_for_all_cpus(sharer) - began) * 1000:.0f} ms after the runtime answered again"
    )
    del node.containers[owner]
    wait_for("the daemon to receive events", lambda: node.daemon.status()["runtime"]["events"] == "connected")
    after = node.daemon.status()["counters"]
    assert after["event_streams"] > before["event_streams"]
    node.wait_until_settled(limit=LIMIT_S)


def test_creates_and_removals_that_bypass_the_daemon_are_found_by_events(calm_node: ModeledNode) -> None:
    """Calls at the runtime's own socket are seen through its events."""
    node = calm_node
    wait_until_subscribed(node)
    pod = node.pod("lse", LAST)
    with node.runtime.client() as direct:
        direct.adopt(node.cri)
        unknown = direct.run(pod, "stranger", cpuset_cpus=str(LAST))
        wait_for("the container to be adopted", lambda: unknown in phases(node), LIMIT_S)
        assert phases(node)[unknown] == "running"
        waiting = node.create(pod, "waiting")
        assert direct.status(waiting).status.state == CREATED
        assert direct.status(unknown).status.state == RUNNING
        direct.remove(waiting)
        del node.containers[waiting]
        wait_for("the container to be forgotten", lambda: waiting not in phases(node), LIMIT_S)
        direct.stop(unknown)
        wait_for("the exit to be known", lambda: phases(node).get(unknown) == "exited", LIMIT_S)


def phases(node: ModeledNode) -> dict[str, str]:
    return {c["id"]: c["phase"] for c in node.daemon.status()["containers"]}


def test_simultaneous_exits_are_all_counted(calm_node: ModeledNode) -> None:
    node = calm_node
    sharers = [node.spawn("ls"), node.spawn("be")]
    pod = node.pod("lse", LAST)
    owners = [node.run(pod, f"c{i}") for i in range(8)]
    before = wait_until_subscribed(node)
    pids = [init_of(owner) for owner in owners]
    killers = [threading.Thread(target=os.kill, args=(pid, signal.SIGKILL)) for pid in pids]
    for killer in killers:
        killer.start()
    for sharer in sharers:
        wait_for_all_cpus(sharer)
    for killer in killers:
        killer.join()
    after = node.daemon.status()["counters"]
    assert after["exits_by_event"] - before.get("exits_by_event", 0) == len(owners)
