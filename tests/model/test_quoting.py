"""Input in messages: escaped and cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import ROOM, cpus, listed, numa_nodes_text
from proxy.model.quoting import MESSAGE, escaped, message, printable, quoted, shown, storable_name

ANY = st.text(st.characters() | st.sampled_from("\ud800\udfff\u202e\x00\n\x1b'\"\\"))


def test_printable_text_is_passed_through() -> None:
    for text in ("a b", "it's", "\u4e2d", "back\\slash"):
        assert printable(text) == escaped(text) == message(text) == text
        assert quoted(text) == repr(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\ud800", r"\ud800"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\u2066x", r"\u2066x"),
        ("\U000e0001", r"\U000e0001"),
    ],
)
def test_unprintable_text_is_escaped(text: str, shown: str) -> None:
    assert escaped(text) == printable(text) == message(text) == shown
    assert quoted(text) == f"'{shown}'"


def test_long_values_are_cut() -> None:
    assert printable("x" * 20, 10) == "xxxxxxx..."
    assert quoted("x" * 20, 10) == "'xxxxxxxxxx'..."
    assert quoted("\n" * 20, 9) == r"'\n\n\n\n'..."
    assert quoted("\ud800" * 9, 11) == r"'\ud800'...", "no escape is cut apart"
    assert quoted("it's \"\n", 20) == r"""'it\'s "\n'"""


@given(ANY, st.integers(10, 90))
def test_any_text_fits_and_can_be_encoded(text: str, limit: int) -> None:
    text *= 40
    for found in (printable(text, limit), quoted(text, limit), escaped(text), message(text)):
        assert found.isprintable()
        found.encode()
    assert len(printable(text, limit)) <= limit
    assert len(quoted(text, limit)) <= limit * 2 + 5
    assert len(message(text).encode()) <= MESSAGE


@given(ANY)
def test_quoted_values_are_distinguished_from_the_text_around_them(text: str) -> None:
    assert quoted(text, 10**6) == repr(text) or eval(quoted(text, 10**6)) == text


def test_values_of_json_are_shown_by_their_kind() -> None:
    assert shown([1] * 10**6) == "a list"
    assert shown({"a": 1}) == "an object"
    assert shown("a") == "'a'"
    assert (shown(1), shown(1.5), shown(None), shown(True)) == ("1", "1.5", "None", "True")
    assert len(shown(10**4000)) <= 60


@given(ANY, ANY)
def test_names_stay_apart_and_can_be_kept(one: str, other: str) -> None:
    for times in (1, 300):
        first, second = storable_name(one * times), storable_name(other * times)
        assert (first == second) <= (one * times == other * times or "\\" in one + other)
        assert len(first) <= 253
        json.dumps(first, ensure_ascii=False).encode()


def test_names_of_kubernetes_are_kept_as_they_are() -> None:
    assert storable_name("a" * 253) == "a" * 253
    assert storable_name("\u4e2d") == "\u4e2d"
    assert storable_name("a" * 254) != storable_name("a" * 255)


def test_sets_in_sentences() -> None:
    assert (cpus(CpuSet([6])), cpus(CpuSet([0, 1, 2]))) == ("CPU 6", "CPUs 0-2")
    assert numa_nodes_text(Mask([0, 2])) == "NUMA nodes 0,2"
    sparse = CpuSet(range(0, 8192, 2))
    assert listed(sparse).startswith("0,2,4,6,")
    assert listed(sparse).endswith(",... (4096 CPUs)")
    assert len(listed(sparse)) < ROOM + 30
    assert listed(Mask(range(0, 1024, 2))).endswith(",... (512 NUMA nodes)")
