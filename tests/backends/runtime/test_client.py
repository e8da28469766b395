"""The proxy's own calls to the runtime, against a small gRPC server on a unix socket."""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.cri import api_pb2 as pb
from proxy.backends.runtime.client import GrpcRuntime, entries_of, parse_detail, read_container, read_sandbox
from proxy.executor.runtime_ports import CONFIG_SOURCE, RuntimeContainer, RuntimeDetail
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.facts import QOS_LABEL
from proxy.wire.protobuf import encode_field

DEEP = b"\x9b\x06" * 200 + b"\x9c\x06" * 200
GOOD = (
    encode_field(1, b"good")
    + encode_field(2, b"s")
    + encode_field(3, encode_field(1, b"main") + b"\x10\x02")
    + b"\x30\x01"
)
ENTRY = RuntimeContainer("good", "s", "main", 2, "RUNNING")


class Server(grpc.GenericRpcHandler):
    """Answers by method path from a table; everything else is UNIMPLEMENTED."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.answers: dict[str, Callable[[bytes, grpc.ServicerContext], Any]] = {}
        self.seen: list[tuple[str, bytes]] = []
        self.authority = ""
        self.server: grpc.Server | None = None

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        name = details.method.rpartition("/")[2]
        answer = self.answers.get(details.method)
        if answer is None:
            self.seen.append((details.method, b""))
            return None

        def unary(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.seen.append((details.method, request))
            return bytes(answer(request, context).SerializeToString())

        def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            for item in answer(request, context):
                yield item.SerializeToString()

        if name == "GetContainerEvents":
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    def start(self) -> None:
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers([self])
        self.server.add_insecure_port(f"unix:{self.socket}")
        self.server.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(None).wait()

    def v1(self, method: str, answer: Any, service: str = "runtime.v1") -> None:
        self.answers[f"/{service}.RuntimeService/{method}"] = (
            answer if callable(answer) else lambda request, context: answer
        )


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="tp-") as directory:
        made = Server(Path(directory) / "cri.sock")
        made.start()
        yield made
        made.stop()


@pytest.fixture
def runtime(server: Server) -> Iterator[GrpcRuntime]:
    made = GrpcRuntime(f"unix://{server.socket}", timeout_s=30)
    yield made
    made.close()


def refuse(code: grpc.StatusCode, message: str) -> Callable[[bytes, grpc.ServicerContext], Any]:
    def answer(request: bytes, context: grpc.ServicerContext) -> Any:
        context.abort(code, message)

    return answer


def test_the_version_has_the_name_of_the_runtime(server: Server, runtime: GrpcRuntime) -> None:
    server.v1("Version", pb.VersionResponse(runtime_name="containerd", runtime_version="1.6.20"))
    assert runtime.version() == "containerd 1.6.20"


def test_an_old_runtime_is_called_with_its_own_version(server: Server, runtime: GrpcRuntime) -> None:
    server.v1("Version", pb.VersionResponse(runtime_name="old", runtime_version="1"), "runtime.v1alpha2")
    assert runtime.version() == "old 1"
    assert runtime.version() == "old 1"
    versions = [method.split(".")[1] for method, _ in server.seen]
    assert versions == ["v1", "v1alpha2", "v1alpha2"]  # the version is determined once


def test_an_unknown_method(server: Server, runtime: GrpcRuntime) -> None:
    server.v1("Version", pb.VersionResponse(runtime_name="new", runtime_version="2"))
    with pytest.raises(RuntimeCallError, match="UNIMPLEMENTED") as caught:
        runtime.list_pods()
    assert caught.value.code == 12
    assert runtime.version() == "new 2"
    assert server.seen[-1][0].startswith("/runtime.v1.")


def test_the_reason_of_the_first_version_is_reported(server: Server, runtime: GrpcRuntime) -> None:
    for service in ("runtime.v1", "runtime.v1alpha2"):
        server.v1("ListPodSandbox", refuse(grpc.StatusCode.UNIMPLEMENTED, f"not by {service}"), service)
    with pytest.raises(RuntimeCallError, match=r"not by runtime.v1 \(UNIMPLEMENTED\)"):
        runtime.list_pods()


@pytest.mark.parametrize(
    ("answer", "driver"),
    [
        (pb.RuntimeConfigResponse(linux=pb.LinuxRuntimeConfiguration(cgroup_driver=pb.CGROUPFS)), "cgroupfs"),
        (pb.RuntimeConfigResponse(linux=pb.LinuxRuntimeConfiguration()), "systemd"),
        (pb.RuntimeConfigResponse(), ""),
        (refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown method"), ""),
    ],
)
def test_the_cgroup_driver(server: Server, runtime: GrpcRuntime, answer: Any, driver: str) -> None:
    server.v1("RuntimeConfig", answer)
    assert runtime.cgroup_driver() == driver


def test_a_cgroup_driver_that_cannot_be_determined(server: Server, runtime: GrpcRuntime) -> None:
    server.v1("RuntimeConfig", refuse(grpc.StatusCode.INTERNAL, "no"))
    with pytest.raises(RuntimeCallError, match="cannot read the cgroup driver of the runtime"):
        runtime.cgroup_driver()


def test_lists_carry_states_labels_and_the_annotations_that_count(
    server: Server, runtime: GrpcRuntime
) -> None:
    pods = pb.ListPodSandboxResponse()
    pod = pods.items.add(
        id="p1",
        state=pb.SANDBOX_READY,
        labels={QOS_LABEL: "LS", "a": "b"},
        annotations={RESOURCE_STATUS: "{}", CONFIG_SOURCE: "file", "c": "d"},
    )
    pod.metadata.CopyFrom(pb.PodSandboxMetadata(name="web", namespace="shop", uid="u1", attempt=2))
    pods.items.add(id="p2", state=pb.SANDBOX_NOTREADY)
    server.v1("ListPodSandbox", pods)
    first, second = runtime.list_pods()
    assert (first.id, first.uid, first.namespace, first.name, first.attempt) == ("p1", "u1", "shop", "web", 2)
    assert (first.ready, second.ready) == (True, False)
    assert (first.labels, first.annotations) == (
        {QOS_LABEL: "LS", "a": "b"},
        {RESOURCE_STATUS: "{}", CONFIG_SOURCE: "file"},
    )

    containers = pb.ListContainersResponse()
    for number in range(5):
        item = containers.containers.add(
            id=f"c{number}", pod_sandbox_id="p1", state=number, labels={"x": "y"}
        )
        item.metadata.CopyFrom(pb.ContainerMetadata(name="app", attempt=number))
    server.v1("ListContainers", containers)
    listed = runtime.list_containers()
    assert [c.state for c in listed] == ["CREATED", "RUNNING", "EXITED", "UNKNOWN", "UNKNOWN"]
    assert (listed[1].sandbox_id, listed[1].name, listed[1].attempt) == ("p1", "app", 1)
    assert [c.id for c in runtime.list_containers("c3")] == ["c3"]
    assert pb.ListContainersRequest.FromString(server.seen[-1][1]).filter.id == "c3"


def test_an_answer_of_many_megabytes(server: Server, runtime: GrpcRuntime) -> None:
    big = pb.ListPodSandboxResponse()
    big.items.add(id="p", annotations={RESOURCE_STATUS: "x" * (20 << 20)})
    server.v1("ListPodSandbox", big)
    assert len(runtime.list_pods()[0].annotations[RESOURCE_STATUS]) == 20 << 20


SPEC = {
    "pid": 4711,
    "runtimeSpec": {
        "linux": {
            "cgroupsPath": "/kubepods/podx/c1",
            "resources": {
                "cpu": {"shares": 512, "quota": -1, "period": 100000, "cpus": "0-1", "mems": "0"},
                "memory": {"limit": 1024},
            },
        }
    },
}


def test_detail_from_the_specification(server: Server, runtime: GrpcRuntime) -> None:
    server.v1("ContainerStatus", pb.ContainerStatusResponse(info={"info": json.dumps(SPEC)}))
    assert runtime.detail("c1") == RuntimeDetail("/kubepods/podx/c1", 512, -1, 100000, 1024, "0-1", "0", 4711)
    request = pb.ContainerStatusRequest.FromString(server.seen[-1][1])
    assert (request.container_id, request.verbose) == ("c1", True)


def test_detail_from_the_status_first(server: Server, runtime: GrpcRuntime) -> None:
    answer = pb.ContainerStatusResponse(info={"info": json.dumps(SPEC)})
    linux = answer.status.resources.linux
    linux.cpu_shares, linux.cpuset_cpus, linux.memory_limit_in_bytes = 2, "7", 5
    server.v1("ContainerStatus", answer)
    assert runtime.detail("c1") == RuntimeDetail("/kubepods/podx/c1", 2, 0, 0, 5, "7", "", 4711)


def test_limits_on_huge_pages_from_the_status_else_from_the_specification(
    server: Server, runtime: GrpcRuntime
) -> None:
    answer = pb.ContainerStatusResponse()
    resources = {"hugepageLimits": [{"pageSize": "2MB", "limit": 4 << 20}, {"pageSize": "1GB", "limit": 0}]}
    answer.info["info"] = json.dumps({"runtimeSpec": {"linux": {"resources": resources}}})
    server.v1("ContainerStatus", answer)
    assert runtime.detail("c1").hugepage_limits == (("2MB", 4 << 20),)
    answer.status.resources.linux.cpu_shares = 2
    server.v1("ContainerStatus", answer)
    assert runtime.detail("c1").hugepage_limits == (("2MB", 4 << 20),), "the status does not report them"
    answer.status.resources.linux.hugepage_limits.add(page_size="2MB", limit=6 << 20)
    server.v1("ContainerStatus", answer)
    assert runtime.detail("c1").hugepage_limits == (("2MB", 6 << 20),)


def test_limits_on_huge_pages_that_cannot_be_decoded_are_left_out() -> None:
    answer = pb.DetailFacts()
    whole = pb.HugepageLimit(page_size="2MB", limit=5).SerializeToString()
    answer.status.resources.linux.hugepage_limits.extend([b"\xff", whole])
    assert parse_detail(answer).hugepage_limits == (("2MB", 5),)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"info": ""},
        {"info": "{"},
        {"info": "[" * 100_000},
        {"info": "[1]"},
        {"info": '{"runtimeSpec": 5}'},
        {"info": '{"pid": "7"}'},
        {"info": '{"runtimeSpec": {"linux": {"cgroupsPath": 7}}}'},
        {"info": '{"runtimeSpec": {"linux": {"resources": {"cpu": {"shares": "x", "quota": true}}}}}'},
        {"info": '{"runtimeSpec": {"linux": {"resources": {"cpu": null, "memory": []}}}}'},
        {"info": '{"runtimeSpec": {"linux": {"resources": {"hugepageLimits": {"2MB": 5}}}}}'},
        {"info": '{"runtimeSpec": {"linux": {"resources": {"hugepageLimits": [7, {"pageSize": "2MB"}]}}}}'},
    ],
)
def test_a_detail_without_usable_fields(server: Server, runtime: GrpcRuntime, info: dict[str, str]) -> None:
    server.v1("ContainerStatus", pb.ContainerStatusResponse(info=info))
    assert runtime.detail("c1") == RuntimeDetail()


def test_update_carries_the_cpuset_and_nothing_else(server: Server, runtime: GrpcRuntime) -> None:
    server.v1("UpdateContainerResources", pb.UpdateContainerResourcesResponse())
    runtime.update_cpuset("c1", CpuSet.parse("0-3,8"), Mask.parse("0"))
    expected = pb.UpdateContainerResourcesRequest(container_id="c1")
    expected.linux.cpuset_cpus, expected.linux.cpuset_mems = "0-3,8", "0"
    assert pb.UpdateContainerResourcesRequest.FromString(server.seen[-1][1]) == expected
    runtime.update_cpuset("c1", CpuSet.parse("1"), None)
    assert pb.UpdateContainerResourcesRequest.FromString(server.seen[-1][1]).linux.cpuset_mems == ""
    sent = len(server.seen)
    for cpus, mems in ((CpuSet(), None), (CpuSet([1]), Mask())):
        with pytest.raises(RuntimeCallError, match="empty"):
            runtime.update_cpuset("c1", cpus, mems)
    assert len(server.seen) == sent


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, RuntimeCallError),
        (grpc.StatusCode.UNKNOWN, RuntimeCallError),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
    ],
)
def test_errors_of_the_runtime(
    server: Server, runtime: GrpcRuntime, code: Any, kind: type[Exception]
) -> None:
    server.v1("ContainerStatus", refuse(code, "no such\n thing"))
    with pytest.raises(kind) as caught:
        runtime.detail("c1")
    assert str(caught.value) == (
        f"cannot read the status of container c1 at {server.socket}: no such thing ({code.name})"
    )
    if isinstance(caught.value, RuntimeCallError):
        assert caught.value.code == code.value[0]


def test_no_answer_in_time(server: Server) -> None:
    release = threading.Event()
    server.v1("Version", lambda request, context: release.wait(60) and pb.VersionResponse())
    runtime = GrpcRuntime(str(server.socket), timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="DEADLINE_EXCEEDED"):
        runtime.version()
    assert time.monotonic() - started < 30, "the call did not wait for the answer"
    release.set()
    runtime.close()


def test_a_runtime_that_stops_and_returns(server: Server, runtime: GrpcRuntime) -> None:
    server.v1("Version", pb.VersionResponse(runtime_name="r", runtime_version="1"))
    server.stop()
    with pytest.raises(UnavailableError, match="cannot read the version of the runtime at"):
        runtime.version()
    server.start()
    until = time.monotonic() + 30
    while True:
        try:
            assert runtime.version() == "r 1"
            break
        except UnavailableError:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_closed_client_makes_no_call(server: Server) -> None:
    runtime = GrpcRuntime(str(server.socket))
    server.v1("Version", pb.VersionResponse())
    runtime.version()
    runtime.close()
    runtime.close()
    with pytest.raises(UnavailableError, match="closed"):
        runtime.version()


def test_the_client_waits_for_a_runtime_that_starts_slowly(server: Server, slow_socket: Any) -> None:
    """On a machine that is starting, the runtime accepts connections and does not answer for a while."""
    server.v1("Version", pb.VersionResponse(runtime_name="slow", runtime_version="1"))
    path = server.socket.with_name("slow.sock")
    slow_socket(path, server.socket, 0.5)
    runtime = GrpcRuntime(f"unix://{path}", timeout_s=30)
    assert runtime.version() == "slow 1"
    runtime.close()


@pytest.mark.parametrize(
    ("entry", "unread", "message"),
    [
        (encode_field(1, b"deep") + DEEP, {"deep"}, "cannot read container 'deep' of the runtime's list"),
        (DEEP, {""}, "cannot read container '' of the runtime's list"),
        (encode_field(2, b"s") + encode_field(1, b"late") + DEEP, {""}, "cannot read container ''"),
        (
            encode_field(1, b"\xff\xfe") + encode_field(2, b"s"),
            set(),
            "cannot use a container of the runtime's list",
        ),
        (b"\x0a\x7fshort", {""}, "cannot read container ''"),
    ],
    ids=["deep", "deep without an id", "id not first", "id not UTF-8", "cut"],
)
def test_one_entry_costs_only_itself(entry: bytes, unread: set[str], message: str) -> None:
    reported: list[str] = []
    raw = encode_field(1, entry) + encode_field(1, GOOD) + encode_field(1, entry)
    found = entries_of(raw, "container", read_container, reported.append)
    assert (list(found), found.unread_ids) == ([ENTRY], unread)
    assert len(reported) == 2
    assert all(each.startswith(message) for each in reported)


def test_a_list_that_cannot_be_split_is_a_failed_call() -> None:
    with pytest.raises(RuntimeCallError, match="cannot read the runtime's list of container entries"):
        entries_of(encode_field(1, GOOD) + b"\x0a\x7f", "container", read_container, lambda what: None)


def test_names_that_are_not_utf8_stay_distinct() -> None:
    """If all invalid bytes became the same character, two pods would have the same uid."""
    pods = [
        encode_field(1, b"s%d" % n) + encode_field(2, encode_field(2, b"uid-" + odd))
        for n, odd in enumerate((b"\xff", b"\xfe"))
    ]
    raw = b"".join(encode_field(1, pod) for pod in pods)
    assert [p.uid for p in entries_of(raw, "sandbox", read_sandbox, lambda what: None)] == [
        r"uid-\xff",
        r"uid-\xfe",
    ]


@given(st.dictionaries(st.sampled_from([QOS_LABEL, "app", "x/y"]), st.text(max_size=5)), st.booleans())
def test_a_sandbox_is_read_from_the_whole_message(labels: dict[str, str], ready: bool) -> None:
    item = pb.PodSandbox(
        id="s",
        metadata=pb.PodSandboxMetadata(name="n", uid="u", namespace="ns", attempt=3),
        state=pb.SANDBOX_READY if ready else pb.SANDBOX_NOTREADY,
        labels=labels,
        annotations={"note": "x" * 100},
    )
    raw = pb.ListPodSandboxResponse(items=[item]).SerializeToString()
    (pod,) = entries_of(raw, "sandbox", read_sandbox, lambda what: None)
    assert (pod.id, pod.name, pod.uid, pod.namespace, pod.attempt) == ("s", "n", "u", "ns", 3)
    assert (pod.ready, pod.annotations) == (ready, {})
    assert pod.labels == labels
