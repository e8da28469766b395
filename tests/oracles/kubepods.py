"""Names of the cgroups that kubelet and runtimes make, from Kubernetes' own terms."""

from __future__ import annotations

from proxy.backends.cgroup.group_names import CgroupDriver, is_safe_path
from proxy.model.errors import CgroupError
from proxy.model.workload import KubeQos

RUNTIMES = {"containerd": "cri-containerd", "cri-o": "crio", "docker": "docker", "pouch": "pouch"}
"""Runtime, as container ids of Kubernetes name it, to the prefix of its scopes."""


_MONITOR = "crio-conmon-"
_CLASSES = {KubeQos.BURSTABLE: "burstable", KubeQos.BEST_EFFORT: "besteffort"}


def driver_of(text: str) -> CgroupDriver | None:
    """Return the driver that a text names; None if it names none."""
    return CgroupDriver(text) if text in tuple(CgroupDriver) else None


def class_path(driver: CgroupDriver, qos: KubeQos | None = None) -> str:
    """Return the path of the group of a class below the root; without a class, that of all pods."""
    name = _CLASSES.get(qos) if qos else None
    if driver is CgroupDriver.CGROUPFS:
        return f"kubepods/{name}" if name else "kubepods"
    return f"kubepods.slice/kubepods-{name}.slice" if name else "kubepods.slice"


def pod_path(driver: CgroupDriver, qos: KubeQos, uid: str) -> str:
    """Return the path of a pod's group below the root.

    Raises:
        CgroupError: The uid is no name.
    """
    if not _is_name(uid):
        raise CgroupError(f"cannot name the cgroup of pod {uid!r}: this is no uid")
    above, name = class_path(driver, qos), _CLASSES.get(qos)
    if driver is CgroupDriver.CGROUPFS:
        return f"{above}/pod{uid}"
    stem = f"kubepods-{name}-pod" if name else "kubepods-pod"
    return f"{above}/{stem}{uid.replace('-', '_')}.slice"


def container_name(driver: CgroupDriver, container_id: str) -> tuple[str, str]:
    """Return the runtime of a container, and the name of its group in that of the pod.

    Args:
        driver: What made it.
        container_id: As Kubernetes writes it, ``containerd://ID``.

    Raises:
        CgroupError: It is not written so, or the runtime is unknown.
    """
    runtime, mark, own = container_id.partition("://")
    if not mark or not _is_name(own):
        raise CgroupError(f"cannot name the cgroup of container {container_id!r}: this is not RUNTIME://ID")
    if runtime not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise CgroupError(
            f"cannot name the cgroup of container {container_id!r}: its runtime is none of {known}"
        )
    return runtime, own if driver is CgroupDriver.CGROUPFS else f"{RUNTIMES[runtime]}-{own}.scope"


def container_path(driver: CgroupDriver, pod: str, container_id: str) -> str:
    """Return the path of a container's group.

    Args:
        driver: What made it.
        pod: The path of the pod's group.
        container_id: As Kubernetes writes it.

    Raises:
        CgroupError: See ``container_name``.
    """
    name = container_name(driver, container_id)[1]
    above = pod.rstrip("/")
    return f"{above}/{name}" if above else name


def container_id(driver: CgroupDriver, name: str) -> str:
    """Read a container's id from the name of its group.

    With the cgroupfs driver the name is the id. CRI-O also makes groups with its prefix and no suffix, and
    groups for its monitors, which are no containers.

    Raises:
        CgroupError: It is not a container's.
    """
    if driver is CgroupDriver.CGROUPFS and name:
        return name
    if not name.startswith(_MONITOR):
        for prefix in RUNTIMES.values():
            found = name.removeprefix(f"{prefix}-")
            if found != name and (found.endswith(".scope") or prefix == RUNTIMES["cri-o"]):
                return found.removesuffix(".scope")
    raise CgroupError(f"cannot name the container of cgroup {name!r} is: this is no container's")


def _is_name(text: str) -> bool:
    return bool(text) and "/" not in text and is_safe_path(text)
