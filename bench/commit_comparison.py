"""Compares every call through this checkout with the same call through another commit, in one run.

    make bench-beside BASE=b3705ac                          three to six minutes
    make bench-beside BASE=b3705ac BENCH_ARGS="--quick"     a minute, rougher
    .venv/bin/python bench/commit_comparison.py /path/to/a/checkout    compared with a directory

Both daemons run at the same time, on the same packages, each in front of a runtime of its own. A turn takes
about a tenth of a second and makes one kind of call; in each round every kind has a turn at every target, in
a shuffled order. After some rounds all processes are restarted, because two processes of the same program
differ by a percent or two for as long as they live.

A ratio is the median over the rounds of this checkout divided by the base, and turned so that more than 1 is
worse. Both are measured within a second or two: other work of the machine changes from minute to minute, and
then affects both. Its interval (95 %) comes from a bootstrap that draws starts, then rounds of a start. While
an interval contains the limit, its kind of call is measured again, up to ``--patience`` times as long. The
exit status is 1 if the ratio of a call is over the limit (1.05) after that, and 2 if it cannot be measured.

``--noise`` measures the base a second time, as a third target: the difference of that ratio from 1 is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from load import Result, run_load
from procs import (
    ROOT,
    BenchError,
    Process,
    Target,
    backend_argv,
    checkout,
    ended,
    interpreter,
    start,
    wait_until,
)
from table import number, render

LIMIT = 1.05
NOW, BASE, BASE_AGAIN = "now", "base", "base again"
BOOTSTRAP_DRAWS = 2000
IN_FLIGHT = 64  # calls in flight while the rate is measured
BUSY_IN_FLIGHT = 8  # calls in flight on the other connection of a busy daemon
HEAD = ("", "base", "now", "ratio", "95 %", "limit")


@dataclass(frozen=True, slots=True)
class CallKind:
    """One kind of call, and how the call is made.

    Attributes:
        text: For the table.
        call: As in ``messages``.
        count: How many calls a turn has.
        conc: How many of them are in flight.
        busy: Whether another connection has calls in flight all the time.
    """

    text: str
    call: str
    count: int
    conc: int = 1
    busy: bool = False

    @property
    def measures(self) -> tuple[str, ...]:
        return ("rate", "cpu") if self.conc > 1 else ("p50",) if self.busy else ("p50", "cpu")


KINDS = (
    CallKind("Version", "Version", 1000),
    CallKind("ContainerStatus, 1.1 kB", "ContainerStatus", 800),
    CallKind("ListContainers of 100, 55 kB", "List100", 500),
    CallKind("ListContainers of 1000, 550 kB", "List1000", 150),
    CallKind("UpdateContainerResources", "Update", 200),
    CallKind("CreateContainer 5.5 kB", "Create", 500),
    CallKind("CreateContainer 205 kB", "Create205k", 80),
    CallKind("CreateContainer 5.5 kB, busy", "Create", 250, busy=True),
    CallKind(f"Version, {IN_FLIGHT} in flight", "Version", 5000, conc=IN_FLIGHT),
    CallKind(f"CreateContainer 5.5 kB, {IN_FLIGHT} in flight", "Create", 1500, conc=IN_FLIGHT),
    CallKind(f"CreateContainer 205 kB, {IN_FLIGHT} in flight", "Create205k", 150, conc=IN_FLIGHT),
)
UNITS = {"p50": "us", "rate": "calls/s", "cpu": "us CPU/call"}
UNLIMITED_MEASURES = (
    ("listening", "start to listening", "ms"),
    ("idle", "memory, idle", "MB"),
    ("after", "memory, after the calls", "MB"),
)
"""Measures that are shown in addition to the calls and have no limit here (``make bench`` has bars for
them)."""


@dataclass(slots=True)
class Series:
    """Samples of one measure: for each start of the processes, for each round, by target."""

    higher_is_better: bool = False
    starts: list[list[Mapping[str, float]]] = field(default_factory=list)

    def add(self, started: int, samples: Mapping[str, float]) -> None:
        while len(self.starts) <= started:
            self.starts.append([])
        self.starts[started].append(samples)

    def rounds(self) -> int:
        return sum(map(len, self.starts))

    def median(self, target: str) -> float:
        return statistics.median(samples[target] for rounds in self.starts for samples in rounds)

    def ratio(self, target: str = NOW, base: str = BASE) -> float:
        """How much worse a target is: 1 is as good, 2 is twice the time or half the rate."""
        return self._ratio([rounds for rounds in self.starts if rounds], target, base)

    def _ratio(self, starts: Sequence[Sequence[Mapping[str, float]]], target: str, base: str) -> float:
        ratios = [samples[target] / samples[base] for rounds in starts for samples in rounds]
        ratio = statistics.median(ratios)
        return 1 / ratio if self.higher_is_better else ratio

    def interval(self, dice: random.Random, target: str = NOW, base: str = BASE) -> tuple[float, float]:
        """The 95 % interval of the ratio; both samples of a round are drawn together."""
        starts = [rounds for rounds in self.starts if rounds]
        drawn = sorted(
            self._ratio(
                [dice.choices(r, k=len(r)) for r in dice.choices(starts, k=len(starts))], target, base
            )
            for _ in range(BOOTSTRAP_DRAWS)
        )
        return drawn[int(BOOTSTRAP_DRAWS * 0.025)], drawn[int(BOOTSTRAP_DRAWS * 0.975)]


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """How much is measured.

    Attributes:
        starts: How often all processes are started.
        rounds: Rounds after each start.
        share: The share of the counts that is made.
        patience: The most times ``starts`` if the limit is inside an interval.
    """

    starts: int = 4
    rounds: int = 8
    share: float = 1.0
    patience: int = 2


QUICK = ComparisonPlan(starts=3, rounds=4, share=0.5, patience=2)


def progress(text: str) -> None:
    """Report the progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def sources(base: str) -> Iterator[tuple[Path, str]]:
    """Return a directory with the sources of a commit, or the named directory itself; and its name."""
    if Path(base).is_dir():
        yield Path(base).resolve(), base
        return
    named = _git("rev-parse", "--short", f"{base}^{{commit}}").decode().strip()
    with tempfile.TemporaryDirectory(prefix="topoproxy-base-") as name:
        with tarfile.open(fileobj=BytesIO(_git("archive", "--format=tar", base))) as archive:
            archive.extractall(name, filter="data")
        yield Path(name).resolve(), named


def _git(*command: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, check=False)
    if done.returncode:
        raise BenchError(f"cannot read the base: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _keep_busy(target: str) -> None:
    """Keep a connection busy until the process is ended."""
    while run_load(target, "Version", conc=BUSY_IN_FLIGHT, n=100_000, dur=60).errors == 0:
        pass


@contextlib.contextmanager
def busy(target: Path) -> Iterator[None]:
    """Keep calls in flight on another connection within the block."""
    process = multiprocessing.get_context("fork").Process(target=_keep_busy, args=(str(target),), daemon=True)
    process.start()
    try:
        time.sleep(0.3)  # header blocks are made first
        if not process.is_alive():
            raise BenchError(f"cannot keep {target} busy")
        yield
    finally:
        process.kill()
        process.join()


class Comparison:
    """One run."""

    def __init__(
        self, directory: Path, targets: Sequence[Target], plan: ComparisonPlan, dice: random.Random
    ) -> None:
        self.directory = directory
        self.targets = targets
        self.plan = plan
        self.dice = dice
        self.series: dict[tuple[CallKind, str], Series] = {
            (kind, measure): Series(higher_is_better=measure == "rate")
            for kind in KINDS
            for measure in kind.measures
        }
        self.shown = {key: Series() for key, _, _ in UNLIMITED_MEASURES}
        self.started = 0

    def start(self, kinds: Sequence[CallKind]) -> None:
        """Start all processes and play the rounds of one start."""
        progress(f"start {self.started + 1}: {len(kinds)} kinds of calls, {self.plan.rounds} rounds")
        with ended([]) as running:
            daemons: dict[str, Process] = {}
            for target in self.dice.sample(self.targets, len(self.targets)):
                sock = self.directory / f"runtime-{target.name.replace(' ', '-')}-{self.started}.sock"
                running.append(start("the runtime", backend_argv(sock), sock, malloc=True))
                daemons[target.name] = target.start(self.directory, sock, f"-{self.started}")
                running.append(daemons[target.name])
                self._settle(daemons[target.name])
            self._show("listening", lambda daemon: daemon.listening_ms, daemons)
            self._show("idle", Process.memory_mb, daemons)
            for _ in range(self.plan.rounds):
                for kind in kinds:
                    self._turns(kind, daemons)
            self._show("after", Process.memory_mb, daemons)
        self.started += 1

    @staticmethod
    def _settle(daemon: Process) -> None:
        """Wait until the work of a start is done, which would slow down the start of the next process."""
        wait_until(lambda: _answers(daemon.sock), 20, f"no answer through {daemon.name}", daemon)
        time.sleep(1)

    def _show(self, key: str, get: Callable[[Process], float], daemons: Mapping[str, Process]) -> None:
        self.shown[key].add(self.started, {name: get(daemon) for name, daemon in daemons.items()})

    def _turns(self, kind: CallKind, daemons: Mapping[str, Process]) -> None:
        """One turn of each target."""
        found: dict[str, dict[str, float]] = {measure: {} for measure in kind.measures}
        for name in self.dice.sample(list(daemons), len(daemons)):
            daemon = daemons[name]
            with busy(daemon.sock) if kind.busy else contextlib.nullcontext():
                before = daemon.cpu_ms()
                result = self._load(kind, daemon)
                cpu = daemon.cpu_ms() - before
            values = {"p50": result.p50_us, "rate": result.calls_per_s, "cpu": cpu * 1000 / result.calls}
            for measure in kind.measures:
                found[measure][name] = values[measure]
        for measure, samples in found.items():
            self.series[kind, measure].add(self.started, samples)

    def _load(self, kind: CallKind, daemon: Process) -> Result:
        count = max(10, int(kind.count * self.plan.share))
        gc.collect()
        gc.disable()
        try:
            result = run_load(
                str(daemon.sock), kind.call, conc=kind.conc, n=count, dur=30, warm=min(20, count)
            )
        finally:
            gc.enable()
        if result.errors or not result.n:
            raise BenchError(
                f"{daemon.name}, {kind.text}: {result.errors} errors, first: {result.first_error}"
            )
        return result

    def undecided_kinds(self, limit: float) -> list[CallKind]:
        """The kinds with an interval that contains the limit."""
        found = []
        for kind in KINDS:
            intervals = [self.series[kind, measure].interval(self.dice) for measure in kind.measures]
            if any(low <= limit <= high for low, high in intervals):
                found.append(kind)
        return found

    def run(self, limit: float) -> None:
        """Measure everything, and unclear kinds again."""
        for _ in range(self.plan.starts):
            self.start(KINDS)
        while self.started < self.plan.starts * self.plan.patience and (kinds := self.undecided_kinds(limit)):
            progress(f"{limit:g} is inside the interval of: {'; '.join(kind.text for kind in kinds)}")
            self.start(kinds)


def _answers(sock: Path) -> bool:
    return run_load(str(sock), "Version", conc=1, n=1, dur=1, warm=0, stall=1).errors == 0


def rows(run: Comparison, limit: float, *, noise: bool) -> tuple[list[list[str]], list[str]]:
    """Return the rows of the table, and messages about calls that are slower than the limit."""
    lines: list[list[str]] = []
    slower: list[str] = []

    def line(text: str, unit: str, series: Series, limit: float | None) -> None:
        ratio, (low, high) = series.ratio(), series.interval(run.dice)
        over = limit is not None and ratio > limit
        cells = [number(series.median(BASE), unit), number(series.median(NOW), unit)]
        cells += [
            f"{ratio:.3f}",
            f"{low:.3f}-{high:.3f}",
            "" if limit is None else f"{limit:g}{' OVER' * over}",
        ]
        if noise:
            cells.append(f"{series.ratio(BASE_AGAIN):.3f}")
        lines.append([text, *cells])
        if over:
            vague = "; the interval has 1 inside: repeat it on a machine with less to do" * (low <= 1)
            slower.append(f"{text}: {ratio:.3f} x the base ({low:.3f} to {high:.3f}), limit {limit:g}{vague}")

    for measure, label in (("p50", "p50"), ("rate", "rate"), ("cpu", "CPU")):
        for kind in KINDS:
            if measure in kind.measures:
                line(f"{label} {kind.text}", UNITS[measure], run.series[kind, measure], limit)
    for key, text, unit in UNLIMITED_MEASURES:
        line(text, unit, run.shown[key], None)
    return lines, slower


def deviations(run: Comparison, target: str) -> tuple[float, float]:
    """Return the typical and the largest deviation of the ratios of calls from 1."""
    found = sorted(abs(math.log(series.ratio(target))) for series in run.series.values())
    return statistics.median(found), found[-1]


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description="Measure this checkout beside another commit, in one run.")
    options.add_argument("base", help="a commit of this repository, or a directory with another checkout")
    options.add_argument(
        "--checkout", type=Path, default=ROOT, help="what is measured instead of this checkout"
    )
    options.add_argument("--quick", action="store_true", help="about a minute, rougher")
    options.add_argument("--starts", type=int, default=0, metavar="N", help="starts of all processes (4)")
    options.add_argument("--rounds", type=int, default=0, metavar="N", help="rounds after each start (8)")
    options.add_argument("--patience", type=int, default=0, metavar="N", help="times as long at most (2)")
    options.add_argument("--limit", type=float, default=LIMIT, help="the largest ratio of a call (1.05)")
    options.add_argument("--noise", action="store_true", help="measure the base twice")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    options.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the order and of the bootstrap"
    )
    return options.parse_args()


def measure(chosen: argparse.Namespace, plan: ComparisonPlan) -> tuple[Comparison, str]:
    """Measure; returns the results and the name of the base."""
    with sources(chosen.base) as (root, named), tempfile.TemporaryDirectory(prefix="tb") as directory:
        lock = root / "requirements.lock"
        if lock.exists() and lock.read_bytes() != (ROOT / lock.name).read_bytes():
            progress("requirements.lock differs; both run on the packages of this checkout")
        targets = [checkout(NOW, chosen.checkout.resolve()), checkout(BASE, root)]
        if chosen.noise:
            targets.append(checkout(BASE_AGAIN, root))
        run = Comparison(Path(directory), targets, plan, random.Random(chosen.seed))
        run.run(chosen.limit)
    return run, named


def samples_by_kind(run: Comparison) -> dict[str, object]:
    """All samples, for JSON."""
    calls = {f"{measure} {kind.text}": series.starts for (kind, measure), series in run.series.items()}
    return {"calls": calls, "shown": {key: series.starts for key, series in run.shown.items()}}


def main() -> int:
    chosen = arguments()
    plan = QUICK if chosen.quick else ComparisonPlan()
    plan = ComparisonPlan(
        chosen.starts or plan.starts,
        chosen.rounds or plan.rounds,
        plan.share,
        chosen.patience or plan.patience,
    )
    begun = time.perf_counter()
    try:
        run, named = measure(chosen, plan)
    except BenchError as error:
        progress(f"bench-beside: {error}")
        return 2
    lines, slower = rows(run, chosen.limit, noise=chosen.noise)
    print(render([*HEAD, *(["base by base"] * chosen.noise)], lines, markdown=chosen.markdown))
    took = time.perf_counter() - begun
    where = f"{os.cpu_count()} CPUs, Linux {platform.release()}, {interpreter()}"
    print(f"\nBase {named}; {run.started} starts of {plan.rounds} rounds in {took:.0f} s, {where}.")
    if chosen.noise:
        typical, worst = deviations(run, BASE_AGAIN)
        print(f"The base beside itself: typically {typical:.1%} off, at most {worst:.1%}.")
    if chosen.json:
        chosen.json.write_text(json.dumps(samples_by_kind(run), indent=1) + "\n")
    for line in slower:
        print(f"SLOWER: {line}")
    if not slower:
        print(f"No call is slower than {chosen.limit:g} x the base in the medians.")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
