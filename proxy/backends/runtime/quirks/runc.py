"""runc: the CPU masks that it sends to systemd.

systemd reads a set of CPUs (``AllowedCPUs``) as the bytes of a mask, the lowest CPUs first. runc before 1.1.6
sends the bytes in the reverse order (opencontainers/runc, pull request 3808).
"""

from __future__ import annotations

from proxy.model.idset import CpuSet


def byte_reversed_mask(cpus: CpuSet) -> CpuSet:
    """Return the set that systemd reads if the bytes of the set's mask are in the reverse order."""
    size = (cpus.bits.bit_length() + 7) // 8
    return CpuSet.from_bits(int.from_bytes(cpus.bits.to_bytes(size, "little"), "big"))
