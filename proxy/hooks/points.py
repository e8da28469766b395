"""Hook points: one dataclass each. Its name gives the handler's name, its fields what the handler is told.

``PreCreateContainer`` is handled by a function ``pre_create_container(event)``. The docstrings are the user's
documentation: docs/hook-points.md is made from them.

Points that come *before* a call hold it until all their hooks have answered or are out of time; most take an
adjustment, and may be vetoed. Points *after* a call are told beside it, and only if the call has done what it
was to do (the peers tell also failed calls: Koordinator a.10, 12). Points that *validate* see what all hooks
together want before any of it is done, and may only veto.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from proxy.hooks.answers import NOTHING, Adjustment
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Pools, Resources, Running
from proxy.model.machine import Machine

_RESOURCES = frozenset(
    (
        "cpus", "mems", "cpu_period", "cpu_quota", "cpu_shares", "memory_limit", "memory_swap_limit",
        "oom_score_adj", "unified", "annotations",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """A point in the way of a call where hooks are asked.

    Attributes:
        TAKES: Fields of an adjustment that can be changed here.
        VETO: A hook may refuse the call.
    """

    TAKES: ClassVar[frozenset[str]] = frozenset()
    VETO: ClassVar[bool] = False
    NAME: ClassVar[str] = "point"

    def __init_subclass__(cls) -> None:
        """Name the handlers of a point and remember it."""
        cls.NAME = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        POINTS[cls.NAME] = cls  # with slots a class is made twice: the second one stays


POINTS: Final[dict[str, type[Point]]] = {}
"""All points by their handlers' name."""


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


@dataclass(frozen=True, slots=True)
class Synchronize(Point):
    """All that exists: once the daemon knows it, and for a hook that is new or was changed.

    Attributes:
        machine: The hardware.
        pools: The node's CPUs by who may use them.
        pods: All sandboxes.
        containers: All containers, those that have ended too.
    """

    TAKES: ClassVar = frozenset(("updates",))
    machine: Machine
    pools: Pools
    pods: Sequence[PodFacts] = ()
    containers: Sequence[Running] = ()


@dataclass(frozen=True, slots=True)
class MachineChanged(Point):
    """CPUs or memory nodes have come or gone.

    Attributes:
        before, after: The hardware.
    """

    TAKES: ClassVar = frozenset(("updates",))
    before: Machine
    after: Machine


@dataclass(frozen=True, slots=True)
class PoolsChanged(Point):
    """The shared pool, the BE pool or who owns CPUs has changed. Several changes in a row may be told as one.

    Attributes:
        before, after: The node's CPUs by who may use them.
    """

    TAKES: ClassVar = frozenset(("updates",))
    before: Pools
    after: Pools


@dataclass(frozen=True, slots=True)
class Configure(Point):
    """The hook has been loaded, and this is its configuration; comes before anything else.

    Attributes:
        settings: What the hook's ``Settings`` makes of the configuration; None if it has none.
        name: The hook's name, that of its file without ``.py``.
    """

    settings: Any = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Shutdown(Point):
    """The daemon ends, or the hook is removed or replaced by a new version; comes last.

    Attributes:
        reason: ``stop``, ``removed`` or ``replaced``.
    """

    reason: str = "stop"


VALIDATES: Final[Mapping[str, str]] = {
    "pre_run_pod_sandbox": "validate_run_pod_sandbox",
    "pre_create_container": "validate_create_container",
    "pre_update_container_resources": "validate_update_container_resources",
}
"""Point to the one that validates what it was answered."""
