"""What a hook file imports.

A hook is a file ``NN-name.py`` with functions named after hook points::

    from proxy.hooks.api import Adjustment, PreCreateContainer

    API_VERSION = 1

    def pre_create_container(event: PreCreateContainer) -> Adjustment | None:
        if event.decision.own:
            return Adjustment(envs={"PINNED": str(event.decision.own)})
        return None

Functions may be ``async``. They may be called for several containers at once, from several threads. A file
that only computes may set ``PURE = True``, which makes its calls cheaper. docs/hooks.md describes how hooks
are found, ordered and configured; docs/hook-points.md lists all points.
"""

from __future__ import annotations

from proxy.hooks import events
from proxy.hooks.answers import CLEAR, LEAVE, Adjustment, Answer, Update, Veto
from proxy.hooks.events import *  # noqa: F403 - the list of events exists once, as ``events.__all__``
from proxy.hooks.facts import ContainerFacts, Decision, Device, Mount, PodFacts, Pools, Resources, Running
from proxy.model.hook_api_versions import SUPPORTED
from proxy.model.idset import CpuSet, Mask

__all__ = [
    "CLEAR",
    "LEAVE",
    "SUPPORTED",
    "Adjustment",
    "Answer",
    "ContainerFacts",
    "CpuSet",
    "Decision",
    "Device",
    "Mask",
    "Mount",
    "PodFacts",
    "Pools",
    "Resources",
    "Running",
    "Update",
    "Veto",
]
__all__ += events.__all__
