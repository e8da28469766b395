"""Hook points that belong to no call: of the node, and of the hook itself; ``points`` has them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.hooks.facts import PodFacts, Pools, Running
from proxy.hooks.point import Point
from proxy.model.machine import Machine


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
