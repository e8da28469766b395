"""The checks of the demonstration: they must detect wrong CPU sets."""

from __future__ import annotations

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import DemoPod, StartedPod
from proxy.demo.expected_sets import Expectation
from proxy.demo.snapshot import ContainerCpuset, DemoError, Snapshot, read_snapshot
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import KubeQos
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(2, 1, 4, 2, sibling_offset=False)
LSE = DemoPod("trading", "LSE", KubeQos.GUARANTEED, "2-3", cpus=2)
LSR = DemoPod("search", "LSR", KubeQos.GUARANTEED, "4-5", cpus=2)
LS = DemoPod("web", "LS")
BE = DemoPod("batch", "BE", KubeQos.BEST_EFFORT)


def seen(spec: DemoPod, cpus: str, mems: str = "0-1") -> ContainerCpuset:
    hard = spec.owns and spec.qos != "LSR"
    return ContainerCpuset(
        spec.name, spec.label, CpuSet.parse(cpus), Mask.parse(mems), spec.owns, hard, spec.uses_be_pool
    )


def expectation() -> Expectation:
    book = Expectation(MACHINE)
    for spec in (LS, BE, LSE, LSR):
        own = CpuSet.parse(spec.cpuset) if spec.owns else None
        book.record_started(StartedPod(spec, "", pb.PodSandboxConfig()), own)
    return book


def node(web="0-1,6-15", batch="0-1,4-15", trading="2-3", search="4-5", near="0") -> Snapshot:
    return Snapshot((seen(LS, web), seen(BE, batch), seen(LSE, trading, near), seen(LSR, search, "0")))


def test_expected_pools_follow_owners_that_come_and_end():
    book = expectation()
    assert (str(book.shared_pool), str(book.be_pool)) == ("0-1,6-15", "0-1,4-15")
    book.check(node())
    book.record_ended("trading")
    assert (str(book.shared_pool), str(book.be_pool)) == ("0-3,6-15", "0-15")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (node(web="0-2,6-15"), "web may run on CPU 2, which trading owns"),
        (node(web="0-1,4,6-15"), "web may run on CPU 4, which search owns"),
        (node(batch="0-15"), "batch may run on CPUs 2-3, which trading owns"),
        (node(search="3-4"), "trading|search may run on CPU 3"),
        (node(web=""), "web has an empty cpuset"),
        (node(near=""), "trading has an empty cpuset"),
        (node(web="0"), "web has CPUs 0, expected 0-1,6-15"),
        (node(batch="0-1,6-15"), "batch has CPUs 0-1,6-15, expected 0-1,4-15"),
        (node(near="0-1"), "trading has memory nodes 0-1, expected 0"),
        (Snapshot(node().containers[:3]), "cgroups are there for"),
    ],
)
def test_wrong_sets_are_detected(wrong, message):
    with pytest.raises(DemoError, match=message):
        expectation().check(wrong)


def test_be_may_stay_on_lsr_cpus_only():
    node(batch="0-1,4-15").check()
    with pytest.raises(DemoError):
        node(batch="2").check()


def test_the_cgroup_files_are_read(client, cgroups):
    pod = client.launch(DemoPod("web", "LS"))
    waiting = client.run_pod(DemoPod("later", "LS"))
    path = cgroups.find(pod.config.linux.cgroup_parent, pod.container_id)
    cgroups.write(path, CpuSet.parse("3"), Mask([1]))
    (one,) = read_snapshot(cgroups, [pod, waiting]).containers
    assert (str(one.cpus), str(one.mems)) == ("3", "1")
    client.stop(pod.container_id)
    assert read_snapshot(cgroups, [pod, waiting]).containers == ()
