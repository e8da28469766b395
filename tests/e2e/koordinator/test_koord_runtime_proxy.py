"""Koordinator's runtime proxy calls the daemon as a hook server: its containers get the daemon's CPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cri import RUNNING, RpcError, code, online
from daemon import DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from peers import RuntimeProxy

pytestmark = pytest.mark.e2e

LAST = CpuSet([max(online())])
REST = online() - LAST


def config_of(cri: Any, container: str) -> Any:
    """Return the config in the runtime's record of the create request."""
    return json.loads(cri.status(container, verbose=True).info["info"])["config"]


def test_containers_of_every_class_have_their_cpus(start_node: Callable[..., ModeledNode]) -> None:
    # With two CPUs the second owner needs the only CPU that the pod of the first one does not hold.
    node = start_node(admission={"sharedFloor": 0, "sharedFloorPerNUMANode": 0})
    for kind in ("ls", "be", "burstable", "besteffort", "part"):
        node.spawn(kind)
    node.wait_until_settled()
    lse = node.spawn("lse", LAST)
    node.check()  # no wait: the other containers left the CPU before the create
    node.remove(lse)
    node.wait_until_settled()
    node.spawn("whole")
    node.check()
    assert [c["container"] for c in node.daemon.status()["exclusive"]] == ["main"]


def test_a_create_through_the_peer_is_placed_and_not_adopted(start_node: Callable[..., ModeledNode]) -> None:
    node = start_node()
    ls, lse = node.spawn("ls"), node.spawn("lse", LAST)
    node.daemon.wait_for_reconciles()
    counters = node.daemon.status()["counters"]
    assert counters.get("creates_placed") == 2
    assert counters.get("adopted", 0) == 0
    assert counters.get("creates_failed", 0) == 0
    assert {c.id for c in node.cri.list()} == {ls, lse}
    assert counters["hook_questions"] >= 8


def test_a_rejection_reaches_the_client_of_the_peer(start_node: Callable[..., ModeledNode]) -> None:
    node = start_node()
    node.spawn("lse", LAST)
    pod = node.pod("lse", LAST)
    with pytest.raises(RpcError) as refused:
        node.create(pod)
    message = str(refused.value)
    assert "hook server err" in message  # the peer's prefix of the daemon's message
    assert "FailedPrecondition" in message
    assert f"CPU {LAST}" in message or f"CPUs {LAST}" in message
    assert code(refused.value) is grpc.StatusCode.UNKNOWN  # the peer does not forward the code


def test_an_update_through_the_peer_keeps_the_daemons_cpus(start_node: Callable[..., ModeledNode]) -> None:
    node = start_node()
    ls, lse = node.spawn("ls"), node.spawn("lse", LAST)
    for container in (ls, lse):
        node.cri.update(container, cpuset_cpus=str(online()), cpu_shares=777)
        node.check()
        assert config_of(node.cri, container)["linux"]["resources"]["cpu_shares"] in (777, 512, 1024)
    node.remove(lse)
    node.wait_until_settled()
    node.cri.update(ls, cpu_shares=778)  # the peer adds an outdated cpuset from its cache
    node.wait_until_settled()


def test_a_create_through_both_programs_changes_nothing_else(
    start_node: Callable[..., ModeledNode], runtime: PrivateRuntime
) -> None:
    """A request through both programs differs from a direct request only in the cpuset."""
    node = start_node()
    fields = {
        "cpu_period": 100_000,
        "cpu_quota": 50_000,
        "cpu_shares": 333,
        "memory_limit_in_bytes": 64 << 20,
        "memory_swap_limit_in_bytes": 64 << 20,
        "oom_score_adj": 900,
    }
    found = []
    with runtime.client() as direct:
        for cri in (node.cri, direct):
            labels = {"koordinator.sh/qosClass": "LS"}
            pod = cri.run_pod(f"pod-{len(found)}", uid="u", labels=labels, annotations={"a": "b"})
            request = cri.create_request(pod, **fields)
            for number in range(20):
                request.config.envs.add(key=f"KEY_{number}", value=f"value={number}".encode())
            request.config.annotations["x.y/z"] = "kept"
            container = cri.method("CreateContainer")(request, timeout=30).container_id
            found.append(config_of(direct, container))
    ours, plain = found
    assert ours["linux"]["resources"].pop("cpuset_cpus") == str(online())
    assert ours["linux"]["resources"].pop("cpuset_mems")
    envs = [sorted((e["key"], e["value"]) for e in each.pop("envs")) for each in found]
    assert envs[0] == envs[1]  # the peer loses their order
    assert ours == plain


def test_the_peer_rejects_creates_while_the_daemon_is_stopped(start_node: Callable[..., ModeledNode]) -> None:
    node = start_node()
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

    wait_for("the peer to reach the daemon again", created, limit=30, pause=0.5)
    node.check()


def test_containers_from_before_a_restart_of_the_peer_keep_their_cpus(
    start_node: Callable[..., ModeledNode],
    make_runtime_proxy: Callable[..., RuntimeProxy],
    runtime: PrivateRuntime,
    tmp_path: Path,
) -> None:
    """A restarted peer has lost its cached resources; the daemon's CPUs do not depend on that cache."""
    node = start_node()
    ls = node.spawn("ls")
    waiting = node.create(node.pod("ls"))
    lse = node.spawn("lse", LAST)
    node.check()
    again = make_runtime_proxy(directory="koord-again")
    for file in (tmp_path / "koord/hookserver.d").iterdir():
        (again.servers / file.name).write_text(file.read_text())
    again.start(runtime.cgroup)
    with again.client(runtime.cgroup) as cri:
        other = ModeledNode(runtime, node.daemon, cri, node.containers, node._pods)
        cri.adopt(node.cri)
        other.start(waiting)
        node.check()
        # The peer now forwards the client's update unchanged; the daemon soon restores its cpuset.
        cri.update(ls, cpuset_cpus=str(online()))
        node.wait_until_settled()
        other.remove(lse)
        node.wait_until_settled()


def test_a_create_seen_as_hook_and_as_call_is_placed_once(
    start_node: Callable[..., ModeledNode],
    start_serving_daemon: Callable[..., DaemonProcess],
    runtime: PrivateRuntime,
) -> None:
    """The peer's runtime is the daemon's socket, so the daemon sees each create twice."""
    daemon = start_serving_daemon()
    node = start_node(daemon, daemon.socket)
    node.spawn("ls")
    lse = node.spawn("lse", LAST)
    node.check()
    node.daemon.wait_for_reconciles()
    status = daemon.status()
    assert status["counters"].get("creates_placed") == 2
    assert [(c["pod"], c["cpus"]) for c in status["exclusive"]] == [("default/lse-1", str(LAST))]
    node.remove(lse)
    node.wait_until_settled()
    whole = node.spawn("whole")
    node.check()
    node.remove(whole)
    node.wait_until_settled()
