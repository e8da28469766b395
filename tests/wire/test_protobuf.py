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
    ENTRIES_LIMIT,
    ENTRY_LIMIT,
    Keys,
    TooManyFieldsError,
    field,
    identity,
    read,
    text,
)
from tests.testkit.hook_facts import container_facts, pod_facts

BITS = st.binary(max_size=12) | st.text(max_size=6).map(str.encode)
KEYS = st.sampled_from([key.encode() for key in POD_KEYS]) | BITS
ENTRIES = st.lists(st.tuples(KEYS, BITS), max_size=8)


def encoded(entries: list[tuple[bytes, bytes]]) -> list[bytes]:
    return [field(1, key) + field(2, value) for key, value in entries]


@given(BITS, BITS)
def test_text_is_plain_and_keeps_bytes_apart(one: bytes, other: bytes) -> None:
    assert text(one).encode() == one or identity(one) == ""
    if one != other and b"\\" not in one + other:
        assert text(one) != text(other)


@given(ENTRIES)
def test_wanted_entries_are_those_of_a_whole_map(entries: list[tuple[bytes, bytes]]) -> None:
    whole = {text(key): text(value) for key, value in entries if identity(key) or not key}
    config = b"".join(field(7, one) for one in encoded(entries))
    raw = pb.SandboxFacts.FromString(config).annotations
    assert Keys(POD_KEYS).of(raw) == {key: whole[key] for key in POD_KEYS if key in whole}


def test_an_entry_that_is_not_a_message_costs_only_itself() -> None:
    key = b"koordinator.sh/qosClass"
    good, bad = field(1, key) + field(2, b"LS"), b"\x12\x7f" + key
    assert Keys(POD_KEYS).of([bad, good, bad]) == {key.decode(): "LS"}


@given(ENTRIES, ENTRIES, BITS)
def test_a_pod_is_read_as_in_the_whole_message(
    labels: list[tuple[bytes, bytes]], annotations: list[tuple[bytes, bytes]], name: bytes
) -> None:
    raw = field(1, field(1, name) + field(2, b"u")) + field(8, field(1, b"/kubepods/podu"))
    raw += b"".join(field(6, one) for one in encoded(labels))
    raw += b"".join(field(7, one) for one in encoded(annotations))
    copy = read(pb.PodSandboxConfig, raw)
    assert pod_of(pb.SandboxFacts.FromString(raw)) == pod_of(
        pb.SandboxFacts.FromString(copy.SerializeToString(deterministic=True))
    )
    facts = pod_facts(pod_of(pb.SandboxFacts.FromString(raw)), raw)
    assert facts.labels == {text(key): text(value) for key, value in labels}
    assert facts.name == text(name)


@given(st.lists(BITS, max_size=5), ENTRIES)
def test_a_message_is_read_with_strings_replaced(
    args: list[bytes], labels: list[tuple[bytes, bytes]]
) -> None:
    config = b"".join(field(4, each) for each in args) + field(1, field(1, b"c") + b"\x10\x03")
    config += b"".join(field(9, one) for one in encoded(labels)) + b"\xf8\x3e\x05" + b"\xfd\x3eabcd"
    found = read(pb.CreateContainerConfig, field(1, b"\xff") + field(2, config)).config
    assert [*found.args] == [text(each) for each in args]
    assert dict(found.labels) == {text(key): text(value) for key, value in labels}
    assert (found.metadata.name, found.metadata.attempt) == ("c", 3)


@given(st.binary(max_size=60))
def test_garbage_is_a_decode_error_or_a_message(raw: bytes) -> None:
    with contextlib.suppress(DecodeError):
        read(pb.CreateContainerRequest, raw)


def test_an_odd_message_that_is_too_large_fails_the_hook_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty map instead would let a request pass that the hook has to refuse."""
    monkeypatch.setattr(protobuf, "MOST", 50)
    raw = b"".join(field(7, field(1, b"k%d" % n) + field(2, b"\xff")) for n in range(60))
    with pytest.raises(TooManyFieldsError):
        read(pb.PodSandboxConfig, raw)
    facts = pod_facts(pod_of(pb.SandboxFacts.FromString(raw)), raw)
    with pytest.raises(HookError, match="cannot read a PodSandboxConfig"):
        len(facts.annotations)
    with pytest.raises(HookError, match="cannot read a CreateContainer request"):
        _ = container_facts(field(2, b"".join(field(4, b"\xff") for _ in range(60)))).args


@given(ENTRIES)
def test_all_labels_are_those_of_a_whole_map(entries: list[tuple[bytes, bytes]]) -> None:
    raw = pb.SandboxFacts.FromString(b"".join(field(6, one) for one in encoded(entries))).labels
    assert Keys(POD_KEYS).and_others(raw) == {text(key): text(value) for key, value in entries}


def test_of_too_many_labels_only_the_wanted_are_read() -> None:
    wanted = field(1, b"koordinator.sh/qosClass") + field(2, b"LS")
    others = [field(1, b"k%d" % at) for at in range(ENTRIES_LIMIT)]
    assert Keys(POD_KEYS).and_others([*others, wanted]) == {"koordinator.sh/qosClass": "LS"}
    assert len(Keys(POD_KEYS).and_others(others)) == ENTRIES_LIMIT
    assert Keys(POD_KEYS).and_others([field(1, b"k") + field(2, b"x" * ENTRY_LIMIT)]) == {}
