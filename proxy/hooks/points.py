"""Hook points: one dataclass each. Its name gives the handler's name, its fields what the handler is told.

``PreCreateContainer`` is handled by a function ``pre_create_container(event)``. The docstrings are the user's
documentation: docs/hook-points.md is made from them.

Points that come *before* a call hold it until all their hooks have answered or are out of time; most take an
adjustment, and may be vetoed. Points *after* a call are told beside it, and only if the call has done what it
was to do (the peers tell also failed calls: Koordinator a.10, 12). Points that *validate* see what all hooks
together want before any of it is done, and may only veto.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from proxy.hooks.call_points import (
    PostCreateContainer,
    PostRemoveContainer,
    PostRemovePodSandbox,
    PostRunPodSandbox,
    PostStartContainer,
    PostStopContainer,
    PostStopPodSandbox,
    PostUpdateContainerResources,
    PreCreateContainer,
    PreRemoveContainer,
    PreRemovePodSandbox,
    PreRunPodSandbox,
    PreStartContainer,
    PreStopContainer,
    PreStopPodSandbox,
    PreUpdateContainerResources,
    ValidateCreateContainer,
    ValidateRunPodSandbox,
    ValidateUpdateContainerResources,
)
from proxy.hooks.node_points import Configure, MachineChanged, PoolsChanged, Shutdown, Synchronize
from proxy.hooks.point import POINTS, Point

__all__ = [
    "POINTS",
    "VALIDATES",
    "Configure",
    "MachineChanged",
    "Point",
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

VALIDATES: Final[Mapping[str, str]] = {
    "pre_run_pod_sandbox": "validate_run_pod_sandbox",
    "pre_create_container": "validate_create_container",
    "pre_update_container_resources": "validate_update_container_resources",
}
"""Point to the one that validates what it was answered."""
