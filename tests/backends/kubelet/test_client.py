"""The whole kubelet client: the sources of requests and devices, and the errors that it reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.api.kubelet import podresources_pb2, pods_pb2
from proxy.backends.kubelet.client import POD_LIST, PODS_API, KubeletClient, SourceErrorLog
from proxy.backends.kubelet.pods import PodList
from proxy.backends.kubelet.settings import KubeletSettings
from proxy.executor.ports import Kubelet
from proxy.model.idset import Mask
from proxy.model.requests import ContainerResources
from proxy.model.workload import LocatedDevice
from proxy.telemetry.port import silent
from tests.testkit.captured_log import reasons

ROOT = Path(__file__).resolve().parents[3]
PODS, LISTER = "v1alpha1.Pods", "v1.PodResourcesLister"
ITEM: dict[str, Any] = {
    "metadata": {"uid": "u-1", "namespace": "shop", "name": "web"},
    "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "2"}}}]},
}


class Clock:
    """A clock that a test advances, so that no test waits for a retry delay to end."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class ClientFactory:
    """Makes clients, and records the problems that they report."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.clock = Clock()
        self.clients: list[KubeletClient] = []

    def __call__(self, **settings: Any) -> KubeletClient:
        client_settings = KubeletSettings(**{"timeout": 60.0, **settings})
        self.clients.append(KubeletClient(client_settings, reasons(self.received), self.clock))
        return self.clients[-1]


@pytest.fixture
def make_client() -> Iterator[ClientFactory]:
    factory = ClientFactory()
    yield factory
    for client in factory.clients:
        client.close()


def pod_answer(cpu: str = "3", uid: str = "u-1") -> bytes:
    requests = pods_pb2.ResourceRequirements(requests={"cpu": pods_pb2.Quantity(string=cpu)})
    spec = pods_pb2.PodSpec(containers=[pods_pb2.Container(name="main", resources=requests)])
    metadata = pods_pb2.ObjectMeta(name="web", namespace="shop", uid=uid)
    return pods_pb2.GetPodResponse(pod=pods_pb2.Pod(metadata=metadata, spec=spec)).SerializeToString()


def cpus(client: KubeletClient, uid: str = "u-1") -> tuple[int, str] | None:
    reported = client.pod_requests(uid, "shop", "web")
    return None if reported is None else (reported[0].named("main").requests["cpu"], reported[1])


def wait_until(answer: Callable[[], Any], expected: Any) -> None:
    """Query until the result is the expected one; the timeout of the test ends a wait without end."""
    while answer() != expected:
        time.sleep(0.02)


def test_a_client_reports_only_the_sources_in_its_settings(make_client: ClientFactory) -> None:
    none: Kubelet = make_client()
    assert not none.knows_pods
    assert not none.knows_devices
    assert none.pod_requests("u-1", "shop", "web") is None
    assert none.devices("shop", "web", "main") is None
    assert make_client().allocatable() == {}
    assert make_client(pods_url="http://x").knows_pods
    assert make_client(pods_api="x").knows_pods
    assert make_client(pod_resources="x").knows_devices
    assert not make_client.received


def test_requests_come_from_the_pod_list(make_client: ClientFactory, pods_server: Any) -> None:
    pods_server.items = [ITEM]
    client = make_client(pods_url=pods_server.url)
    reported = client.pod_requests("u-1", "shop", "web")
    assert reported is not None
    assert (reported[0].uid, reported[0].containers, reported[0].guaranteed) == (
        "u-1",
        (ContainerResources("main", requests={"cpu": 2000}),),
        False,
    )
    assert reported[1] == POD_LIST
    assert client.pod_requests("u-2", "shop", "db") is None
    assert client.pod_requests("", "shop", "web") is None
    assert len(pods_server.seen) == 2
    assert not make_client.received


def test_a_static_pod_keeps_the_uid_that_the_runtime_knows(
    make_client: ClientFactory, pods_server: Any
) -> None:
    annotations = {"kubernetes.io/config.hash": "h-1", "kubernetes.io/config.mirror": "h-1"}
    pods_server.items = [{**ITEM, "metadata": {**ITEM["metadata"], "uid": "m-1", "annotations": annotations}}]
    reported = make_client(pods_url=pods_server.url).pod_requests("h-1", "shop", "web")
    assert reported is not None
    assert reported[0].uid == "h-1"


def test_the_pods_api_is_queried_before_the_pod_list(
    make_client: ClientFactory, pods_server: Any, serve: Any, tmp_path: Path
) -> None:
    pods_server.items = [ITEM, {**ITEM, "metadata": {**ITEM["metadata"], "uid": "u-2"}}]
    serve(tmp_path / "pods.sock", PODS, GetPod=lambda *_: pod_answer())
    client = make_client(pods_url=pods_server.url, pods_api=str(tmp_path / "pods.sock"))
    assert cpus(client) == (3000, PODS_API)
    assert not pods_server.seen
    assert cpus(client, "u-2") == (2000, POD_LIST)
    assert len(make_client.received) == 1
    assert "it gave another one" in make_client.received[0]


@pytest.mark.parametrize("served", ["nothing", "another service"])
def test_the_list_replaces_a_missing_pods_api_for_a_minute(
    make_client: ClientFactory, pods_server: Any, serve: Any, tmp_path: Path, served: str
) -> None:
    pods_server.items = [ITEM]
    path = tmp_path / "pods.sock"
    if served == "another service":
        serve(path, LISTER, Get=lambda *_: b"")
    client = make_client(pods_url=pods_server.url, pods_api=str(path))
    assert cpus(client) == (2000, POD_LIST)
    make_client.clock.now += 50
    assert cpus(client) == (2000, POD_LIST)
    assert len(make_client.received) == 1
    assert make_client.received[0].startswith(f"cannot query kubelet for a pod at {path}: ")
    if served == "nothing":
        serve(path, PODS, GetPod=lambda *_: pod_answer())
        assert cpus(client) == (2000, POD_LIST)

        def a_minute_later() -> tuple[int, str] | None:
            make_client.clock.now += 61
            return cpus(client)

        wait_until(a_minute_later, (3000, PODS_API))


def test_without_a_list_the_pods_api_is_queried_each_time(
    make_client: ClientFactory, serve: Any, tmp_path: Path
) -> None:
    path = tmp_path / "pods.sock"
    client = make_client(pods_api=str(path))
    assert cpus(client) is None
    serve(path, PODS, GetPod=lambda *_: pod_answer())
    wait_until(lambda: cpus(client), (3000, PODS_API))


def test_an_error_is_reported_once_until_a_query_succeeds(
    make_client: ClientFactory, pods_server: Any, answer: Any
) -> None:
    client = make_client(pods_url=pods_server.url)

    def query(status: int) -> tuple[int, str] | None:
        pods_server.items, pods_server.reply = [ITEM], answer(status, b"") if status else None
        make_client.clock.now += 60  # longer than a list is used and than any retry delay
        return cpus(client)

    assert [query(401), query(401), query(403), query(401)] == [None] * 4
    codes = [re.findall(r"\b40[13]\b", text) for text in make_client.received]  # a port may contain them
    assert [set(found) for found in codes] == [{"401"}, {"403"}]
    assert query(0) == (2000, POD_LIST)
    assert len(make_client.received) == 2
    assert query(401) is None
    assert len(make_client.received) == 3
    assert "401" in make_client.received[2]


def test_a_restarted_kubelet_is_queried_again(make_client: ClientFactory, serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"
    client = make_client(pods_api=str(path))
    server = serve(path, PODS, GetPod=lambda *_: pod_answer())
    assert cpus(client) == (3000, PODS_API)
    server.stop(None).wait()
    wait_until(lambda: cpus(client), None)
    assert make_client.received
    path.unlink(missing_ok=True)
    serve(path, PODS, GetPod=lambda *_: pod_answer("4"))
    wait_until(lambda: cpus(client), (4000, PODS_API))


def test_the_pods_api_is_still_queried_after_an_internal_error(
    make_client: ClientFactory, pods_server: Any, serve: Any, tmp_path: Path
) -> None:
    def fail_first_call(_: bytes, context: Any) -> bytes:
        if not make_client.received:
            context.abort(grpc.StatusCode.INTERNAL, "oh")
        return pod_answer()

    pods_server.items = [ITEM]
    serve(tmp_path / "pods.sock", PODS, GetPod=fail_first_call)
    client = make_client(pods_url=pods_server.url, pods_api=str(tmp_path / "pods.sock"))
    assert cpus(client) == (2000, POD_LIST)
    assert cpus(client) == (3000, PODS_API)
    assert [message.rpartition(": ")[2] for message in make_client.received] == ["oh (INTERNAL)"]


def test_a_pods_api_that_never_answers_costs_one_timeout(
    make_client: ClientFactory, pods_server: Any, serve: Any, tmp_path: Path
) -> None:
    released = threading.Event()
    calls: list[bytes] = []

    def hang(request: bytes, _: Any) -> bytes:
        calls.append(request)
        released.wait(60)
        return b""

    pods_server.items = [ITEM]
    serve(tmp_path / "pods.sock", PODS, GetPod=hang)
    client = make_client(pods_api=str(tmp_path / "pods.sock"), pods_url=pods_server.url, timeout=2.0)
    try:
        assert cpus(client) == (2000, POD_LIST)
        assert cpus(client) == (2000, POD_LIST)
    finally:
        released.set()
    assert len(calls) == 1
    assert "DEADLINE_EXCEEDED" in make_client.received[0]


def test_a_source_that_hangs_is_not_queried_for_a_while(
    make_client: ClientFactory, serve: Any, tmp_path: Path
) -> None:
    released, hangs = threading.Event(), [True]
    calls: list[bytes] = []
    path = tmp_path / "kubelet.sock"

    def get(request: bytes, _: Any) -> bytes:
        calls.append(request)
        if hangs[0]:
            released.wait(60)
        return podresources_pb2.GetPodResourcesResponse().SerializeToString()

    serve(path, LISTER, Get=get)
    client = make_client(pod_resources=f"unix://{path}", timeout=1.5)
    try:
        for _ in range(4):
            assert client.devices("shop", "web", "main") is None
        assert len(calls) == 2, "the query for the third pod does not wait"
        hangs[0] = False
        released.set()
        make_client.clock.now += 15.1
        client.devices("shop", "web", "main")
        client.devices("shop", "web", "main")
        assert len(calls) == 4
    finally:
        released.set()


def test_devices_of_pods_and_of_the_node_are_read_from_the_pod_resources_api(
    make_client: ClientFactory, serve: Any, tmp_path: Path
) -> None:
    gpu = podresources_pb2.ContainerDevices(resource_name="v.com/gpu", device_ids=["g0"])
    gpu.topology.nodes.add()
    main = podresources_pb2.ContainerResources(name="main", devices=[gpu])
    pod = podresources_pb2.PodResources(name="web", namespace="shop", containers=[main])
    reply = podresources_pb2.GetPodResourcesResponse(pod_resources=pod).SerializeToString()
    every = podresources_pb2.AllocatableResourcesResponse(devices=[gpu]).SerializeToString()
    path = tmp_path / "kubelet.sock"
    server = serve(path, LISTER, Get=lambda *_: reply, GetAllocatableResources=lambda *_: every)
    client = make_client(pod_resources=f"unix://{path}")
    device = LocatedDevice("g0", "v.com/gpu", Mask([0]), "kubelet's pod-resources API")
    assert client.devices("shop", "web", "main") == (device,)
    assert client.devices("shop", "web", "init") is None
    assert client.allocatable() == {"v.com/gpu": {"g0": Mask([0])}}
    assert not make_client.received
    server.stop(None).wait()
    wait_until(lambda: client.devices("shop", "web", "main"), None)
    assert client.allocatable() == {"v.com/gpu": {"g0": Mask([0])}}
    make_client.clock.now += 11
    assert client.allocatable() == {}
    assert make_client.received


def test_an_internal_error_is_reported_and_not_raised(
    make_client: ClientFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(PodList, "find", broken)
    assert make_client(pods_url="http://127.0.0.1:1").pod_requests("u-1", "shop", "web") is None
    assert make_client.received == ["cannot query kubelet's list of pods: RuntimeError: oh"]


def test_a_closed_client_returns_nothing(make_client: ClientFactory, tmp_path: Path) -> None:
    client = make_client(pods_api=str(tmp_path / "a"), pod_resources=str(tmp_path / "b"))
    client.close()
    client.close()
    assert client.pod_requests("u-1", "shop", "web") is None
    assert client.devices("shop", "web", "main") is None


def test_the_number_of_remembered_errors_is_bounded() -> None:
    received: list[str] = []
    errors = SourceErrorLog(reasons(received))
    for i in range(1000):
        errors.add("list", f"cause {i}")
    assert len(received) == 1000
    errors.add("list", "cause 999")
    errors.add("list", "cause 0")  # no longer remembered
    assert len(received) == 1001
    errors.clear("other")
    errors.add("list", "cause 0")
    assert len(received) == 1001


def test_a_source_that_works_again_is_no_problem_any_more() -> None:
    resolved: list[object] = []
    errors = SourceErrorLog(silent, lambda message, **keys: resolved.append((message, keys)))
    errors.clear("list")
    errors.add("list", "refused")
    errors.clear("list")
    errors.clear("list")
    assert resolved == [("cannot use a source of kubelet", {"source": "list"})]


def test_an_unused_client_loads_neither_grpc_nor_tls() -> None:
    code = """
import json, sys
from proxy.backends.kubelet.client import KubeletClient
from proxy.backends.kubelet.settings import KubeletSettings
from proxy.telemetry.port import silent
client = KubeletClient(KubeletSettings(pods_url="https://x", pods_api="y", pod_resources="z"), silent)
client.close()
print(json.dumps([name for name in ("grpc", "google.protobuf", "ssl", "http.client") if name in sys.modules]))
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []
