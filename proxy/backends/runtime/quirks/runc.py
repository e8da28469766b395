"""runc: the masks of CPUs that it sends to systemd.

systemd takes a set of CPUs (``AllowedCPUs``) as the bytes of a mask, the lowest CPUs first. runc before 1.1.6
sends the bytes in the other order (opencontainers/runc, pull request 3808).
"""

from __future__ import annotations

from proxy.model.idset import CpuSet


def reversed_mask(cpus: CpuSet) -> CpuSet:
    """Return what systemd reads where the bytes of the set's mask come in the wrong order."""
    size = (cpus.bits.bit_length() + 7) // 8
    return CpuSet.from_bits(int.from_bytes(cpus.bits.to_bytes(size, "little"), "big"))
