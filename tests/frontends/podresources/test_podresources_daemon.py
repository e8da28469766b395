"""The daemon with ``podResources.serve``: a real gRPC client, a stand-in runtime and a simulated kubelet."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.demo.client import DemoPod
from proxy.engine.node_events import ModeChanged
from proxy.model.mode import NodeMode
from proxy.model.workload import KubeQos
from proxy.telemetry import metrics
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.waiting import until

LISTER = "v1.PodResourcesLister"
OWNER = DemoPod("db", kube_qos=KubeQos.GUARANTEED, cpus=2)
GPU = pb.ContainerDevices(
    resource_name="nvidia.com/gpu",
    device_ids=["GPU-0"],
    topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=1)]),
)


class Kubelet:
    """kubelet's own API; it fails if ``refuse`` is set."""

    def __init__(self, path: Path) -> None:
        self.pods = pb.ListPodResourcesResponse()
        self.refuse = False
        self.calls = 0
        self.server = grpc.server(ThreadPoolExecutor(4))
        answers = {"List": lambda: self.pods, "GetAllocatableResources": lambda: self.allocatable}
        self.allocatable = pb.AllocatableResourcesResponse(devices=[GPU])
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._method(answer))
            for name, answer in answers.items()
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(LISTER, handlers),))
        assert self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def _method(self, answer: Callable[[], Any]) -> Callable[[bytes, Any], bytes]:
        def handler(_: bytes, context: Any) -> bytes:
            self.calls += 1
            if self.refuse:
                context.abort(grpc.StatusCode.UNKNOWN, "out of order")
            content: bytes = answer().SerializeToString()
            return content

        return handler


class Agent:
    """A monitoring agent."""

    def __init__(self, path: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}")

    def call(self, method: str, request: Any, kind: Any) -> Any:
        call = self._channel.unary_unary(
            f"/{LISTER}/{method}",
            request_serializer=lambda r: r if isinstance(r, bytes) else r.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        return call(request, timeout=60, wait_for_ready=True)

    def list(self) -> Any:
        return self.call("List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)

    def get(self, name: str, namespace: str = "demo") -> Any:
        request = pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace)
        return self.call("Get", request, pb.GetPodResourcesResponse).pod_resources

    def allocatable(self) -> Any:
        request = pb.AllocatableResourcesRequest()
        return self.call("GetAllocatableResources", request, pb.AllocatableResourcesResponse)

    def refused(self, call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
        with pytest.raises(grpc.RpcError) as caught:
            call(*args)
        error: Any = caught.value
        return error.code(), error.details()

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def node() -> Iterator[DaemonNode]:
    with temporary_node() as created:
        yield created


@pytest.fixture
def socket(node: DaemonNode) -> Path:
    return node.directory / "pod-resources" / "kubelet.sock"


@pytest.fixture
def agent(socket: Path) -> Iterator[Agent]:
    created = Agent(socket)
    yield created
    created.close()


@pytest.fixture
def kubelet(node: DaemonNode) -> Iterator[Kubelet]:
    created = Kubelet(node.directory / "kubelet.sock")
    yield created
    created.server.stop(None).wait()


def settings(socket: Path, more: str = "") -> str:
    return (
        "cpuManagerPolicy: static\nreservedSystemCPUs: '0'\nreconcilePeriod: 200ms\n"
        f"podResources: {{serve: 'unix://{socket}'}}\n{more}"
    )


def test_an_agent_gets_the_cpus_of_owners_while_they_own_them(
    node: DaemonNode, socket: Path, agent: Agent
) -> None:
    daemon: Any = node.daemon(settings(socket))

    async def scenario() -> None:
        await node.launch(DemoPod("web"))
        owner = await node.launch(OWNER)
        listed = await asyncio.to_thread(agent.list)
        found = {pod.name: list(pod.containers[0].cpu_ids) for pod in listed.pod_resources}
        assert found["web"] == []
        assert len(found["db"]) == 2
        assert node.cpus(owner) == ",".join(map(str, found["db"]))
        got = await asyncio.to_thread(agent.get, "db")
        assert (got.namespace, got.name, got.containers[0].name) == ("demo", "db", "main")
        assert list(got.containers[0].cpu_ids) == found["db"]
        allocatable = await asyncio.to_thread(agent.allocatable)
        assert list(allocatable.cpu_ids) == list(range(1, 16))
        with node.client() as client:
            await asyncio.to_thread(client.end_pod, daemon.executor.state.containers[owner].pod.sandbox_id)
        code, message = await asyncio.to_thread(agent.refused, agent.get, "db")
        assert (code, message) == (grpc.StatusCode.UNKNOWN, "pod db in namespace demo not found")
        telemetry = daemon.executor.telemetry
        assert telemetry.value(metrics.POD_RESOURCES_REQUESTS, method="Get") == 2
        assert telemetry.value(metrics.POD_RESOURCES_REQUESTS_REFUSED, method="Get") == 1

    run(daemon, scenario, reconciled=True)
    assert not socket.exists()


def test_the_socket_is_only_for_root_and_in_a_directory_of_its_own(node: DaemonNode, socket: Path) -> None:
    async def scenario() -> None:
        await until(socket.exists)
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket.parent.stat().st_mode) & 0o007 == 0

    run(node.daemon(settings(socket)), scenario)


def test_no_cpus_are_exclusive_in_observe_mode_and_after_a_release(
    node: DaemonNode, socket: Path, agent: Agent
) -> None:
    observing: Any = node.daemon(settings(socket, "mode: observe\n"))

    async def observed() -> None:
        await node.launch(OWNER)
        await until(lambda: observing.executor.state.owners)
        assert list((await asyncio.to_thread(agent.get, "db")).containers[0].cpu_ids) == []
        assert list((await asyncio.to_thread(agent.allocatable)).cpu_ids) == []

    run(observing, observed, reconciled=True)
    enforcing: Any = node.daemon(settings(socket))

    async def released() -> None:
        await node.launch(DemoPod("late", kube_qos=KubeQos.GUARANTEED, cpus=1))
        assert len((await asyncio.to_thread(agent.get, "late")).containers[0].cpu_ids) == 1
        enforcing.executor.store.handle(ModeChanged(NodeMode.RELEASED))
        assert list((await asyncio.to_thread(agent.get, "late")).containers[0].cpu_ids) == []

    run(enforcing, released, reconciled=True)


def test_the_answer_contains_kubelets_assignments(
    node: DaemonNode, socket: Path, agent: Agent, kubelet: Kubelet
) -> None:
    main = pb.ContainerResources(name="main", devices=[GPU])
    kubelet.pods.pod_resources.add(name="db", namespace="demo", containers=[main])
    kubelet.pods.pod_resources.add(name="soon", namespace="demo", containers=[main])
    kubelet_config = f"kubelet: {{podResources: 'unix://{node.directory}/kubelet.sock'}}\n"
    daemon: Any = node.daemon(settings(socket, kubelet_config))

    async def scenario() -> None:
        await node.launch(OWNER)
        db, soon = (await asyncio.to_thread(agent.list)).pod_resources
        assert len(db.containers[0].cpu_ids) == 2
        assert list(db.containers[0].devices) == [GPU]
        assert soon.containers[0] == main
        assert list((await asyncio.to_thread(agent.allocatable)).devices) == [GPU]
        await asyncio.sleep(0.2)  # longer than an answer of kubelet is cached
        kubelet.refuse = True
        code, message = await asyncio.to_thread(agent.refused, agent.list)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "out of order (UNKNOWN)" in message

    run(daemon, scenario, reconciled=True)


def test_kubelet_is_queried_once_for_many_requests(
    node: DaemonNode, socket: Path, agent: Agent, kubelet: Kubelet
) -> None:
    kubelet_config = f"kubelet: {{podResources: 'unix://{node.directory}/kubelet.sock'}}\n"
    daemon: Any = node.daemon(settings(socket, kubelet_config))

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(agent.allocatable)
        before, began = kubelet.calls, loop.time()
        for _ in range(9):
            await asyncio.to_thread(agent.list)
        assert kubelet.calls - before <= 1 + (loop.time() - began) / 0.1

    run(daemon, scenario, reconciled=True)


def test_requests_above_kubelets_rate_limit_are_rejected(
    node: DaemonNode, socket: Path, agent: Agent
) -> None:
    daemon: Any = node.daemon(settings(socket))

    async def scenario() -> None:
        def burst() -> list[Any]:
            codes: list[Any] = []
            for _ in range(200):
                try:
                    agent.list()
                except grpc.RpcError as error:
                    failed: Any = error
                    codes.append((failed.code(), failed.details()))
            return codes

        refused = await asyncio.to_thread(burst)
        assert set(refused) <= {(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")}
        daemon.parts.pod_resources._server._request_limit.allows = lambda: False
        code, message = await asyncio.to_thread(agent.refused, agent.list)
        assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    run(daemon, scenario, reconciled=True)


def test_invalid_requests_are_refused(node: DaemonNode, socket: Path, agent: Agent) -> None:
    async def scenario() -> None:
        malformed = ("Get", b"\x0a\xff", pb.GetPodResourcesResponse)
        code, message = await asyncio.to_thread(agent.refused, agent.call, *malformed)
        assert (code, message) == (
            grpc.StatusCode.INTERNAL,
            "cannot read the request: GetPodResourcesRequest expected",
        )
        unknown = ("Watch", b"", pb.GetPodResourcesResponse)
        code, _ = await asyncio.to_thread(agent.refused, agent.call, *unknown)
        assert code == grpc.StatusCode.UNIMPLEMENTED

    run(node.daemon(settings(socket)), scenario, reconciled=True)


def test_a_list_before_the_first_list_of_the_runtime_is_refused(
    node: DaemonNode, socket: Path, agent: Agent
) -> None:
    node.runtime.stop()
    daemon: Any = node.daemon(settings(socket))

    async def scenario() -> None:
        assert not daemon.executor.reconciled.is_set()
        code, message = await asyncio.to_thread(agent.refused, agent.list)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert message == "cannot list pods: the containers of the runtime are not known yet"

    run(daemon, scenario)


def test_a_socket_in_use_by_another_process_is_kept_and_reported(node: DaemonNode, socket: Path) -> None:
    socket.parent.mkdir()
    kubelet = Kubelet(socket)
    daemon: Any = node.daemon(settings(socket))

    async def scenario() -> None:
        def problems() -> list[str]:
            return [p["what"] for p in daemon.executor.telemetry.problems()]

        await until(lambda: any("cannot serve the pod-resources API" in problem for problem in problems()))
        assert any("another process answers there" in problem for problem in problems())
        assert socket.exists()
        await asyncio.to_thread(kubelet.server.stop(None).wait)
        socket.unlink(missing_ok=True)
        await until(
            lambda: not any("cannot serve the pod-resources API" in problem for problem in problems())
        )

    run(daemon, scenario)


def test_without_the_setting_no_module_of_the_api_is_imported(node: DaemonNode) -> None:
    program = f"""
import asyncio, sys
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.topology.regular_machine import regular_machine
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from pathlib import Path

async def main():
    machine = regular_machine(2, 1, 4, 2)
    cgroups = FakeCgroups(Path({str(node.directory / "cg")!r}), machine.online, machine.memory_nodes, 1)
    daemon = Daemon(parse({node.configuration()!r}, "test"), machine=machine, cgroups=cgroups)
    await daemon.start()
    await asyncio.wait_for(daemon.executor.reconciled.wait(), 60)
    await daemon.stop()

asyncio.run(main())
print([name for name in sys.modules if "podresources" in name or "pod_resources" in name])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
