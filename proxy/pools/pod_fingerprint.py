"""The fingerprint of the pods on a node, by which schedulers check that an object includes their pods.

See k8stopologyawareschedwg/podfingerprint v0.2.2 fingerprint.go. The 64-bit hash of each pod is that of its
name, seeded with the hash of its namespace; the sorted hashes, 8 bytes each in little-endian order, are
hashed again. The hash is xxHash64 (Cyan4973/xxHash doc/xxhash_spec.md). Plain Python takes 3 ms for 250 pods.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "pfp0v001"
ATTRIBUTE = "nodeTopologyPodsFingerprint"
ATTRIBUTE_METHOD = "nodeTopologyPodsFingerprintMethod"
ANNOTATION = "topology.node.k8s.io/fingerprint"
METHOD_ALL = "all"

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_ALL = (1 << 64) - 1


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Return the fingerprint of pods.

    Args:
        pods: Namespace and name of each.
    """
    hashes = sorted(xxhash64(name.encode(), xxhash64(namespace.encode())) for namespace, name in pods)
    return f"{PREFIX}{xxhash64(b''.join(each.to_bytes(8, 'little') for each in hashes)):016x}"


def xxhash64(data: bytes, seed: int = 0) -> int:
    """Return the 64-bit xxHash of bytes."""
    at, end = 0, len(data)
    if end >= 32:
        lanes = [(seed + _P1 + _P2) & _ALL, (seed + _P2) & _ALL, seed & _ALL, (seed - _P1) & _ALL]
        while at <= end - 32:
            for lane in range(4):
                lanes[lane] = _round(lanes[lane], int.from_bytes(data[at : at + 8], "little"))
                at += 8
        value = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _ALL
        for lane in lanes:
            value = ((value ^ _round(0, lane)) * _P1 + _P4) & _ALL
    else:
        value = (seed + _P5) & _ALL
    value = _tail(data[at:], (value + end) & _ALL)
    for shift, prime in ((33, _P2), (29, _P3)):
        value = ((value ^ value >> shift) * prime) & _ALL
    return value ^ value >> 32


def _tail(data: bytes, value: int) -> int:
    """Hash the last bytes, which fill no whole block."""
    at = 0
    while at + 8 <= len(data):
        value = (
            _rotated(value ^ _round(0, int.from_bytes(data[at : at + 8], "little")), 27) * _P1 + _P4
        ) & _ALL
        at += 8
    if at + 4 <= len(data):
        value = (
            _rotated(value ^ int.from_bytes(data[at : at + 4], "little") * _P1 & _ALL, 23) * _P2 + _P3
        ) & _ALL
        at += 4
    for byte in data[at:]:
        value = _rotated(value ^ byte * _P5 & _ALL, 11) * _P1 & _ALL
    return value


def _round(lane: int, block: int) -> int:
    return _rotated((lane + block * _P2) & _ALL, 31) * _P1 & _ALL


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & _ALL
