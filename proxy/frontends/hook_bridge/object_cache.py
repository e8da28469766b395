"""Facts of pods and containers for hooks that later calls do not carry: labels, annotations, the image...

They are kept while there are hooks, and only as long as the pod or container exists. Facts of earlier pods
and containers are read from the runtime's lists, which have less (no environment, command, mounts or
devices); the ledger's record of the resources is added when facts are created.

Sizes are limited. A small configuration of a container is kept unchanged. Of a large one only the labels and
annotations are kept, and if these are too large, the largest are left out first. A small request is kept
undecoded until a hook reads it, so nothing is decoded in the path of a call. The front end decides in which
form a configuration is kept (``ContainerDetails``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Protocol, TypeAlias

from msgspec import Struct, msgpack
from msgspec.structs import replace

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.hook_bridge.lazy_collections import LazyMap
from proxy.frontends.hook_bridge.resources import NO_RESOURCES, merged
from proxy.hooks.facts import ContainerFacts, PodFacts, Resources

CONTAINER_BYTES = 16 << 10
"""The largest size that is kept of a container's configuration."""
POD_BYTES = 64 << 10
"""The largest size that is kept of a pod's: users annotate pods, and Kubernetes allows 256 KiB."""
_ENTRY_OVERHEAD_BYTES = 2
"""The fewest bytes that an entry of a map takes in addition to its key and its value."""
_NO_TEXTS: Mapping[str, str] = {}
ContainerIdentity: TypeAlias = tuple[str, str, int, str]
"""A container's id, name, attempt and phase."""


class ContainerDetails(Protocol):
    """The kept data of a container's configuration, in the form of its front end."""

    def facts(self, identity: ContainerIdentity, image: str, resources: Resources) -> ContainerFacts:
        """Return the facts of the container, including those that are not part of its configuration."""


class PackedTexts(Struct, frozen=True):
    """Labels, annotations and environment as bytes: maps take several times as much memory.

    Attributes:
        raw: The three maps, packed.
    """

    raw: bytes

    @classmethod
    def of(
        cls,
        limit: int,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        envs: Mapping[str, str] = _NO_TEXTS,
    ) -> PackedTexts:
        """Pack texts; while they are too large, leave out the environment, then annotations, then labels.

        Args:
            limit: The most bytes.
            labels: The labels; the largest are left out first.
            annotations: The annotations; the same.
            envs: The environment; all of it is left out.
        """
        raw = _packed(labels, annotations, envs)
        if len(raw) > limit and envs:
            raw = _packed(labels, annotations, _NO_TEXTS)
        if (excess := len(raw) - limit) > 0:
            kept = dict(labels), dict(annotations)
            for entries in reversed(kept):
                sizes = {key: len(key) + len(value) for key, value in entries.items()}
                for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
                    if excess <= 0:
                        break
                    del entries[key]
                    excess -= sizes[key] + _ENTRY_OVERHEAD_BYTES
            raw = _packed(*kept, _NO_TEXTS)
        return cls(raw)

    def of_pod(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the labels and the annotations, each read at the first access."""
        return LazyMap(_LABELS, self.raw), LazyMap(_ANNOTATIONS, self.raw)

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels, read at the first access."""
        return LazyMap(_LABELS, self.raw)

    @property
    def annotations(self) -> Mapping[str, str]:
        """The annotations, read at the first access."""
        return LazyMap(_ANNOTATIONS, self.raw)

    def facts(self, identity: ContainerIdentity, image: str, resources: Resources) -> ContainerFacts:
        """See ``ContainerDetails``."""
        envs = LazyMap(_ENVS, self.raw)
        return ContainerFacts(*identity, image, self.labels, self.annotations, envs, resources=resources)


class RememberedPod(Struct, frozen=True):
    """A pod sandbox.

    Attributes:
        handler: Its runtime handler.
        texts: Its labels and annotations.
    """

    handler: str
    texts: PackedTexts


class RememberedContainer(Struct, frozen=True):
    """A container.

    Attributes:
        image: Its image, as users name it.
        details: All of its configuration, or labels and annotations.
        requested: The merged requests of the calls that passed here.
        includes_create: Its create was among these calls.
    """

    image: str
    details: ContainerDetails
    requested: Resources
    includes_create: bool


class ObjectCache:
    """Remembers sandboxes and containers for hooks; used only on the event loop's thread."""

    def __init__(self) -> None:
        self._pods: dict[str, RememberedPod] = {}
        self._containers: dict[str, RememberedContainer | Callable[[], RememberedContainer]] = {}

    def pod(self, sandbox_id: str) -> RememberedPod | None:
        """Return the remembered facts of a sandbox."""
        return self._pods.get(sandbox_id)

    def container(self, container_id: str) -> RememberedContainer | None:
        """Return the remembered facts of a container."""
        remembered = self._containers.get(container_id)
        if remembered is not None and not isinstance(remembered, RememberedContainer):
            remembered = self._containers[container_id] = remembered()
        return remembered

    def knows(self, container_id: str) -> bool:
        """Return whether anything is remembered of a container."""
        return container_id in self._containers

    def add_pod(self, sandbox_id: str, pod: PodFacts) -> None:
        """Remember a sandbox that the runtime has created.

        Args:
            sandbox_id: The runtime's id.
            pod: Its facts as they were sent to the runtime, including the fields that hooks have set.
        """
        texts = PackedTexts.of(POD_BYTES, pod.labels, pod.annotations)
        self._pods[sandbox_id] = RememberedPod(pod.runtime_handler, texts)

    def add_container(
        self, container_id: str, container: RememberedContainer | Callable[[], RememberedContainer]
    ) -> None:
        """Remember a container that the runtime has created.

        Args:
            container_id: The runtime's id.
            container: Its request with the fields that hooks have set, but without the engine's decision,
                which the client did not request; or a function that reads it.
        """
        self._containers[container_id] = container

    def update_container(self, container_id: str, update: Resources) -> None:
        """Remember the resources that a successful update of a container has set."""
        known = self.container(container_id)
        if known is not None:
            self._containers[container_id] = replace(known, requested=merged(known.requested, update))

    def add_listed(self, pods: Iterable[pb.PodSandbox], containers: Iterable[pb.Container]) -> None:
        """Add the earlier sandboxes and containers from the runtime's lists."""
        for pod in pods:
            if pod.id not in self._pods:
                texts = PackedTexts.of(POD_BYTES, pod.labels, pod.annotations)
                self._pods[pod.id] = RememberedPod(pod.runtime_handler, texts)
        for each in containers:
            if each.id not in self._containers:
                kept = PackedTexts.of(CONTAINER_BYTES, each.labels, each.annotations)
                self._containers[each.id] = RememberedContainer(
                    image_of(each.image), kept, NO_RESOURCES, includes_create=False
                )

    def forget(self, *ids: str) -> None:
        """Forget pods or containers that are gone; unknown ids are allowed."""
        for each in ids:
            self._pods.pop(each, None)
            self._containers.pop(each, None)

    def keep_only(self, pods: Collection[str], containers: Collection[str]) -> None:
        """Forget all except these, which exist."""
        self.forget(*(each for each in self._pods if each not in pods))
        self.forget(*(each for each in self._containers if each not in containers))


def image_of(spec: pb.ImageSpec) -> str:
    """Return the image's name as users wrote it; kubelet sends it in addition to the resolved image."""
    return spec.user_specified_image or spec.image


def _packed(*maps: Mapping[str, str]) -> bytes:
    return msgpack.encode([dict(each) for each in maps])


def _unpacked(number: int, raw: bytes) -> dict[str, str]:
    return msgpack.decode(raw, type=list[dict[str, str]])[number]


_LABELS, _ANNOTATIONS, _ENVS = (partial(_unpacked, number) for number in range(3))
