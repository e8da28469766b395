"""Files of the kernel that are set for a while."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from proxy.hooks.kit.kernel_settings import KernelSettings, put


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {name: tmp_path / name for name in "abc"}
    for name, path in made.items():
        path.write_text(f"{name}\n")
    return made


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state.json"


def held(files: dict[str, Path]) -> str:
    return "".join(path.read_text().strip() for path in files.values())


def test_a_value_that_is_no_longer_wanted_is_restored(files: dict[str, Path], state: Path) -> None:
    knobs = KernelSettings(state)
    assert knobs.apply({files["a"]: "1", files["b"]: "2"}).written == (files["a"], files["b"])
    assert held(files) == "12c"
    assert knobs.own(files["a"]) == "a"
    assert knobs.apply({files["b"]: "3"}).written == (files["a"], files["b"])
    assert held(files) == "a3c"
    assert knobs.apply({files["b"]: "3"}).written == ()
    knobs.apply({})
    assert held(files) == "abc"
    assert json.loads(state.read_text()) == {}


def test_nothing_is_kept_where_nothing_is_wished(files: dict[str, Path], state: Path) -> None:
    KernelSettings(state).apply({files["a"]: "a"})
    assert not state.exists()


def test_another_process_gives_back(files: dict[str, Path], state: Path) -> None:
    KernelSettings(state).apply({files["a"]: "1"})
    later = KernelSettings(state)
    assert later.own(files["a"]) == "a"
    later.apply({})
    assert held(files) == "abc"


def test_a_foreign_value_stays(files: dict[str, Path], state: Path) -> None:
    knobs = KernelSettings(state)
    knobs.apply({files["a"]: "1", files["b"]: "2"})
    files["a"].write_text("x")
    files["b"].write_text("y")
    assert knobs.own(files["a"]) == "x"
    knobs.apply({files["b"]: "2"})
    assert list(json.loads(state.read_text())) == [str(files["b"])]
    assert held(files) == "x2c"
    knobs.apply({})
    assert held(files) == "xyc"


def test_a_crash_anywhere_loses_nothing(files: dict[str, Path], state: Path) -> None:
    class CrashError(Exception):
        pass

    def crash(path: Path, value: str) -> None:
        raise CrashError

    KernelSettings(state).apply({files["a"]: "1"})
    with pytest.raises(CrashError):  # remembered, and not written
        KernelSettings(state, crash).apply({files["a"]: "2", files["b"]: "2"})
    assert held(files) == "1bc"
    assert KernelSettings(state).own(files["a"]) == "a"

    def write_and_crash(path: Path, value: str) -> None:
        put(path, value)
        raise CrashError

    with pytest.raises(CrashError):
        KernelSettings(state, write_and_crash).apply({files["a"]: "2", files["b"]: "2"})
    assert held(files) == "2bc"
    KernelSettings(state).apply({})
    assert held(files) == "abc"


def test_a_value_is_ours_in_the_spelling_of_the_kernel(files: dict[str, Path], state: Path) -> None:
    def shorten(path: Path, value: str) -> None:
        put(path, value.lstrip("0"))

    KernelSettings(state, shorten).apply({files["a"]: "007"})
    assert files["a"].read_text() == "7\n"
    knobs = KernelSettings(state, shorten)
    assert knobs.own(files["a"]) == "a"
    knobs.apply({files["a"]: "008"})
    knobs.apply({})
    assert held(files) == "abc"


def test_a_refused_value_is_reported_and_not_ours(files: dict[str, Path], state: Path) -> None:
    def refuse(path: Path, value: str) -> None:
        if value == "no":
            raise OSError(errno.EIO, "no")
        put(path, value)

    knobs = KernelSettings(state, refuse)
    knobs.apply({files["b"]: "2"})
    came = knobs.apply({files["a"]: "no", files["b"]: "no"})
    assert {path: error.errno for path, error in came.refused.items()} == {
        files["a"]: errno.EIO,
        files["b"]: errno.EIO,
    }
    assert knobs.own(files["a"]) == "a"
    assert knobs.own(files["b"]) == "b", "it holds what we wrote before"
    assert list(json.loads(state.read_text())) == [str(files["b"])]
    knobs.apply({})
    assert held(files) == "abc"


def test_giving_back_is_tried_again(files: dict[str, Path], state: Path) -> None:
    KernelSettings(state).apply({files["a"]: "1"})

    def refuse(path: Path, value: str) -> None:
        raise OSError(errno.EBUSY, "busy")

    assert KernelSettings(state, refuse).apply({}).refused
    KernelSettings(state).apply({})
    assert held(files) == "abc"


def test_a_file_that_goes_is_forgotten(files: dict[str, Path], state: Path) -> None:
    knobs = KernelSettings(state)
    knobs.apply({files["a"]: "1"})
    files["a"].unlink()
    assert knobs.apply({}).written == ()
    assert json.loads(state.read_text()) == {}
    assert knobs.own(files["a"]) is None
    came = knobs.apply({files["a"]: "1"})
    assert (came.written, came.refused) == ((), {})
    assert not files["a"].exists(), "only files that are there are written"


def test_what_cannot_be_remembered_is_not_written(files: dict[str, Path], state: Path) -> None:
    state.parent.write_text("in the way")
    with pytest.raises(OSError):
        KernelSettings(state).apply({files["a"]: "1"})
    assert held(files) == "abc"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"FILE": 1}', '{"FILE": []}', '{"FILE": [1, 2]}', "[" * 9999]
)
def test_a_damaged_state_is_none(files: dict[str, Path], state: Path, text: str) -> None:
    state.parent.mkdir()
    state.write_text(text.replace("FILE", str(files["a"])))
    knobs = KernelSettings(state)
    assert knobs.own(files["a"]) == "a"
    knobs.apply({files["a"]: "1"})
    knobs.apply({})
    assert held(files) == "abc"


def test_a_file_that_was_born_with_our_value_gets_what_it_would_have_had(
    files: dict[str, Path], state: Path
) -> None:
    knobs = KernelSettings(state)
    knobs.adopt(files["a"], "0-3")
    assert knobs.own(files["a"]) == "0-3"
    knobs.apply({})
    assert held(files) == "0-3bc"
