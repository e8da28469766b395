"""Hook points: one event dataclass each.

The class name gives the name of the handler: ``PreCreateContainer`` is handled by a function
``pre_create_container(event)``. The fields are what the handler receives, and the docstrings are the user's
documentation: docs/hook-points.md is generated from them.

Points *before* a call (``pre_``) hold it until all their hooks have answered or timed out. Most accept an
adjustment and may be vetoed. Points *after* a call (``post_``) run alongside it, and only if the call
succeeded; Koordinator's runtime proxy ignores the result of its PostStopPodSandbox hooks and runs them also
for a failed call (Koordinator v1.8.0 pkg/runtimeproxy/server/cri/criserver.go, InterceptRuntimeRequest).
Points that *validate* receive the merged answers of all hooks before any of them is applied, and may only
veto.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from proxy.hooks.answers import NOTHING, Adjustment
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Pools, Resources, Running
from proxy.hooks.slot_init import slot_init
from proxy.model.machine import Machine

__all__ = [
    "Configure",
    "MachineChanged",
    "PoolsChanged",
    "PostCreateContainer",
    "PostRemoveContainer",
    "PostRemovePodSandbox",
    "PostRunPodSandbox",
    "PostStartContainer",
    "PostStopContainer",
    "PostStopPodSandbox",
    "PostUpdateContainerResources",
    "PreCreateContainer",
    "PreRemoveContainer",
    "PreRemovePodSandbox",
    "PreRunPodSandbox",
    "PreStartContainer",
    "PreStopContainer",
    "PreStopPodSandbox",
    "PreUpdateContainerResources",
    "Shutdown",
    "Synchronize",
    "ValidateCreateContainer",
    "ValidateRunPodSandbox",
    "ValidateUpdateContainerResources",
]

POINTS: Final[dict[str, type[Point]]] = {}
"""Every hook point by the name of its handler, in the order of this file."""

VALIDATES: Final[Mapping[str, str]] = {
    "pre_run_pod_sandbox": "validate_run_pod_sandbox",
    "pre_create_container": "validate_create_container",
    "pre_update_container_resources": "validate_update_container_resources",
}
"""A point to the point that validates its answers."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point during a call at which hooks are called.

    Attributes:
        TAKES: Fields of an adjustment that can be changed here.
        VETO: A hook may refuse the call.
        NAME: The name of the handler, from the name of the class.
    """

    TAKES: ClassVar[frozenset[str]] = frozenset()
    VETO: ClassVar[bool] = False
    NAME: ClassVar[str] = "point"

    def __init_subclass__(cls) -> None:
        """Register the point under the name of its handler.

        Raises:
            TypeError: Another class has the same name.
        """
        cls.NAME = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        known = POINTS.get(cls.NAME)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"cannot add the hook point {cls.__module__}.{cls.__qualname__}: "
                f"{known.__module__}.{known.__qualname__} has the name {cls.NAME}"
            )
        POINTS[cls.NAME] = cls  # ``slots=True`` creates a class twice: the second one is used


_RESOURCES = frozenset(
    (
        "cpus", "mems", "cpu_period", "cpu_quota", "cpu_shares", "memory_limit", "memory_swap_limit",
        "oom_score_adj", "unified", "annotations",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PreRunPodSandbox(Point):
    """A pod's sandbox is about to be created; no placement has been decided for the pod.

    Labels and annotations that a hook sets here count as if the pod had them, for example a QoS class, or
    CPUs that a scheduler would have assigned. A cgroup parent is also used for the pod's containers.

    Attributes:
        pod: The pod, which has no id yet.
        resources: The sum of the pod's containers' requests, if kubelet sends it.
    """

    TAKES: ClassVar = frozenset(("annotations", "labels", "cgroup_parent", "updates"))
    VETO: ClassVar = True
    pod: PodFacts
    resources: Resources = field(default_factory=Resources)


@dataclass(frozen=True, slots=True)
class PostRunPodSandbox(Point):
    """A pod's sandbox is running.

    Attributes:
        pod: The pod, with its id.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@slot_init
@dataclass(frozen=True, slots=True)
class PreCreateContainer(Point):
    """A container is about to be created: its CPUs are decided, and no other container has been moved yet.

    Attributes:
        pod: The container's pod.
        container: The container as the request describes it.
        decision: The placement that it will get.
    """

    TAKES: ClassVar = _RESOURCES | {"labels", "envs", "devices", "mounts", "updates"}
    VETO: ClassVar = True
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PostCreateContainer(Point):
    """A container has been created; it is not running yet.

    Attributes:
        pod: The container's pod.
        container: The container, with its id.
        decision: Its placement.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreStartContainer(Point):
    """A container is about to be started.

    Attributes:
        pod: The container's pod.
        container: The container.
        decision: Its placement.
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
        pod: The container's pod.
        container: The container.
        decision: Its placement.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreUpdateContainerResources(Point):
    """A client (usually kubelet) is about to update the container's resources.

    Attributes:
        pod: The container's pod.
        container: The container; its ``resources`` are those in effect before the update.
        decision: Its placement.
        asked: The resources that the client requests now.
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
    """A client has updated the container's resources.

    Attributes:
        pod: The container's pod.
        container: The container, with its new resources.
        decision: Its placement.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreStopContainer(Point):
    """A container is about to be stopped. The call cannot be refused, only delayed.

    Attributes:
        pod: The container's pod.
        container: The container.
        decision: Its placement.
        grace: Seconds that the container has to end by itself.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision
    grace: int = 0


@dataclass(frozen=True, slots=True)
class PostStopContainer(Point):
    """A container has stopped: by a call, or by itself. Sent once.

    Attributes:
        pod: The container's pod.
        container: The container.
        decision: The placement that it had.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts
    decision: Decision


@dataclass(frozen=True, slots=True)
class PreRemoveContainer(Point):
    """A container is about to be removed. The call cannot be refused, only delayed.

    Attributes:
        pod: The container's pod.
        container: The container.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts


@dataclass(frozen=True, slots=True)
class PostRemoveContainer(Point):
    """A container has been removed. Sent once, even if it disappeared without a call.

    Attributes:
        pod: The container's pod.
        container: The container, as it was.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts
    container: ContainerFacts


@dataclass(frozen=True, slots=True)
class PreStopPodSandbox(Point):
    """A pod's sandbox is about to be stopped. The call cannot be refused, only delayed.

    Attributes:
        pod: The pod.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class PostStopPodSandbox(Point):
    """A pod's sandbox has been stopped. Sent once, although kubelet stops it several times.

    Attributes:
        pod: The pod.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class PreRemovePodSandbox(Point):
    """A pod's sandbox is about to be removed. The call cannot be refused, only delayed.

    Attributes:
        pod: The pod.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class PostRemovePodSandbox(Point):
    """A pod's sandbox has been removed. Sent once, even if it disappeared without a call.

    Attributes:
        pod: The pod, as it was.
    """

    TAKES: ClassVar = frozenset(("updates",))
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class ValidateRunPodSandbox(Point):
    """All hooks have answered for a new sandbox; no answer has been applied.

    Attributes:
        event: The event that the hooks received.
        adjustment: The merged answers of all hooks.
        owners: Field (``annotations[key]``, ``cgroup_parent``) to the hook that set it.
    """

    VETO: ClassVar = True
    event: PreRunPodSandbox
    adjustment: Adjustment = NOTHING
    owners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ValidateCreateContainer(Point):
    """All hooks have answered for a new container; no answer has been applied.

    Attributes:
        event: The event that the hooks received.
        adjustment: The merged answers of all hooks.
        owners: Field (``cpus``, ``envs[NAME]``) to the hook that set it.
    """

    VETO: ClassVar = True
    event: PreCreateContainer
    adjustment: Adjustment = NOTHING
    owners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ValidateUpdateContainerResources(Point):
    """All hooks have answered for an update; no answer has been applied.

    Attributes:
        event: The event that the hooks received.
        adjustment: The merged answers of all hooks.
        owners: Field (``cpus``, ``unified[memory.high]``) to the hook that set it.
    """

    VETO: ClassVar = True
    event: PreUpdateContainerResources
    adjustment: Adjustment = NOTHING
    owners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Synchronize(Point):
    """The whole state of the node: sent when the daemon knows it, and to a hook that is new or changed.

    Attributes:
        machine: The hardware.
        pools: The node's CPUs by what may use them.
        pods: All sandboxes.
        containers: All containers, including those that have exited.
    """

    TAKES: ClassVar = frozenset(("updates",))
    machine: Machine
    pools: Pools
    pods: Sequence[PodFacts] = ()
    containers: Sequence[Running] = ()


@dataclass(frozen=True, slots=True)
class MachineChanged(Point):
    """CPUs or NUMA nodes with memory went online or offline.

    Attributes:
        before, after: The hardware.
    """

    TAKES: ClassVar = frozenset(("updates",))
    before: Machine
    after: Machine


@dataclass(frozen=True, slots=True)
class PoolsChanged(Point):
    """The shared pool, the BE (best effort) pool or the owners of exclusive CPUs changed.

    Several changes in a row may be sent as one event.

    Attributes:
        before, after: The node's CPUs by what may use them.
    """

    TAKES: ClassVar = frozenset(("updates",))
    before: Pools
    after: Pools


@dataclass(frozen=True, slots=True)
class Configure(Point):
    """The hook has been loaded. Carries its configuration, and is the first event that the hook receives.

    Attributes:
        settings: The configuration, parsed by the hook's ``Settings``; None if it has no ``Settings``.
        name: The hook's name: its file name without ``.py``.
    """

    settings: Any = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Shutdown(Point):
    """The daemon stops, or the hook is removed or replaced by a new version; the last event of a hook.

    Attributes:
        reason: ``stop``, ``removed`` or ``replaced``.
    """

    reason: str = "stop"
