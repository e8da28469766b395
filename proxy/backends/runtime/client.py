"""Calls the container runtime over the daemon's own gRPC channel.

Nothing here is in the path of a client's request. Importing grpc takes longer than everything else at start,
so it is imported with the first call. If a runtime answers UNIMPLEMENTED for the service ``runtime.v1``,
``runtime.v1alpha2`` is called instead; its messages have the same layout.

Since the CRI of 1.25, the status of a container contains its resources, if the runtime fills them in
(containerd 1.7). In addition, containerd and CRI-O put a JSON document under ``info["info"]``. Its
``runtimeSpec`` is the saved OCI specification, and its ``pid`` is that of the container's first process. The
layout of this document is not specified, so a value that is missing, of another type, or not JSON counts as
unknown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from proxy.allocation.memory.request import SIZES_LIMIT
from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import (
    CONFIG_SOURCE,
    Limits,
    RuntimeContainer,
    RuntimeDetail,
    RuntimeList,
    RuntimePod,
)
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import NO_ANSWER, GrpcStatus
from proxy.model.idset import CpuSet, Mask, plausible
from proxy.pools.facts import POD_KEYS
from proxy.wire.grpc_channel import GrpcChannel, details_of
from proxy.wire.protobuf import WantedKeys, decode_entry, decode_name, decode_text

if TYPE_CHECKING:
    from google.protobuf.message import Message

_SERVICES = ("runtime.v1", "runtime.v1alpha2")
Answer = TypeVar("Answer", bound="Message")

_Entry = TypeVar("_Entry")

_KEYS = WantedKeys((*POD_KEYS, CONFIG_SOURCE))
_STATES = {number: name.removeprefix("CONTAINER_") for name, number in pb.ContainerState.items()}
_ID_FIELD_KEY = 0x0A
"""The protobuf key of field 1, a string: the id, which encoders write first."""

_TOO_LARGE = 1 << 64
"""Numbers of the OCI specification have 64 bits."""


def entries_of(
    raw: bytes, kind: str, read: Callable[[bytes], _Entry | None], report_unread: Callable[[str], None]
) -> RuntimeList[_Entry]:
    """Read a list.

    Args:
        raw: The runtime's answer.
        kind: The kind of the entries, for messages: ``sandbox`` or ``container``.
        read: Reads an entry. It raises DecodeError if the entry cannot be decoded, and returns None if the
            entry has an id that cannot be used in a call.
        report_unread: Called with a sentence about each entry that is left out.

    Raises:
        RuntimeCallError: The answer cannot even be split into entries.
    """
    try:
        pieces = pb.ListEntries.FromString(raw).entries
    except DecodeError as error:
        message = f"cannot read the runtime's list of {kind} entries: {error}"
        report_unread(message)
        raise RuntimeCallError(message, GrpcStatus.INTERNAL) from None
    entries, lacking = list[_Entry](), set[str]()
    for piece in pieces:
        try:
            entry = read(piece)
        except DecodeError as error:
            known = _id_of(piece)
            lacking.add(known)
            report_unread(f"cannot read {kind} {known!r} of the runtime's list: {error}")
            continue
        if entry is None:
            report_unread(f"cannot use a {kind} of the runtime's list: its id is not UTF-8")
        else:
            entries.append(entry)
    return RuntimeList(entries, lacking)


def read_sandbox(raw: bytes) -> RuntimePod | None:
    """Read a sandbox, with its labels and the annotations that are used here."""
    item = pb.ListedSandbox.FromString(raw)
    sandbox_id, meta = decode_name(item.id), item.metadata
    if not sandbox_id:
        return None
    return RuntimePod(
        id=sandbox_id,
        uid=decode_text(meta.uid),
        namespace=decode_text(meta.namespace),
        name=decode_text(meta.name),
        attempt=meta.attempt,
        ready=item.state == pb.SANDBOX_READY,
        labels=_KEYS.all_entries(item.labels),
        annotations=_KEYS.wanted_entries(item.annotations),
    )


def read_container(raw: bytes) -> RuntimeContainer | None:
    """Read a container."""
    item = pb.ListedContainer.FromString(raw)
    container_id, meta = decode_name(item.id), item.metadata
    if not container_id:
        return None
    return RuntimeContainer(
        id=container_id,
        sandbox_id=decode_text(item.pod_sandbox_id),
        name=decode_text(meta.name),
        attempt=meta.attempt,
        state=_STATES.get(item.state, "UNKNOWN"),
    )


def _id_of(raw: bytes) -> str:
    """Read the id of an entry that cannot be decoded; empty if the entry does not begin with its id."""
    if len(raw) < 2 or raw[0] != _ID_FIELD_KEY or raw[1] > 0x7F or len(raw) < 2 + raw[1]:
        return ""
    return decode_name(raw[2 : 2 + raw[1]])


def parse_detail(answer: pb.DetailFacts) -> RuntimeDetail:
    """Return the cgroup and the resources in a status answer; never raises."""
    document = _document(answer)
    linux = _nested_value(document, "runtimeSpec", "linux")
    cgroups_path = _text(_nested_value(linux, "cgroupsPath"))
    pid = _number(_nested_value(document, "pid"))
    status = answer.status
    pages = _reported_pages(status.resources.linux) or _specified_pages(linux)
    if status.resources.HasField("linux"):
        resources = status.resources.linux
        return RuntimeDetail(
            cgroups_path=cgroups_path,
            cpu_shares=resources.cpu_shares,
            cpu_quota=resources.cpu_quota,
            cpu_period=resources.cpu_period,
            memory_limit=resources.memory_limit_in_bytes,
            cpuset_cpus=plausible(decode_text(resources.cpuset_cpus)),
            cpuset_mems=plausible(decode_text(resources.cpuset_mems)),
            pid=pid,
            hugepage_limits=pages,
        )
    cpu = _nested_value(linux, "resources", "cpu")
    return RuntimeDetail(
        cgroups_path=cgroups_path,
        cpu_shares=_number(_nested_value(cpu, "shares")),
        cpu_quota=_number(_nested_value(cpu, "quota")),
        cpu_period=_number(_nested_value(cpu, "period")),
        memory_limit=_number(_nested_value(linux, "resources", "memory", "limit")),
        cpuset_cpus=plausible(_text(_nested_value(cpu, "cpus"))),
        cpuset_mems=plausible(_text(_nested_value(cpu, "mems"))),
        pid=pid,
        hugepage_limits=pages,
    )


def _reported_pages(resources: pb.ResourceFacts) -> tuple[tuple[str, int], ...]:
    """Return the limits on huge pages in the status; entries that cannot be decoded are left out."""
    limits: list[tuple[str, int]] = []
    for raw in resources.hugepage_limits[:SIZES_LIMIT]:
        with contextlib.suppress(DecodeError):
            entry = pb.HugepageFacts.FromString(raw)
            limits.append((decode_text(entry.page_size), entry.limit))
    return tuple(limits)


def _specified_pages(linux: object) -> tuple[tuple[str, int], ...]:
    """Return the limits on huge pages in the OCI specification; values of other types are left out."""
    entries = _nested_value(linux, "resources", "hugepageLimits")
    known = entries[:SIZES_LIMIT] if isinstance(entries, list) else ()
    limits = [
        (_text(_nested_value(each, "pageSize")), _number(_nested_value(each, "limit"))) for each in known
    ]
    return tuple((size, limit) for size, limit in limits if size and limit > 0)


def _document(answer: pb.DetailFacts) -> object:
    """Read the JSON document. Bytes that are not UTF-8 spoil only the text that contains them."""
    document = b""
    for raw in answer.info:
        entry = decode_entry(raw)
        if entry is not None and entry.key == b"info":
            document = entry.value
    try:
        return json.loads(document.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _nested_value(value: object, *keys: str) -> object:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _TOO_LARGE:
        return 0
    return value


class GrpcRuntime:
    """Implements ``proxy.executor.runtime_ports.Runtime``; safe to use from several threads.

    Answers are decoded here and not by grpc, because grpc fails the whole call if it cannot decode the
    answer.

    Attributes:
        timeout: Returns the deadline of a call, in seconds; called from any thread.
        report_unread: Called with a sentence about each entry of an answer that cannot be read, from any
            thread.
    """

    def __init__(self, path: str, timeout_s: float = 5.0) -> None:
        """Store the address of the runtime; nothing is dialled before the first call.

        Args:
            path: Path of its unix socket, with or without ``unix://``.
            timeout_s: Deadline of each call.
        """
        self._path = path.removeprefix("unix://")
        self.timeout: Callable[[], float] = lambda: timeout_s
        self._service = _SERVICES[0]
        # A list of thousands of containers exceeds the default limit of 4 MiB.
        self._channel = GrpcChannel(self._path, -1, ("grpc.max_send_message_length", -1))
        self.report_unread: Callable[[str], None] = lambda message: None

    def version(self) -> str:
        """Return the runtime's name and version; see ``proxy.executor.runtime_ports.Runtime``."""
        answer = self._query(
            "read the version of the runtime", "Version", pb.VersionRequest(), pb.VersionFacts
        )
        return f"{decode_text(answer.runtime_name)} {decode_text(answer.runtime_version)}"

    def cgroup_driver(self) -> str:
        """Read the cgroup driver (CRI of 1.28, containerd 2.0); see ``Runtime`` of the ports."""
        action = "read the cgroup driver of the runtime"
        try:
            answer = self._query(action, "RuntimeConfig", pb.RuntimeConfigRequest(), pb.RuntimeConfigResponse)
        except RuntimeCallError as error:
            if error.code != GrpcStatus.UNIMPLEMENTED:
                raise
            return ""
        if not answer.HasField("linux"):
            return ""
        return "systemd" if answer.linux.cgroup_driver == pb.SYSTEMD else "cgroupfs"

    def list_pods(self) -> RuntimeList[RuntimePod]:
        """List all sandboxes; see ``proxy.executor.runtime_ports.Runtime``."""
        raw = self._call("list pods", "ListPodSandbox", pb.ListPodSandboxRequest())
        return entries_of(raw, "sandbox", read_sandbox, self.report_unread)

    def list_containers(self, container_id: str = "") -> RuntimeList[RuntimeContainer]:
        """List all containers, or only the given one; see ``proxy.executor.runtime_ports.Runtime``."""
        request = pb.ListContainersRequest()
        if container_id:
            request.filter.id = container_id
        raw = self._call("list containers", "ListContainers", request)
        listed = entries_of(raw, "container", read_container, self.report_unread)
        if not container_id:
            return listed
        if listed.unread_ids & {container_id, ""}:
            message = f"cannot list container {container_id} at {self._path}: its entry cannot be decoded"
            raise RuntimeCallError(message, GrpcStatus.INTERNAL)
        # The CRI allows a runtime to match ids by prefix.
        return RuntimeList(item for item in listed if item.id == container_id)

    def detail(self, container_id: str) -> RuntimeDetail:
        """Read one container's verbose status; see ``proxy.executor.runtime_ports.Runtime``."""
        request = pb.ContainerStatusRequest(container_id=container_id, verbose=True)
        action = f"read the status of container {container_id}"
        return parse_detail(self._query(action, "ContainerStatus", request, pb.DetailFacts))

    def update_cpuset(self, container_id: str, cpus: CpuSet, mems: Mask | None, cpu_quota: int = 0) -> None:
        """Store a cpuset and a quota at the runtime; see ``proxy.executor.runtime_ports.Runtime``.

        The runtime does not change values whose fields are not set, so the request contains only these
        fields.
        """
        action = f"update the cpuset of container {container_id}"
        if not cpus or (mems is not None and not mems):
            raise RuntimeCallError(f"cannot {action}: the set is empty", GrpcStatus.INVALID_ARGUMENT)
        request = pb.UpdateContainerResourcesRequest(container_id=container_id)
        request.linux.cpuset_cpus = str(cpus)
        if mems is not None:
            request.linux.cpuset_mems = str(mems)
        request.linux.cpu_quota = cpu_quota
        self._call(action, "UpdateContainerResources", request)

    def update_limits(
        self, container_id: str, cpus: CpuSet | None, mems: Mask | None, limits: Limits
    ) -> None:
        """Change a container's resource limits; see ``proxy.executor.runtime_ports.Runtime``."""
        linux = pb.LinuxContainerResources(
            cpu_period=limits.cpu_period,
            cpu_quota=limits.cpu_quota,
            cpu_shares=limits.cpu_shares,
            memory_limit_in_bytes=limits.memory_limit,
            memory_swap_limit_in_bytes=limits.memory_swap_limit,
            oom_score_adj=limits.oom_score_adj,
            cpuset_cpus=str(cpus or ""),
            cpuset_mems=str(mems or ""),
            unified=limits.unified,
        )
        request = pb.UpdateContainerResourcesRequest(container_id=container_id, linux=linux)
        action = f"update container {container_id}"
        self._call(action, "UpdateContainerResources", request)

    def raw_lists(self) -> tuple[bytes, bytes]:
        """List all sandboxes and containers; see ``proxy.executor.runtime_ports.Runtime``."""
        pods = self._call("list pods", "ListPodSandbox", pb.ListPodSandboxRequest())
        return pods, self._call("list containers", "ListContainers", pb.ListContainersRequest())

    def close(self) -> None:
        """Close the channel; calls after that fail as unavailable."""
        self._channel.close()

    def _query(self, action: str, method: str, request: Message, answer: type[Answer]) -> Answer:
        """Make a call whose answer is decoded as a whole."""
        raw = self._call(action, method, request)
        try:
            return answer.FromString(raw)
        except DecodeError as error:
            message = f"cannot {action} at {self._path}: {error}"
            self.report_unread(message)
            raise RuntimeCallError(message, GrpcStatus.INTERNAL) from None

    def _call(self, action: str, method: str, request: Message) -> bytes:
        """Make a call in the version of the API that the runtime has, and return the encoded answer.

        Raises:
            UnavailableError: The runtime has not answered.
            RuntimeCallError: The runtime has answered with an error.
        """
        import grpc

        first, refusal = self._service, None
        for service in (first, *(s for s in _SERVICES if s != first)):
            try:
                call: Any = self._channel.open(self.timeout()).unary_unary(
                    f"/{service}.RuntimeService/{method}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=None,
                )
                result: bytes = call(request, timeout=self.timeout())
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    refusal = refusal or error  # keep the error of the version that is tried first
                    continue
                raise call_error(f"{action} at {self._path}", error) from None
            except ValueError:  # the channel is closed
                raise UnavailableError(f"cannot {action} at {self._path}: the channel is closed") from None
            self._service = service
            return result
        raise call_error(f"{action} at {self._path}", refusal) from None


def call_error(action: str, error: Any) -> UnavailableError | RuntimeCallError:
    """Return the error for an action at the runtime that ended with an error of gRPC."""
    number, name = error.code().value[0], error.code().name
    message = f"cannot {action}: {details_of(error)} ({name})"
    return UnavailableError(message) if number in NO_ANSWER else RuntimeCallError(message, number)
