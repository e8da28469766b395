"""The differences between runtimes: names of cgroups, monitors, faults. Values and pure functions.

Others import it from here: ``backends/cgroup/group_names`` imports the names, and the executor is given
``QUIRKS`` by the composition root. All runtimes are known at once, as a node may change its runtime, and a
runtime is recognized by what it does, not by the name that it reports.

A new runtime is one module here and one entry in each table below.
"""

from __future__ import annotations

from proxy.backends.runtime.quirks import containerd, crio, runc
from proxy.executor.runtime_ports import RuntimeQuirks

SCOPE_PREFIXES = (containerd.SCOPE_PREFIX, crio.SCOPE_PREFIX, "docker")
"""Prefixes that containerd, CRI-O and cri-dockerd give to the systemd scopes of containers."""
NOT_CONTAINERS = (crio.MONITOR_GROUP, "libpod-conmon-")
"""Prefixes of groups that carry a container's id and hold no container; the last is podman's."""

QUIRKS = RuntimeQuirks(
    has_monitors=crio.is_group_of_crio,
    monitor=crio.monitor,
    is_left_behind=crio.is_left_behind,
    is_made_by_create=crio.is_group_of_crio,
    mask_as_sent=runc.reversed_mask,
)
"""What the executor has to know."""
