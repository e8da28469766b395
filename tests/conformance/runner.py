"""Runs files of vectors and reports the outcomes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance import registry
from tests.conformance.cases import BadCaseError, BadFileError, Case, Outcome, Topologies, topology

OWN = Path(__file__).with_name("vectors")
"""The vectors of this repository."""

NAMED = "topologies.json"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "vectors" / NAMED
"""The topologies to which a file refers that comes without any."""


@dataclass(slots=True)
class Report:
    """The outcome of one file.

    Attributes:
        failures: One line per failed case.
        skips: Reason to number of cases.
        note: A remark about a file without cases.
        error: Why the file could not be used.
    """

    path: Path
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    note: str = ""
    error: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines to print on standard output."""
        parts = [f"{self.passed} passed"] if self.passed else []
        parts += [f"{len(self.failures)} failed"] if self.failures else []
        parts += [f"{self.skips.total()} skipped"] if self.skips else []
        yield f"{self.path}: {self.note or ', '.join(parts)}"
        for line in self.failures:
            yield f"  FAILED {self.path} {line}"
        for reason, count in self.skips.items():
            yield f"  skipped {count}: {reason}"


def expand(paths: Sequence[Path]) -> list[Path]:
    """Return the files to run: files as they are, directories searched for ``*.json`` at any depth."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(found for found in path.rglob("*.json") if found.is_file())
        else:
            files.append(path)
    return list(dict.fromkeys(files))


def run_file(path: Path, beside: Sequence[Path] = ()) -> Report:
    """Run one file.

    Args:
        path: The file.
        beside: Other files that are run with it; topologies among them are used if its own directory has
            none of the name.
    """
    report = Report(path)
    try:
        document = read(path)
        schema = document["schema"]
        if schema == registry.DATA:
            known = [topology(raw) for raw in document["cases"]]
            report.note = f"{len(known)} topologies for the other files, no cases"
        else:
            _run_cases(report, schema, document, beside)
    except BadFileError as error:
        report.error = f"cannot use {path}: {error}"
    return report


def read(path: Path) -> Mapping[str, Any]:
    """Read a file of vectors.

    Raises:
        BadFileError: It cannot be read, is not JSON, or has no schema and cases.
    """
    try:
        content = path.read_bytes()
        if not content.strip():
            raise BadFileError("it is empty")
        document = json.loads(content)
    except OSError as error:
        raise BadFileError(error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise BadFileError("it names no schema")
    cases = document.get("cases")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise BadFileError("it has no list of cases")
    if not cases:
        raise BadFileError("its list of cases is empty")
    return document


def _run_cases(report: Report, schema: str, document: Mapping[str, Any], beside: Sequence[Path]) -> None:
    check = registry.find(schema)
    if check is None:
        if (missing := registry.not_yet(schema)) is None:
            raise BadFileError(f"its schema {schema!r} is unknown (known: {', '.join(registry.supported())})")
        report.skips[f"{missing}: not supported yet"] = len(document["cases"])
        return
    topologies = Topologies(_topologies(report.path, document, beside))
    for index, fields in enumerate(document["cases"]):
        case = Case(index, fields)
        try:
            _count(report, case, check(case, topologies))
        except BadCaseError as error:
            report.failures.append(f"{case.label}: cannot be used: {error}")
        except Exception as error:  # whatever we raise is a wrong answer to this case, and only to this one
            expected = {name: value for name, value in fields.items() if name.startswith("expected")}
            report.failures.append(f"{case.label}: expected {expected!r}, got an exception: {error!r}")


def _count(report: Report, case: Case, outcome: Outcome) -> None:
    if outcome.skipped:
        report.skips[outcome.skipped] += 1
    elif outcome.passed:
        report.passed += 1
    else:
        report.failures.append(f"{case.label}: expected {outcome.expected!r}, got {outcome.got!r}")


def _topologies(
    path: Path, document: Mapping[str, Any], beside: Sequence[Path]
) -> Mapping[str, Mapping[str, Any]]:
    """Collect named topologies: of the file, of its directory, of the other files, then the usual ones."""
    found: dict[str, Mapping[str, Any]] = {}
    for raw in _lists(document, path.with_name(NAMED), beside):
        if not isinstance(raw, dict):
            raise BadFileError(f"{raw!r} is no topology")
        found.setdefault(str(raw.get("name")), raw)
    return found


def _lists(document: Mapping[str, Any], near: Path, beside: Sequence[Path]) -> Iterator[object]:
    yield from document.get("topologies") or ()
    above = near.parent.parent / NAMED
    others = [path for path in beside if path.name == NAMED]
    for path in dict.fromkeys([near, *others, above, SHARED]):
        if not path.is_file():
            continue
        try:
            other = read(path)
        except BadFileError as error:
            raise BadFileError(f"cannot use {path}: {error}") from None
        if other["schema"] == registry.DATA:
            yield from other["cases"]
