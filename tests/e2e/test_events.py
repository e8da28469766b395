"""Ends without a call, on a real containerd: CPUs come back by its events, not by a comparison.

The daemon compares once an hour here, so nothing but an event, or the comparison that follows a lost stream,
can show it. How long it took is printed (``pytest -s``); what is asserted is that it came that way.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from bed import Bed, wait_for
from cri import CREATED, EXITED, RUNNING, UNTIL_PROCEED, cgroup_of, cpuset_of, online
from crio import DIRECTORY as CRIO
from daemon import MIB, Node

from proxy.model.idset import CpuSet

needs_events = pytest.mark.skipif(bool(CRIO), reason="CRI-O has no such events")
pytestmark = [pytest.mark.e2e, needs_events]

ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST
LIMIT_S = 30


def hears(node: Node) -> dict[str, int]:
    """Wait until the daemon listens and has compared what came before; gives its counters."""

    def steady() -> bool:
        before = node.daemon.status()
        time.sleep(1)
        after = node.daemon.status()
        listens = after["runtime"]["events"] == "connected"
        return listens and before["counters"] == after["counters"]

    wait_for("the daemon to listen", steady, LIMIT_S)
    counters: dict[str, int] = node.daemon.status()["counters"]
    return counters


def init_of(container: str) -> int:
    directory = cgroup_of(container)
    assert directory is not None
    return int((directory / "cgroup.procs").read_text().split()[0])


def back(sharer: str) -> float:
    """Wait until a sharer has all CPUs again; gives the time of day."""
    wait_for("the CPUs to be back", lambda: cpuset_of(sharer).cpus == ALL, LIMIT_S, pause=0.002)
    return time.time()


ENDS = {
    "by itself": UNTIL_PROCEED,
    "by a signal": "sleep 3600",
    # It reads all of /dev/zero into its memory.
    "by its memory": f"{UNTIL_PROCEED}; exec tail /dev/zero",
}


@pytest.mark.parametrize("how", ENDS)
def test_cpus_are_back_by_the_event(calm_node: Node, how: str) -> None:
    node = calm_node
    sharer, pod = node.spawn("ls"), node.pod("lse", LAST)
    owner = node.run(pod, command=["sh", "-c", ENDS[how]], memory_limit_in_bytes=16 * MIB)
    assert cpuset_of(sharer).cpus == REST
    before = hears(node)
    if how == "by a signal":
        os.kill(init_of(owner), signal.SIGKILL)
    else:
        node.cri.proceed(owner)
    end = back(sharer)
    wait_for("the runtime to say so", lambda: node.cri.status(owner).status.state == EXITED, LIMIT_S)
    status = node.cri.status(owner).status
    print(f"{how}: back {(end - status.finished_at / 1e9) * 1000:.0f} ms after the exit")
    after = node.daemon.status()
    assert after["counters"]["exits_by_event"] - before.get("exits_by_event", 0) == 1
    assert (owner, "exited") in {(c["id"], c["phase"]) for c in after["containers"]}
    del node.members[owner]
    node.settle(limit=LIMIT_S)
    if how == "by its memory":
        assert status.exit_code == 137


def test_the_runtime_kills_what_is_left(calm_node: Node) -> None:
    """A container's processes are killed with its first one: nothing stays on its CPUs when they are back."""
    node = calm_node
    sharer = node.spawn("ls")
    owner = node.run(node.pod("lse", LAST), command=["sh", "-c", "sleep 3600 & sleep 3600 & sleep 3600"])
    hears(node)
    directory = cgroup_of(owner)
    assert directory is not None
    pids = (directory / "cgroup.procs").read_text().split()
    assert len(pids) > 1
    os.kill(int(pids[0]), signal.SIGKILL)
    back(sharer)
    wait_for("its processes to be gone", lambda: not [pid for pid in pids if alive(pid)], LIMIT_S)


def alive(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_exec_that_ends_is_not_an_end(calm_node: Node) -> None:
    node = calm_node
    owner = node.spawn("lse", LAST)
    sharer = node.spawn("ls")
    before = hears(node)
    for _ in range(3):
        node.cri.execute(owner, "true")
    ended = node.run(node.pod("be"), command=["true"])  # its event comes after those of the three
    del node.members[ended]
    wait_for(
        "its end",
        lambda: node.daemon.status()["counters"].get("exits_by_event", 0) > before.get("exits_by_event", 0),
        LIMIT_S,
    )
    assert node.daemon.status()["counters"]["exits_by_event"] - before.get("exits_by_event", 0) == 1
    assert cpuset_of(sharer).cpus == REST
    node.settle(limit=LIMIT_S)


def test_a_container_that_ends_at_once_holds_nothing(calm_node: Node) -> None:
    """Its exit may come before the answer to its start."""
    node = calm_node
    sharer = node.spawn("ls")
    hears(node)
    for round_ in range(5):
        owner = node.run(node.pod("lsr", LAST, name=f"short-{round_}"), command=["true"])
        del node.members[owner]
        back(sharer)
        # The runtime's own books are behind its events: it may still call the container running.
        wait_for(
            "the runtime to see it",
            lambda owner=owner: node.cri.status(owner).status.state == EXITED,  # type: ignore[misc]
            LIMIT_S,
        )
        node.cri.remove(owner)
    assert node.daemon.status()["violations"] == []
    node.settle(limit=LIMIT_S)


def test_an_exit_while_the_runtime_was_away_is_found(calm_node: Node, bed: Bed) -> None:
    node = calm_node
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    before = hears(node)
    pid = init_of(owner)
    bed.kill9()
    os.kill(pid, signal.SIGKILL)
    wait_for("the end", lambda: not alive(str(pid)), LIMIT_S)
    try:
        wait_for("the status to say so", lambda: node.daemon.status()["runtime"]["events"] == "waiting")
        assert cpuset_of(sharer).cpus == REST
    finally:
        bed.restart()
    began = time.time()
    print(f"back {(back(sharer) - began) * 1000:.0f} ms after the runtime answered again")
    del node.members[owner]
    wait_for("the daemon to listen", lambda: node.daemon.status()["runtime"]["events"] == "connected")
    after = node.daemon.status()["counters"]
    assert after["event_streams"] > before["event_streams"]
    node.settle(limit=LIMIT_S)


def test_made_and_removed_behind_our_back(calm_node: Node) -> None:
    """What goes to the runtime directly is seen by its events too."""
    node = calm_node
    hears(node)
    pod = node.pod("lse", LAST)
    with node.bed.client() as direct:
        direct.adopt(node.cri)
        stranger = direct.run(pod, "stranger", cpuset_cpus=str(LAST))
        wait_for("it to be taken in", lambda: stranger in known(node), LIMIT_S)
        assert known(node)[stranger] == "running"
        waiting = node.create(pod, "waiting")
        assert direct.status(waiting).status.state == CREATED
        assert direct.status(stranger).status.state == RUNNING
        direct.remove(waiting)
        del node.members[waiting]
        wait_for("it to be forgotten", lambda: waiting not in known(node), LIMIT_S)
        direct.stop(stranger)
        wait_for("its end", lambda: known(node).get(stranger) == "exited", LIMIT_S)


def known(node: Node) -> dict[str, str]:
    return {c["id"]: c["phase"] for c in node.daemon.status()["containers"]}


def test_many_ends_at_once(calm_node: Node) -> None:
    node = calm_node
    sharers = [node.spawn("ls"), node.spawn("be")]
    pod = node.pod("lse", LAST)
    owners = [node.run(pod, f"c{i}") for i in range(8)]
    before = hears(node)
    pids = [init_of(owner) for owner in owners]
    killers = [threading.Thread(target=os.kill, args=(pid, signal.SIGKILL)) for pid in pids]
    for killer in killers:
        killer.start()
    for sharer in sharers:
        back(sharer)
    for killer in killers:
        killer.join()
    after = node.daemon.status()["counters"]
    assert after["exits_by_event"] - before.get("exits_by_event", 0) == len(owners)
