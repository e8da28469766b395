"""The private runtime itself, and the behaviour of containerd, CRI-O and runc on which the design depends.

If a new runtime behaves differently, these tests fail and show it before the tests of the daemon do.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from cri import EXITED, Cri, cgroup_of, code, cpuset_of, is_v2, online
from private_runtime import PrivateRuntime, hierarchies, wait_for

from proxy.model.idset import CpuSet

pytestmark = pytest.mark.e2e

CPUS = online()
LAST = CpuSet([max(CPUS)])
FIRST = CpuSet([CPUS.first()])


def test_the_cpuset_of_a_create_request_reaches_the_kernel(cri: Cri) -> None:
    container = cri.run(cri.run_pod("direct"), cpuset_cpus=str(LAST), cpuset_mems="0")
    found = cpuset_of(container)
    assert (found.cpus, found.effective, found.tasks) == (LAST, LAST, {LAST})
    assert str(found.mems) == "0"


def test_an_update_of_the_quota_undoes_a_written_cpuset(runtime: PrivateRuntime, cri: Cri) -> None:
    """Therefore every update must carry the desired cpuset. CRI-O forwards only the fields of the update."""
    kept = runtime.name == "crio"
    container = cri.run(cri.run_pod("direct"), cpuset_cpus=str(LAST), cpu_quota=50000, cpu_period=100000)
    directory = cgroup_of(container)
    assert directory is not None
    (directory / "cpuset.cpus").write_text(str(CPUS))
    assert cpuset_of(container).cpus == CPUS

    cri.update(container, cpu_quota=60000, cpu_period=100000)
    assert cpuset_of(container).cpus == (CPUS if kept else LAST)

    cri.update(container, cpuset_cpus=str(FIRST))
    assert cpuset_of(container).cpus == FIRST
    cri.update(container, cpu_quota=70000, cpu_period=100000)
    assert cpuset_of(container).cpus == FIRST, "the runtime keeps the cpuset of the last update"


def test_a_container_without_a_cpuset_inherits_that_of_its_parent(cri: Cri) -> None:
    found = cpuset_of(cri.run(cri.run_pod("direct")))
    assert found.cpus == (CpuSet() if is_v2() else CPUS)
    assert found.effective == CPUS


def test_a_created_container_starts_with_the_last_update(runtime: PrivateRuntime, cri: Cri) -> None:
    """containerd creates the cgroup at the start; CRI-O at the create, with a waiting runc process in it."""
    container = cri.create(cri.run_pod("direct"), cpuset_cpus=str(FIRST))
    made = runtime.name == "crio"
    assert (cgroup_of(container) is not None) is made
    cri.update(container, cpuset_cpus=str(LAST))
    assert cpuset_of(container).cpus == LAST if made else cgroup_of(container) is None
    cri.start(container)
    assert cpuset_of(container).cpus == LAST


def test_a_create_with_an_unknown_image_fails(runtime: PrivateRuntime, cri: Cri) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        cri.create(cri.run_pod("direct"), image="localhost/absent:1")
    status = grpc.StatusCode.UNKNOWN if runtime.name == "crio" else grpc.StatusCode.NOT_FOUND
    assert code(caught.value) is status


def test_an_update_with_a_cpu_that_does_not_exist_is_refused(cri: Cri) -> None:
    container = cri.run(cri.run_pod("direct"), cpuset_cpus=str(LAST))
    with pytest.raises(grpc.RpcError) as caught:
        cri.update(container, cpuset_cpus="4000")
    assert code(caught.value) is grpc.StatusCode.UNKNOWN
    assert cpuset_of(container).cpus == LAST


def test_a_crash_of_the_runtime_leaves_containers_running(runtime: PrivateRuntime, cri: Cri) -> None:
    container = cri.run(cri.run_pod("direct"), cpuset_cpus=str(LAST))
    runtime.kill9()
    assert cpuset_of(container).tasks == {LAST}
    with pytest.raises(grpc.RpcError) as caught:
        cri.version()
    assert code(caught.value) is grpc.StatusCode.UNAVAILABLE
    runtime.restart()
    wait_for("the channel to recover", cri.version)
    assert [c.id for c in cri.list()] == [container]
    cri.stop(container)
    assert cri.status(container).status.state == EXITED


def test_two_private_runtimes_are_isolated_and_remove_their_cgroups(
    runtime: PrivateRuntime, cri: Cri, tmp_path: Path
) -> None:
    mine = cri.run(cri.run_pod("same"), cpuset_cpus=str(FIRST))
    other = PrivateRuntime(tmp_path / "other").start()
    try:
        assert other.cgroup != runtime.cgroup
        with other.client() as client:
            theirs = client.run(client.run_pod("same"), cpuset_cpus=str(LAST))
            assert [c.id for c in client.list()] == [theirs]
            assert [c.id for c in cri.list()] == [mine]
            assert (cpuset_of(mine).cpus, cpuset_of(theirs).cpus) == (FIRST, LAST)
    finally:
        other.stop()
    assert cgroup_of(theirs) is None
    assert not [root for root in hierarchies() if (root / other.cgroup.lstrip("/")).exists()]
    assert cpuset_of(mine).cpus == FIRST
