"""The conformance command on our own vectors, on those beside the repository, and on bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).with_name("vectors")
SHARED = ROOT.parent / "shared" / "vectors"


def conformance(*paths: Path) -> tuple[int, list[str], str]:
    """Run the command; give its status, the lines that it prints, and what it complains about."""
    command = [sys.executable, "-m", "tests.conformance", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def write(path: Path, **document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def own_cases(name: str) -> list[dict[str, object]]:
    cases: list[dict[str, object]] = json.loads((OWN / name).read_text())["cases"]
    return cases


def test_own_vectors_pass() -> None:
    status, lines, errors = conformance(OWN)
    total = len(own_cases("cpu_take.json")) + len(own_cases("cpu_accumulator.json"))
    assert (status, lines[-1], errors) == (0, f"{total} passed, 0 failed", "")
    assert conformance() == (status, lines, errors), "without a path it runs our own"


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/vectors beside the repository")
def test_shared_vectors_pass() -> None:
    status, lines, errors = conformance(SHARED)
    assert (status, errors) == (0, ""), "\n".join(lines)
    assert re.fullmatch(r"\d+ passed, 0 failed(, \d+ skipped)?", lines[-1])
    ran = "\n".join(lines)
    assert re.search(r"/cpu_accumulator\.json: \d+ passed$", ran, re.MULTILINE), "all of it is run"
    assert re.search(r"/cpu_take\.json: \d+ passed", ran)


def test_a_wrong_expectation_is_named(tmp_path: Path) -> None:
    case = {**own_cases("cpu_take.json")[1], "expected": "1,5"}
    write(tmp_path / "topologies.json", schema="topologies", cases=own_cases("topologies.json"))
    path = write(tmp_path / "take.json", schema="cpu_take", cases=[case, own_cases("cpu_take.json")[2]])
    status, lines, _ = conformance(path)
    assert status == 1
    assert lines[0] == f"{path}: 1 passed, 1 failed"
    assert lines[1] == "  FAILED case 0 'a whole core': expected '1,5', got '0,4'"
    assert lines[-1] == "1 passed, 1 failed"


def test_refusals_are_compared_with_their_words(tmp_path: Path) -> None:
    case = {**own_cases("cpu_take.json")[3], "error": "no"}
    path = write(
        tmp_path / "x.json", schema="cpu_take", topologies=own_cases("topologies.json"), cases=[case]
    )
    status, lines, _ = conformance(path)
    assert status == 1
    assert "expected 'error: no', got 'error: not enough cpus" in lines[1]


def test_topologies_may_lie_elsewhere_if_they_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", schema="cpu_take", cases=own_cases("cpu_take.json")[:2])
    status, _, errors = conformance(path)
    assert status == 2
    assert "wants topology 'one-socket', which is in no topologies.json" in errors
    assert conformance(path, OWN / "topologies.json")[0] == 0


def test_what_we_cannot_do_yet_is_skipped_and_said(tmp_path: Path) -> None:
    later = write(tmp_path / "later.json", schema="koord_nrt", cases=[{}, {}])
    case = {**own_cases("cpu_take.json")[1], "algorithm": "scattered"}
    take = write(tmp_path / "take.json", schema="cpu_take", cases=[case])
    status, lines, _ = conformance(tmp_path)
    assert status == 0
    assert lines == [
        f"{later}: 2 skipped",
        "  skipped 2: node topology objects: not built yet",
        f"{take}: 1 skipped",
        "  skipped 1: algorithm 'scattered' is not built yet",
        "0 passed, 0 failed, 3 skipped",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "names no schema"),
        ('{"schema": "cpu_take"}', "has no list of cases"),
        ('{"schema": "cpu_take", "cases": []}', "list of cases is empty"),
        (
            '{"schema": "recipes", "cases": [{}]}',
            "schema 'recipes' is unknown (known: checkpoints, cpu_accumulator, ",
        ),
        ('{"schema": "cpu_take", "cases": [{"name": "a"}]}', "case 0 'a' has no 'algorithm'"),
        (
            '{"schema": "cpu_take", "cases": [{"algorithm": "packed", "options": {}, "expected": "3-1"}]}',
            "case 0 has no 'error'",
        ),
        (
            '{"schema": "cpu_accumulator", "cases": [{"kind": "free_cpus", "expected": "3-1"}]}',
            "case 0 has an unusable 'expected': '3-1'",
        ),
        ('{"schema": "topologies", "cases": [{"name": "t", "cpus": [[1]]}]}', "topology 't' is unusable"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    status, lines, errors = conformance(path, OWN / "cpu_accumulator.json")
    assert status == 2
    assert errors.startswith(f"cannot use {path}: ")
    assert words in errors
    assert lines[-1] == f"{len(own_cases('cpu_accumulator.json'))} passed, 0 failed", "the others are run"


def test_a_folder_without_vectors(tmp_path: Path) -> None:
    assert conformance(tmp_path)[0] == 2
