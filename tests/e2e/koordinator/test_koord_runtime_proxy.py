"""Koordinator's own runtime proxy asks us: containers that are made through it have our CPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from bed import Bed, wait_for
from cri import RUNNING, RpcError, code, online
from daemon import Daemon, Node

from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from peers import RuntimeProxy

pytestmark = pytest.mark.e2e

LAST = CpuSet([max(online())])
REST = online() - LAST


def config_of(cri: Any, container: str) -> Any:
    """What the runtime was requested, by its own account."""
    return json.loads(cri.status(container, verbose=True).info["info"])["config"]


def test_every_class_of_pods_is_where_it_belongs(through: Callable[..., Node]) -> None:
    # On a machine of two CPUs the last owner takes all that the pod of the one before has left.
    node = through(admission={"sharedFloor": 0, "sharedFloorPerNUMANode": 0})
    for kind in ("ls", "be", "burstable", "besteffort", "part"):
        node.spawn(kind)
    node.settle()
    lse = node.spawn("lse", LAST)
    node.check()  # at once: the others have left before it was made
    node.remove(lse)
    node.settle()
    node.spawn("whole")
    node.check()
    assert [c["container"] for c in node.daemon.status()["exclusive"]] == ["main"]


def test_a_container_is_found_as_one(through: Callable[..., Node]) -> None:
    node = through()
    ls, lse = node.spawn("ls"), node.spawn("lse", LAST)
    node.daemon.compared()
    counters = node.daemon.status()["counters"]
    assert counters.get("creates_placed") == 2
    assert counters.get("adopted", 0) == 0
    assert counters.get("creates_failed", 0) == 0
    assert {c.id for c in node.cri.list()} == {ls, lse}
    assert counters["hook_questions"] >= 8


def test_a_refusal_reaches_the_client(through: Callable[..., Node]) -> None:
    node = through()
    node.spawn("lse", LAST)
    pod = node.pod("lse", LAST)
    with pytest.raises(RpcError) as refused:
        node.create(pod)
    words = str(refused.value)
    assert "hook server err" in words  # the peer's own words around ours
    assert "FailedPrecondition" in words
    assert f"CPU {LAST}" in words or f"CPUs {LAST}" in words
    assert code(refused.value) is grpc.StatusCode.UNKNOWN  # it does not hand on the code


def test_an_update_keeps_our_cpus(through: Callable[..., Node]) -> None:
    node = through()
    ls, lse = node.spawn("ls"), node.spawn("lse", LAST)
    for container in (ls, lse):
        node.cri.update(container, cpuset_cpus=str(online()), cpu_shares=777)
        node.check()
        assert config_of(node.cri, container)["linux"]["resources"]["cpu_shares"] in (777, 512, 1024)
    node.remove(lse)
    node.settle()
    node.cri.update(ls, cpu_shares=778)  # the peer adds what it has cached: a set of before
    node.settle()


def test_nothing_else_is_changed(through: Callable[..., Node], bed: Bed) -> None:
    """What the runtime gets with both programs in the way is what it gets directly, but for what is ours."""
    node = through()
    fields = {
        "cpu_period": 100_000,
        "cpu_quota": 50_000,
        "cpu_shares": 333,
        "memory_limit_in_bytes": 64 << 20,
        "memory_swap_limit_in_bytes": 64 << 20,
        "oom_score_adj": 900,
    }
    found = []
    with bed.client() as direct:
        for cri in (node.cri, direct):
            labels = {"koordinator.sh/qosClass": "LS"}
            pod = cri.run_pod(f"pod-{len(found)}", uid="u", labels=labels, annotations={"a": "b"})
            asked = cri.create_request(pod, **fields)
            for number in range(20):
                asked.config.envs.add(key=f"KEY_{number}", value=f"value={number}".encode())
            asked.config.annotations["x.y/z"] = "kept"
            container = cri.method("CreateContainer")(asked, timeout=30).container_id
            found.append(config_of(direct, container))
    ours, plain = found
    assert ours["linux"]["resources"].pop("cpuset_cpus") == str(online())
    assert ours["linux"]["resources"].pop("cpuset_mems")
    envs = [sorted((e["key"], e["value"]) for e in each.pop("envs")) for each in found]
    assert envs[0] == envs[1]  # their order is lost in the peer
    assert ours == plain


def test_no_container_runs_while_the_daemon_is_away(through: Callable[..., Node]) -> None:
    node = through()
    ls = node.spawn("ls")
    pod, late = node.pod("lse", LAST), node.pod("ls")
    node.daemon.stop()
    with pytest.raises(RpcError, match="hook server err"):
        node.create(pod)
    with pytest.raises(RpcError, match="hook server err"):
        node.create(late)
    assert node.cri.status(ls).status.state == RUNNING
    node.daemon.start()

    def created() -> bool:
        node.run(pod)
        return True

    wait_for("the peer to find us again", created, limit=30, pause=0.5)
    node.check()


def test_what_was_made_before_the_peer_came_back(
    through: Callable[..., Node], peers: Callable[..., RuntimeProxy], bed: Bed, tmp_path: Path
) -> None:
    """The peer forgets resources with a restart, and ours do not depend on what it remembers."""
    node = through()
    ls = node.spawn("ls")
    waiting = node.create(node.pod("ls"))
    lse = node.spawn("lse", LAST)
    node.check()
    again = peers(directory="koord-again")
    for file in (tmp_path / "koord/hookserver.d").iterdir():
        (again.servers / file.name).write_text(file.read_text())
    again.start(bed.cgroup)
    with again.client(bed.cgroup) as cri:
        other = Node(bed, node.daemon, cri, node.members, node._pods)
        cri.adopt(node.cri)
        other.start(waiting)
        node.check()
        # It sends the client's update as it is now; the kernel has our set again within a moment.
        cri.update(ls, cpuset_cpus=str(online()))
        node.settle()
        other.remove(lse)
        node.settle()


def test_both_ways_at_once_are_one_placement(
    through: Callable[..., Node], serving: Callable[..., Daemon], bed: Bed
) -> None:
    """The peer's runtime is our socket: each create is seen twice."""
    daemon = serving()
    node = through(daemon, daemon.socket)
    node.spawn("ls")
    lse = node.spawn("lse", LAST)
    node.check()
    node.daemon.compared()
    status = daemon.status()
    assert status["counters"].get("creates_placed") == 2
    assert [(c["pod"], c["cpus"]) for c in status["exclusive"]] == [("default/lse-1", str(LAST))]
    node.remove(lse)
    node.settle()
    whole = node.spawn("whole")
    node.check()
    node.remove(whole)
    node.settle()
