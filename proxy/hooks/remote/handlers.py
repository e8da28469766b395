"""The handlers of a remote hook: they send an event to a server and convert its answer.

The protocol has no field presence: a server returns everything that it received, with its changes. So the
changes that it *wants* are the differences between the merged answer (``merge``) and the request. An answer
that changes nothing claims nothing, and conflicts with no other hook. In these cases Koordinator's merge does
harm, and we do not follow it:

- A server that never sets an OOM score adjustment answers with 0 (Koordinator v1.8.0
  pkg/runtimeproxy/resexecutor/cri/utils.go, updateResource), so 0 is ignored. No server can set it to 0.
- An empty set takes back the CPUs that the *client* requested: koordlet uses it to free BE (best effort) pods
  from the CPUs that kubelet wrote (Koordinator v1.8.0 pkg/koordlet/runtimehooks/hooks/cpuset/rule.go,
  getContainerCPUSet). So an empty set becomes ``CLEAR``, never a container without CPUs. It is ignored if the
  client requested no CPUs or a previous hook has chosen some.
- CPUs and nodes that hooks may not give are left out of the answer and reported, and the rest of it counts:
  koordlet computes pools by itself, and would otherwise lose every answer. A set that contains all CPUs of
  the container (or all that a previous hook has chosen) narrows nothing, so it claims nothing.
- The pod's cgroup exists before its containers, so an answer for a container cannot move it.
- Environment variables are set in place, so their order stays (Koordinator's transferToCRIContainerEnvs loses
  it), and variables that could not be sent to the server are not removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from proxy.api.koordinator import hook_pb2 as pb
from proxy.hooks.answers import CLEAR, LEAVE, NOTHING, Adjustment, Presence
from proxy.hooks.events import (
    Point,
    PostStartContainer,
    PostStopContainer,
    PostStopPodSandbox,
    PreCreateContainer,
    PreRunPodSandbox,
    PreStartContainer,
    PreUpdateContainerResources,
)
from proxy.hooks.remote.client import LARGEST_MESSAGE_BYTES, HookServerClient
from proxy.hooks.remote.convert import PROTOCOL_NUMBERS, container_request, sandbox_request
from proxy.hooks.remote.merge import merge_answer
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet, IdSet, Mask
from proxy.telemetry.port import Report

REMOTE_POINTS: Final[dict[str, type[Point]]] = {
    point.__name__: point
    for point in (
        PreRunPodSandbox,
        PostStopPodSandbox,
        PreCreateContainer,
        PreStartContainer,
        PostStartContainer,
        PostStopContainer,
        PreUpdateContainerResources,
    )
}
"""Koordinator's names of its hooks, which are the names of our points."""

_SANDBOX = (PreRunPodSandbox, PostStopPodSandbox)

_S = TypeVar("_S", CpuSet, Mask)


@dataclass(frozen=True, slots=True)
class ServerClaims:
    """The changes that a server requests.

    Attributes:
        adjustment: As the engine takes it.
        dropped: Field to the part of the answer that cannot be applied, and why.
    """

    adjustment: Adjustment
    dropped: Mapping[str, str]


def sandbox_claims(sent: pb.PodSandboxHookRequest, after: pb.PodSandboxHookRequest) -> ServerClaims:
    """Find the changes that a server wants for a sandbox.

    Args:
        sent: The request that the server received.
        after: That with its answer.
    """
    wanted: dict[str, Any] = {
        "labels": _changed(sent.labels, after.labels),
        "annotations": _changed(sent.annotations, after.annotations),
    }
    if after.cgroup_parent != sent.cgroup_parent:
        wanted["cgroup_parent"] = after.cgroup_parent
    return ServerClaims(Adjustment(**wanted), {})


def container_claims(
    event: PreCreateContainer | PreUpdateContainerResources,
    so_far: Adjustment,
    sent: pb.ContainerResourceHookRequest,
    after: pb.ContainerResourceHookRequest,
) -> ServerClaims:
    """Find the changes that a server wants for a container.

    Args:
        event: The event.
        so_far: The fields that previous hooks have set.
        sent: The request that the server received.
        after: That with its answer.

    Raises:
        HookError: A list of CPUs or nodes is invalid.
    """
    dropped: dict[str, str] = {}
    wanted: dict[str, Any] = {
        "annotations": _changed(sent.container_annotations, after.container_annotations)
    }
    if isinstance(event, PreCreateContainer):
        wanted["envs"] = _changed(sent.container_envs, after.container_envs)
    if after.pod_cgroup_parent != sent.pod_cgroup_parent:
        dropped["pod_cgroup_parent"] = f"{after.pod_cgroup_parent!r}: the pod's cgroup is there already"
    had, has = sent.container_resources, after.container_resources
    if had != has:
        wanted |= _numbers(had, has)
        wanted["unified"] = _changed(had.unified, has.unified)
        wanted |= _sets(event, so_far, sent, after, dropped)
    return ServerClaims(Adjustment(**wanted), dropped)


def claims_of(event: object, so_far: Adjustment, sent: Any, after: Any) -> ServerClaims:
    """Find the changes that a server wants; none at points where Koordinator's proxy ignores answers too."""
    if isinstance(event, PreRunPodSandbox):
        return sandbox_claims(sent, after)
    if isinstance(event, PreCreateContainer | PreUpdateContainerResources):
        return container_claims(event, so_far, sent, after)
    return ServerClaims(NOTHING, {})


def _changed(sent: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    changed: dict[str, Any] = {key: value for key, value in after.items() if sent.get(key) != value}
    return changed | {key: CLEAR for key in sent if key not in after}


def _numbers(had: pb.LinuxContainerResources, has: pb.LinuxContainerResources) -> dict[str, int]:
    pairs = ((field, getattr(had, name), getattr(has, name)) for field, name in PROTOCOL_NUMBERS.items())
    wanted = {field: value for field, before, value in pairs if value != before}
    if not has.oom_score_adj:
        wanted.pop("oom_score_adj", None)
    return wanted


@dataclass(frozen=True, slots=True)
class _Choice(Generic[_S]):
    """The CPUs or nodes that can be chosen.

    Attributes:
        engine_choice: The set that the engine has chosen; None if it chooses none.
        hook_choice: The set that a previous hook has chosen.
        allowed: The set that hooks may choose from.
        by_client: The client has requested a set.
    """

    engine_choice: _S | None
    hook_choice: _S | Literal[Presence.LEAVE, Presence.CLEAR]
    allowed: _S
    by_client: bool

    def wanted_set(self, name: str, text: str, dropped: dict[str, str]) -> _S | Presence:
        """Find the set that a field of an answer wants; parts that are not allowed go into ``dropped``."""
        ids = ",".join(part for part in text.split(",") if part.strip())  # koordlet joins empty pools, too
        try:
            wanted = type(self.allowed).parse(ids)
        except ValueError:
            cause = f"{name} is {text[:60]!r}, and not a list such as 0-3,8"
            raise HookError(f"cannot use the answer of a hook server: {cause}") from None
        if not wanted:
            return CLEAR if not text and self.by_client and self.hook_choice is LEAVE else LEAVE
        given = wanted & self.allowed
        if given != wanted:
            dropped[name] = f"{wanted - given}: not among those that hooks may give the container"
        base = self.engine_choice if self.hook_choice is LEAVE else self.hook_choice
        narrows_nothing = isinstance(self.hook_choice, IdSet) and self.hook_choice <= given
        return LEAVE if not given or given == base or narrows_nothing else given


def _sets(
    event: PreCreateContainer | PreUpdateContainerResources,
    so_far: Adjustment,
    sent: pb.ContainerResourceHookRequest,
    after: pb.ContainerResourceHookRequest,
    dropped: dict[str, str],
) -> dict[str, Any]:
    """Find the CPUs and nodes that the answer wants."""
    had, has, decision = sent.container_resources, after.container_resources, event.decision
    requested = [event.container.resources]
    if isinstance(event, PreUpdateContainerResources):
        requested.append(event.asked)
    wanted: dict[str, Any] = {}
    if has.cpuset_cpus != had.cpuset_cpus:
        by_client = any(update.cpuset_cpus for update in requested)
        cpus = _Choice(decision.cpus, so_far.cpus, decision.allowed, by_client)
        wanted["cpus"] = cpus.wanted_set("cpuset_cpus", has.cpuset_cpus, dropped)
    if has.cpuset_mems != had.cpuset_mems:
        by_client = any(update.cpuset_mems for update in requested)
        mems = _Choice(decision.mems, so_far.mems, decision.allowed_mems, by_client)
        wanted["mems"] = mems.wanted_set("cpuset_mems", has.cpuset_mems, dropped)
    return wanted


@dataclass(slots=True)
class RemoteHook:
    """One server, and the fields that it tries to set without success.

    Attributes:
        name: The hook's name.
        client: Its socket.
        report: Takes a message for the log; called from the hooks' threads.
        reported: The problems that have been reported; each is reported once.
    """

    name: str
    client: HookServerClient
    report: Report
    reported: set[tuple[str, str]]

    def handler(self, point: type[Point]) -> Callable[..., Adjustment | None]:
        """Make the function that the engine calls at a point."""
        method = f"{point.__name__}Hook"
        build: Any = sandbox_request if point in _SANDBOX else container_request
        kind: Any = pb.PodSandboxHookResponse if point in _SANDBOX else pb.ContainerResourceHookResponse

        def call_server(event: Point, so_far: Adjustment = NOTHING) -> Adjustment | None:
            try:
                reported = build(event, so_far)
                request = reported.SerializeToString()
            except ValueError as error:  # a name that is not text, a number that is too large
                raise HookError(f"cannot call {method} at {self.client.path}: {error}") from None
            if len(request) > LARGEST_MESSAGE_BYTES:
                cause = f"the request has {len(request)} bytes, and {LARGEST_MESSAGE_BYTES} is the most"
                raise HookError(f"cannot call {method} at {self.client.path}: {cause}")
            answer = decoded(kind, self.client.call(method, request))
            claims = claims_of(event, so_far, reported, merge_answer(reported, answer))
            for field, what in claims.dropped.items():
                self._report_once(point.NAME, field, what)
            return claims.adjustment or None

        return call_server

    def shutdown(self, _event: Point, _so_far: Adjustment = NOTHING) -> None:
        """Disconnect from the server; the handler of the point ``shutdown``."""
        self.client.close()

    def _report_once(self, point: str, field: str, what: str) -> None:
        if (point, field) not in self.reported:
            self.reported.add((point, field))
            with contextlib.suppress(RuntimeError):  # the loop that would take it has ended
                self.report(
                    "dropped a field of the answer of a hook server",
                    hook=self.name,
                    point=point,
                    field=field,
                    reason=what[:300],
                )


def decoded(kind: type[Any], content: bytes) -> Any:
    """Decode an answer.

    Raises:
        HookError: It is not a message, or a message of another type: a field of the type has another wire
            type, which the decoder alone would treat as an unknown field.
    """
    try:
        answer: Message = kind.FromString(content)
    except DecodeError:
        raise HookError("cannot use the answer of a hook server: it cannot be decoded") from None
    names = [name for name in ("container_resources", "resources") if name in kind.DESCRIPTOR.fields_by_name]
    for part in (answer, *(getattr(answer, name) for name in names)):
        known = part.DESCRIPTOR.fields_by_number
        unknown: Any = UnknownFieldSet(part)
        if any(field.field_number in known for field in unknown):
            raise HookError(f"cannot use the answer of a hook server: it is not a {kind.__name__}")
    return answer
