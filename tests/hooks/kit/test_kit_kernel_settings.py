"""Files of the kernel with temporary values."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from proxy.hooks.kit.kernel_settings import KernelSettings, put


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in "abc"}
    for name, path in paths.items():
        path.write_text(f"{name}\n")
    return paths


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state.json"


def contents(files: dict[str, Path]) -> str:
    return "".join(path.read_text().strip() for path in files.values())


def test_a_value_that_is_no_longer_wanted_is_restored(files: dict[str, Path], state: Path) -> None:
    knobs = KernelSettings(state)
    assert knobs.apply({files["a"]: "1", files["b"]: "2"}).written == (files["a"], files["b"])
    assert contents(files) == "12c"
    assert knobs.own(files["a"]) == "a"
    assert knobs.apply({files["b"]: "3"}).written == (files["a"], files["b"])
    assert contents(files) == "a3c"
    assert knobs.apply({files["b"]: "3"}).written == ()
    knobs.apply({})
    assert contents(files) == "abc"
    assert json.loads(state.read_text()) == {}


def test_an_unchanged_value_is_not_recorded(files: dict[str, Path], state: Path) -> None:
    KernelSettings(state).apply({files["a"]: "a"})
    assert not state.exists()


def test_another_process_restores_the_value(files: dict[str, Path], state: Path) -> None:
    KernelSettings(state).apply({files["a"]: "1"})
    later = KernelSettings(state)
    assert later.own(files["a"]) == "a"
    later.apply({})
    assert contents(files) == "abc"


def test_a_value_of_another_program_is_kept(files: dict[str, Path], state: Path) -> None:
    knobs = KernelSettings(state)
    knobs.apply({files["a"]: "1", files["b"]: "2"})
    files["a"].write_text("x")
    files["b"].write_text("y")
    assert knobs.own(files["a"]) == "x"
    knobs.apply({files["b"]: "2"})
    assert list(json.loads(state.read_text())) == [str(files["b"])]
    assert contents(files) == "x2c"
    knobs.apply({})
    assert contents(files) == "xyc"


def test_values_are_restored_after_a_crash_at_any_step(files: dict[str, Path], state: Path) -> None:
    class CrashError(Exception):
        pass

    def crash(path: Path, value: str) -> None:
        raise CrashError

    KernelSettings(state).apply({files["a"]: "1"})
    with pytest.raises(CrashError):  # the state is saved, and the file not written
        KernelSettings(state, crash).apply({files["a"]: "2", files["b"]: "2"})
    assert contents(files) == "1bc"
    assert KernelSettings(state).own(files["a"]) == "a"

    def write_and_crash(path: Path, value: str) -> None:
        put(path, value)
        raise CrashError

    with pytest.raises(CrashError):
        KernelSettings(state, write_and_crash).apply({files["a"]: "2", files["b"]: "2"})
    assert contents(files) == "2bc"
    KernelSettings(state).apply({})
    assert contents(files) == "abc"


def test_a_value_rewritten_by_the_kernel_is_recognized(files: dict[str, Path], state: Path) -> None:
    def shorten(path: Path, value: str) -> None:
        put(path, value.lstrip("0"))

    KernelSettings(state, shorten).apply({files["a"]: "007"})
    assert files["a"].read_text() == "7\n"
    knobs = KernelSettings(state, shorten)
    assert knobs.own(files["a"]) == "a"
    knobs.apply({files["a"]: "008"})
    knobs.apply({})
    assert contents(files) == "abc"


def test_a_refused_value_is_reported_and_not_recorded(files: dict[str, Path], state: Path) -> None:
    def refuse(path: Path, value: str) -> None:
        if value == "no":
            raise OSError(errno.EIO, "no")
        put(path, value)

    knobs = KernelSettings(state, refuse)
    knobs.apply({files["b"]: "2"})
    result = knobs.apply({files["a"]: "no", files["b"]: "no"})
    assert {path: error.errno for path, error in result.refused.items()} == {
        files["a"]: errno.EIO,
        files["b"]: errno.EIO,
    }
    assert knobs.own(files["a"]) == "a"
    assert knobs.own(files["b"]) == "b", "the file has the value that was written before"
    assert list(json.loads(state.read_text())) == [str(files["b"])]
    knobs.apply({})
    assert contents(files) == "abc"


def test_a_failed_restore_is_repeated(files: dict[str, Path], state: Path) -> None:
    KernelSettings(state).apply({files["a"]: "1"})

    def refuse(path: Path, value: str) -> None:
        raise OSError(errno.EBUSY, "busy")

    assert KernelSettings(state, refuse).apply({}).refused
    KernelSettings(state).apply({})
    assert contents(files) == "abc"


def test_a_removed_file_is_forgotten(files: dict[str, Path], state: Path) -> None:
    knobs = KernelSettings(state)
    knobs.apply({files["a"]: "1"})
    files["a"].unlink()
    assert knobs.apply({}).written == ()
    assert json.loads(state.read_text()) == {}
    assert knobs.own(files["a"]) is None
    result = knobs.apply({files["a"]: "1"})
    assert (result.written, result.refused) == ((), {})
    assert not files["a"].exists(), "a missing file is not created"


def test_a_value_is_not_written_if_the_state_cannot_be_saved(files: dict[str, Path], state: Path) -> None:
    state.parent.write_text("in the way")
    with pytest.raises(OSError):
        KernelSettings(state).apply({files["a"]: "1"})
    assert contents(files) == "abc"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"FILE": 1}', '{"FILE": []}', '{"FILE": [1, 2]}', "[" * 9999]
)
def test_a_damaged_state_is_ignored(files: dict[str, Path], state: Path, text: str) -> None:
    state.parent.mkdir()
    state.write_text(text.replace("FILE", str(files["a"])))
    knobs = KernelSettings(state)
    assert knobs.own(files["a"]) == "a"
    knobs.apply({files["a"]: "1"})
    knobs.apply({})
    assert contents(files) == "abc"


def test_an_adopted_file_is_restored_to_its_adopted_value(files: dict[str, Path], state: Path) -> None:
    knobs = KernelSettings(state)
    knobs.adopt(files["a"], "0-3")
    assert knobs.own(files["a"]) == "0-3"
    knobs.apply({})
    assert contents(files) == "0-3bc"
