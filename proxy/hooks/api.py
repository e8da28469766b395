"""What a hook file imports.

A hook is a file ``NN-name.py`` with functions named after hook points::

    from proxy.hooks.api import Adjustment, PreCreateContainer

    API_VERSION = 1

    def pre_create_container(event: PreCreateContainer) -> Adjustment | None:
        if event.decision.own:
            return Adjustment(envs={"PINNED": str(event.decision.own)})
        return None

Functions may be ``async``. They may be called for several containers at once, from several threads. A file
that only computes may say ``PURE = True``, and costs less. How hooks are found, ordered and configured:
docs/hooks.md; all points: docs/hook-points.md.
"""

from __future__ import annotations

from proxy.hooks.answers import CLEAR, LEAVE, Adjustment, Answer, Update, Veto
from proxy.hooks.facts import ContainerFacts, Decision, Device, Mount, PodFacts, Pools, Resources, Running
from proxy.hooks.points import (
    Configure,
    MachineChanged,
    PoolsChanged,
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
    Shutdown,
    Synchronize,
    ValidateCreateContainer,
    ValidateRunPodSandbox,
    ValidateUpdateContainerResources,
)
from proxy.model.idset import CpuSet, Mask

__all__ = [
    "CLEAR",
    "LEAVE",
    "SUPPORTED",
    "Adjustment",
    "Answer",
    "Configure",
    "ContainerFacts",
    "CpuSet",
    "Decision",
    "Device",
    "MachineChanged",
    "Mask",
    "Mount",
    "PodFacts",
    "Pools",
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
    "Resources",
    "Running",
    "Shutdown",
    "Synchronize",
    "Update",
    "ValidateCreateContainer",
    "ValidateRunPodSandbox",
    "ValidateUpdateContainerResources",
    "Veto",
]

SUPPORTED = (1,)
"""Versions of this interface that hook files may name as ``API_VERSION``."""
