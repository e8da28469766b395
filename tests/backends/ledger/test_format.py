"""The journal's lines: what survives truncation, and what is read from a damaged file."""

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.ledger import format as fmt

keys = st.text(min_size=1, max_size=6)
values = st.dictionaries(
    st.text(max_size=4), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5), max_size=3
)
batches = st.lists(st.dictionaries(keys, st.none() | values, min_size=1, max_size=3), max_size=6)


def journal(changes: list[dict[str, Any]]) -> tuple[bytes, list[fmt.Entries]]:
    """A file, and the state after each of its batches."""
    data, states = fmt.header("m1"), [{}]
    for number, change in enumerate(changes, start=1):
        data += fmt.batch(number, fmt.pack(change)[0])
        states.append(fmt.apply(states[-1], change))
    return data, states


@given(batches)
def test_what_was_written_is_read(changes: list[dict[str, Any]]) -> None:
    data, states = journal(changes)
    found = fmt.recover(data, "m1")
    assert (found.entries, found.number, found.refused) == (states[-1], len(changes), "")
    assert (found.good_bytes, found.cut_bytes) == (len(data), 0)


@given(batches)
def test_a_crash_at_any_byte_leaves_whole_batches(changes: list[dict[str, Any]]) -> None:
    data, states = journal(changes)
    first = data.index(b"\n") + 1
    for end in range(len(data)):
        found = fmt.recover(data[:end], "m1")
        if end < first:
            assert found.refused == "its first line is damaged"
            continue
        whole = data[:end].count(b"\n") - 1
        assert (found.entries, found.number, found.refused) == (states[whole], whole, "")
        assert found.good_bytes + found.cut_bytes == end
        assert data[: found.good_bytes].endswith(b"\n")


@given(batches, st.data())
def test_a_changed_byte_never_makes_another_state(changes: list[dict[str, Any]], draw: st.DataObject) -> None:
    data, states = journal(changes)
    place = draw.draw(st.integers(0, len(data) - 1))
    byte = draw.draw(st.integers(0, 255).filter(lambda b: b != data[place]))
    found = fmt.recover(data[:place] + bytes([byte]) + data[place + 1 :], "m1")
    if found.refused:
        assert found.entries == {}
    else:
        assert found.cut_bytes > 0
        assert found.entries == states[found.number]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_unexpected_error(data: bytes) -> None:
    assert fmt.recover(data, "m1").entries == {}
    assert fmt.recover(fmt.header("m1") + data, "m1").entries == {}


def line(text: str) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text.encode()), text.encode())


GOOD = fmt.batch(1, {"a": b"{}"})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "first line is damaged"),
        (b"\n", "first line is damaged"),
        (line('{"n":1,"set":{}}'), "not a header"),
        (line('{"n":0,"format":2,"machine":"m1"}') + GOOD, "format 2"),
        (fmt.header("m2") + GOOD, "another machine"),
        (fmt.header("m1") + b"rubbish\n" + GOOD, "line 2 is damaged"),
        (fmt.header("m1") + fmt.batch(2, {"a": b"{}"}), "number 2 where 1 belongs"),
        (fmt.header("m1") + GOOD + GOOD, "number 1 where 2 belongs"),
    ],
)
def test_files_that_are_refused(data: bytes, why: str) -> None:
    found = fmt.recover(data, "m1")
    assert why in found.refused
    assert (found.entries, found.good_bytes) == ({}, 0)


@pytest.mark.parametrize(
    "text", ['{"n":2,"set":{"b":5}}', '{"n":"2","set":{}}', "[" * 5000, "{}", '{"n":2,"set":']
)
def test_a_line_of_another_shape_at_the_end_is_cut(text: str) -> None:
    found = fmt.recover(fmt.header("m1") + GOOD + line(text), "m1")
    assert (found.entries, found.refused, found.cut_bytes) == ({"a": {}}, "", len(line(text)))


def test_unknown_header_fields_are_accepted() -> None:
    assert not fmt.recover(line('{"n":0,"format":1,"machine":"m1","by":"later"}') + GOOD, "m1").refused


def test_values_are_kept_as_a_restart_reads_them() -> None:
    assert fmt.pack({"a": {"t": (1, 2)}, "b": None}) == ({"a": b'{"t":[1,2]}', "b": None}, {})
