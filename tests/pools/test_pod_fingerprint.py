"""The fingerprint of a set of pods, and the hash that it uses."""

from __future__ import annotations

import pytest

from proxy.pools.pod_fingerprint import fingerprint, xxhash64


@pytest.mark.parametrize(
    ("pods", "value"),
    [
        ([], "pfp0v001ef46db3751d8e999"),
        ([("namespace1", "pod1")], "pfp0v0019e0420efb37746c6"),
        ([("default", "web-0")], "pfp0v001d5676506abe7e28f"),
        ([("kube-system", "coredns-0"), ("default", "web-0")], "pfp0v001ffde0f83923e7790"),
        ([("default", "web-0"), ("kube-system", "coredns-0")], "pfp0v001ffde0f83923e7790"),
    ],
)
def test_fingerprints(pods: list[tuple[str, str]], value: str) -> None:
    assert fingerprint(pods) == value


@pytest.mark.parametrize(
    ("data", "seed", "value"),
    [
        (b"", 0, 0xEF46DB3751D8E999),
        (b"a", 0, 0xD24EC4F1A98C6E5B),
        (b"abc", 0, 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
        (b"The quick brown fox jumps over the lazy dog", 0, 0x0B242D361FDA71BC),
    ],
)
def test_the_hash_is_that_of_its_specification(data: bytes, seed: int, value: int) -> None:
    assert xxhash64(data, seed) == value
