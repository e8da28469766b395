"""Enumerations: settings with a fixed set of values; if kubelet has the setting, kubelet's values."""

from __future__ import annotations

import enum


class CpuManagerPolicy(enum.StrEnum):
    """Whether topoproxy gives exclusive CPUs to Guaranteed containers."""

    NONE = "none"
    STATIC = "static"


class MemoryManagerPolicy(enum.StrEnum):
    """Whether Guaranteed containers are promised memory of NUMA nodes; kubelet capitalizes the values."""

    NONE = "None"
    STATIC = "Static"


class OnError(enum.StrEnum):
    """What happens to a call when its decision fails with an internal error."""

    FORWARD = "forward"
    REFUSE = "refuse"


class OwnerMemoryNodes(enum.StrEnum):
    """The cpuset.mems of containers that own CPUs."""

    FOLLOW = "follow"
    LEAVE = "leave"


class OwnerPartitions(enum.StrEnum):
    """The kind of partition that owned CPUs become (cpuset.cpus.partition of cgroup v2)."""

    NONE = "none"
    ROOT = "root"
    ISOLATED = "isolated"


class FailurePolicy(enum.StrEnum):
    """What happens to a call when a hook fails: it is refused, or continues without that hook.

    The names of the values are Koordinator's.
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
