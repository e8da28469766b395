"""CRI messages as hooks see them, and the adjustments of hooks as messages; imported only if hooks exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Final, NoReturn

from google.protobuf.message import DecodeError
from msgspec import Struct

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.config_fields import PackedMessage, unread_container_facts, unread_pod_facts
from proxy.frontends.cri.hook_adjust import adjusted_create, adjusted_run_pod, adjusted_update
from proxy.frontends.hook_bridge.lazy_collections import LazyMap
from proxy.frontends.hook_bridge.object_cache import (
    CONTAINER_BYTES,
    ContainerDetails,
    ContainerIdentity,
    PackedTexts,
    RememberedContainer,
    image_of,
)
from proxy.frontends.hook_bridge.resources import NO_RESOURCES, merged, resources_of
from proxy.hooks.answers import Adjustment
from proxy.hooks.facts import ContainerFacts, PodFacts, Resources
from proxy.model.errors import HookError
from proxy.model.workload import Pod
from proxy.wire.protobuf import TooManyFieldsError, decode_message, decode_text

_FIELDS: Final = tuple(each.name for each in fields(ContainerFacts))
_RESOURCES: Final = tuple(each.name for each in fields(Resources))
_ADJUST: Final[Mapping[str, Callable[[bytes, Adjustment], bytes]]] = {
    "RunPodSandbox": adjusted_run_pod,
    "CreateContainer": adjusted_create,
    "UpdateContainerResources": adjusted_update,
}


class CriHookView(Struct, frozen=True):
    """A CRI message; see ``proxy.frontends.hook_bridge.view.HookView``."""

    _method: str
    _body: bytes

    def sandbox(self, pod: Pod) -> tuple[PodFacts, Resources]:
        """Read a RunPodSandbox: the pod, and the sum of its containers' requests."""
        try:
            request = decode_message(pb.RunPodSandboxRequest, self._body)
        except DecodeError as error:
            return self._unreadable_sandbox(pod, error)
        config = request.config
        facts = unread_pod_facts(
            pod, PackedMessage(pb.PodSandboxConfig, b"", config), request.runtime_handler
        )
        return facts, resources_of(config.linux.resources)

    def _unreadable_sandbox(self, pod: Pod, error: DecodeError) -> tuple[PodFacts, Resources]:
        """Return the facts of a RunPodSandbox that the engine can read, and not all of it.

        A hook that reads the rest fails, and its policy decides: the runtime may accept the request.
        """
        message = f"cannot read a RunPodSandbox request: {error}"
        # The request has the runtime handler in field 2, where an ``Entry`` has its value as bytes.
        handler = decode_text(pb.Entry.FromString(self._body).value)
        unread = PackedMessage(pb.PodSandboxConfig, partial(_fail, message))
        return unread_pod_facts(pod, unread, handler), UnreadableResources.of(message)

    def pod(self, pod: Pod) -> PodFacts:
        """Read the pod of a CreateContainer."""
        return unread_pod_facts(pod, PackedMessage(pb.PodSandboxConfig, partial(_sandbox_config, self._body)))

    def container(self) -> ContainerFacts:
        """Read the container of a CreateContainer; empty if it cannot be read: the runtime refuses it."""
        return NewContainer.of(self._body)

    def update(self) -> tuple[Resources, Mapping[str, str]]:
        """Read an UpdateContainerResources: the requested resources, and the annotations."""
        try:
            request = decode_message(pb.UpdateContainerResourcesRequest, self._body)
        except DecodeError as error:  # as in ``_unreadable_sandbox``
            message = f"cannot read an UpdateContainerResources request: {error}"
            return UnreadableResources.of(message), LazyMap(_fail, message)
        return resources_of(request.linux), LazyMap(_annotations, request)

    def grace(self) -> int:
        """Read the grace period of a StopContainer, in seconds."""
        return decode_message(pb.StopContainerRequest, self._body).timeout

    def adjusted(self, adjustment: Adjustment) -> bytes:
        """Return the message with the adjustment of hooks.

        Raises:
            HookError: A field of the adjustment cannot be written, or the message cannot be read.
        """
        return _ADJUST[self._method](self._body, adjustment)

    def remembered(self) -> RememberedContainer | Callable[[], RememberedContainer]:
        """Return the data to keep of a CreateContainer; a small request is kept undecoded."""
        if len(self._body) <= CONTAINER_BYTES:
            return partial(_remembered, self._body)
        return _remembered(self._body)


class NewContainer(ContainerFacts):
    """A container that is being created: its request is decoded when a hook reads the first field.

    Most hooks read the fields of only a few of the created containers. As in ``lazy_collections``, two
    threads that read a first field at the same time get equal values; copies and pickles are plain
    ``ContainerFacts``.
    """

    __qualname__ = ContainerFacts.__qualname__  # repr() names the public class
    __slots__ = ("_body",)

    @classmethod
    def of(cls, body: bytes) -> NewContainer:
        """Create it from a CreateContainerRequest that is read later."""
        new = object.__new__(cls)
        object.__setattr__(new, "_body", body)
        return new

    def __getattr__(self, name: str) -> Any:
        """Fill the fields; Python calls this for a field that has no value yet."""
        if name not in _FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = _read(self._body)
        for each in _FIELDS:
            object.__setattr__(self, each, getattr(found, each))
        return getattr(found, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContainerFacts):
            return NotImplemented
        return all(getattr(self, each) == getattr(other, each) for each in _FIELDS)

    __hash__ = ContainerFacts.__hash__

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return ContainerFacts, tuple(getattr(self, each) for each in _FIELDS)


class UnreadableResources(Resources):
    """Resources of a request that cannot be read: a hook that reads one of them fails."""

    __slots__ = ("_message",)

    @classmethod
    def of(cls, message: str) -> UnreadableResources:
        """Create it with the message of the error."""
        new = object.__new__(cls)
        object.__setattr__(new, "_message", message)
        return new

    def __getattr__(self, name: str) -> Any:
        """Python calls this for a field, because none has a value."""
        if name not in _RESOURCES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise HookError(self._message)

    def __reduce__(self) -> tuple[Callable[[str], UnreadableResources], tuple[str]]:
        return UnreadableResources.of, (self._message,)


def _fail(message: str) -> NoReturn:
    raise HookError(message)


class KeptConfig(Struct, frozen=True):
    """A ContainerConfig that is kept unchanged; see ``ContainerDetails``."""

    raw: bytes

    def facts(self, identity: ContainerIdentity, image: str, resources: Resources) -> ContainerFacts:
        """See ``ContainerDetails``."""
        return unread_container_facts(identity, image, PackedMessage(pb.ContainerConfig, self.raw), resources)


def _sandbox_config(body: bytes) -> bytes:
    return b"".join(pb.CreateContainerPieces.FromString(body).sandbox_config)


def _read(body: bytes) -> ContainerFacts:
    try:
        config = decode_message(pb.CreateContainerConfig, body).config
    except TooManyFieldsError as error:
        raise HookError(f"cannot read a CreateContainer request: {error}") from None
    except DecodeError:
        config = pb.ContainerConfig()
    meta = config.metadata
    identity = "", meta.name, meta.attempt, "creating"
    unread, requested = PackedMessage(pb.ContainerConfig, b"", config), resources_of(config.linux.resources)
    return unread_container_facts(identity, image_of(config.image), unread, requested)


def _remembered(body: bytes) -> RememberedContainer:
    try:
        config = decode_message(pb.CreateContainerConfig, body).config
        raw = b"".join(pb.CreateContainerPieces.FromString(body).config)
    except DecodeError:
        # The runtime has created the container, so it can decode more than we can.
        return RememberedContainer("", KeptConfig(b""), NO_RESOURCES, includes_create=False)
    kept: ContainerDetails = KeptConfig(raw)
    if len(raw) > CONTAINER_BYTES:
        kept = PackedTexts.of(CONTAINER_BYTES, config.labels, config.annotations)
    requested = merged(NO_RESOURCES, resources_of(config.linux.resources))  # a plain copy
    return RememberedContainer(image_of(config.image), kept, requested, includes_create=True)


def _annotations(request: pb.UpdateContainerResourcesRequest) -> dict[str, str]:
    return dict(request.annotations)
