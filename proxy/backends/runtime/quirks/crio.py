"""CRI-O: its cgroups, its monitors, and the creates that it finishes after the client has disconnected.

**Monitors.** CRI-O runs a monitor (conmon) for each container, which copies the container's output as long as
the container lives. The group of the monitor, ``crio-conmon-ID``, is a sibling of the container's group,
unless the monitors are configured to be in another group (``conmon_cgroup`` in crio.conf(5)).

**Groups without controllers.** With the systemd driver, the group of a sandbox without a process is not a
scope, and only CRI-O knows it. When the pod's last container has ended, systemd removes the controllers from
this group (cgroup v2). After that, the group has no CPU list that could be read or written.

**Groups of created containers.** CRI-O runs ``runc create`` for a CreateContainer, and ``runc start`` for the
start. So the group of a container exists, and its cpuset is written, before the container is started. Other
runtimes make the group and write the cpuset when the container is started.

**Hidden creates** (CRI-O 1.34, internal/resourcestore). If the client of a CreateContainer disconnects, CRI-O
finishes the create and hides the container: no list shows it. The next request for the same pod, name and
attempt is answered with this container, which has the CPUs of the first request. ``engine/runtime_knowledge``
remembers such creates, for any runtime. Hidden creates of an earlier run of the daemon are unknown. So in the
sandboxes of an earlier run, the CPUs of a request are not taken for those that CRI-O has saved
(``calls/create_calls``), and the update before the start sends them.
"""

from __future__ import annotations

SCOPE_PREFIX = "crio"
"""A container's group is the systemd scope ``crio-ID.scope`` in the slice of its pod."""
GROUP_PREFIX = "crio-"
"""With the cgroupfs driver a container's group is ``crio-ID``; groups of sandboxes have the prefix too."""
_MONITOR = "conmon-"
MONITOR_GROUP = GROUP_PREFIX + _MONITOR
"""The group of a monitor is ``crio-conmon-ID``, with ``.scope`` if systemd makes it."""


def is_group_of_crio(path: str) -> bool:
    """Return whether CRI-O made the group at a path: it does so at the create, and runs monitors."""
    return path.rpartition("/")[2].startswith(GROUP_PREFIX)


def monitor(container_id: str) -> str:
    """Return the text that replaces the container's id in the name of its monitor's group."""
    return _MONITOR + container_id


def may_lose_controllers(path: str) -> bool:
    """Return whether a sandbox's group can be one that contains no process and loses its controllers."""
    return is_group_of_crio(path) and not path.endswith(".scope")
