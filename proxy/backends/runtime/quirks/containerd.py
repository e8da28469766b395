"""containerd: where it puts the cgroups of containers."""

from __future__ import annotations

SCOPE_PREFIX = "cri-containerd"
"""A container is the systemd scope ``cri-containerd-ID.scope`` in the slice of its pod."""
NAMESPACE = "k8s.io"
"""The group of containers whose pod names no parent: containerd's namespace for the CRI."""


def unexpanded(slice_path: str, container_id: str) -> str:
    """Return the directory of a container whose runc does not know systemd, although containerd does.

    containerd passes ``SLICE:cri-containerd:ID`` as the cgroup's path, and such a runc makes a directory of
    this name.

    Args:
        slice_path: The pod's slice, a name or a path that ends in it.
        container_id: The container's id.
    """
    return f"{slice_path.rstrip('/').rpartition('/')[2]}:{SCOPE_PREFIX}:{container_id}"
