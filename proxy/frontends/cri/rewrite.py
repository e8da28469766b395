"""Writing a cpuset into a CRI request without taking it apart; and, for an owner of CPUs, a CFS quota.

A protobuf parser merges a singular message that occurs twice, field by field, the later one winning. So a
second, tiny ``config`` (or ``linux``) appended to the request overrides what it holds and nothing else: every
other field, known to us or not, stays unchanged, byte for byte.

Field numbers (CRI v1 and v1alpha2 alike): CreateContainerRequest.config 2, ContainerConfig.linux 15,
LinuxContainerConfig.resources 1; UpdateContainerResourcesRequest.linux 2; in LinuxContainerResources
cpu_quota is 2 (int64), cpuset_cpus 6 and cpuset_mems 7.
"""

from __future__ import annotations

import functools

from proxy.model.idset import CpuSet, Mask
from proxy.wire.fields import field, varint

_SUFFIXES = 256
_create_suffixes: dict[tuple[int, int, int], bytes] = {}


def _resources(cpus: CpuSet | None, mems: Mask | None, quota: int) -> bytes:
    assert cpus is None or cpus, "an empty set means all CPUs to a runtime"
    body = field(6, str(cpus).encode() if cpus else b"")
    if mems:
        body += field(7, str(mems).encode())
    # A negative int64 goes as the 64 bits of its two's complement.
    return body + bytes((2 << 3,)) + varint(quota % (1 << 64)) if quota else body


def create_suffix(cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> bytes:
    """Return what is appended to a CreateContainerRequest.

    Args:
        cpus: The CPUs; None to erase what the request names.
        mems: The memory nodes; None to leave them.
        quota: The CFS quota, -1 for none; 0 to leave it.
    """
    key = (cpus.bits if cpus is not None else -1, mems.bits if mems is not None else 0, quota)
    known = _create_suffixes.get(key)
    if known is None:
        if len(_create_suffixes) >= _SUFFIXES:
            _create_suffixes.clear()
        known = _create_suffixes[key] = field(2, field(15, field(1, _resources(cpus, mems, quota))))
    return known


def cgroup_parent_suffix(parent: str) -> bytes:
    """Return what names another cgroup of the pod at the end of a CreateContainerRequest.

    The field is ``sandbox_config.linux.cgroup_parent``: 3, 8, 1.
    """
    return field(3, field(8, field(1, parent.encode())))


@functools.lru_cache(maxsize=256)
def update_suffix(cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> bytes:
    """Return what is appended to an UpdateContainerResourcesRequest; as ``create_suffix``."""
    return field(2, _resources(cpus, mems, quota))
