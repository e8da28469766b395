"""A peer creates, updates and removes pods, and each container gets its desired CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from proxy.api.cri import api_pb2 as cri
from proxy.demo.client import DemoPod
from proxy.model.workload import KubeQos, Phase
from proxy.telemetry import metrics

QUICK = "cpuManagerPolicy: static\nreconcilePeriod: 200ms\n"


def test_an_owner_gets_its_cpus_after_other_containers_leave_them(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        assert node.cpus(ls.container_id) == "0-15"
        lse = await in_thread(node.peer.run_pod, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
        created = await in_thread(node.peer.create, lse)
        # Other containers leave the CPUs before the create continues, not when the container runs.
        assert node.cpus(ls.container_id) == "0-1,4-15"
        reported = node.saved(created)
        assert (reported.cpuset_cpus, reported.cpuset_mems, reported.cpu_quota) == ("2-3", "0", -1)
        await in_thread(node.peer.start, created)
        assert node.cpus(created) == "2-3"
        containers = node.executor.state.containers
        assert containers[created].phase is Phase.RUNNING
        assert set(containers) == {ls.container_id, created}
        await in_thread(node.peer.stop, created)
        await node.until(lambda: node.cpus(ls.container_id) == "0-15")
        assert not node.executor.state.owners

    run_scenario(scenario)


def test_all_other_containers_get_a_pool(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        await in_thread(node.peer.launch, DemoPod("lsr", "LSR", cpuset="4-5", cpus=2))
        for qos, kube, cpus in (
            ("LS", KubeQos.BURSTABLE, "0-3,6-15"),
            ("BE", KubeQos.BEST_EFFORT, "0-15"),  # LSR's CPUs are the BE pool's too
        ):
            pod = await in_thread(node.peer.launch, DemoPod(qos.lower(), qos, kube))
            assert node.saved(pod.container_id).cpuset_cpus in (cpus, ""), qos
            assert node.cpus(pod.container_id) == cpus, qos
        whole = await in_thread(node.peer.launch, DemoPod("whole", "", KubeQos.GUARANTEED, cpus=2))
        assert len(node.executor.state.containers[whole.container_id].placement.exclusive) == 2

    run_scenario(scenario)


def test_an_update_carries_the_placed_cpus_and_never_the_clients(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        lse = await in_thread(node.peer.launch, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
        request = cri.LinuxContainerResources(cpuset_cpus="0-15", cpu_shares=512, cpu_quota=50_000)
        await in_thread(node.peer.update, lse.container_id, request)
        sent = [c for c in node.runtime.calls if c.method == "UpdateContainerResources"][-1].request.linux
        assert (sent.cpuset_cpus, sent.cpu_quota, sent.cpu_shares) == ("2-3", -1, 512)
        assert node.cpus(lse.container_id) == "2-3"
        # The peer's next update repeats the daemon's response; the daemon still knows the client's quota.
        await in_thread(node.peer.update, lse.container_id, cri.LinuxContainerResources(cpu_shares=600))
        container = node.executor.state.containers[lse.container_id]
        assert container.request.cpuset_cpus == ""
        assert node.executor.quotas.known.records[f"qc/{lse.container_id}"].quota == 50_000
        await node.until(lambda: not node.executor.state.inflight.of(lse.container_id))

    run_scenario(scenario)


def test_a_stopped_pod_releases_its_cpus(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.launch, DemoPod("ls", "LS"))
        lse = await in_thread(node.peer.launch, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
        await in_thread(node.peer.end_pod, lse)
        await node.until(lambda: node.cpus(ls.container_id) == "0-15")
        assert lse.pod_id not in node.executor.state.pods

    run_scenario(scenario, QUICK.replace("200ms", "1h"))  # only the request reports the stop


def test_a_start_settles_a_create_at_once(run_scenario: Callable[..., None], in_thread: Any) -> None:
    async def scenario(node: Any) -> None:
        pod = await in_thread(node.peer.run_pod, DemoPod("ls", "LS"))
        created = await in_thread(node.peer.create, pod)
        await in_thread(node.peer.start, created)
        assert node.executor.state.containers[created].phase is Phase.RUNNING
        assert not node.pending.creates
        assert not node.pending.starts
        # The runtime already has the current CPU set, so no update is sent.
        assert not [c for c in node.runtime.calls if c.method == "UpdateContainerResources"]

    run_scenario(scenario)


def test_a_container_that_is_not_started_is_found_in_the_list(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        pod = await in_thread(node.peer.run_pod, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
        created = await in_thread(node.peer.create, pod)
        await node.until(lambda: created in node.executor.state.containers)
        assert node.executor.state.containers[created].phase is Phase.CREATED
        assert len(node.executor.state.containers) == 1

    run_scenario(scenario)


def test_an_outdated_cpuset_is_updated_before_the_start(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    async def scenario(node: Any) -> None:
        ls = await in_thread(node.peer.run_pod, DemoPod("ls", "LS"))
        created = await in_thread(node.peer.create, ls)
        await in_thread(node.peer.launch, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
        seen: list[str] = []
        node.runtime.before(
            "StartContainer",
            lambda request: seen.append(node.runtime.containers[request.container_id].resources.cpuset_cpus),
        )
        await in_thread(node.peer.start, created)
        assert seen == ["0-1,4-15"]

    run_scenario(scenario)


def test_a_pod_that_does_not_fit_is_refused_in_pod_scope(
    run_scenario: Callable[..., None], in_thread: Any
) -> None:
    text = QUICK + "topologyManagerPolicy: single-numa-node\ntopologyManagerScope: pod\n"

    async def scenario(node: Any) -> None:
        ok = await in_thread(node.peer.launch, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
        assert node.cpus(ok.container_id) == "2-3"
        spec = DemoPod("big", "LSR", KubeQos.GUARANTEED, cpus=12)
        pod = await in_thread(node.peer.run_pod, spec)  # the peer does not report the pod's total request
        with pytest.raises(grpc.RpcError) as refused:
            await in_thread(node.peer.create, pod)
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "demo/big" in error.details()
        assert node.executor.telemetry.value(metrics.HOOK_SERVER_REQUESTS_REFUSED) == 1

    run_scenario(scenario, text)


@pytest.mark.parametrize("listed", [False, True])
def test_a_cpuset_changed_by_the_peer_is_corrected_before_the_start(
    run_scenario: Callable[..., None], in_thread: Any, listed: bool
) -> None:
    async def scenario(node: Any) -> None:
        merge = node.peer._merge

        def merged(request: Any, answer: Any) -> None:
            merge(request, answer)
            request.container_resources.cpuset_cpus = "0-15"
            request.container_resources.cpu_quota = 70_000

        node.peer._merge = merged
        pod = await in_thread(node.peer.run_pod, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
        created = await in_thread(node.peer.create, pod)
        if listed:
            await node.until(lambda: created in node.executor.state.containers)
        seen: list[tuple[str, int]] = []

        def record(request: Any) -> None:
            resources = node.runtime.containers[request.container_id].resources
            seen.append((resources.cpuset_cpus, resources.cpu_quota))

        node.runtime.before("StartContainer", record)
        await in_thread(node.peer.start, created)
        assert seen == [("2-3", -1)]

    run_scenario(scenario)
