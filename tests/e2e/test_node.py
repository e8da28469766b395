"""The daemon in front of a real containerd: its placements are checked in the kernel.

The tests use the host's CPUs, and two are enough: owners get the last one, the rest is shared.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri import CREATED, EXITED, UNTIL_PROCEED, Cri, cgroup_of, code, cpuset_of, online
from daemon import KINDS, DaemonProcess, ModelContainer, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.admin.client import query_admin
from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

Status = grpc.StatusCode
ALL = online()
LAST = CpuSet([max(ALL)])
REST = ALL - LAST


def refused(call: Callable[[], object]) -> tuple[Status, str]:
    """Make a call that must fail; returns its status code and message."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return code(caught.value), caught.value.details()  # type: ignore[attr-defined]


def files(*containers: str) -> dict[str, str]:
    """Return the contents of the cpuset files of containers."""
    found = {}
    for container in containers:
        directory = cgroup_of(container)
        assert directory is not None
        for name in ("cpuset.cpus", "cpuset.mems"):
            found[f"{container}/{name}"] = (directory / name).read_text()
    return found


def controller(container: str, name: str) -> str:
    """Read a file of a container's cgroup in the hierarchy that has the file."""
    for root in Path("/sys/fs/cgroup").iterdir():
        if root.is_dir() and (directory := cgroup_of(container, root)) and (directory / name).exists():
            return (directory / name).read_text().strip()
    raise FileNotFoundError(name)


# Placement of each class.


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_of_each_class_has_its_cpus(node: ModeledNode, kind: str) -> None:
    pool = KINDS[kind].pool
    container = node.spawn(kind, LAST if pool == "named" else None)
    node.check()
    if pool in ("named", "picked"):
        assert len(cpuset_of(container).cpus) == 1


@pytest.mark.parametrize("owner", ["lse", "lsr", "whole"])
def test_pools_exclude_the_cpus_of_an_owner(node: ModeledNode, owner: str) -> None:
    node.spawn(owner, LAST if owner != "whole" else None)
    for kind in ("ls", "be", "part", "burstable", "besteffort"):
        node.spawn(kind)
    node.check()
    assert len(node.owned()) == 1


def test_all_containers_of_a_pod_share_its_owned_cpus(node: ModeledNode) -> None:
    pod = node.pod("lse", LAST)
    first, second = node.run(pod, "first"), node.run(pod, "second")
    node.check()
    assert cpuset_of(first).cpus == cpuset_of(second).cpus == LAST


def test_the_cpuset_in_kubelets_create_is_replaced(node: ModeledNode) -> None:
    owner = node.run(node.pod("lse", LAST), cpuset_cpus=str(REST))
    sharer = node.run(node.pod("ls"), cpuset_cpus=str(ALL))
    assert (cpuset_of(owner).cpus, cpuset_of(sharer).cpus) == (LAST, REST)


# Moves of other containers.


def test_other_containers_leave_before_the_runtime_receives_the_create(node: ModeledNode) -> None:
    """The runtime is suspended during the create, so only the daemon can move containers."""
    sharer, batch = node.spawn("ls"), node.spawn("be")
    pod = node.pod("lse", LAST)
    with node.runtime.frozen():
        request = node.cri.create_request(pod, **KINDS["lse"].resources)
        call = node.cri.method("CreateContainer").future(request, timeout=30)
        wait_for(
            "other containers to leave",
            lambda: cpuset_of(sharer).cpus == cpuset_of(batch).cpus == REST,
            limit=5,
        )
        assert not call.done()
    container = call.result().container_id
    node.containers[container] = ModelContainer(KINDS["lse"], LAST)
    node.start(container)
    node.check()


def test_no_container_is_on_owned_cpus_when_the_create_returns(node: ModeledNode) -> None:
    for kind in ("ls", "be", "burstable"):
        node.spawn(kind)
    pod = node.pod("lse", LAST)
    node.create(pod)
    node.check()


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"image": "localhost/absent:1"}, id="no such image"),
        pytest.param({"device": "/dev/absent"}, id="no such device"),
    ],
)
def test_a_failed_create_restores_other_containers(node: ModeledNode, wrong: dict[str, Any]) -> None:
    if node.runtime.name == "crio" and "device" in wrong:
        pytest.skip("CRI-O ignores a device that does not exist")
    sharers = [node.spawn("ls"), node.spawn("be")]
    before = files(*sharers)
    pod = node.pod("lse", LAST)
    with node.runtime.client() as direct:
        direct.adopt(node.cri)
        request = {**KINDS["lse"].resources, **wrong}
        expected = refused(lambda: direct.create(pod, "direct", **request))
    with node.runtime.frozen():
        call = node.cri.method("CreateContainer").future(node.cri.create_request(pod, **request), timeout=30)
        wait_for("other containers to leave", lambda: cpuset_of(sharers[0]).cpus == REST, limit=5)
    assert refused(call.result)[0] is expected[0]
    wait_for("other containers to be restored", lambda: files(*sharers) == before, limit=5)
    node.check()


def test_a_stop_or_removal_releases_the_cpus(calm_node: ModeledNode) -> None:
    node = calm_node
    sharer, batch = node.spawn("ls"), node.spawn("be")
    owner = node.spawn("lse", LAST)
    node.check()
    node.cri.stop(owner)
    del node.containers[owner]
    node.wait_until_settled()
    assert cpuset_of(sharer).cpus == cpuset_of(batch).cpus == ALL
    node.cri.remove(owner)

    created = node.create(node.pod("lsr", LAST))
    node.check()
    assert cpuset_of(sharer).cpus == REST
    node.cri.remove(created)
    del node.containers[created]
    node.wait_until_settled()


@pytest.mark.parametrize("how", ["stop_pod", "remove_pod"])
def test_the_end_of_a_pod_releases_its_cpus(calm_node: ModeledNode, how: str) -> None:
    node = calm_node
    sharer = node.spawn("ls")
    pod = node.pod("lse", LAST)
    # CRI-O waits for a process that ignores SIGTERM until the deadline of the call.
    owner = node.run(pod, command=["sh", "-c", "trap exit TERM; sleep 3600 & wait"])
    node.check()
    getattr(node.cri, how)(pod)
    del node.containers[owner]
    node.wait_until_settled()
    assert cpuset_of(sharer).cpus == ALL


def test_a_container_that_exits_releases_its_cpus(node: ModeledNode) -> None:
    sharer = node.spawn("ls")
    owner = node.run(node.pod("lse", LAST), command=["sh", "-c", UNTIL_PROCEED])
    node.check()
    node.cri.proceed(owner)
    wait_for("the end", lambda: node.cri.status(owner).status.state == EXITED, limit=10)
    del node.containers[owner]
    node.wait_until_settled(limit=5)  # the reconcile period is one second
    assert cpuset_of(sharer).cpus == ALL


# Created containers, and updates.


def test_a_created_container_starts_with_the_current_cpuset(node: ModeledNode) -> None:
    """A container has no cgroup before its start, so the runtime's saved spec must have the cpuset."""
    waiting, batch = node.create(node.pod("ls")), node.create(node.pod("be"))
    owner = node.spawn("lse", LAST)
    node.start(waiting)
    node.check()
    node.remove(owner)
    node.start(batch)
    node.wait_until_settled()
    assert cpuset_of(waiting).cpus == cpuset_of(batch).cpus == ALL


def test_a_start_during_a_create_never_has_owned_cpus(node: ModeledNode) -> None:
    """Start and create at the same time, several times: in either order, owned CPUs are never shared."""
    sharing, owning = node.pod("ls"), node.pod("lse", LAST)
    for attempt in range(8):
        waiting = node.create(sharing, attempt=attempt)
        starter = threading.Thread(target=node.start, args=(waiting,))
        starter.start()
        owner = node.create(owning, attempt=attempt)
        starter.join(30)
        node.check()
        node.remove(owner)
        node.remove(waiting)


@pytest.mark.parametrize("requested", ["", str(ALL)], ids=["no cpuset", "another cpuset"])
def test_an_update_keeps_the_daemons_cpuset_and_applies_all_other_fields(
    node: ModeledNode, requested: str
) -> None:
    owner, sharer = node.spawn("lse", LAST), node.spawn("ls")
    extra = {"cpuset_cpus": requested} if requested else {}
    for container in (owner, sharer):
        node.cri.update(container, cpu_quota=70_000, cpu_period=50_000, cpu_shares=333, **extra)
    node.check()
    for container, quota in ((owner, "-1"), (sharer, "70000")):  # a container that owns CPUs has no quota
        if not (Path("/sys/fs/cgroup") / "cgroup.controllers").exists():
            assert controller(container, "cpu.cfs_quota_us") == quota
            assert controller(container, "cpu.cfs_period_us") == "50000"
            assert controller(container, "cpu.shares") == "333"
        else:
            assert controller(container, "cpu.max") == f"{quota.replace('-1', 'max')} 50000"
    node.cri.update(owner, memory_limit_in_bytes=96 << 20)
    node.check()
    limit = node.cri.status(owner).status.resources.linux.memory_limit_in_bytes
    assert limit in (96 << 20, 0)  # 0: the runtime does not report the limit


def test_a_changed_pool_survives_an_update_that_bypasses_the_daemon(node: ModeledNode) -> None:
    """The runtime would undo a mere kernel write, so the daemon must also update the runtime's saved spec."""
    sharer = node.spawn("ls")
    node.spawn("lse", LAST)
    with node.runtime.client() as direct:

        def lasting() -> bool:
            direct.update(sharer, cpu_shares=400)
            return cpuset_of(sharer).cpus == REST

        wait_for("the cpuset to be in the saved spec", lasting, limit=10, pause=0.5)


def test_a_cpuset_that_another_program_changed_is_repaired(node: ModeledNode) -> None:
    sharer = node.spawn("ls")
    owner = node.spawn("lse", LAST)
    for container in (sharer, owner):
        directory = cgroup_of(container)
        assert directory is not None
        (directory / "cpuset.cpus").write_text(str(ALL))
    node.wait_until_settled()


# Rejected requests.


@pytest.mark.parametrize(
    "annotation",
    ['{"cpuset":"5-"}', "no JSON", '{"cpuset":"60000"}', '{"cpuset":7}'],
    ids=["backwards", "not JSON", "no such CPU", "not text"],
)
def test_a_malformed_annotation_is_reported_and_rejected_for_owners(
    node: ModeledNode, annotation: str
) -> None:
    pod = node.pod("ls", name="tolerant", annotation=annotation)
    node.run(pod)
    node.check()
    before = node.daemon.log.read_text().count("default/tolerant")
    node.run(pod, "second")
    text = str(node.daemon.printed_status())
    assert "tolerant" in text
    assert "cpuset" in text or "CPU" in text
    assert before >= 1
    for kind in ("lse", "lsr"):
        strict = node.pod(kind, annotation=annotation)
        status, message = refused(lambda strict=strict: node.create(strict))
        assert status is Status.INVALID_ARGUMENT
        assert "cannot" in message
    node.check()


def test_a_pod_that_requests_all_cpus_is_rejected(node: ModeledNode) -> None:
    sharer = node.spawn("ls")
    status, message = refused(lambda: node.create(node.pod("lse", ALL)))
    assert status is Status.FAILED_PRECONDITION
    assert "empty" in message
    node.check()
    assert cpuset_of(sharer).cpus == ALL


def test_a_pod_that_requests_owned_cpus_is_rejected(node: ModeledNode) -> None:
    node.spawn("lse", LAST)
    for kind in ("lse", "lsr"):
        assert refused(lambda kind=kind: node.create(node.pod(kind, LAST)))[0] is Status.FAILED_PRECONDITION
    node.check()


# Crashes.


def test_a_killed_daemon_moves_no_container_and_keeps_its_owners(node: ModeledNode) -> None:
    owner, sharer, batch = node.spawn("lse", LAST), node.spawn("ls"), node.spawn("be")
    waiting = node.create(node.pod("ls"))
    before = files(owner, sharer, batch)
    node.daemon.kill9()
    assert files(owner, sharer, batch) == before
    node.daemon.start()

    def check_unchanged() -> None:
        assert files(owner, sharer, batch) == before

    node.daemon.wait_for_reconciles(check=check_unchanged)
    assert refused(lambda: node.create(node.pod("lsr", LAST)))[0] is Status.FAILED_PRECONDITION
    node.start(waiting)
    node.check()
    node.remove(owner)
    node.wait_until_settled()
    assert cpuset_of(sharer).cpus == ALL


def test_a_daemon_without_its_ledger_finds_the_owners_again(node: ModeledNode) -> None:
    owner, sharer = node.spawn("lse", LAST), node.spawn("ls")
    before = files(owner, sharer)
    node.daemon.kill9()
    for path in (node.daemon.directory / "state").iterdir():
        path.unlink()
    node.daemon.start()
    node.daemon.wait_for_reconciles(1)
    assert files(owner, sharer) == before
    assert refused(lambda: node.create(node.pod("lsr", LAST)))[0] is Status.FAILED_PRECONDITION


def test_an_owner_that_ended_while_the_daemon_was_down_releases_its_cpus(
    node: ModeledNode, runtime: PrivateRuntime
) -> None:
    owner, sharer = node.spawn("lse", LAST), node.spawn("ls")
    node.daemon.kill9()
    with runtime.client() as direct:
        direct.stop(owner)
        direct.remove(owner)
    del node.containers[owner]
    node.daemon.start()
    node.wait_until_settled()
    assert cpuset_of(sharer).cpus == ALL


@pytest.mark.parametrize("after", [0.0, 0.02, 0.2])
def test_a_daemon_killed_during_a_create_recovers(
    node: ModeledNode, runtime: PrivateRuntime, after: float
) -> None:
    """The runtime may have received the create or not; in both cases the placement is correct afterwards."""
    sharer = node.spawn("ls")
    pod = node.pod("lse", LAST)
    with runtime.frozen():
        request = node.cri.create_request(pod, **KINDS["lse"].resources)
        call = node.cri.method("CreateContainer").future(request, timeout=30)
        time.sleep(after)
        node.daemon.kill9()
        with suppress(grpc.RpcError):
            call.result(10)
    node.daemon.start()
    node.daemon.wait_for_reconciles()  # a create that reached the runtime is finished by now
    for container in node.cri.list():
        if container.pod_sandbox_id == pod:
            assert container.state == CREATED
            node.containers[container.id] = ModelContainer(KINDS["lse"], LAST)
    node.wait_until_settled()
    assert cpuset_of(sharer).cpus == (REST if len(node.containers) == 2 else ALL)


def test_a_stopped_daemon_removes_its_socket(node: ModeledNode) -> None:
    owner, sharer = node.spawn("lse", LAST), node.spawn("ls")
    before = files(owner, sharer)
    assert node.daemon.stop() == 0
    assert not node.daemon.socket.exists()
    assert files(owner, sharer) == before
    node.daemon.start()
    node.wait_until_settled()


def test_calls_fail_while_the_runtime_is_down_and_no_container_moves(
    node: ModeledNode, runtime: PrivateRuntime
) -> None:
    owner, sharer = node.spawn("lse", LAST), node.spawn("ls")
    before = files(owner, sharer)
    pod, late = node.pod("lsr", LAST), node.pod("ls")
    runtime.kill9()
    for call in (node.cri.version, lambda: node.create(pod), lambda: node.create(late)):
        assert refused(call)[0] is Status.UNAVAILABLE
    time.sleep(1.5)  # time for a reconcile without the runtime
    assert files(owner, sharer) == before
    runtime.restart()
    wait_for("the same channel to recover", node.cri.version, limit=10)
    node.wait_until_settled()
    node.run(late)
    node.check()
    node.remove(owner)
    node.wait_until_settled()


def test_a_runtime_killed_during_a_create_releases_the_cpus(
    node: ModeledNode, runtime: PrivateRuntime
) -> None:
    sharer = node.spawn("ls")
    pod = node.pod("lse", LAST)
    request = node.cri.create_request(pod, **KINDS["lse"].resources)
    os.kill(runtime.pid, signal.SIGSTOP)
    call = node.cri.method("CreateContainer").future(request, timeout=30)
    wait_for("other containers to leave", lambda: cpuset_of(sharer).cpus == REST, limit=5)
    runtime.kill9()
    assert refused(call.result)[0] is Status.UNAVAILABLE
    runtime.restart()
    node.wait_until_settled(limit=10)
    assert cpuset_of(sharer).cpus == ALL


# The older version of the CRI, and observe mode.


def test_calls_of_cri_v1alpha2_are_placed_too(node: ModeledNode) -> None:
    with Cri(node.daemon.socket, node.runtime.cgroup, "runtime.v1alpha2") as older:
        with suppress(grpc.RpcError):
            older.version()
            node.cri = older
        if node.cri is not older:
            assert refused(older.version)[0] is Status.UNIMPLEMENTED
            pytest.skip("this runtime supports CRI v1 only")
        sharer = node.spawn("ls")
        node.spawn("lse", LAST)
        node.check()
        assert cpuset_of(sharer).cpus == REST


def test_observe_mode_moves_no_container(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> None:
    daemon = start_daemon(mode="observe")
    with daemon.client() as client:
        node = ModeledNode(runtime, daemon, client)
        sharer, owner = node.spawn("ls"), node.spawn("lse", LAST)
        assert cpuset_of(sharer).cpus == cpuset_of(owner).cpus
        assert "would place pod=default/lse" in daemon.log.read_text()
        page: Any = query_admin(daemon.directory / "admin.sock", "/observe/report", 20)
        rows = {row["id"]: row for pod in page["pods"] for row in pod["containers"]}
        assert {key: rows[key]["cpus"] for key in (sharer, owner)} == {
            key: str(cpuset_of(key).cpus) for key in (sharer, owner)
        }
        assert (rows[owner]["change"], rows[owner]["desired_cpus"]) == ("pin", str(LAST))
        assert (rows[sharer]["change"], rows[sharer]["desired_cpus"]) == ("move", str(REST))
        assert page["sums"]["unchanged"] == 0
    runtime.clear()


# Random calls.


def may_be_placed(node: ModeledNode, pod: str, kind: str) -> bool:
    """Return whether a create must succeed: CPUs have one owner, and the shared pool keeps one CPU."""
    pool, owned = KINDS[kind].pool, node.owned()
    if pool == "named":
        mine = any(member.pod == pod for member in node.containers.values())
        return mine or (owned.isdisjoint(LAST) and bool(REST - owned))
    return pool != "picked" or len(ALL - owned) > 1


@pytest.mark.timeout(400)
def test_two_hundred_random_calls_match_the_model(node: ModeledNode) -> None:
    """Random creates and removals; after each one every container has the CPUs of the model."""
    dice = random.Random(20)
    pods = {kind: node.pod(kind, LAST if what.pool == "named" else None) for kind, what in KINDS.items()}
    counts = {"placed": 0, "refused": 0, "removed": 0}
    for turn in range(200):
        if len(node.containers) > 8 or (node.containers and dice.random() < 0.45):
            node.remove(dice.choice(sorted(node.containers)))
            counts["removed"] += 1
            node.wait_until_settled()
            continue
        kind = dice.choice(sorted(KINDS))
        if may_be_placed(node, pods[kind], kind):
            node.run(pods[kind], f"c{turn}")
            counts["placed"] += 1
        else:
            status, message = refused(lambda kind=kind, turn=turn: node.create(pods[kind], f"c{turn}"))
            assert status is Status.FAILED_PRECONDITION, message
            counts["refused"] += 1
        node.check()
    assert {c.id for c in node.cri.list()} == set(node.containers), "the runtime and the model differ"
    assert counts["placed"] > 60, counts
    assert counts["refused"] > 5, counts
    while node.containers:
        node.remove(next(iter(node.containers)))
    node.spawn("ls")
    node.spawn("be")
    node.wait_until_settled()
    assert node.owned() == CpuSet()
