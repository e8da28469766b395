"""A bad record never affects another one: surrogates, odd values, records that are too long."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.ledger import FileLedger, open_ledger
from proxy.backends.ledger.format import RECORD_BYTES, recover
from proxy.model.errors import RecordError

SURROGATE = "node 0: \ud800 is no resource"
SECRET = "tenant-a/payments"


@pytest.fixture
def ledger(tmp_path: Path) -> FileLedger:
    return open_ledger(tmp_path, "m1")[0]


def read_back(directory: Path) -> dict[str, Any]:
    again, notes = open_ledger(directory, "m1")
    try:
        assert notes == []
        return dict(again.entries)
    finally:
        again.close()


def test_a_lone_surrogate_is_stored_as_text_beside_the_other_records(
    ledger: FileLedger, tmp_path: Path
) -> None:
    ledger.write({"p/evil": {"problem": SURROGATE}, "i/owner": {"own": "0-3"}})
    expected = {"p/evil": {"problem": "node 0: \\ud800 is no resource"}, "i/owner": {"own": "0-3"}}
    assert ledger.entries == expected
    ledger.close()
    assert read_back(tmp_path) == expected


def test_every_stored_text_can_be_encoded_by_readers_that_know_no_escape(
    ledger: FileLedger, tmp_path: Path
) -> None:
    """Earlier readers store what they read as UTF-8 without escapes, and do not start if that fails."""
    ledger.write({"p/one": {"problem": SURROGATE, "\udfff": ["\ud83d\ude00", "é", "\\ud800"]}})
    ledger.close()
    found = recover((tmp_path / "ledger.jsonl").read_bytes(), "m1").entries
    assert json.dumps(found, ensure_ascii=False).encode()


def test_a_file_with_escaped_surrogates_is_read(ledger: FileLedger, tmp_path: Path) -> None:
    from proxy.backends.ledger.format import batch

    ledger.close()
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(batch(1, {"p/one": b'{"problem":"\\ud800"}'}))
    assert read_back(tmp_path) == {"p/one": {"problem": "\\ud800"}}


class _Deep(dict[str, Any]):
    """A value that is too deep for the encoder, whatever its limit."""

    def __init__(self) -> None:
        super().__init__()
        self["self"] = self


BAD: dict[str, Any] = {
    "no JSON": {"x": object()},
    "keys that are no text": {("a", 1): 2},
    "not a number": {"x": float("nan")},
    "within itself": _Deep(),
    "no object": 5,
    "too long": {"x": "y" * RECORD_BYTES},
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_is_dropped_alone_and_named_alone(ledger: FileLedger, tmp_path: Path, kind: str) -> None:
    ledger.write({"c/bad": {"old": SECRET}})
    with pytest.raises(RecordError) as raised:
        ledger.write({"p/good": {"name": SECRET}, "c/bad": BAD[kind], "i/owner": {"own": "0-3"}})
    assert list(raised.value.rejected) == ["c/bad"]
    assert str(raised.value).startswith("cannot store record c/bad in the ledger: ")
    assert "tenant" not in str(raised.value)
    assert len(str(raised.value)) < 200
    expected = {"p/good": {"name": SECRET}, "i/owner": {"own": "0-3"}}
    assert ledger.entries == expected, "an outdated record under the key would be used after a restart"
    ledger.close()
    assert read_back(tmp_path) == expected


def test_a_key_that_is_not_a_text_costs_no_other_record(ledger: FileLedger) -> None:
    with pytest.raises(RecordError) as raised:
        ledger.write({"p/\ud800" + "x" * 5000: {}, 7: {}, "p/good": {}})  # type: ignore[dict-item]
    assert len(raised.value.rejected) == 2
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 300
    assert ledger.entries == {"p/good": {}}
    ledger.close()


def test_records_of_the_node_may_be_longer_than_those_of_containers(ledger: FileLedger) -> None:
    ledger.write(
        {"t/takeover": {"written": "y" * (4 * RECORD_BYTES)}, "c/c": {"x": "y" * (RECORD_BYTES - 8)}}
    )
    assert len(ledger.entries) == 2
    ledger.close()


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=())) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=()), max_size=4), anything, max_size=4))
def test_other_records_are_stored_whatever_one_record_holds(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ledger, _ = open_ledger(Path(directory), "m1")
        rejected: dict[str, str] = {}
        message = ""
        try:
            ledger.write({**changes, "c/good": {"own": "0-3"}})
        except RecordError as error:
            rejected, message = dict(error.rejected), str(error)
        ledger.close()
        found = read_back(Path(directory))
    assert len(message) < 300
    assert found["c/good"] == {"own": "0-3"}
    for key, value in changes.items():
        plain = value is None or (isinstance(value, dict) and all(isinstance(v, str) for v in value.values()))
        if plain and key.isprintable() and key != "c/good":
            assert key not in rejected
            assert (key in found) == (value is not None)
