"""Compute the path of a container's cgroup from the names that runtimes use.

Two things decide the path: the parent that kubelet sends with the pod, and the runtime's cgroup driver.

* cgroupfs: the parent is a path, ``/kubepods/burstable/podUID``, and the container is a directory below it,
  named by its id.
* systemd: the parent is the name of a slice, ``kubepods-burstable-podUID.slice``. A slice's name contains its
  ancestors (systemd.slice(5): each dash opens one level), so the path of ``a-b.slice`` is
  ``a.slice/a-b.slice``. The container is a scope in the slice, named by the runtime's prefix and the id.
* no parent (crictl, tests of the runtime): containerd uses its namespace, ``k8s.io/ID``; systemd's default is
  ``system.slice``.

An OCI ``cgroupsPath`` is accepted as the parent too, because a runtime reports it for a running container:
``/kubepods/podUID/ID``, or ``slice:prefix:ID``.

This module only computes names; it looks nothing up.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

from proxy.backends.runtime.quirks import MONITOR_PREFIXES, SCOPE_PREFIXES, containerd, crio
from proxy.model.errors import CgroupError


def expand_slice(name: str) -> str | None:
    """Return the path of a slice below the root.

    Args:
        name: As ``a-b-c.slice``.

    Returns:
        ``a.slice/a-b.slice/a-b-c.slice``; empty for the root slice ``-.slice``; None for a name that systemd
        would not accept for a slice (no ``.slice``, empty parts, a slash).
    """
    stem, dot, rest = name.rpartition(".slice")
    if not dot or rest or "/" in name:
        return None
    if stem == "-":
        return ""
    parts = stem.split("-")
    if not all(parts):
        return None
    return "/".join("-".join(parts[: i + 1]) + ".slice" for i in range(len(parts)))


def is_safe_path(path: str) -> bool:
    """Return whether a path cannot lead out of its directory: it has no ``.`` or ``..``, and no NUL."""
    return "\0" not in path and not {".", ".."}.intersection(path.split("/"))


def parent_path(parent: str) -> str | None:
    """Return the directory that ``cgroup_parent`` names, relative to the root; None if it names none."""
    if not parent or not is_safe_path(parent):
        return None
    expanded = expand_slice(parent.rstrip("/").rpartition("/")[2])
    if expanded is not None:
        return expanded
    return "/".join(part for part in parent.split("/") if part)


def _split(parent: str, container_id: str) -> tuple[str, str | None]:
    """Split an OCI ``cgroupsPath``: the parent, and the container's own name if it contains one."""
    if parent.endswith(f":{container_id}") and parent.count(":") == 2:
        slice_name, prefix, _ = parent.split(":")
        return slice_name or "system.slice", f"{prefix}-{container_id}.scope" if prefix else None
    if parent.endswith(f"/{container_id}"):
        return parent.rpartition("/")[0], container_id
    return parent, None


def parent_of_container(parent: str, container_id: str) -> str | None:
    """Return the group below which the container's group is expected; None if the parent names no group."""
    above = _split(parent, container_id)[0]
    return parent_path(above) if above else containerd.NAMESPACE


def candidates(parent: str, container_id: str) -> Iterator[str]:
    """Return the paths at which a container's cgroup is expected, the most likely first.

    Args:
        parent: ``cgroup_parent``, or an OCI ``cgroupsPath`` that ends in the id; may be empty.
        container_id: The runtime's id, without slashes.
    """
    above, own = _split(parent, container_id)
    base = parent_path(above)
    if own is not None and base is not None and is_safe_path(own) and "/" not in own:
        yield _join(base, own)
    if above:
        in_slice = above.rstrip("/").endswith(".slice")
        yield from _below(base, container_id, scopes=in_slice)
        if in_slice:
            yield containerd.unexpanded(above, container_id)
        return
    yield f"{containerd.NAMESPACE}/{container_id}"
    yield container_id
    yield from _below("system.slice", container_id, scopes=True)


def _below(base: str | None, container_id: str, *, scopes: bool) -> Iterator[str]:
    if base is None:
        return
    names = [f"{prefix}-{container_id}.scope" for prefix in SCOPE_PREFIXES]
    names = [*names, container_id] if scopes else [container_id, *names]
    for name in (*names, f"{crio.GROUP_PREFIX}{container_id}"):
        yield _join(base, name)


def _join(base: str, name: str) -> str:
    return f"{base}/{name}" if base else name


def is_name_of_container(name: str, container_id: str) -> bool:
    """Return whether a directory's name is that of the container with this id (and not of its monitor)."""
    if name.startswith(MONITOR_PREFIXES):
        return False
    return name == container_id or name.removesuffix(".scope").endswith(
        (f"-{container_id}", f":{container_id}")
    )


class CgroupDriver(enum.StrEnum):
    """The cgroup driver of kubelet, which determines the names of groups.

    Source: kubernetes v1.36 pkg/kubelet/cm/qos_container_manager_linux.go and
    pkg/kubelet/cm/cgroup_manager_linux.go, ToSystemd. ``kubepods`` contains one group for each of the
    Kubernetes QoS classes Burstable and BestEffort. These two contain one group for each of their pods; the
    groups of Guaranteed pods are directly in ``kubepods``. A pod's group contains one group for each
    container and one for the sandbox. With the systemd driver, containers are scopes and all other groups are
    slices; the name of a slice lists its ancestors, and has underscores in place of the dashes of a pod's
    uid.
    """

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


_POD_SLICE = re.compile(r"(?:.+-)?kubepods-(?:burstable-|besteffort-)?pod([^-]+)\.slice")
"""A pod's slice. If kubelet has a ``cgroupRoot``, the name begins with the names of the slices above."""


def pod_uid(driver: CgroupDriver, name: str) -> str:
    """Read a pod's uid from the name of its group.

    Raises:
        CgroupError: The group is not that of a pod.
    """
    if driver is CgroupDriver.SYSTEMD:
        if found := _POD_SLICE.fullmatch(name):
            return found[1].replace("_", "-")
    elif name.startswith("pod") and name != "pod":
        return name.removeprefix("pod")
    raise CgroupError(f"cannot find the pod of cgroup {name!r}: this is not a pod's")
