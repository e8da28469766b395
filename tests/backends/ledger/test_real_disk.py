"""A ledger on a disk that is really full, and ledgers that are truncated or damaged at any byte."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.ledger import FileLedger, open_ledger
from proxy.model.errors import CannotCreateError


def written_ledger(home: Path) -> tuple[bytes, dict[int, dict[str, Any]]]:
    """Write some batches; return the file, and the state after each complete batch by the file's length."""
    ledger, _ = open_ledger(home, "m1")
    file = home / "ledger.jsonl"
    states = {file.stat().st_size: dict(ledger.entries)}
    for number in range(6):
        ledger.write({f"c/{number % 4}": {"n": number, "cpus": "0-3,8", "text": 'a "\u00fc"\n'}, "i/x": None})
        states[file.stat().st_size] = dict(ledger.entries)
    ledger.write({"c/1": None})
    states[file.stat().st_size] = dict(ledger.entries)
    ledger.close()
    return file.read_bytes(), states


def entries_after_a_start(home: Path, data: bytes) -> dict[str, Any]:
    """Open a ledger with this content and write to it: neither may fail, and the next start finds it."""
    file = home / "ledger.jsonl"
    file.write_bytes(data)
    file.chmod(0o600)
    ledger, _ = open_ledger(home, "m1")
    found = dict(ledger.entries)
    ledger.write({"new": {"n": 1}})
    ledger.close()
    again, notes = open_ledger(home, "m1")
    assert notes == []
    assert dict(again.entries) == {**found, "new": {"n": 1}}
    again.close()
    for path in home.iterdir():
        path.unlink()
    return found


def test_cut_at_every_byte(tmp_path: Path) -> None:
    data, states = written_ledger(tmp_path)
    for length in range(len(data) + 1):
        whole = max((size for size in states if size <= length), default=0)
        assert entries_after_a_start(tmp_path, data[:length]) == states.get(whole, {}), length


def test_damaged_at_every_byte(tmp_path: Path) -> None:
    """Read only a state that existed: none, or all but the end (two batches if a line break is damaged)."""
    data, states = written_ledger(tmp_path)
    whole = list(states.values())
    for place in range(0, len(data), 3):
        odd = bytes([data[place] ^ 0x11])
        found = entries_after_a_start(tmp_path, data[:place] + odd + data[place + 1 :])
        assert found == {} or found in whole[-3:], place


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "topoproxy-test", str(where)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount: {error}")
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def fill(ledger: FileLedger) -> int:
    """Write until the disk is full; return the number of the last record that was written."""

    def more() -> None:
        for number in range(10_000):
            ledger.write({f"c/{number}": {"n": number, "text": "x" * 500}})

    with pytest.raises(CannotCreateError, match="No space left"):
        more()
    return len(ledger.entries) - 1


def test_a_full_disk_keeps_its_content_and_takes_more_later(small: Path) -> None:
    home = small / "state"
    ledger, _ = open_ledger(home, "m1")
    last = fill(ledger)
    assert last > 50
    for _ in range(3):
        with pytest.raises(CannotCreateError):
            ledger.write({"one": {"text": "x" * 5000}})
    before = dict(ledger.entries)
    ledger.close()
    again, notes = open_ledger(home, "m1")
    assert (dict(again.entries), notes) == (before, [])
    again.close()
    subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
    again, _ = open_ledger(home, "m1")
    again.write({f"c/{number}": None for number in range(last)})
    again.write({"one": {"n": 1}})
    expected = {f"c/{last}": before[f"c/{last}"], "one": {"n": 1}}
    assert dict(again.entries) == expected
    again.close()
    again, _ = open_ledger(home, "m1")
    assert dict(again.entries) == expected
    again.close()


def test_a_disk_that_is_full_at_the_start(small: Path) -> None:
    """The ledger opens, or opening fails with an error, and the daemon continues without one."""
    home = small / "state"
    home.mkdir()
    fd = os.open(small / "ballast", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(fd, b"x" * 512):
            pass
    os.close(fd)
    with pytest.raises(CannotCreateError, match=r"cannot open the ledger .*No space left"):
        open_ledger(home, "m1")
    (small / "ballast").unlink()
    ledger, _ = open_ledger(home, "m1")
    ledger.write({"a": {}})
    ledger.close()


def test_a_clock_that_jumps_puts_nothing_over_what_was_put_aside(tmp_path: Path) -> None:
    for when in (time.time(), 0.0, 4e9, 0.0):
        (tmp_path / "ledger.jsonl").write_bytes(b"nonsense\n")
        ledger, notes = open_ledger(tmp_path, "m1", now=lambda when=when: when)
        ledger.close()
        assert "put aside" in notes[0] or "kept as" in notes[0]
    assert len(list(tmp_path.glob("ledger.jsonl.bad-*"))) == 4
