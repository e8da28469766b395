"""The last line of a run of all tests."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

from tests.testkit.run_all import copied, counts, summary

if TYPE_CHECKING:
    import pytest


def test_the_last_lines_of_both_runs_are_added() -> None:
    first = counts("=== 1 failed, 10200 passed, 60 skipped, 1 warning in 1200.34s (0:20:00) ===")
    second = counts("=== 190 passed, 7 skipped, 2 warnings, 2 errors in 700.10s (0:11:40) ===")
    expected = "== 1 failed, 2 error, 10390 passed, 67 skipped, 3 warning in 20:05 =="
    assert summary(first + second, 1205.9) == expected


def test_a_run_without_a_summary_counts_nothing() -> None:
    assert counts("ERROR: file or directory not found") == Counter()
    assert summary(Counter(), 3.0) == "== no tests ran in 0:03 =="


def test_output_is_copied_and_its_last_line_kept(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    content = b"".join(b"line %d\n" % number for number in range(20_000)) + b"== 3 passed in 1s ==\n"
    with io.BufferedReader(io.BytesIO(content)) as source:  # type: ignore[arg-type]
        assert copied(source) == "== 3 passed in 1s =="
    assert capfdbinary.readouterr().out == content
