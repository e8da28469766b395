"""What hooks see of a pod or a container and later calls do not carry: labels, annotations, the image...

It is kept while there are hooks, and only as long as the pod or container exists. What was created earlier is
read from the runtime's lists, which carry less (the runtimes keep no environment, command, mounts or devices
there); what the ledger has of its resources is added when facts are made.

Sizes are bounded: of a container the configuration is kept unchanged, if it is small; else its labels and
annotations alone; and of these what is too large is left out, largest first. A small request is kept unread
until a hook looks at it: nothing is decoded in the path of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.hook_bridge.config_fields import image_of
from proxy.frontends.hook_bridge.resources import NOT_SAID, merged
from proxy.hooks.facts import ContainerFacts, PodFacts, Resources

CONTAINER_BYTES = 16 << 10
"""The most that is kept of a container's configuration."""
POD_BYTES = 64 << 10
"""The most that is kept of a pod's: users annotate pods, and Kubernetes lets them write 256 KiB."""
_AROUND = 6
"""The least bytes that an entry of a map takes besides its key and its value."""


class RememberedPod(Struct, frozen=True):
    """A pod sandbox.

    Attributes:
        handler: Its runtime handler.
        raw: A PodSandboxConfig with its labels and annotations.
    """

    handler: str
    raw: bytes


class RememberedContainer(Struct, frozen=True):
    """A container.

    Attributes:
        image: Its image, as users name it.
        raw: A ContainerConfig: all of it, or labels and annotations.
        asked: What it requests altogether, as far as calls have passed.
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
        self._containers: dict[str, RememberedContainer | Callable[[], RememberedContainer]] = {}

    def pod(self, sandbox_id: str) -> RememberedPod | None:
        """Return what is remembered of a sandbox."""
        return self._pods.get(sandbox_id)

    def container(self, container_id: str) -> RememberedContainer | None:
        """Return what is remembered of a container."""
        found = self._containers.get(container_id)
        if found is not None and not isinstance(found, RememberedContainer):
            found = self._containers[container_id] = found()
        return found

    def knows(self, container_id: str) -> bool:
        """Return whether anything is remembered of a container."""
        return container_id in self._containers

    def ran(self, sandbox_id: str, pod: PodFacts) -> None:
        """A sandbox has been created.

        Args:
            sandbox_id: The runtime's id.
            pod: Its facts as they went to the runtime, with what hooks have set.
        """
        kept = pb.PodSandboxConfig(labels=dict(pod.labels), annotations=dict(pod.annotations))
        self._pods[sandbox_id] = RememberedPod(pod.runtime_handler, _fitting(kept, POD_BYTES))

    def created(
        self, container_id: str, made: RememberedContainer | Callable[[], RememberedContainer]
    ) -> None:
        """A container has been created.

        Args:
            container_id: The runtime's id.
            made: What is kept of its request with what hooks have set, without the engine's decision, which
                is not the client's request; or a function that reads it.
        """
        self._containers[container_id] = made

    def updated(self, container_id: str, update: Resources) -> None:
        """An update of a container has succeeded."""
        known = self.container(container_id)
        if known is not None:
            self._containers[container_id] = replace(known, asked=merged(known.asked, update))

    def listed(self, pods: Iterable[pb.PodSandbox], containers: Iterable[pb.Container]) -> None:
        """Add from the runtime's lists what was created earlier."""
        for pod in pods:
            if pod.id not in self._pods:
                config = pb.PodSandboxConfig(labels=pod.labels, annotations=pod.annotations)
                self._pods[pod.id] = RememberedPod(pod.runtime_handler, _fitting(config, POD_BYTES))
        for each in containers:
            if each.id not in self._containers:
                self._containers[each.id] = RememberedContainer(
                    image_of(each.image), packed(each), NOT_SAID, whole=False
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


def packed(container: pb.ContainerConfig | pb.Container | ContainerFacts) -> bytes:
    """Encode the labels and annotations of a container, without those that are too large."""
    kept = pb.ContainerConfig(labels=dict(container.labels), annotations=dict(container.annotations))
    return _fitting(kept, CONTAINER_BYTES)


def remembered(container: ContainerFacts) -> RememberedContainer:
    """Return what is kept of a container whose facts are plain values."""
    envs = [pb.KeyValue(key=key, value=value.encode()) for key, value in container.envs.items()]
    kept = pb.ContainerConfig(
        labels=dict(container.labels), annotations=dict(container.annotations), envs=envs
    )
    raw = kept.SerializeToString() if kept.ByteSize() <= CONTAINER_BYTES else packed(container)
    return RememberedContainer(container.image, raw, merged(NOT_SAID, container.resources), whole=True)


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
