"""Run all tests in four processes.

    python -m tests.testkit.run_all [--coverage] [SEED]

The third and the fourth only compute, and use the CPU time that the others leave. With ``--coverage`` the
coverage of the third is measured: its tests are those of the packages that decide. The output of the others
is printed after that of the first, then the table of the coverage. The last line has totals.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

import pytest

from tests.testkit.shuffle import RANDOM, seed_of

ROOT = Path(__file__).parents[2]
SECOND = (
    *("tests/e2e", "tests/bench", "tests/fuzz", "tests/simulation"),
    *("tests/agent", "tests/attach", "tests/deploy", "tests/extender", "tests/release", "tests/scheduler"),
)
"""What the second process runs: the end-to-end tests, which mostly wait, and others that share no files."""
THIRD = tuple(f"tests/{name}" for name in ("allocation", "engine", "pools", "relay"))
"""What the third process runs: pure functions, which depend on no time limit."""
SEARCHES = (
    *("tests/engine/test_every_interleaving.py", "tests/engine/test_device_interleaving.py"),
    *("tests/engine/test_reservation_search.py", "tests/relay/test_splits.py"),
)
"""Left out of it: they run the same lines for minutes."""
FOURTH = (*SEARCHES, "tests/oracles", "tests/simulate")
"""What the fourth process runs: the same kind of tests."""
COVERAGE = ("-m", "coverage")
REPORT = "build/coverage/report.json"
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|warnings?|xfailed|xpassed)")


def counts(line: str) -> Counter[str]:
    """Return the numbers of pytest's last line, by what they count."""
    return Counter({word.removesuffix("s"): int(number) for number, word in COUNTED.findall(line)})


def summary(found: Counter[str], seconds: float) -> str:
    """Return one last line for all runs."""
    order = ("failed", "error", "passed", "skipped", "xfailed", "xpassed", "warning")
    counts = [f"{found[word]} {word}" for word in order if found[word]]
    return f"== {', '.join(counts) or 'no tests ran'} in {int(seconds) // 60}:{int(seconds) % 60:02d} =="


def start(
    seed: int, output: int | IO[bytes], *selection: str, nice: int = 0, measured: bool = False
) -> subprocess.Popen[bytes]:
    """Start pytest on some of the tests; a nice one with the CPU time that others leave."""
    line = [sys.executable, *((*COVERAGE, "run") if measured else ()), "-m", "pytest", f"--shuffle={seed}"]
    line += selection
    if nice:
        line = ["nice", "-n", str(nice), *line, "--timeout", "1200"]
    return subprocess.Popen(line, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def copied(source: IO[bytes]) -> str:
    """Print a run's output as it comes, and return its last line."""
    last = b""
    while part := source.read1(65536):  # type: ignore[attr-defined]
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        last = (last + part)[-4096:]
    return last.decode(errors="replace").rstrip().rpartition("\n")[2]


def print_coverage() -> None:
    """Print the coverage of the third process."""
    subprocess.run([sys.executable, *COVERAGE, "json", "-q", "-o", REPORT], cwd=ROOT, check=False)
    subprocess.run([sys.executable, "tests/testkit/coverage_table.py", REPORT], cwd=ROOT, check=False)


def main(seed_text: str, *, measured: bool = False) -> int:
    """Run all; return the exit status."""
    began, seed = time.monotonic(), seed_of(seed_text)
    (ROOT / REPORT).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        others = start(seed, subprocess.PIPE, *(f"--ignore={path}" for path in (*SECOND, *THIRD, *FOURTH)))
        second = start(seed, outputs[0], *SECOND)
        third = start(
            seed, outputs[1], *THIRD, *(f"--ignore={path}" for path in SEARCHES), nice=10, measured=measured
        )
        fourth = start(seed, outputs[2], *FOURTH, nice=10)
        runs = (others, second, third, fourth)
        signal.signal(signal.SIGTERM, lambda *_: [run.terminate() for run in runs])
        assert others.stdout is not None
        last = [copied(others.stdout)]
        statuses = [run.wait() for run in runs]
        for kept in outputs:
            kept.seek(0)
            last.append(copied(kept))
    if measured:
        print_coverage()
    print(summary(sum(map(counts, last), Counter()), time.monotonic() - began), flush=True)
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("seed", nargs="?", default=RANDOM)
    options = parser.parse_args()
    try:
        sys.exit(main(options.seed, measured=options.coverage))
    except pytest.UsageError as error:
        sys.exit(str(error))
