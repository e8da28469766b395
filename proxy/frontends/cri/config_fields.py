"""The parts of pod and container configurations as hooks see them.

A part is read from a ``PackedMessage``: bytes that are decoded once, for all parts together, when the first
part is accessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.hook_bridge.facts import hook_pod_facts
from proxy.frontends.hook_bridge.lazy_collections import LazyList, LazyMap
from proxy.frontends.hook_bridge.object_cache import ContainerIdentity
from proxy.hooks.facts import ContainerFacts, Device, Mount, PodFacts, Resources
from proxy.model.errors import HookError
from proxy.model.workload import Pod
from proxy.wire.protobuf import TooManyFieldsError, decode_message

_M = TypeVar("_M", bound=Message)
_Pod: TypeAlias = "PackedMessage[pb.PodSandboxConfig]"
_Container: TypeAlias = "PackedMessage[pb.ContainerConfig]"

PROPAGATIONS = ("private", "host_to_container", "bidirectional")
"""Names of the CRI's MountPropagation, by number."""


class PackedMessage(Generic[_M]):
    """A message, or bytes that become one."""

    __slots__ = ("_found", "_kind", "_raw")

    def __init__(self, kind: type[_M], raw: bytes | Callable[[], bytes], message: _M | None = None) -> None:
        """Hold a message.

        Args:
            kind: Its class.
            raw: Its bytes, or a function that takes them out of a larger message. If they are not such
                a message, it counts as empty: the runtime refuses such a request.
            message: The message itself, if it has been decoded; the bytes are ignored then.
        """
        self._kind = kind
        self._raw = raw
        self._found = message

    @property
    def message(self) -> _M:
        """The message, which must not be changed.

        Raises:
            HookError: It cannot be read. The hook that reads it fails, and its policy decides.
        """
        found = self._found
        if found is None:
            try:
                raw = self._raw
                found = decode_message(self._kind, raw if isinstance(raw, bytes) else raw())
            except TooManyFieldsError as error:
                raise HookError(f"cannot read a {self._kind.DESCRIPTOR.name}: {error}") from None
            except DecodeError:
                found = self._kind()
            self._found = found
        return found


def labels_of(unread: _Pod | _Container) -> dict[str, str]:
    """Read labels."""
    return dict(unread.message.labels)


def annotations_of(unread: _Pod | _Container) -> dict[str, str]:
    """Read annotations."""
    return dict(unread.message.annotations)


def envs_of(unread: _Container) -> dict[str, str]:
    """Read the environment. If a variable occurs twice, the last value counts, as in the runtimes."""
    return {pair.key: pair.value.decode("utf-8", "surrogateescape") for pair in unread.message.envs}


def command_of(unread: _Container) -> tuple[str, ...]:
    """Read the command."""
    return tuple(unread.message.command)


def args_of(unread: _Container) -> tuple[str, ...]:
    """Read the command's arguments."""
    return tuple(unread.message.args)


def mounts_of(unread: _Container) -> tuple[Mount, ...]:
    """Read the mounts; an unknown propagation counts as private."""
    return tuple(
        Mount(
            entry.container_path,
            entry.host_path,
            entry.readonly,
            PROPAGATIONS[entry.propagation if 0 <= entry.propagation < len(PROPAGATIONS) else 0],
        )
        for entry in unread.message.mounts
    )


def devices_of(unread: _Container) -> tuple[Device, ...]:
    """Read the devices."""
    return tuple(
        Device(entry.container_path, entry.host_path, entry.permissions) for entry in unread.message.devices
    )


def cdi_devices_of(unread: _Container) -> tuple[str, ...]:
    """Read the names of CDI devices that the request has a field for."""
    return tuple(entry.name for entry in unread.message.CDI_devices)


def unread_pod_facts(pod: Pod, config: PackedMessage[pb.PodSandboxConfig], handler: str = "") -> PodFacts:
    """Return the facts of a pod, whose labels and annotations are read at the first access."""
    labels, annotations = LazyMap(labels_of, config), LazyMap(annotations_of, config)
    return hook_pod_facts(pod, labels, annotations, handler)


def unread_container_facts(
    identity: ContainerIdentity,
    image: str,
    unread: PackedMessage[pb.ContainerConfig],
    resources: Resources,
) -> ContainerFacts:
    """Return the facts of a container, most of which are read at the first access.

    Args:
        identity: Its id, name, attempt and phase.
        image: Its image, as users name it.
        unread: Its configuration.
        resources: The resources that it requests.
    """
    return ContainerFacts(
        *identity,
        image,
        LazyMap(labels_of, unread),
        LazyMap(annotations_of, unread),
        LazyMap(envs_of, unread),
        LazyList(command_of, unread),
        LazyList(args_of, unread),
        LazyList(mounts_of, unread),
        LazyList(devices_of, unread),
        LazyList(cdi_devices_of, unread),
        resources,
    )
