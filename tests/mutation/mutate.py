"""Break the code of a package on purpose, one small change at a time, and see whether its tests notice.

Theory. A mutant is a copy of the program in which one node of one syntax tree is different: a comparison, an
operator, a number, a dropped ``not``, a statement that is gone. A test suite that passes on a mutant says
nothing about that line. What survives is either a missing test or a mutant that behaves like the original.

    python tests/mutation/mutate.py allocation -n 60
    python tests/mutation/mutate.py relay --at proxy/relay/flow.py --at proxy/relay/streams.py:30

The mutants are tried in copies of the tree, so that the work in the clone can continue. The tests end at the
first failure; a mutant with which they take several times as long as without any is noticed, and listed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import enum
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from changes import Mutant, mutants
from quick_first import limit_of

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("proxy", "tests", "proto", "pyproject.toml")


class Part(NamedTuple):
    """What is changed, and the tests that ought to notice; those that are quick or find much first."""

    changed: list[str]
    tests: list[str]
    waiting: Sequence[str] = ()
    """Tests that mostly wait, for mutants that ``tests`` do not notice; run in several processes at once."""


def tests_of(package: str, names: str) -> list[str]:
    return [f"tests/{package}/test_{name}.py" for name in names.split()]


def files_of(package: str, names: str) -> list[str]:
    return [f"proxy/{package}/{name}.py" for name in names.split()]


def all_but(directory: str, names: str) -> list[str]:
    """List all tests of a directory without those that take minutes."""
    slow = [f"{directory}/test_{name}.py" for name in names.split()]
    files = sorted(str(f.relative_to(ROOT)) for f in (ROOT / directory).rglob("test_*.py"))
    return [f for f in files if f not in slow]


CALLS = [
    *files_of("calls", "call_flow pod_calls create_calls container_calls"),
    *files_of("frontends/cri", "call messages"),
]
BRIDGE = files_of("frontends/hook_bridge", "bridge lifecycle_events update_queue updates held_call_hooks")
NARROWED = ["proxy/executor/hook_overrides.py", *files_of("engine", "hook_narrowing placement")]
SEARCHES = "reservation_search device_interleaving every_interleaving"
THROUGH_THE_EXECUTOR = (
    "quotas best_effort_suppression partitions hotplug pod_exclusive_cpus plan_report random client_calls"
)
"""Tests that send events to the engine through the executor; they notice much that its own do not."""
SLOW_WITHOUT_THE_ENGINE = (
    "best_effort_groups ledger_codec reservation_records worker_health background decision_history"
)
EXECUTOR_TESTS = "ledger_and_runtime_sync cpuset_writer single_line_regressions client_calls failures random"
ENGINE_TESTS = "claims errors breaker checks calls pure notifier runners deadlines chaos"
PACKAGES: dict[str, list[Part]] = {
    "allocation": [Part(["proxy/allocation"], ["tests/allocation"])],
    "pools": [Part(["proxy/pools"], ["tests/pools"])],
    "engine": [
        Part(
            ["proxy/engine"],
            all_but("tests/engine", SEARCHES),
            [
                *tests_of("executor", THROUGH_THE_EXECUTOR),
                *all_but("tests/executor", f"{THROUGH_THE_EXECUTOR} {SLOW_WITHOUT_THE_ENGINE}"),
            ],
        )
    ],
    "simulate": [Part(["proxy/simulate"], ["tests/simulate", "tests/cli/test_simulate.py"])],
    "relay": [
        Part(
            ["proxy/relay"],
            tests_of("relay", "frames huffman flow headers session windows garbage splits bounds"),
        )
    ],
    "executor": [
        Part(
            ["proxy/executor", *CALLS],
            tests_of("executor", EXECUTOR_TESTS),
            all_but("tests/executor", EXECUTOR_TESTS),
        ),
    ],
    "pages": [
        Part(
            files_of("executor", "status_data plan_report kernel_view rejections decision_history readiness"),
            tests_of(
                "executor",
                "kernel_view plan_report rejections decision_history ledger_and_runtime_sync"
                " worker_health quotas",
            ),
        )
    ],
    "doctor": [
        Part(
            files_of("doctor", "checks certificate"),
            tests_of("doctor", "checks certificate"),
        ),
        Part(files_of("doctor", "gather"), tests_of("doctor", "broken_nodes")),
    ],
    "observe": [
        Part(
            files_of("observe", "plan_report_text device_list metrics"),
            [
                *tests_of("observe", "plan_report_text device_list metrics hook_metrics"),
                "tests/cli/test_devices.py",
            ],
        )
    ],
    "hook_bridge": [
        Part(
            [*BRIDGE, *NARROWED],
            tests_of("engine", "hook_narrowing")
            + tests_of(
                "executor",
                "hook_overrides hook_bridge_updates hook_bridge_lifecycle_events hook_bridge_calls",
            ),
        ),
        Part(
            [
                *files_of("frontends/hook_bridge", "lazy_collections facts object_cache"),
                *files_of("frontends/cri", "hook_adjust hook_suffix hook_view config_fields"),
            ],
            [
                *tests_of("frontends/cri", "hook_adjust"),
                *tests_of(
                    "frontends/hook_bridge",
                    "hook_bridge_lazy_collections hook_bridge_facts hook_bridge_object_cache",
                ),
            ],
        ),
    ],
    "hooks": [
        Part(
            ["proxy/hooks/engine"],
            [f"tests/hooks/engine/test_engine_{name}.py" for name in ENGINE_TESTS.split()],
        ),
        Part(
            ["proxy/frontends/hookserver"],
            [
                f"tests/frontends/hookserver/test_hookserver_{name}.py"
                for name in ("messages", "socket_path", "calls", "daemon", "faults", "random")
            ],
        ),
        Part(["proxy/hooks/remote"], ["tests/hooks/remote"]),
        Part(files_of("hooks", "registry"), tests_of("hooks", "hook_registry")),
        Part(
            ["proxy/hooks/loader"],
            tests_of("hooks", "hook_directories hook_safe_read hook_loading hook_registry"),
        ),
        Part(["proxy/permissions.py"], ["tests/test_permissions.py"]),
    ],
}
"""Package to its parts; a mutant is tried by the tests of its part."""


def chosen(sources: list[str], at: list[str]) -> list[Mutant]:
    """List the mutants of a part, or of some of its files or lines (``file`` or ``file:line``)."""
    listed = [ROOT / s for s in sources]
    files = [f for s in listed for f in ([s] if s.is_file() else sorted(s.rglob("*.py")))]
    found = {m.source: m for f in files for m in mutants(ROOT, f)}  # two ways to one text are one mutant
    return [
        m
        for m in found.values()
        if not at or {m.path, str(Path(m.path).parent), f"{m.path}:{m.line}"} & {*at}
    ]


class Outcome(enum.Enum):
    """The outcome of tests with a mutant; tests that do not end in time have noticed it."""

    SURVIVED = "survived"
    NOTICED = "noticed"
    TIMED_OUT = "timed out"


MEASUREMENT_S = 900.0
"""How long the tests may take without any mutant."""
PROCESSES = 8
"""How many processes share the tests that mostly wait."""


def shares(part: Part) -> list[list[list[str]]]:
    """List what is run one after the other; the lists of files in each are run at once."""
    waiting = [share for n in range(PROCESSES) if (share := part.waiting[n::PROCESSES])]
    return [[part.tests], waiting] if waiting else [[part.tests]]


class TestProcesses:
    """The processes that try one mutant; all of them end with the block."""

    stopped = threading.Event()

    def __init__(self) -> None:
        self._all: dict[subprocess.Popen[bytes], tuple[float, Path]] = {}

    def __enter__(self) -> TestProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            with contextlib.suppress(ProcessLookupError):  # a test may have left processes of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, command: list[str], limit: float, printed: Path, **options: Any) -> None:
        """Start a process, which may take ``limit`` seconds and prints to a file."""
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )
        self._all[process] = time.monotonic() + limit, printed

    def outcome(self) -> tuple[Outcome, str]:
        """Wait until one process fails or all have passed."""
        left = dict(self._all)
        while left and not self.stopped.is_set():
            for process, (deadline, printed) in list(left.items()):
                if process.poll() is None:
                    if time.monotonic() > deadline:
                        return Outcome.TIMED_OUT, "all tests"
                elif process.returncode == 0:
                    del left[process]
                else:
                    words = printed.read_text(errors="replace")
                    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", words, re.MULTILINE)
                    late = "from pytest-timeout" in words
                    return (Outcome.TIMED_OUT if late else Outcome.NOTICED), failed[1] if failed else words
            time.sleep(0.05)
        if left:
            raise KeyboardInterrupt
        return Outcome.SURVIVED, ""


class Workspace:
    """A copy of the tree in which one mutant at a time is tried."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.limits: dict[str, float] = {}
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, directory / name)
        # Byte code is compared by contents; by time and size a mutant could go unnoticed.
        compiled = ["compileall", "-q", "--invalidation-mode", "checked-hash", "proxy"]
        subprocess.run([sys.executable, "-m", *compiled], cwd=directory, check=True)

    def twin(self, directory: Path) -> Workspace:
        """Copy the workspace, with the measured limits."""
        other = copy.copy(self)
        other.directory = directory
        shutil.copytree(self.directory, directory)
        return other

    def measure(self, part: Part) -> None:
        """Run the tests without any mutant; later runs may take a multiple of that time."""
        for tests in shares(part):
            started = time.monotonic()
            outcome, failed = self.run(tests, measured=True)
            if outcome is not Outcome.SURVIVED:
                sys.exit(f"cannot try mutants: without any, tests fail: {failed}")
            limit = limit_of(time.monotonic() - started)
            self.limits |= {files[0]: limit for files in tests}

    def times(self, files: list[str]) -> Path:
        return self.directory / f"{files[0].replace('/', '-')}.json"

    def run(self, tests: list[list[str]], first: str = "", *, measured: bool = False) -> tuple[Outcome, str]:
        """Run lists of test files at once, each in a process.

        Args:
            tests: The lists.
            first: The name of the file whose tests come first.
            measured: Whether this is to give the order and the limits of later runs.

        Returns:
            The outcome, and the test that failed.
        """
        env = os.environ | ({} if measured else {"PYTHONDONTWRITEBYTECODE": "1"})
        with tempfile.TemporaryDirectory(prefix="mutate-") as temp, TestProcesses() as processes:
            for number, files in enumerate(tests):
                options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutation.quick_first"]
                options += [
                    "--hypothesis-profile=mutation",
                    f"--basetemp={temp}/{number}",
                    f"--first={first}",
                ]
                options.append(f"--{'measured' if measured else 'times'}={self.times(files)}")
                command = [sys.executable, "-m", "pytest", *options, *files]
                limit = self.limits.get(files[0], MEASUREMENT_S)
                printed = Path(temp) / f"{number}.txt"
                processes.start(command, limit, printed, cwd=self.directory, env=env)
            return processes.outcome()

    def attempt(self, mutant: Mutant, part: Part) -> tuple[Outcome, str]:
        """Try a mutant; the tests that mostly wait run only if the others do not notice it."""
        file = self.directory / mutant.path
        original = file.read_text()
        file.write_text(mutant.source)
        try:
            for tests in shares(part):
                outcome, failed = self.run(tests, first=f"test_{file.name}")
                if outcome is not Outcome.SURVIVED:
                    break
            return outcome, failed
        finally:
            file.write_text(original)


def run(todo: list[tuple[Mutant, Part]], jobs: int, *, all_shown: bool) -> int:
    """Try the mutants, each by its tests, and return what survived.

    Returns:
        How many survived.
    """
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as temp, ThreadPoolExecutor(jobs) as threads:
        idle: queue.Queue[Workspace] = queue.Queue()
        first = Workspace(Path(temp) / "0")
        for part in {part.tests[0]: part for _, part in todo}.values():
            first.measure(part)
        for place in (first, *(first.twin(Path(temp) / str(number)) for number in range(1, jobs))):
            idle.put(place)

        def attempt(what: tuple[Mutant, Part]) -> tuple[Outcome, str]:
            place = idle.get()
            try:
                return place.attempt(*what)
            finally:
                idle.put(place)

        try:
            for (mutant, _), (outcome, failed) in zip(todo, threads.map(attempt, todo), strict=True):
                survived += outcome is Outcome.SURVIVED
                if all_shown or outcome is not Outcome.NOTICED:
                    print(f"{outcome.value:9} {mutant}" + (f" ({failed})" if failed else ""), flush=True)
        except BaseException:
            TestProcesses.stopped.set()
            threads.shutdown(cancel_futures=True)
            raise
    return survived


def main() -> None:
    parser = argparse.ArgumentParser(description="Try the tests of a package on broken copies of it.")
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("-n", type=int, default=0, help="how many mutants, chosen at random (0: all)")
    parser.add_argument("--seed", type=int, default=1, help="another number chooses others")
    parser.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="PATH[:LINE]",
        help="only this directory, file or line",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="list those that are noticed too, with the test")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    options = parser.parse_args()
    known = [(m, part) for part in PACKAGES[options.package] for m in chosen(part.changed, options.at)]
    todo = random.Random(options.seed).sample(known, options.n) if 0 < options.n < len(known) else known
    started = time.monotonic()
    killed = len(todo) - run(todo, options.jobs, all_shown=options.all)
    share = 100 * killed / len(todo) if todo else 100
    took = time.monotonic() - started
    print(
        f"{options.package}:"
        f" {killed} of {len(todo)} noticed ({share:.0f} %), of {len(known)}, in {took:.0f} s"
    )


if __name__ == "__main__":
    main()
