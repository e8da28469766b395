"""Events of containerd, from its own event service on the socket of its CRI.

The CRI's stream (GetContainerEvents) is not used, because listening to it takes events from kubelet or delays
them:

- containerd 1.7 has one queue for all listeners: each event goes to only one of them.
- containerd 2.x copies each event to all listeners, but events that happened while there was no listener go
  to the first one, and the copying waits for the slowest listener.
- CRI-O sends to one listener after the other: a listener that does not read delays all others. It sends no
  events unless ``enable_pod_events`` is set.

containerd's own service (1.0 to 2.x) has a queue for each listener. It sends only events that happen after
the subscription, has no sequence numbers that would show a gap, and sends no answer until there is an event.
So ``listen`` makes another call before and after it subscribes. When the second call has been answered, the
subscription exists, and a caller that reconciles after that misses no event. A runtime without this service
answers UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from proxy.api.containerd import containerd_events_pb2 as pb
from proxy.backends.runtime.client import call_error
from proxy.executor.runtime_ports import RuntimeEvent
from proxy.model.errors import UnavailableError
from proxy.wire.grpc_channel import SINGLE_THREADED_STREAM, GrpcChannel

if TYPE_CHECKING:
    import grpc

NAMESPACE = "k8s.io"
"""The containerd namespace of containers that are made through the CRI; fixed in containerd's code."""
ID_LIMIT = 256
"""The most characters of an id; containerd allows 76."""
MESSAGE_LIMIT_BYTES = 64 << 10
"""The most bytes of an event; requested events have a few hundred. A larger event ends the stream."""
_EXIT, _START, _DELETE = "/tasks/exit", "/tasks/start", "/containers/delete"
_SUBSCRIBE = "/containerd.services.events.v1.Events/Subscribe"
_VERSION = "/containerd.services.version.v1.Version/Version"


class ContainerdEvents:
    """Implements ``proxy.executor.runtime_ports.RuntimeEventStream``.

    Attributes:
        timeout: Returns the deadline of a call, in seconds; called from any thread.
        report_unread: Called with a sentence about each event that cannot be decoded, from the thread that
            listens.
    """

    def __init__(self, path: str, timeout_s: float = 5.0) -> None:
        """Store the address of the runtime; nothing is dialled before ``listen``.

        Args:
            path: Path of its unix socket, with or without ``unix://``.
            timeout_s: Deadline of the calls before and after subscribing.
        """
        self._path = path.removeprefix("unix://")
        self.timeout: Callable[[], float] = lambda: timeout_s
        self._channel = GrpcChannel(self._path, MESSAGE_LIMIT_BYTES, SINGLE_THREADED_STREAM)
        self.report_unread: Callable[[str], None] = lambda message: None

    def listen(self) -> Iterator[RuntimeEvent]:
        """Subscribe; see ``proxy.executor.runtime_ports.RuntimeEventStream``."""
        import grpc

        try:
            channel = self._channel.open()
            self._query(channel)
            subscribe: Any = channel.unary_stream(
                _SUBSCRIBE,
                request_serializer=pb.SubscribeRequest.SerializeToString,
                response_deserializer=None,  # bytes: an unreadable event must not end the stream
            )
            topics = (_EXIT, _START, _DELETE)
            filters = [f'namespace=="{NAMESPACE}",topic=="{topic}"' for topic in topics]
            stream = subscribe(pb.SubscribeRequest(filters=filters))
            self._query(channel)
        except grpc.RpcError as error:
            raise call_error(f"listen to events of {self._path}", error) from None
        except ValueError:
            raise UnavailableError(
                f"cannot listen to events of {self._path}: the channel is closed"
            ) from None
        return self._events(stream)

    def _query(self, channel: grpc.Channel) -> None:
        version: Any = channel.unary_unary(_VERSION, request_serializer=None, response_deserializer=None)
        version(b"", timeout=self.timeout())

    def _events(self, stream: Any) -> Iterator[RuntimeEvent]:
        import grpc

        try:
            for message in stream:
                try:
                    event = _decoded(message)
                except DecodeError as error:
                    self.report_unread(f"cannot read an event of the runtime: {error}")
                    continue
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise call_error(f"listen to events of {self._path}", error) from None
        finally:
            stream.cancel()

    def close(self) -> None:
        """End the stream, from any thread."""
        self._channel.close()


def _decoded(message: bytes) -> RuntimeEvent | None:
    """Read one envelope; raises DecodeError if it cannot be decoded; None for events that are not used."""
    envelope = pb.Envelope.FromString(message)
    kind, value = envelope.event.type_url.rpartition("/")[2], envelope.event.value
    if envelope.namespace != NAMESPACE:
        return None
    if kind == "containerd.events.TaskExit":
        ended = pb.TaskExit.FromString(value)
        event = RuntimeEvent("exit", ended.container_id)
        if ended.id != ended.container_id:
            return None  # a process that was started by exec, mostly a probe
    elif kind == "containerd.events.TaskStart":
        event = RuntimeEvent("start", pb.TaskStart.FromString(value).container_id)
    elif kind == "containerd.events.ContainerDelete":
        event = RuntimeEvent("delete", pb.ContainerDelete.FromString(value).id)
    else:
        return None
    return event if 0 < len(event.container_id) <= ID_LIMIT else None
