"""Break the code of a room on purpose, one small change at a time, and see whether its tests notice.

Theory. A mutant is a copy of the program in which one node of one syntax tree is different: a comparison, an
operator, a number, a dropped ``not``, a statement that is gone. A test suite that passes on a mutant says
nothing about that line. What survives is either a missing test or a mutant that behaves like the original.

    python tests/mutation/mutate.py allocation -n 60
    python tests/mutation/mutate.py relay --at proxy/relay/flow.py --at proxy/relay/stream.py:30

The mutants are tried in copies of the tree, so that the work in the clone can go on.
"""

from __future__ import annotations

import argparse
import copy
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from changes import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("proxy", "tests", "proto", "pyproject.toml")


Part = tuple[list[str], list[str]]
"""What is changed, and the tests that ought to notice; those that are quick or find much first."""


def tests_of(room: str, names: str) -> list[str]:
    return [f"tests/{room}/test_{name}.py" for name in names.split()]


def files_of(room: str, names: str) -> list[str]:
    return [f"proxy/{room}/{name}.py" for name in names.split()]


def all_but(directory: str, names: str) -> list[str]:
    """List all tests of a directory without those that take minutes."""
    slow = [f"{directory}/test_{name}.py" for name in names.split()]
    files = sorted(str(f.relative_to(ROOT)) for f in (ROOT / directory).rglob("test_*.py"))
    return [f for f in files if f not in slow]


CALLS = [
    *files_of("calls", "call_flow pod_calls create_calls container_calls"),
    *files_of("frontends/cri", "interceptors call decode rewrite"),
]
BRIDGE = files_of("frontends/hook_bridge", "calls lifecycle_events update_queue updates dispatch")
NARROWED = ["proxy/executor/hook_overrides.py", *files_of("engine", "narrowing pool_placement")]
SEARCHES = "reservation_search device_interleaving every_interleaving"
THROUGH_THE_EXECUTOR = "quotas suppression partitions hotplug pod_exclusive_cpus plan_report random day"
"""Tests that send events to the engine through the executor; they notice much that its own do not."""
SLOW_WITHOUT_THE_ENGINE = "be_groups codec worker_health threads tasks history"
ENGINE_TESTS = "claims errors breaker checks asking notifier runners deadlines chaos"
ROOMS: dict[str, list[Part]] = {
    "allocation": [(["proxy/allocation"], ["tests/allocation"])],
    "pools": [(["proxy/pools"], ["tests/pools"])],
    "engine": [
        (
            ["proxy/engine"],
            [
                *all_but("tests/engine", SEARCHES),
                *tests_of("executor", THROUGH_THE_EXECUTOR),
                *all_but("tests/executor", f"{THROUGH_THE_EXECUTOR} {SLOW_WITHOUT_THE_ENGINE}"),
            ],
        )
    ],
    "simulate": [(["proxy/simulate"], ["tests/simulate", "tests/cli/test_simulate.py"])],
    "relay": [
        (
            ["proxy/relay"],
            tests_of("relay", "frames huffman flow headers session windows garbage splits bounds"),
        )
    ],
    "executor": [
        (["proxy/executor", *CALLS], tests_of("executor", "parts enforce rare day bad_days random")),
    ],
    "pages": [
        (
            files_of(
                "executor", "status_data plan_report kernel_view rejections history cpu_users readiness"
            ),
            tests_of("executor", "kernel_view plan_report rejections history parts worker_health quotas"),
        )
    ],
    "doctor": [
        (
            files_of("doctor", "checks certificate"),
            tests_of("doctor", "checks certificate"),
        ),
        (files_of("doctor", "gather"), tests_of("doctor", "broken_nodes")),
    ],
    "observe": [
        (
            files_of("observe", "plan_report_text device_list metrics"),
            [
                *tests_of("observe", "plan_report_text device_list metrics hook_metrics"),
                "tests/cli/test_devices.py",
            ],
        )
    ],
    "hook_bridge": [
        (
            [*BRIDGE, *NARROWED],
            tests_of("engine", "narrowing")
            + tests_of(
                "executor",
                "hook_overrides hook_bridge_updates hook_bridge_lifecycle_events hook_bridge_calls",
            ),
        ),
        (
            [
                *files_of("frontends/hook_bridge", "lazy facts config_fields object_cache"),
                *files_of("frontends/cri", "hook_adjust hook_suffix hook_view"),
            ],
            [
                *tests_of("frontends/cri", "hook_adjust"),
                *tests_of(
                    "frontends/hook_bridge", "hook_bridge_lazy hook_bridge_facts hook_bridge_object_cache"
                ),
            ],
        ),
    ],
    "hooks": [
        (
            ["proxy/hooks/engine"],
            [f"tests/hooks/engine/test_engine_{name}.py" for name in ENGINE_TESTS.split()],
        ),
        (
            ["proxy/frontends/hookserver"],
            [
                f"tests/frontends/hookserver/test_hookserver_{name}.py"
                for name in ("messages", "socket_path", "day", "daemon", "faults", "random")
            ],
        ),
        (["proxy/hooks/remote"], ["tests/hooks/remote"]),
        (files_of("hooks", "registry handover"), tests_of("hooks", "hook_registry")),
        (
            ["proxy/hooks/loader"],
            tests_of("hooks", "hook_directories hook_safe_read hook_loading hook_registry"),
        ),
        (["proxy/permissions.py"], ["tests/test_permissions.py"]),
    ],
}
"""Room to its parts; a mutant is tried by the tests of the part that it is of."""


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
        """Copy it, with what has been measured."""
        other = copy.copy(self)
        other.directory = directory
        shutil.copytree(self.directory, directory)
        return other

    def measure(self, tests: list[str]) -> None:
        """Try tests without any mutant, and let them take some times as long from then on."""
        started = time.monotonic()
        if not self.passes(tests, keep_bytecode=True):
            sys.exit(f"cannot try mutants: {' '.join(tests)} fails without any")
        self.limits[tests[0]] = 10 + 4 * (time.monotonic() - started)

    def passes(self, tests: list[str], *, first: str = "", keep_bytecode: bool = False) -> bool:
        """Run the tests, one of the listed files first; running past the limit is not passing."""
        env = os.environ | ({} if keep_bytecode else {"PYTHONDONTWRITEBYTECODE": "1"})
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                *options,
                *sorted(tests, key=lambda test: Path(test).name != first),
            ],
            cwd=self.directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(self.limits.get(tests[0], 600.0)) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def survives(self, mutant: Mutant, tests: list[str]) -> bool:
        file = self.directory / mutant.path
        original = file.read_text()
        file.write_text(mutant.source)
        try:
            return self.passes(tests, first=f"test_{file.name}")
        finally:
            file.write_text(original)


def run(todo: list[tuple[Mutant, list[str]]], jobs: int) -> int:
    """Try the mutants, each by its tests, and return what survived.

    Returns:
        How many survived.
    """
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as temp, ThreadPoolExecutor(jobs) as threads:
        idle: queue.Queue[Workspace] = queue.Queue()
        first = Workspace(Path(temp) / "0")
        for tests in {tests[0]: tests for _, tests in todo}.values():
            first.measure(tests)
        for place in (first, *(first.twin(Path(temp) / str(number)) for number in range(1, jobs))):
            idle.put(place)

        def attempt(what: tuple[Mutant, list[str]]) -> bool:
            place = idle.get()
            try:
                return place.survives(*what)
            finally:
                idle.put(place)

        for (mutant, _), alive in zip(todo, threads.map(attempt, todo), strict=True):
            survived += alive
            if alive:
                print(f"survived  {mutant}", flush=True)
    return survived


def main() -> None:
    parser = argparse.ArgumentParser(description="Try the tests of a room on broken copies of it.")
    parser.add_argument("room", choices=ROOMS)
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
    asked = parser.parse_args()
    known = [(m, tests) for sources, tests in ROOMS[asked.room] for m in chosen(sources, asked.at)]
    todo = random.Random(asked.seed).sample(known, asked.n) if 0 < asked.n < len(known) else known
    started = time.monotonic()
    killed = len(todo) - run(todo, asked.jobs)
    share = 100 * killed / len(todo) if todo else 100
    took = time.monotonic() - started
    print(f"{asked.room}: {killed} of {len(todo)} noticed ({share:.0f} %), of {len(known)}, in {took:.0f} s")


if __name__ == "__main__":
    main()
