"""Names of the cgroups that kubelet makes for pods.

Theory (kubernetes v1.36 pkg/kubelet/cm/qos_container_manager_linux.go and
pkg/kubelet/cm/cgroup_manager_linux.go, ToSystemd). Below the root lies ``kubepods``, in it a group for each
of the classes Burstable and BestEffort, in these (or in ``kubepods``, for Guaranteed) one for each pod, and
in that one for each container, its sandbox among them. With the systemd driver all but containers are slices,
whose names spell out their ancestors and have underscores where a pod's uid has dashes; containers are
scopes.

``proxy.backends.cgroup.group_names`` finds a container by its CRI request. Pure: names in, names out.
"""

from __future__ import annotations

import enum

from proxy.model.errors import CgroupError
from proxy.model.workload import KubeQos


class Driver(enum.StrEnum):
    """The cgroup driver: kubelet itself, or systemd for it."""

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


_CLASSES = {KubeQos.BURSTABLE: "burstable", KubeQos.BEST_EFFORT: "besteffort"}


def pod_uid(driver: Driver, name: str) -> str:
    """Read a pod's uid from the name of its group.

    Raises:
        CgroupError: It is not a pod's.
    """
    stems, end = ["pod"], ""
    if driver is Driver.SYSTEMD:
        stems, end = [*(f"kubepods-{each}-pod" for each in _CLASSES.values()), "kubepods-pod"], ".slice"
    for stem in stems:
        if name.startswith(stem) and name.endswith(end) and len(name) > len(stem) + len(end):
            uid = name[len(stem) : len(name) - len(end)]
            return uid if driver is Driver.CGROUPFS else uid.replace("_", "-")
    raise CgroupError(f"cannot find the pod of cgroup {name!r}: this is not a pod's")
