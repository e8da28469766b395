"""The conformance command on our own vectors, on those beside the repository, and on bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).with_name("vectors")
SHARED = ROOT.parent / "shared" / "vectors"
SCHEMAS = sorted(path.stem for path in (OWN.parent / "schemas").glob("*.py"))


def conformance(*paths: Path) -> tuple[int, list[str], str]:
    """Run the command; return its exit status, the lines that it prints, and its error messages."""
    command = [sys.executable, "-m", "tests.conformance", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def write(path: Path, **document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def own_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((OWN / name).read_text())["cases"]
    return cases


def own_topologies() -> list[dict[str, Any]]:
    quirks: list[dict[str, Any]] = json.loads((OWN / "quirks.json").read_text())["topologies"]
    return own_cases("topologies.json") + quirks


def test_own_vectors_pass() -> None:
    status, lines, errors = conformance(OWN)
    total = sum(len(own_cases(f"{schema}.json")) for schema in SCHEMAS)
    assert (status, lines[-1], errors) == (0, f"{total} passed, 0 failed", ""), "\n".join(lines)
    assert conformance() == (status, lines, errors), "without a path it runs our own"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_own_files_count_what_they_hold(schema: str) -> None:
    document = json.loads((OWN / f"{schema}.json").read_text())
    assert document["schema"] == schema
    assert document["count"] == len(document["cases"]) >= 2


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/vectors beside the repository")
def test_shared_vectors_pass() -> None:
    files = sorted(path for path in SHARED.glob("*.json") if path.name != "topologies.json")
    status, lines, errors = conformance(*files)
    assert (status, errors) == (0, ""), "\n".join(lines)
    counts = [len(json.loads(path.read_text())["cases"]) for path in files]
    assert lines == [
        *(f"{path}: {count} passed" for path, count in zip(files, counts, strict=True)),
        f"{sum(counts)} passed, 0 failed",
    ], "every file, and all of it"


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/vectors beside the repository")
def test_koordinators_vectors_pass_and_open_ones_are_listed() -> None:
    status, lines, errors = conformance(SHARED / "koordinator")
    assert (status, errors) == (0, ""), "\n".join(lines)
    assert re.fullmatch(r"\d+ passed, 0 failed", lines[-1])
    later = [line for line in lines if line.startswith("  skipped ")]
    assert all(line.endswith(": not supported yet") for line in later), "\n".join(later)


# Wrong values with which one of our cases must fail, by schema, in the field of the expected result.
WRONG: dict[str, dict[str, Any]] = {
    "checkpoints": {"checksum": 1},
    "cpu_accumulator": {"expected": [77]},
    "cpu_hints": {"expected": [{"affinity": [1], "preferred": True}]},
    "cpu_pod_request": {"expected": 77},
    "cpu_static": {"expected_default": "77", "error": None},
    "cpu_take": {"expected": "77", "error": None},
    "device_alloc": {"expected_count_per_numa": {"0": 77}},
    "device_hints": {"expected": {"r": [{"affinity": [1], "preferred": True}]}},
    "koord_cpu_take": {"expected": "77"},
    "koord_cpu_take_sequences": {"expected": [77]},
    "koord_be_suppress": {"expected_milli": 77},
    "koord_cgroup_paths": {"expected": "77"},
    "koord_cgroup_v2_values": {"expected": 77},
    "koord_cpuset_hook": {"expected": "77"},
    "koord_cri_merge": {"expected": {"cpu_period": 77}},
    "koord_cpuset_rule": {"expected": "77"},
    "koord_extension": {"expected_count": 77},
    "koord_nrt": {"expected": "77"},
    "koord_topology_merge": {"expected": {"affinity": [0], "preferred": True, "score": 1}},
    "koord_topology_small": {"expected": False},
    "memory_small": {"expected": {"memory": 77}},
    "memory_static": {"expected_hints": {"memory": [{"affinity": [1], "preferred": True}]}},
    "options": {"error": True},
    "quirks": {"expected": "7"},
    "topology_discover": {"error": True},
    "topology_merge": {"expected": {"affinity": [1], "preferred": True}},
    "topology_small": {"expected": 77},
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_wrong_expectation_fails_and_is_named(schema: str, tmp_path: Path) -> None:
    cases = own_cases(f"{schema}.json")[:2]
    cases[1] = {**cases[0], "name": 'it\'s "wrong"', **WRONG[schema]}
    path = write(tmp_path / "x.json", schema=schema, topologies=own_topologies(), cases=cases)
    status, lines, errors = conformance(path)
    assert (status, errors, lines[-1]) == (1, "", "1 passed, 1 failed"), "\n".join(lines)
    assert lines[0] == f"{path}: 1 passed, 1 failed"
    assert lines[1].startswith(f"  FAILED {path} case 1 ")
    assert '"wrong"' in lines[1]
    assert ": expected " in lines[1]
    assert ", got " in lines[1]
    assert len(lines) == 3


@pytest.mark.parametrize("schema", SCHEMAS)
def test_other_fields_do_not_matter_and_null_is_absent(schema: str, tmp_path: Path) -> None:
    cases = []
    for case in own_cases(f"{schema}.json"):
        more = {"zz_note": {"a": [1]}, **case}
        cases.append({k: v for k, v in more.items() if v not in (None, {}) or k.startswith("expected")})
        cases.append(more | dict.fromkeys(("gates", "description"), None) | {"gates": case.get("gates")})
    path = write(tmp_path / "x.json", schema=schema, more=1, topologies=own_topologies(), cases=cases)
    status, lines, errors = conformance(path)
    assert (status, errors, lines[-1]) == (0, "", f"{len(cases)} passed, 0 failed"), "\n".join(lines)


def test_the_answer_is_shown_beside_the_expected_one(tmp_path: Path) -> None:
    case = {**own_cases("cpu_take.json")[1], "expected": "1,5"}
    write(tmp_path / "topologies.json", schema="topologies", cases=own_cases("topologies.json"))
    path = write(tmp_path / "take.json", schema="cpu_take", cases=[case, own_cases("cpu_take.json")[2]])
    lines = conformance(path)[1]
    assert lines[1] == f"  FAILED {path} case 0 'a whole core': expected '1,5', got '0,4'"


def test_refusals_are_compared_with_their_words(tmp_path: Path) -> None:
    case = {**own_cases("cpu_take.json")[3], "error": "no"}
    path = write(
        tmp_path / "x.json", schema="cpu_take", topologies=own_cases("topologies.json"), cases=[case]
    )
    status, lines, _ = conformance(path)
    assert status == 1
    assert "expected 'error: no', got 'error: not enough cpus" in lines[1]


def test_topologies_are_in_the_parent_directory_or_among_the_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep" / "x.json", schema="cpu_take", cases=own_cases("cpu_take.json")[:2])
    status, lines, _ = conformance(path)
    assert status == 1
    assert (
        "case 0 'nothing wanted': cannot be used: it wants topology 'one-socket', which is in no" in lines[1]
    )
    assert conformance(path, OWN / "topologies.json")[0] == 0
    write(tmp_path / "topologies.json", schema="topologies", cases=own_cases("topologies.json"))
    assert conformance(path)[0] == 0


def test_a_case_that_cannot_be_used_fails_alone(tmp_path: Path) -> None:
    good, other = own_cases("cpu_take.json")[:2]
    cases = [
        {"name": "a"},
        {**good, "expected": "3-1"},
        {**good, "num_cpus": True},
        {**good, "topology": {"name": "t", "cpus": [[1]]}},
        {**good, "num_cpus": -1},
        other,
    ]
    path = write(tmp_path / "x.json", schema="cpu_take", topologies=own_topologies(), cases=cases)
    status, lines, errors = conformance(path)
    assert (status, errors, lines[-1]) == (1, "", "1 passed, 5 failed")
    words = [
        "case 0 'a': cannot be used: it has no 'algorithm'",
        "cannot be used: it has an unusable 'expected': range '3-1' in '3-1' runs backwards",
        "cannot be used: it has an unusable 'num_cpus': True",
        "cannot be used: topology 't' is unusable",
        "expected {'expected': ''}, got an exception: ValueError('cannot take -1 CPUs",
    ]
    for word, line in zip(words, lines[1:6], strict=True):
        assert word in line


def test_unsupported_cases_are_skipped_and_reported(tmp_path: Path) -> None:
    later = write(tmp_path / "later.json", schema="koord_of_tomorrow", cases=[{}, {}])
    case = {**own_cases("cpu_take.json")[1], "algorithm": "scattered"}
    take = write(tmp_path / "take.json", schema="cpu_take", cases=[case])
    status, lines, _ = conformance(tmp_path)
    assert status == 0
    assert lines == [
        f"{later}: 2 skipped",
        "  skipped 2: Koordinator's rules: not supported yet",
        f"{take}: 1 skipped",
        "  skipped 1: algorithm 'scattered' is not built yet",
        "3 skipped",
        "0 passed, 0 failed",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("\udcff", "not JSON"),
        ("[]", "names no schema"),
        ('{"schema": "cpu_take"}', "has no list of cases"),
        ('{"schema": "cpu_take", "cases": [1]}', "has no list of cases"),
        ('{"schema": "cpu_take", "cases": []}', "list of cases is empty"),
        (
            '{"schema": "recipes", "cases": [{}]}',
            "schema 'recipes' is unknown (known: checkpoints, cpu_accumulator, ",
        ),
        ('{"schema": "topologies", "cases": [{"name": "t", "cpus": [[1]]}]}', "topology 't' is unusable"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    status, lines, errors = conformance(path, OWN / "cpu_accumulator.json")
    assert status == 2
    assert errors.startswith(f"cannot use {path}: ")
    assert errors.count("\n") == 1, "one line"
    assert words in errors
    assert lines[-1] == f"{len(own_cases('cpu_accumulator.json'))} passed, 0 failed", "the others are run"


def test_topologies_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "topologies.json").write_text("{")
    path = write(tmp_path / "x.json", schema="cpu_take", cases=own_cases("cpu_take.json")[:2])
    status, _, errors = conformance(path)
    assert status == 2
    assert errors.startswith(f"cannot use {path}: cannot use {tmp_path}/topologies.json: not JSON")


def test_a_directory_without_vectors(tmp_path: Path) -> None:
    (tmp_path / "directory.json").mkdir()
    status, lines, errors = conformance(tmp_path)
    assert (status, lines) == (2, ["0 passed, 0 failed"])
    assert errors == "cannot find any vectors: no *.json file in these directories\n"
