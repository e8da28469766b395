"""Run all tests in four processes.

    python -m tests.testkit.run_all [SEED]

The first three mostly wait: for programs, for timers, and for threads. The fourth only computes, and uses the
CPU time that the others leave. The output of the others is printed after that of the first. The last line has
totals.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from tests.testkit.shuffle import RANDOM, seed_of

ROOT = Path(__file__).parents[2]
SECOND_PROCESS = ("tests/e2e", "tests/bench", "tests/fuzz", "tests/simulation")
"""What the second process runs: the end-to-end tests, which mostly wait, and other long ones."""
THIRD_PROCESS = (
    *("tests/executor", "tests/frontends", "tests/hooks", "tests/agent", "tests/attach", "tests/deploy"),
    *("tests/extender", "tests/release", "tests/scheduler", "tests/simulate"),
)
"""What the third process runs: parts that wait for timers and threads, and share no files with others."""
FOURTH_PROCESS = tuple(f"tests/{name}" for name in ("allocation", "engine", "oracles", "pools", "relay"))
"""What the fourth process runs: pure functions, which depend on no time limit."""
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|warnings?|xfailed|xpassed)")


def counts(line: str) -> Counter[str]:
    """Return the numbers of pytest's last line, by what they count."""
    return Counter({word.removesuffix("s"): int(number) for number, word in COUNTED.findall(line)})


def summary(found: Counter[str], seconds: float) -> str:
    """Return one last line for all runs."""
    order = ("failed", "error", "passed", "skipped", "xfailed", "xpassed", "warning")
    counts = [f"{found[word]} {word}" for word in order if found[word]]
    return f"== {', '.join(counts) or 'no tests ran'} in {int(seconds) // 60}:{int(seconds) % 60:02d} =="


def start(seed: int, output: int | IO[bytes], *selection: str, nice: int = 0) -> subprocess.Popen[bytes]:
    """Start pytest on some of the tests; a nice one with the CPU time that others leave."""
    line = [sys.executable, "-m", "pytest", f"--shuffle={seed}", *selection]
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


def main(seed_text: str) -> int:
    """Run all; return the exit status."""
    began, seed = time.monotonic(), seed_of(seed_text)
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        elsewhere = (*SECOND_PROCESS, *THIRD_PROCESS, *FOURTH_PROCESS)
        first = start(seed, subprocess.PIPE, *(f"--ignore={path}" for path in elsewhere))
        others = [
            start(seed, outputs[0], *SECOND_PROCESS),
            start(seed, outputs[1], *THIRD_PROCESS),
            start(seed, outputs[2], *FOURTH_PROCESS, nice=10),
        ]
        runs = (first, *others)
        signal.signal(signal.SIGTERM, lambda *_: [run.terminate() for run in runs])
        assert first.stdout is not None
        last = [copied(first.stdout)]
        statuses = [run.wait() for run in runs]
        for output in outputs:
            output.seek(0)
            last.append(copied(output))
    print(summary(sum(map(counts, last), Counter()), time.monotonic() - began), flush=True)
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else RANDOM))
    except pytest.UsageError as error:
        sys.exit(str(error))
