"""The mode of the daemon: one value instead of several switches that must agree."""

from __future__ import annotations

from enum import StrEnum


class NodeMode(StrEnum):
    """The mode of the node. A release goes from ``enforce`` through ``releasing`` to ``released``.

    Attributes:
        in_release: Whether containers get, or have got, the cpusets that they would have without topoproxy.
    """

    in_release: bool

    PASSTHROUGH = "passthrough"
    """All calls are relayed, and nothing is decided."""
    OBSERVE = "observe"
    """Containers are placed in the state only; nothing is changed."""
    ENFORCE = "enforce"
    """Containers are placed, and their cpusets are written."""
    RELEASING = "releasing"
    """Containers get back the cpusets that they would have without topoproxy; calls are only relayed."""
    RELEASED = "released"
    """All containers have got those cpusets back; calls are only relayed."""

    @property
    def enforces(self) -> bool:
        """Return whether decisions take effect."""
        return self is NodeMode.ENFORCE

    def __init__(self, name: str) -> None:
        self.in_release = name in ("releasing", "released")
