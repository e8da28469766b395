"""The differences between runtimes: names of cgroups, monitors, and faults, as values and pure functions.

``backends/cgroup/group_names`` imports the names from here, and the composition root passes ``QUIRKS`` to the
executor. The quirks of all runtimes apply at the same time, because a node can change its runtime, and a
runtime is recognized by its behaviour, not by the name that it reports.

A new runtime needs one module here and one entry in each table below.
"""

from __future__ import annotations

from proxy.backends.runtime.quirks import containerd, crio, runc
from proxy.executor.runtime_ports import RuntimeQuirks

SCOPE_PREFIXES = (containerd.SCOPE_PREFIX, crio.SCOPE_PREFIX, "docker")
"""Prefixes that containerd, CRI-O and cri-dockerd give to the systemd scopes of containers."""
MONITOR_PREFIXES = (crio.MONITOR_GROUP, "libpod-conmon-")
"""Prefixes of groups that are named by a container's id but contain no container; the last is podman's."""

QUIRKS = RuntimeQuirks(
    has_monitors=crio.is_group_of_crio,
    monitor=crio.monitor,
    may_lose_controllers=crio.may_lose_controllers,
    is_made_by_create=crio.is_group_of_crio,
    mask_as_sent=runc.byte_reversed_mask,
)
"""The quirks that the executor must know."""
