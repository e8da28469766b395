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
def test_a_fingerprint_does_not_depend_on_the_order_of_pods(pods: list[tuple[str, str]], value: str) -> None:
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


@pytest.mark.parametrize(
    ("size", "plain", "seeded"),
    [
        (0, 0xEF46DB3751D8E999, 0xAC75FDA2929B17EF),
        (1, 0xE934A84ADB052768, 0x5014607643A9B4C3),
        (4, 0x9136A0DCA57457EE, 0xCAAB286BD8E9FDB5),
        (8, 0xCDBCF538E71D1348, 0xFE0C047A5353CDAC),
        (12, 0x0723BF50086EAD9A, 0x8252819F4E506951),
        (14, 0x8282DCC4994E35C8, 0xC3BD6BF63DEB6DF0),
        (31, 0x299B39A290E6D783, 0xDA673D5FEB5C1D79),
        (32, 0x18B216492BB44B70, 0xB3F33BDF93ADE409),
        (33, 0x55C8DC3E578F5B59, 0xE92C292F64BC3071),
        (64, 0xEF558F8ACAC2B5CD, 0xB5EEBA99264CC44F),
        (222, 0xB641AE8CB691C174, 0x20CB8AB7AE10C14A),
    ],
)
def test_the_hash_of_the_bytes_that_its_authors_test_it_with(size: int, plain: int, seeded: int) -> None:
    """Bytes of Cyan4973/xxHash v0.8.2 cli/xsum_sanity_check.c, XSUM_fillTestBuffer; hashes of libxxhash."""
    seed, factor, made = 2654435761, 11400714785074694797, bytearray()
    state = seed
    for _ in range(size):
        made.append(state >> 56)
        state = state * factor % 2**64
    assert (xxhash64(bytes(made)), xxhash64(bytes(made), seed)) == (plain, seeded)
