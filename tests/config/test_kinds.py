"""Conversion between texts and values."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.kinds import (
    BOOLEAN,
    BYTES,
    CPU_AMOUNT,
    DIRECTORY,
    OPTIONAL_ADDRESS,
    OPTIONAL_FILE,
    OPTIONAL_SOCKET,
    duration,
    parse_duration,
    quote,
    show_duration,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10s", 10),
        ("1m30s", 90),
        ("500ms", 0.5),
        ("1h", 3600),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("0", 0),
        ("0s", 0),
        ("250us", 0.00025),
        ("250µs", 0.00025),
        ("7ns", 7e-9),
    ],
)
def test_durations_are_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, abs=1e-12)


@pytest.mark.parametrize(
    "text", ["", "s", "10", "1.5", "-1s", "1s ago", "1 s", "1d", "1:30", "1s" * 30, "٣s", "1e3s"]
)
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


def test_a_number_without_unit_is_refused_with_the_spelling() -> None:
    with pytest.raises(ValueError, match="'10' has no unit: write 10s"):
        parse_duration("10")


@given(st.integers(0, 10**8).map(lambda ms: ms / 1000) | st.integers(0, 10**14).map(lambda ns: ns / 10**9))
def test_a_shown_duration_reads_back(seconds: float) -> None:
    assert parse_duration(show_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (10, "10s"),
        (90, "1m30s"),
        (3600, "1h"),
        (0.1, "100ms"),
        (1.5, "1.5s"),
        (0.0005, "500us"),
        (0.1000007, "100ms700ns"),
        (61.5000015, "1m1.5s1500ns"),
    ],
)
def test_durations_are_shown_short(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_bounds_are_accepted_and_values_outside_are_refused() -> None:
    kind = duration(0.1, 60)
    assert (kind.read("100ms"), kind.read("1m")) == (0.1, 60)
    for text in ("99ms", "61s"):
        with pytest.raises(ValueError, match="outside 100ms to 1m"):
            kind.read(text)
    number = whole_number(1, 10)
    assert (number.read("1"), number.read("10")) == (1, 10)
    for text in ("0", "11", "1.0", "0x1", "ten", "1_0", "9" * 5000):
        with pytest.raises(ValueError):
            number.read(text)


def test_a_boolean_is_a_yaml_word_and_not_a_number() -> None:
    assert [BOOLEAN.read(t) for t in ("true", "Yes", "on", "false", "NO", "off")] == [True] * 3 + [False] * 3
    with pytest.raises(ValueError):
        BOOLEAN.read("1")


def test_directories_are_absolute() -> None:
    assert str(DIRECTORY.read("//var/./lib/../x/")) == "/var/x"
    for text in ("", "x", "./x", "/a\0"):
        with pytest.raises(ValueError, match="not an absolute path"):
            DIRECTORY.read(text)


def test_an_optional_socket_may_be_empty() -> None:
    assert OPTIONAL_SOCKET.read(" ") is None
    assert OPTIONAL_SOCKET.show(None) == ""
    assert OPTIONAL_SOCKET.show(OPTIONAL_SOCKET.read("unix:///a")) == "unix:///a"
    with pytest.raises(ValueError, match="'tcp://a': only unix sockets"):
        OPTIONAL_SOCKET.read("tcp://a")


def test_optional_files_and_addresses_may_be_empty() -> None:
    assert (OPTIONAL_FILE.read(" "), OPTIONAL_FILE.show(None), OPTIONAL_ADDRESS.read(" ")) == (None, "", "")
    assert OPTIONAL_FILE.show(OPTIONAL_FILE.read("/a//b/")) == "/a/b"
    with pytest.raises(ValueError, match="'b' is not an absolute path"):
        OPTIONAL_FILE.read("b")


def test_amounts_may_be_empty_and_not_negative() -> None:
    assert [CPU_AMOUNT.read(t) for t in ("", "0", "0.5", "2", "1500m")] == [None, 0, 500, 2000, 1500]
    assert [BYTES.read(t) for t in (" ", "0", "1Ki", "1e3")] == [None, 0, 1024, 1000]
    assert [CPU_AMOUNT.show(v) for v in (None, 0, 500, 2000)] == ["", "0", "500m", "2"]
    assert BYTES.show(1 << 30) == "1Gi"
    for kind in (CPU_AMOUNT, BYTES):
        with pytest.raises(ValueError, match=r"^-1 is negative$"):
            kind.read("-1")
        with pytest.raises(ValueError, match="'1gi' is not an amount: 'gi' is not a suffix; did you mean Gi"):
            kind.read("1gi")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_quoted_text_is_the_same_text_for_yaml(text: str) -> None:
    assert yaml.safe_load(f"k: {quote(text)}") == {"k": text} or quote(text)[0] != '"'


@pytest.mark.parametrize(
    "text", ["", "off", "null", "1", "0-1", "a: b", "#", "10", "~", "a:", "- x", "/a b", "y"]
)
def test_texts_that_yaml_would_read_as_other_types_are_quoted(text: str) -> None:
    assert yaml.safe_load(f"k: {quote(text)}") == {"k": text}
    assert quote(text)[0] == '"'
