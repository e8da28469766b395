"""Hook points in the way of calls: before, after, and those that validate; ``points`` has them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from proxy.hooks.answers import NOTHING, Adjustment
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Resources
from proxy.hooks.point import Point

_RESOURCES = frozenset(
    (
        "cpus", "mems", "cpu_period", "cpu_quota", "cpu_shares", "memory_limit", "memory_swap_limit",
        "oom_score_adj", "unified", "annotations",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PreRunPodSandbox(Point):
    """A pod's sandbox is about to be made; nothing has been decided for the pod.

    Labels and annotations that a hook sets here count for the engine as if the pod had them: a QoS class,
    CPUs that a scheduler would have named. A cgroup parent is also used for the pod's containers.

    Attributes:
        pod: The pod, without an id.
        resources: What the pod's containers ask for together, where kubelet says it.
    """

    TAKES: ClassVar = frozenset(("annotations", "labels", "cgroup_parent", "updates"))
    VETO: ClassVar = True
    pod: PodFacts
    resources: Resources = field(default_factory=Resources)


@dataclass(frozen=True, slots=True)
class PostRunPodSandbox(Point):
    """A pod's sandbox runs.

    Attributes:
        pod: The pod, with its id.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class PreCreateContainer(Point):
    """A container is about to be made; its CPUs have been decided, and nobody else has moved yet.

    Attributes:
        pod: Its pod.
        container: What the request says.
        decision: What it gets.
    """

    TAKES: ClassVar = _RESOURCES | {"labels", "envs", "devices", "mounts", "updates"}
    VETO: ClassVar = True
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PostCreateContainer(Point):
    """A container has been made; it does not run.

    Attributes:
        pod: Its pod.
        container: The container, with its id.
        decision: What it has.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreStartContainer(Point):
    """A container is about to be started.

    Attributes:
        pod: Its pod.
        container: The container.
        decision: What it has.
    """

    TAKES: ClassVar = frozenset(("updates",))
    VETO: ClassVar = True
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PostStartContainer(Point):
    """A container has been started.

    Attributes:
        pod: Its pod.
        container: The container.
        decision: What it has.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreUpdateContainerResources(Point):
    """A client (kubelet, mostly) is about to change what a container may use.

    Attributes:
        pod: Its pod.
        container: The container; its ``resources`` are all that was asked for before.
        decision: What it has.
        asked: What the client asks for now.
        asked_annotations: Annotations of the update.
    """

    TAKES: ClassVar = _RESOURCES | {"updates"}
    VETO: ClassVar = True
    pod: PodFacts
    container: ContainerFacts
    decision: Decision
    asked: Resources = field(default_factory=Resources)
    asked_annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostUpdateContainerResources(Point):
    """What a container may use has been changed by a client.

    Attributes:
        pod: Its pod.
        container: The container, with what it asks for now.
        decision: What it has.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreStopContainer(Point):
    """A container is about to be stopped. This cannot be refused, only waited for.

    Attributes:
        pod: Its pod.
        container: The container.
        decision: What it has.
        grace: Seconds that it is given to end by itself.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision
    grace: int = 0


@dataclass(frozen=True, slots=True)
class PostStopContainer(Point):
    """A container runs no more: it was stopped, or it has ended by itself. Comes once.

    Attributes:
        pod: Its pod.
        container: The container.
        decision: What it had.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreRemoveContainer(Point):
    """A container is about to be removed. This cannot be refused, only waited for.

    Attributes:
        pod: Its pod.
        container: The container.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts


@dataclass(frozen=True, slots=True)
class PostRemoveContainer(Point):
    """A container is gone. Comes once, also where it went without a call.

    Attributes:
        pod: Its pod.
        container: The container, as it was.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts


@dataclass(frozen=True, slots=True)
class PreStopPodSandbox(Point):
    """A pod's sandbox is about to be stopped. This cannot be refused, only waited for.

    Attributes:
        pod: The pod.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class PostStopPodSandbox(Point):
    """A pod's sandbox has been stopped. Comes once, though kubelet stops it several times.

    Attributes:
        pod: The pod.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class PreRemovePodSandbox(Point):
    """A pod's sandbox is about to be removed. This cannot be refused, only waited for.

    Attributes:
        pod: The pod.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class PostRemovePodSandbox(Point):
    """A pod's sandbox is gone. Comes once, also where it went without a call.

    Attributes:
        pod: The pod, as it was.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class ValidateRunPodSandbox(Point):
    """All hooks have answered about a sandbox; nothing of it has been done.

    Attributes:
        event: What they were told.
        adjustment: What they want together.
        owners: Field (``annotations[key]``, ``cgroup_parent``) to the hook that has set it.
    """

    VETO: ClassVar = True
    event: PreRunPodSandbox
    adjustment: Adjustment = NOTHING
    owners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ValidateCreateContainer(Point):
    """All hooks have answered about a new container; nothing of it has been done.

    Attributes:
        event: What they were told.
        adjustment: What they want together.
        owners: Field (``cpus``, ``envs[NAME]``) to the hook that has set it.
    """

    VETO: ClassVar = True
    event: PreCreateContainer
    adjustment: Adjustment = NOTHING
    owners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ValidateUpdateContainerResources(Point):
    """All hooks have answered about an update; nothing of it has been done.

    Attributes:
        event: What they were told.
        adjustment: What they want together.
        owners: Field (``cpus``, ``unified[memory.high]``) to the hook that has set it.
    """

    VETO: ClassVar = True
    event: PreUpdateContainerResources
    adjustment: Adjustment = NOTHING
    owners: Mapping[str, str] = field(default_factory=dict)
