"""A state file of kubelet while another program writes it: never a wrong set, never an exception."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.backends.kubelet.checkpoint_writer import static_state, write_cpu_state
from proxy.backends.kubelet.checkpoints import held_cpus
from proxy.backends.kubelet.small_file import FILE_LIMIT_BYTES
from proxy.backends.kubelet.state_files import PAUSES_S, RECENT_NS, StateFile
from proxy.model.idset import CpuSet

ALL = CpuSet.parse("0-15")


def content(*cpus: int) -> str:
    return static_state(ALL, {"uid": {"c": CpuSet(cpus)}})


def held(file: StateFile) -> CpuSet | None:
    checkpoint = file.read().checkpoint
    return None if checkpoint is None else held_cpus(checkpoint).held["uid"]["c"]


class Pauses:
    """Pauses that take no time; each runs the action that a test has planned for it."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.then: Any = None

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        if self.then is not None:
            self.then(len(self.taken))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cpu_manager_state"


def opened(path: Path, **more: Any) -> tuple[StateFile, Pauses]:
    pauses = Pauses()
    return StateFile(str(path), pauses, **more), pauses


def test_without_a_file_nothing_is_known(path: Path) -> None:
    file, pauses = opened(path)
    assert (file.read().checkpoint, file.read().problem, pauses.taken) == (None, "", [])
    write_cpu_state(path.parent, content(2, 3))
    assert held(file) == CpuSet([2, 3])
    path.unlink()
    assert (file.read().checkpoint, file.read().problem) == (None, "")


def test_checking_an_unchanged_file_reads_nothing(path: Path, monkeypatch: Any) -> None:
    write_cpu_state(path.parent, content(2))
    later = time.time_ns() + 10**9
    file, _ = opened(path, wall_clock_ns=lambda: later)
    first = file.read()
    monkeypatch.setattr("proxy.backends.kubelet.state_files.read_small_file", None)
    assert file.read() is first


def test_a_file_that_was_written_just_now_is_read_again(path: Path) -> None:
    """Two contents of one length, written within one tick of the file system's clock, have one stamp."""
    write_cpu_state(path.parent, content(2))
    stamp = path.stat()
    file, _ = opened(path, wall_clock_ns=lambda: stamp.st_mtime_ns + RECENT_NS)
    first = file.read()
    assert file.read() is first, "the same content gives the same answer nevertheless"
    with path.open("r+") as same:
        same.write(content(3))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert held(file) == CpuSet([3])


TORN = [
    ("", "it is empty"),
    ("  \n", "it is empty"),
    (content(2)[:-1], "Expecting"),
    (content(2)[:20], "Unterminated"),
    (content(2).replace('"2"', '"3"'), "its checksum does not match its content"),
    (json.dumps({**json.loads(content(2)), "checksum": 0}), "it has no checksum"),
    ("[]", "it is not a JSON object"),
    ('{"checksum": Infinity}', "Infinity is not a number"),
    ("[" * 100_000, "nested too deeply"),
    ("\udcff", "it is not UTF-8"),
]


@pytest.mark.parametrize(("torn", "cause"), TORN)
def test_a_torn_file_is_read_again_for_a_short_while(path: Path, torn: str, cause: str) -> None:
    write_cpu_state(path.parent, content(2))
    file, pauses = opened(path)
    assert held(file) == CpuSet([2])
    path.write_bytes(torn.encode(errors="surrogateescape"))
    assert held(file) == CpuSet([2]), "the last valid content stays in effect"
    problem = file.read().problem
    assert problem.startswith(f"cannot use kubelet's state file {path}: ")
    assert cause in problem
    assert problem.endswith("; its last content stays in effect")
    assert tuple(pauses.taken[: len(PAUSES_S)]) == PAUSES_S
    write_cpu_state(path.parent, content(4))
    assert (held(file), file.read().problem) == (CpuSet([4]), "")


@pytest.mark.parametrize(("torn", "cause"), TORN)
def test_a_file_that_was_never_complete_gives_nothing(path: Path, torn: str, cause: str) -> None:
    path.write_bytes(torn.encode(errors="surrogateescape"))
    later = path.stat().st_mtime_ns + 10**9
    file, pauses = opened(path, wall_clock_ns=lambda: later)
    seen = file.read()
    assert seen.checkpoint is None
    assert cause in seen.problem
    assert not seen.problem.endswith("stands")
    waited = list(pauses.taken)
    assert file.read() is seen
    assert pauses.taken == waited, "a file that stays torn costs no pause at each check"


def test_a_file_completed_during_a_pause_is_not_a_problem(path: Path) -> None:
    path.write_text(content(2)[:30])
    file, pauses = opened(path)
    pauses.then = lambda times: write_cpu_state(path.parent, content(2)) if times == 3 else None
    assert (held(file), file.read().problem, len(pauses.taken)) == (CpuSet([2]), "", 3)


def test_a_file_removed_during_a_pause_gives_nothing(path: Path) -> None:
    path.write_text("")
    file, pauses = opened(path)
    pauses.then = lambda times: path.unlink(missing_ok=True)
    assert file.read().checkpoint is None
    assert file.read().problem == ""


def test_a_large_or_special_file_is_refused_at_once(path: Path) -> None:
    write_cpu_state(path.parent, content(2))
    file, pauses = opened(path)
    assert held(file) == CpuSet([2])
    path.write_bytes(b"{" * (FILE_LIMIT_BYTES + 1))
    assert "it is larger than 1 MiB" in file.read().problem
    path.unlink()
    os.mkfifo(path)
    assert "it is not a regular file" in file.read().problem
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "it is not a regular file" in file.read().problem
    path.unlink()
    path.symlink_to(path)
    assert "symbolic links" in file.read().problem
    assert held(file) == CpuSet([2])
    assert pauses.taken == []


def test_sets_that_no_machine_has_cost_no_memory(path: Path) -> None:
    pods = {f"pod-{i}": {"cpuSet": "0-65535"} for i in range(2000)}
    state = {"policyName": "static", "defaultCpuSet": "0", "podEntries": pods, "checksum": 1}
    path.write_text(json.dumps(state))
    file, _ = opened(path)
    begun = time.process_time()
    assert "its checksum does not match" in file.read().problem
    assert time.process_time() - begun < 30


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200), junk=st.binary(max_size=30), at=st.integers(0, 200), drop=st.integers(0, 30))
def test_an_edited_file_never_gives_a_set_that_was_not_written(
    path: Path, cut: int, junk: bytes, at: int, drop: int
) -> None:
    whole = content(2, 3, 5).encode()
    file, _ = opened(path)
    path.write_bytes(whole)
    assert held(file) == CpuSet([2, 3, 5])
    path.write_bytes((whole[:at] + junk + whole[at + drop :])[: cut or None])
    result = file.read()
    assert result.checkpoint is not None
    assert held_cpus(result.checkpoint).held == {"uid": {"c": CpuSet([2, 3, 5])}}


@pytest.mark.parametrize("way", ["renamed", "in place", "torn"])
def test_a_file_that_is_written_all_the_time_gives_only_what_was_written(path: Path, way: str) -> None:
    sets = [CpuSet([i, i + 1]) for i in range(14)]
    contents = [static_state(ALL, {"uid": {"c": each}}) for each in sets]
    over, written = threading.Event(), itertools.count()
    write_cpu_state(path.parent, contents[0])

    def write() -> None:
        while not over.is_set():
            text = contents[next(written) % len(contents)]
            if way == "renamed":
                write_cpu_state(path.parent, text)
            elif way == "in place":
                path.write_text(text)
            else:
                with path.open("w") as out:
                    out.write(text[:40])
                    out.flush()
                    time.sleep(0.0005)
                    out.write(text[40:])

    writer = threading.Thread(target=write)
    file = StateFile(str(path))
    found = {str(held(file))}
    writer.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until or (len(found) < 3 and time.monotonic() < until + 30):
            result = held(file)
            assert result in sets
            found.add(str(result))
    finally:
        over.set()
        writer.join()
    assert len(found) >= 3
    write_cpu_state(path.parent, content(9))
    assert (held(file), file.read().problem) == (CpuSet([9]), "")
