"""The tracker against hpack's own encoder and decoder."""

import random

import pytest
from hpack import Decoder, Encoder
from hpack.table import HeaderTable
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.relay import headers
from proxy.relay.events import RelayError
from proxy.relay.headers import MAX_TABLE_SIZE, HpackTracker

STATIC = {4: "/", 5: "/index.html"}


def tracker():
    return HpackTracker(b":path", STATIC)


def test_lengths_of_static_names():
    assert (0, *(len(name) for name, _ in HeaderTable.STATIC_TABLE)) == headers._NAME_LENGTHS


names = st.sampled_from(
    [b":path", b"grpc-timeout", b"user-agent", b"te", b"x-a", b"x-longer-name", b":authority"]
)
values = st.one_of(st.sampled_from([b"/", b"/index.html", b"/a/b", b""]), st.binary(max_size=300))
blocks = st.lists(
    st.tuples(
        st.one_of(st.none(), st.sampled_from([0, 40, 200, 4096, 5000])),
        st.lists(st.tuples(names, values), max_size=8),
        st.booleans(),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(blocks)
def test_the_tracker_agrees_with_the_reference_decoder(conversation):
    encoder, decoder, ours = Encoder(), Decoder(), tracker()
    decoder.max_allowed_table_size = 5000
    ours.allow(5000)
    for size, fields, huffman in conversation:
        if size is not None:
            encoder.header_table_size = size
        unique = list(dict(fields).items())
        block = encoder.encode(unique, huffman=huffman)
        theirs = dict(decoder.decode(block, raw=True)).get(b":path")
        found = ours.feed(block)
        assert found == (None if theirs is None else theirs.decode("latin-1"))
        table = decoder.header_table
        assert ours._used == table._current_size
        assert len(ours._table) == len(table.dynamic_entries)


def test_a_path_is_found_through_ten_thousand_evictions():
    encoder, ours, rng = Encoder(), tracker(), random.Random(7)
    for _ in range(10_000):
        path = f"/service/Method{rng.randrange(9)}"
        fields = [(":method", "POST"), (":path", path), ("grpc-timeout", f"{rng.randrange(10**8)}u")]
        assert ours.feed(encoder.encode(fields)) == path


def test_literals_that_no_table_keeps():
    ours = tracker()
    for lead in (b"\x04", b"\x14", b"\x00\x05:path", b"\x10\x05:path"):
        assert ours.feed(lead + b"\x02/x") == "/x"
    assert not ours._table


def test_a_name_of_a_table_entry_is_borrowed():
    ours = tracker()
    assert ours.feed(b"\x40\x05:path\x02/a") == "/a"
    assert ours.feed(b"\x7e\x02/b") == "/b"  # index 62
    assert ours.feed(b"\xbe") == "/b"
    assert ours.feed(b"\xbf") == "/a"
    assert ours.feed(b"\x84") == "/"
    assert ours.feed(b"\x0f\x2f\x02/c") == "/c"  # index 62, not kept


def test_indices_of_two_bytes():
    ours = tracker()
    ours.feed(b"\x44\x02/p" + b"".join(b"\x40\x01x\x02%02d" % number for number in range(70)))
    assert ours.feed(b"\xff\x05") == "/p"  # 127 + 5 = 132 = 61 + 71
    assert ours.feed(b"\xff\x85\x00") == "/p"  # the same, written longer than needed
    assert ours.feed(b"\xff\x04") is None
    assert ours.feed(b"\xff\x80\x00") is None
    with pytest.raises(RelayError):
        ours.feed(b"\xff\x06")


def test_skimming_follows_and_remembers_only_harmless_blocks():
    ours = tracker()
    growing = b"\x44\x02/p"
    for count in range(1, 4):
        ours.skip_block(growing)
        assert len(ours._table) == count
    ours.skip_block(b"\x83\x86")
    ours.skip_block(b"\x83\x86")
    assert ours._inert == {b"\x83\x86"}
    ours.skip_block(b"\x20")
    assert not ours._table
    ours.skip_block(b"\x3f\xe1\x1f")
    ours.skip_block(growing)
    ours.skip_block(b"\x20")
    assert not ours._table


def test_a_repeated_harmless_block_is_decoded_once(monkeypatch):
    ours, read = tracker(), []
    feed = HpackTracker.feed
    monkeypatch.setattr(HpackTracker, "feed", lambda self, block: (read.append(block), feed(self, block)))
    limit = headers._CACHED_BYTES
    short, long = b"\x83" * limit, b"\x83" * (limit + 1)
    for block in (short, short, long, long):
        ours.skip_block(block)
    assert read == [short, long, long]
    for number in range(headers._CACHE_ENTRIES + 10):
        ours.skip_block(b"\x04\x03%03x" % number)
    assert len(ours._inert) == headers._CACHE_ENTRIES


def test_the_table_never_exceeds_its_announced_size():
    ours = tracker()
    with pytest.raises(RelayError):
        ours.feed(b"\x3f\xe2\x1f")  # 4097
    ours.allow(5000)
    ours.feed(b"\x3f\xe2\x1f")
    assert ours.size == 4097
    ours.feed(b"\x3f\x80\x01")
    assert ours.size == 31 + 128
    ours.feed(b"\x20\x3f\x11")  # to zero and then to 48
    assert ours.size == 48
    ours.feed(b"\x44\x0b/1234567890")  # 32 + 5 + 11 = 48
    assert len(ours._table) == 1
    ours.feed(b"\x44\x0c/12345678901")  # larger than the table: empties it
    assert not ours._table
    ours.allow(1 << 31)
    assert ours.cap == MAX_TABLE_SIZE


def test_a_size_update_must_come_first():
    with pytest.raises(RelayError):
        tracker().feed(b"\x83\x20")


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",
        b"\x80\x01a\x01b",
        b"\xbe",
        b"\xff",
        b"\xff\x80\x80\x80\x80\x01",
        b"\x7f",
        b"\x44",
        b"\x44\x05/abc",
        b"\x44\x7f",
        b"\x40\x03ab",
        b"\x7e\x01a",
        b"\x3f",
        b"\x44\x81\x00",
        b"\x44\x84\xff\xff\xff\xff",
    ],
)
def test_garbage_is_refused(block):
    with pytest.raises(RelayError, match="cannot"):
        tracker().feed(block)


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_any_bytes_are_tracked_or_refused_as_by_the_reference_decoder(pieces):
    decoder, ours = Decoder(), tracker()
    for piece in pieces:
        try:
            decoder.decode(piece, raw=True)
        except Exception:
            return  # invalid bytes may be refused here or pass to the receiver, which refuses them
        ours.feed(piece)
        assert ours._used == decoder.header_table._current_size
