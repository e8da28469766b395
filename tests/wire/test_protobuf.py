"""Text from bytes that may not be UTF-8, and messages with such strings."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.messages import pod_of
from proxy.model.errors import HookError
from proxy.pools.facts import POD_KEYS
from proxy.wire import protobuf
from proxy.wire.protobuf import (
    ENTRY_COUNT_LIMIT,
    ENTRY_LIMIT_BYTES,
    TooManyFieldsError,
    WantedKeys,
    decode_message,
    decode_name,
    decode_text,
    encode_field,
)
from tests.testkit.hook_facts import container_facts, pod_facts

BITS = st.binary(max_size=12) | st.text(max_size=6).map(str.encode)
KEYS = st.sampled_from([key.encode() for key in POD_KEYS]) | BITS
ENTRIES = st.lists(st.tuples(KEYS, BITS), max_size=8)


def encoded(entries: list[tuple[bytes, bytes]]) -> list[bytes]:
    return [encode_field(1, key) + encode_field(2, value) for key, value in entries]


@given(BITS, BITS)
def test_text_is_plain_and_keeps_bytes_apart(one: bytes, other: bytes) -> None:
    assert decode_text(one).encode() == one or decode_name(one) == ""
    if one != other and b"\\" not in one + other:
        assert decode_text(one) != decode_text(other)


@given(ENTRIES)
def test_wanted_entries_are_those_of_a_whole_map(entries: list[tuple[bytes, bytes]]) -> None:
    whole = {decode_text(key): decode_text(value) for key, value in entries if decode_name(key) or not key}
    config = b"".join(encode_field(7, one) for one in encoded(entries))
    raw = pb.SandboxFacts.FromString(config).annotations
    assert WantedKeys(POD_KEYS).wanted_entries(raw) == {key: whole[key] for key in POD_KEYS if key in whole}


def test_an_entry_that_is_not_a_message_costs_only_itself() -> None:
    key = b"koordinator.sh/qosClass"
    good, bad = encode_field(1, key) + encode_field(2, b"LS"), b"\x12\x7f" + key
    assert WantedKeys(POD_KEYS).wanted_entries([bad, good, bad]) == {key.decode(): "LS"}


@given(ENTRIES, ENTRIES, BITS)
def test_a_pod_is_read_as_in_the_whole_message(
    labels: list[tuple[bytes, bytes]], annotations: list[tuple[bytes, bytes]], name: bytes
) -> None:
    raw = encode_field(1, encode_field(1, name) + encode_field(2, b"u")) + encode_field(
        8, encode_field(1, b"/kubepods/podu")
    )
    raw += b"".join(encode_field(6, one) for one in encoded(labels))
    raw += b"".join(encode_field(7, one) for one in encoded(annotations))
    copy = decode_message(pb.PodSandboxConfig, raw)
    assert pod_of(pb.SandboxFacts.FromString(raw)) == pod_of(
        pb.SandboxFacts.FromString(copy.SerializeToString(deterministic=True))
    )
    facts = pod_facts(pod_of(pb.SandboxFacts.FromString(raw)), raw)
    assert facts.labels == {decode_text(key): decode_text(value) for key, value in labels}
    assert facts.name == decode_text(name)


@given(st.lists(BITS, max_size=5), ENTRIES)
def test_a_message_is_read_with_strings_replaced(
    args: list[bytes], labels: list[tuple[bytes, bytes]]
) -> None:
    config = b"".join(encode_field(4, each) for each in args) + encode_field(
        1, encode_field(1, b"c") + b"\x10\x03"
    )
    config += b"".join(encode_field(9, one) for one in encoded(labels)) + b"\xf8\x3e\x05" + b"\xfd\x3eabcd"
    found = decode_message(
        pb.CreateContainerConfig, encode_field(1, b"\xff") + encode_field(2, config)
    ).config
    assert [*found.args] == [decode_text(each) for each in args]
    assert dict(found.labels) == {decode_text(key): decode_text(value) for key, value in labels}
    assert (found.metadata.name, found.metadata.attempt) == ("c", 3)


@given(st.binary(max_size=60))
def test_garbage_is_a_decode_error_or_a_message(raw: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode_message(pb.CreateContainerRequest, raw)


def test_an_odd_message_that_is_too_large_fails_the_hook_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty map instead would let a request pass that the hook has to refuse."""
    monkeypatch.setattr(protobuf, "FIELDS_LIMIT", 50)
    raw = b"".join(encode_field(7, encode_field(1, b"k%d" % n) + encode_field(2, b"\xff")) for n in range(60))
    with pytest.raises(TooManyFieldsError):
        decode_message(pb.PodSandboxConfig, raw)
    facts = pod_facts(pod_of(pb.SandboxFacts.FromString(raw)), raw)
    with pytest.raises(HookError, match="cannot read a PodSandboxConfig"):
        len(facts.annotations)
    with pytest.raises(HookError, match="cannot read a CreateContainer request"):
        _ = container_facts(encode_field(2, b"".join(encode_field(4, b"\xff") for _ in range(60)))).args


@given(ENTRIES)
def test_all_labels_are_those_of_a_whole_map(entries: list[tuple[bytes, bytes]]) -> None:
    raw = pb.SandboxFacts.FromString(b"".join(encode_field(6, one) for one in encoded(entries))).labels
    assert WantedKeys(POD_KEYS).all_entries(raw) == {
        decode_text(key): decode_text(value) for key, value in entries
    }


def test_of_too_many_labels_only_the_wanted_are_read() -> None:
    wanted = encode_field(1, b"koordinator.sh/qosClass") + encode_field(2, b"LS")
    others = [encode_field(1, b"k%d" % at) for at in range(ENTRY_COUNT_LIMIT)]
    assert WantedKeys(POD_KEYS).all_entries([*others, wanted]) == {"koordinator.sh/qosClass": "LS"}
    assert len(WantedKeys(POD_KEYS).all_entries(others)) == ENTRY_COUNT_LIMIT
    assert (
        WantedKeys(POD_KEYS).all_entries([encode_field(1, b"k") + encode_field(2, b"x" * ENTRY_LIMIT_BYTES)])
        == {}
    )
