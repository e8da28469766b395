"""The CFS quota of pods that own CPUs.

See Koordinator v1.8.0 pkg/koordlet/runtimehooks/hooks/cpuset/cpuset.go, UnsetContainerCPUQuota.

A container whose CPUs are its own can use no more than those, so a quota only throttles it, for work that
comes in bursts: it is switched off, for the container and for its pod. Containers of one pod share the pod's
CPUs, though, and without quotas one can starve the others; so a setting keeps them, for all pods or for pods
of several containers. A container that no longer owns CPUs gets the quota of its request back.
"""

from __future__ import annotations

from proxy.model.koordinator import KeepQuota

UNLIMITED = -1
PERIOD = 100_000
"""Microseconds, kubelet's."""


def quota_of_owner(*, owns: bool, containers: int, keep: KeepQuota) -> int | None:
    """Decide whether the CFS quota of a pod, or of a container of it, is switched off.

    Args:
        owns: Whether the pod owns CPUs (row 1 of the decision table, whatever its class).
        containers: How many containers of the pod run at the same time.
        keep: The setting.

    Returns:
        -1 to switch it off, None to leave it.
    """
    several = containers > 1 and keep is KeepQuota.SEVERAL_CONTAINERS
    return None if not owns or several or keep is KeepQuota.ALWAYS else UNLIMITED
