"""containerd's events, against a small gRPC server on a unix socket."""

from __future__ import annotations

import importlib.util
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Payload

from proxy.api.containerd import containerd_events_pb2 as pb
from proxy.backends.runtime.containerd_events import MESSAGE_LIMIT_BYTES, ContainerdEvents
from proxy.executor.runtime_ports import RuntimeEvent
from proxy.model.errors import RuntimeCallError, UnavailableError
from tests.oracles.containerd_events import read_event

if TYPE_CHECKING:
    from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[3]
VERSION = "/containerd.services.version.v1.Version/Version"
SUBSCRIBE = "/containerd.services.events.v1.Events/Subscribe"
LONG_TIMEOUT_S = 60


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_committed_classes_are_what_the_proto_file_says(tmp_path: Path) -> None:
    options = ["-I", "proto/containerd", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", *options, "containerd_events.proto"]
    subprocess.run(protoc, cwd=ROOT, check=True)
    for name in ("containerd_events_pb2.py", "containerd_events_pb2.pyi"):
        committed = (ROOT / "proxy" / "api" / "containerd" / name).read_text()
        assert committed == (tmp_path / name).read_text(), f"{name} is outdated: run `make proto`"


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (pb.SubscribeRequest, {"filters": 1}),
        (pb.Envelope, {"namespace": 2, "topic": 3, "event": 4}),
        (pb.TaskExit, {"container_id": 1, "id": 2}),
        (pb.TaskStart, {"container_id": 1}),
        (pb.ContainerDelete, {"id": 1}),
    ],
)
def test_messages_have_the_field_numbers_of_containerd(
    message: type[Message], numbers: dict[str, int]
) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: field.number for name, field in fields.items()} == numbers


def envelope(kind: str, value: Message | bytes, namespace: str = "k8s.io", prefix: str = "") -> bytes:
    data = value if isinstance(value, bytes) else value.SerializeToString()
    payload = Payload(type_url=f"{prefix}containerd.events.{kind}", value=data)
    return pb.Envelope(namespace=namespace, topic="/a/topic", event=payload).SerializeToString()


def ended(container_id: str, process_id: str | None = None) -> bytes:
    return envelope("TaskExit", pb.TaskExit(container_id=container_id, id=process_id or container_id))


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (ended("c1"), RuntimeEvent("exit", "c1")),
        (ended("c1", "probe"), None),
        (envelope("TaskExit", pb.TaskExit(container_id="c1")), None),
        (envelope("TaskStart", pb.TaskStart(container_id="c1")), RuntimeEvent("start", "c1")),
        (envelope("ContainerDelete", pb.ContainerDelete(id="c1")), RuntimeEvent("delete", "c1")),
        (
            envelope("ContainerDelete", pb.ContainerDelete(id="c1"), prefix="type.googleapis.com/"),
            RuntimeEvent("delete", "c1"),
        ),
        (envelope("TaskDelete", pb.TaskExit(container_id="c1", id="c1")), None),
        (envelope("TaskExit", pb.TaskExit(container_id="c1", id="c1"), namespace="moby"), None),
        (envelope("TaskExit", b"\x0a\xff"), None),
        (envelope("TaskExit", pb.TaskExit()), None),
        (ended("c" * 256), RuntimeEvent("exit", "c" * 256)),
        (ended("c" * 257), None),
        (b"\xff\xff", None),
        (b"", None),
    ],
)
def test_an_envelope_gives_an_event_or_none(message: bytes, event: RuntimeEvent | None) -> None:
    assert read_event(message) == event


def test_fields_that_are_not_declared_do_not_matter() -> None:
    # pid (3), exit_status (4) and exited_at (5) of a TaskExit, as containerd sends them
    value = b"\x0a\x02c1\x12\x02c1\x18\x07\x20\x89\x01\x2a\x02\x08\x05"
    assert read_event(envelope("TaskExit", value) + b"\x0a\x02\x08\x05") == RuntimeEvent("exit", "c1")


class Containerd(grpc.GenericRpcHandler):
    """Serves version and events; it sends the items of ``reported``, and None ends the stream."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.serves = {VERSION, SUBSCRIBE}
        self.seen: list[str] = []
        self.subscriptions: list[pb.SubscribeRequest] = []
        self.reported: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.left = threading.Event()
        self.server: grpc.Server | None = None

    def service(self, details: Any) -> Any:
        self.seen.append(details.method)
        if details.method not in self.serves:
            return None
        if details.method == VERSION:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\x0a\x051.7.0")
        return grpc.unary_stream_rpc_method_handler(
            self.subscribe, request_deserializer=pb.SubscribeRequest.FromString
        )

    def subscribe(self, request: pb.SubscribeRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.subscriptions.append(request)
        reported = self.reported

        def left() -> None:
            self.left.set()
            reported.put(None)

        if not context.add_callback(left):  # the client has left already
            left()
        while (message := reported.get()) is not None:
            yield message

    def start(self) -> None:
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers([self])
        self.server.add_insecure_port(f"unix:{self.socket}")
        self.server.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(None).wait()
            self.server = None


@pytest.fixture
def containerd() -> Iterator[Containerd]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="tp-") as directory:
        made = Containerd(Path(directory) / "containerd.sock")
        made.start()
        yield made
        made.stop()


@pytest.fixture
def events(containerd: Containerd) -> Iterator[ContainerdEvents]:
    made = ContainerdEvents(f"unix://{containerd.socket}", timeout_s=30)
    yield made
    made.close()


def test_events_come_in_order(containerd: Containerd, events: ContainerdEvents) -> None:
    for message in (ended("a"), b"\xff", ended("a", "exec"), ended("b"), None):
        containerd.reported.put(message)
    assert list(events.listen()) == [RuntimeEvent("exit", "a"), RuntimeEvent("exit", "b")]


def test_the_subscription_names_only_the_events_that_are_read(
    containerd: Containerd, events: ContainerdEvents
) -> None:
    containerd.reported.put(None)
    assert list(events.listen()) == []
    (request,) = containerd.subscriptions
    assert list(request.filters) == [
        'namespace=="k8s.io",topic=="/tasks/exit"',
        'namespace=="k8s.io",topic=="/tasks/start"',
        'namespace=="k8s.io",topic=="/containers/delete"',
    ]


def test_the_subscription_stands_when_listen_returns(
    containerd: Containerd, events: ContainerdEvents
) -> None:
    events.listen()
    assert containerd.seen == [VERSION, SUBSCRIBE, VERSION]


@pytest.mark.parametrize("serves", [set(), {VERSION}])
def test_a_runtime_without_events(containerd: Containerd, events: ContainerdEvents, serves: set[str]) -> None:
    containerd.serves = serves
    with pytest.raises(RuntimeCallError, match=r"cannot listen to events of /tmp/.*UNIMPLEMENTED") as caught:
        list(events.listen())
    assert caught.value.code == 12


def test_a_missing_runtime_is_reported(containerd: Containerd, events: ContainerdEvents) -> None:
    containerd.stop()
    with pytest.raises(UnavailableError, match="cannot listen"):
        events.listen()


def test_events_resume_after_a_restart_of_the_runtime(
    containerd: Containerd, events: ContainerdEvents
) -> None:
    stream = events.listen()
    containerd.reported.put(ended("a"))
    assert next(stream) == RuntimeEvent("exit", "a")
    containerd.stop()
    with pytest.raises(UnavailableError):
        next(stream)
    containerd.reported = queue.SimpleQueue()
    containerd.start()
    stream = until(events.listen)
    containerd.reported.put(ended("b"))
    assert next(stream) == RuntimeEvent("exit", "b")


def until(what: Callable[[], Iterator[RuntimeEvent]]) -> Iterator[RuntimeEvent]:
    """Try again until the channel is connected again."""
    pause = threading.Event()
    for _ in range(LONG_TIMEOUT_S * 10):
        try:
            return what()
        except UnavailableError:
            pause.wait(0.1)
    raise AssertionError("it does not come back")


def test_an_event_without_bounds_ends_the_stream(containerd: Containerd, events: ContainerdEvents) -> None:
    stream = events.listen()
    containerd.reported.put(ended("a"))
    containerd.reported.put(ended("b" * MESSAGE_LIMIT_BYTES))
    assert next(stream) == RuntimeEvent("exit", "a")
    with pytest.raises(RuntimeCallError, match="RESOURCE_EXHAUSTED"):
        next(stream)
    assert containerd.left.wait(LONG_TIMEOUT_S)


def test_close_wakes_the_reader(containerd: Containerd, events: ContainerdEvents) -> None:
    stream = events.listen()
    with futures.ThreadPoolExecutor(1) as reader:
        waits = reader.submit(next, stream)
        events.close()
        with pytest.raises(UnavailableError):
            waits.result(LONG_TIMEOUT_S)
    assert containerd.left.wait(LONG_TIMEOUT_S), (
        "the runtime must not keep a queue for a client that has gone"
    )
    with pytest.raises(UnavailableError, match="closed"):
        events.listen()


def test_a_client_that_stops_reading_is_dropped(containerd: Containerd, events: ContainerdEvents) -> None:
    stream = events.listen()
    containerd.reported.put(ended("a"))
    next(stream)
    del stream
    assert containerd.left.wait(LONG_TIMEOUT_S)
