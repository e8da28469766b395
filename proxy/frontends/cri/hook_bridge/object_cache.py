"""What calls about a pod or a container do not carry, but hooks are told: labels, annotations, the image...

Kept while there are hooks, and only as long as the pod or container is there. What was made before is learned
from the runtime's lists, which carry less (the runtimes keep no environment, command, mounts or devices
there); what the ledger knows of its resources is added when facts are made.

Sizes are bounded: of a container the configuration is kept as it came, if it is small; else its labels and
annotations alone; and of these what is too large goes, largest first. A small request is kept unread until
somebody looks: nothing is decoded in the way of calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.hook_bridge.config_fields import image_of
from proxy.frontends.cri.hook_bridge.lenient import read
from proxy.frontends.cri.hook_bridge.resources import NOT_SAID, merged, resources_of
from proxy.hooks.facts import Resources

CONTAINER_BYTES = 16 << 10
"""The most that is kept of a container's configuration."""
POD_BYTES = 64 << 10
"""The most that is kept of a pod's: users annotate pods, and Kubernetes lets them write 256 KiB."""
_AROUND = 6
"""The least bytes that an entry of a map takes beside its key and its value."""


@dataclass(frozen=True, slots=True)
class RememberedPod:
    """A pod sandbox.

    Attributes:
        handler: Its runtime handler.
        cgroup_parent: Its cgroup as its request named it; empty where that is not known.
        raw: A PodSandboxConfig with its labels and annotations.
    """

    handler: str
    cgroup_parent: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class RememberedContainer:
    """A container.

    Attributes:
        image: Its image, as users name it.
        raw: A ContainerConfig: all of it, or labels and annotations.
        asked: What it asks for altogether, as far as calls have passed.
        whole: Its create was among these calls.
    """

    image: str
    raw: bytes
    asked: Resources
    whole: bool


class ObjectCache:
    """All that is remembered; on the event loop's thread."""

    def __init__(self) -> None:
        self._pods: dict[str, RememberedPod] = {}
        self._containers: dict[str, RememberedContainer | bytes] = {}

    def pod(self, sandbox_id: str) -> RememberedPod | None:
        """Give what is remembered of a sandbox."""
        return self._pods.get(sandbox_id)

    def container(self, container_id: str) -> RememberedContainer | None:
        """Give what is remembered of a container."""
        found = self._containers.get(container_id)
        if isinstance(found, bytes):
            found = self._containers[container_id] = _read(found)
        return found

    def knows(self, container_id: str) -> bool:
        """Tell whether anything is remembered of a container."""
        return container_id in self._containers

    def ran(self, sandbox_id: str, config: bytes | pb.PodSandboxConfig, handler: str) -> None:
        """A sandbox has been made.

        Args:
            sandbox_id: The runtime's id.
            config: Its configuration as it went to the runtime, with what hooks have set.
            handler: Its runtime handler.
        """
        if isinstance(config, bytes):
            config = read(pb.PodSandboxConfig, config)
        kept = pb.PodSandboxConfig(labels=config.labels, annotations=config.annotations)
        raw = _fitting(kept, POD_BYTES)
        self._pods[sandbox_id] = RememberedPod(handler, config.linux.cgroup_parent, raw)

    def created(self, container_id: str, body: bytes) -> None:
        """A container has been made.

        Args:
            container_id: The runtime's id.
            body: The CreateContainerRequest with what hooks have set, without the engine's suffix: that is
                no wish of the client's.
        """
        self._containers[container_id] = body if len(body) <= CONTAINER_BYTES else _read(body)

    def updated(self, container_id: str, said: Resources | pb.LinuxContainerResources) -> None:
        """An update of a container has succeeded."""
        known = self.container(container_id)
        if known is not None:
            said = said if isinstance(said, Resources) else resources_of(said)
            self._containers[container_id] = replace(known, asked=merged(known.asked, said))

    def listed(self, pods: Iterable[pb.PodSandbox], containers: Iterable[pb.Container]) -> None:
        """Learn from the runtime's lists about those that were made before."""
        for pod in pods:
            if pod.id not in self._pods:
                config = pb.PodSandboxConfig(labels=pod.labels, annotations=pod.annotations)
                self._pods[pod.id] = RememberedPod(pod.runtime_handler, "", _fitting(config, POD_BYTES))
        for each in containers:
            if each.id not in self._containers:
                found = pb.ContainerConfig(labels=each.labels, annotations=each.annotations)
                raw = _fitting(found, CONTAINER_BYTES)
                self._containers[each.id] = RememberedContainer(
                    image_of(each.image), raw, NOT_SAID, whole=False
                )

    def forget(self, *ids: str) -> None:
        """Pods or containers are gone; unknown ids are fine."""
        for each in ids:
            self._pods.pop(each, None)
            self._containers.pop(each, None)

    def keep_only(self, pods: Collection[str], containers: Collection[str]) -> None:
        """Forget all but those that are there."""
        self.forget(*(each for each in self._pods if each not in pods))
        self.forget(*(each for each in self._containers if each not in containers))


def _read(body: bytes) -> RememberedContainer:
    try:
        config = read(pb.CreateContainerConfig, body).config
        raw = b"".join(pb.CreateContainerPieces.FromString(body).config)
    except DecodeError:
        return RememberedContainer("", b"", NOT_SAID, whole=False)  # a runtime that reads more than we do
    if len(raw) > CONTAINER_BYTES:
        raw = _fitting(
            pb.ContainerConfig(labels=config.labels, annotations=config.annotations), CONTAINER_BYTES
        )
    asked = merged(NOT_SAID, resources_of(config.linux.resources))  # a plain copy
    return RememberedContainer(image_of(config.image), raw, asked, whole=True)


def _fitting(config: pb.PodSandboxConfig | pb.ContainerConfig, limit: int) -> bytes:
    """Encode labels and annotations.

    While they are too large, the largest annotation is left out; then labels are.
    """
    excess = config.ByteSize() - limit
    for entries in (config.annotations, config.labels):
        if excess > 0:
            sizes = {key: len(key) + len(value) for key, value in entries.items()}
            for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
                del entries[key]
                excess -= sizes[key] + _AROUND
                if excess <= 0:
                    break
    return config.SerializeToString()
