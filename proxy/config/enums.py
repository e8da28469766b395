"""Enumerations: settings with a fixed set of values; where kubelet has the setting, its values."""

from __future__ import annotations

import enum


class CpuManagerPolicy(enum.StrEnum):
    """Whether topoproxy gives exclusive CPUs to Guaranteed containers."""

    NONE = "none"
    STATIC = "static"


class MemoryManagerPolicy(enum.StrEnum):
    """Whether Guaranteed containers are promised memory of NUMA nodes; kubelet writes it with capitals."""

    NONE = "None"
    STATIC = "Static"


class OnError(enum.StrEnum):
    """What happens to a call when deciding fails by an internal error."""

    FORWARD = "forward"
    REFUSE = "refuse"


class OwnerMemoryNodes(enum.StrEnum):
    """What cpuset.mems of containers with CPUs of their own is."""

    FOLLOW = "follow"
    LEAVE = "leave"


class OwnerPartitions(enum.StrEnum):
    """What the kernel makes of CPUs that are owned (cpuset.cpus.partition of cgroup v2)."""

    NONE = "none"
    ROOT = "root"
    ISOLATED = "isolated"


class FailurePolicy(enum.StrEnum):
    """What happens to a call when a hook fails: it is refused, or continues without that hook.

    The words are Koordinator's.
    """

    FAIL = "Fail"
    IGNORE = "Ignore"


class LogLevel(enum.StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """The format of the log."""

    TEXT = "text"
    KLOG = "klog"
    JSON = "json"
