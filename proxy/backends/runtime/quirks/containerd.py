"""containerd: the paths of the cgroups of its containers."""

from __future__ import annotations

SCOPE_PREFIX = "cri-containerd"
"""A container's group is the systemd scope ``cri-containerd-ID.scope`` in the slice of its pod."""
NAMESPACE = "k8s.io"
"""The group of containers whose pod has no ``cgroup_parent``; its name is containerd's CRI namespace."""


def unexpanded(slice_path: str, container_id: str) -> str:
    """Return the directory of a container if containerd uses the systemd driver, but runc does not.

    containerd passes ``SLICE:cri-containerd:ID`` as the cgroup's path, and such a runc makes a directory with
    this name.

    Args:
        slice_path: The name of the pod's slice, or a path that ends in it.
        container_id: The container's id.
    """
    return f"{slice_path.rstrip('/').rpartition('/')[2]}:{SCOPE_PREFIX}:{container_id}"
