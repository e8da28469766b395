"""Writing a cpuset into a CRI request without taking it apart.

A protobuf parser merges a singular message that occurs twice, field by field, the later one winning. So a
second, tiny ``config`` (or ``linux``) appended to the request overrides the cpuset and nothing else: every
other field, known to us or not, stays as it came, byte for byte.

Field numbers (CRI v1 and v1alpha2 alike): CreateContainerRequest.config 2, ContainerConfig.linux 15,
LinuxContainerConfig.resources 1; UpdateContainerResourcesRequest.linux 2; in LinuxContainerResources
cpuset_cpus is 6 and cpuset_mems 7.
"""

from __future__ import annotations

import functools

from proxy.model.idset import CpuSet, Mask

_SUFFIXES = 256
_create_suffixes: dict[tuple[int, int], bytes] = {}


def _field(number: int, payload: bytes) -> bytes:
    size, tail = len(payload), b""
    while size > 0x7F:
        tail += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((number << 3 | 2,)) + tail + bytes((size,)) + payload


def _resources(cpus: CpuSet, mems: Mask | None) -> bytes:
    assert cpus, "an empty set means all CPUs to a runtime"
    body = _field(6, str(cpus).encode())
    return body + _field(7, str(mems).encode()) if mems else body


def create_suffix(cpus: CpuSet, mems: Mask | None) -> bytes:
    """Give what is appended to a CreateContainerRequest; without ``mems`` that field is left alone."""
    key = (cpus.bits, mems.bits if mems is not None else 0)
    known = _create_suffixes.get(key)
    if known is None:
        if len(_create_suffixes) >= _SUFFIXES:
            _create_suffixes.clear()
        known = _create_suffixes[key] = _field(2, _field(15, _field(1, _resources(cpus, mems))))
    return known


@functools.lru_cache(maxsize=256)
def update_suffix(cpus: CpuSet, mems: Mask | None) -> bytes:
    """Give what is appended to an UpdateContainerResourcesRequest."""
    return _field(2, _resources(cpus, mems))
