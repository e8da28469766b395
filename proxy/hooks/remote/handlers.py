"""The handlers of a remote hook: they send an event to a server and convert its answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from proxy.api.koordinator import hook_pb2 as pb
from proxy.hooks.answers import NOTHING, Adjustment
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
from proxy.hooks.remote.adjustments import claims_of
from proxy.hooks.remote.client import LARGEST, Client
from proxy.hooks.remote.convert import container_request, sandbox_request
from proxy.hooks.remote.merge import merge_answer
from proxy.model.errors import HookError
from proxy.telemetry.port import Report

POINTS: Final[dict[str, type[Point]]] = {
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


@dataclass(slots=True)
class Remote:
    """One server, and the fields that it tries to set without success.

    Attributes:
        name: The hook's name.
        client: Its socket.
        report: Takes a message for the log; called from the hooks' threads.
        reported: What has been reported: each matter once.
    """

    name: str
    client: Client
    report: Report
    reported: set[tuple[str, str]]

    def handler(self, point: type[Point]) -> Callable[..., Adjustment | None]:
        """Make what the engine calls at a point."""
        method = f"{point.__name__}Hook"
        build: Any = sandbox_request if point in _SANDBOX else container_request
        kind: Any = pb.PodSandboxHookResponse if point in _SANDBOX else pb.ContainerResourceHookResponse

        def ask(event: Point, so_far: Adjustment = NOTHING) -> Adjustment | None:
            try:
                reported = build(event, so_far)
                request = reported.SerializeToString()
            except ValueError as error:  # a name that is not text, a number that is too large
                raise HookError(f"cannot call {method} at {self.client.path}: {error}") from None
            if len(request) > LARGEST:
                cause = f"the request has {len(request)} bytes, and {LARGEST} is the most"
                raise HookError(f"cannot call {method} at {self.client.path}: {cause}")
            answer = decoded(kind, self.client.call(method, request))
            claims = claims_of(event, so_far, reported, merge_answer(reported, answer))
            for field, what in claims.dropped.items():
                self._report_once(point.NAME, field, what)
            return claims.adjustment or None

        return ask

    def shutdown(self, _event: Point, _so_far: Adjustment = NOTHING) -> None:
        """Let go of the server; handler of the point of this name."""
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
        HookError: It is not a message, or one of another type: a field of the type is on the wire as another
            kind of value, which decoding alone takes for one that it does not know.
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
