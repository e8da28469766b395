"""Measures calls through topoproxy, a direct connection and a plain grpc.aio proxy.

    make bench                            under four minutes; needs only the repository
    make bench BENCH_ARGS="--quick"       half a minute, rougher

Then the cost of decisions without calls is measured, see ``place_figures.py`` and ``pools_figures.py``.

The runtime, the proxies and the load are separate processes in a temporary directory. In each round every
target is measured in a shuffled order; the table gives medians over the rounds. "added" is the p50 through a
proxy minus the p50 of the direct connection. Absolute numbers depend on the machine, ratios less so; the bars
of calls are relative to a proxy in Go (``go_kit.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figures
from load import run_load
from place_figures import HEAD as PLACE_HEAD
from place_figures import measure as measure_deciding
from place_figures import rows as place_rows
from pools_figures import HEAD as POOLS_HEAD
from pools_figures import measure as measure_pools
from pools_figures import rows as pools_rows
from procs import (
    BENCH,
    PLAIN,
    TOPOPROXY,
    BenchError,
    Process,
    Target,
    backend_argv,
    ended,
    environment,
    interpreter,
    start,
    wait_until,
)
from table import number, render

DIRECT = "direct"
TARGETS: tuple[Target, ...] = (TOPOPROXY, PLAIN)
NAMES = (DIRECT, *(target.name for target in TARGETS))
# Call, its description, the most calls in a round.
LATENCY = (
    ("Version", "Version", 2000),
    ("ContainerStatus", "ContainerStatus, 1.1 kB", 1000),
    ("List100", "ListContainers of 100, 55 kB", 1000),
    ("List1000", "ListContainers of 1000, 550 kB", 400),
    ("Create", "CreateContainer 5.5 kB, rewritten", 1000),
)
RATES = (
    ("Version", "Version", 20_000),
    ("Create", "CreateContainer 5.5 kB", 8_000),
    ("Create205k", "CreateContainer 205 kB", 1_000),
)
IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """How much is measured."""

    rounds: int
    share: float = 1.0  # of the counts
    seconds: float = 1.5  # the longest load
    starts: int = 5
    outages: int = 3


QUICK = BenchPlan(rounds=2, share=0.25, seconds=0.5, starts=2, outages=1)


def progress(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def load(target: Path, call: str, *, conc: int, n: int, seconds: float, expect: str = "") -> dict[str, Any]:
    """Run the load generator in a separate process."""
    argv = [sys.executable, str(BENCH / "load.py"), "--target", str(target), "--call", call]
    argv += ["--conc", str(conc), "-n", str(n), "--dur", str(seconds), "--expect", expect]
    done = subprocess.run(
        argv, env=environment(malloc=True), capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    if done.returncode:
        raise BenchError(f"cannot put load on {target}: {done.stderr.strip()[-400:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def answers(target: Path) -> bool:
    """Whether a new connection gets a good answer."""
    return run_load(str(target), "Version", conc=1, n=1, dur=1, warm=0, stall=1).errors == 0


class Bench:
    """One run: a directory, a runtime, the targets, and the figures."""

    def __init__(self, directory: Path, plan: BenchPlan, seed: int) -> None:
        self.directory = directory
        self.plan = plan
        self.random = random.Random(seed)
        self.figures = Figures()
        self.failures: list[str] = []
        self.backend = start(
            "the runtime", backend_argv(directory / "runtime.sock"), directory / "runtime.sock", malloc=True
        )
        self.cpus: dict[str, str] = {}

    # -- rounds -------------------------------------------------------------------------------------------

    def rounds(self) -> None:
        """Latency, throughput and CPU, all targets in turn."""
        with ended([]) as running:
            for target in TARGETS:
                running.append(target.start(self.directory, self.backend.sock))
            paths = {DIRECT: self.backend.sock} | {process.name: process.sock for process in running}
            by_name = {process.name: process for process in running}
            for name, path in paths.items():
                self._read_written_cpus(name, path)
            work = [(self._latency, item) for item in LATENCY] + [(self._rate, item) for item in RATES]
            for turn in range(1, self.plan.rounds + 1):
                progress(f"round {turn} of {self.plan.rounds}")
                for measure, (call, _, count) in work:
                    for name in self.random.sample(NAMES, len(NAMES)):
                        measure(
                            name, paths[name], by_name.get(name), call, max(50, int(count * self.plan.share))
                        )

    def _read_written_cpus(self, name: str, path: Path) -> None:
        """Learn which CPUs a target writes; all its later creates must carry them."""
        wait_until(lambda: answers(path), 10, f"no answer through {name}")
        shown = run_load(str(path), "Create", conc=1, n=1, dur=5, warm=0)
        if shown.errors:
            raise BenchError(f"cannot create a container through {name}: {shown.first_error}")
        self.cpus[name] = shown.sample.partition("|")[0]
        if name != DIRECT and not self.cpus[name]:
            raise BenchError(f"{name} passed a CreateContainer without CPUs: {shown.sample}")

    def _run(self, name: str, path: Path, call: str, conc: int, n: int) -> dict[str, Any]:
        expect = f"{self.cpus[name]}|" if call.startswith("Create") else ""
        result = load(path, call, conc=conc, n=n, seconds=self.plan.seconds, expect=expect)
        if result["errors"]:
            self.failures.append(
                f"{name}, {call} x{conc}: {result['errors']} errors, first: {result['first_error']}"
            )
        return result

    def _latency(self, name: str, path: Path, process: Process | None, call: str, n: int) -> None:
        before = process.cpu_ms() if process else 0.0
        result = self._run(name, path, call, 1, n)
        if result["n"]:
            self.figures.add(f"p50 {call}", name, result["p50_us"])
        if process and result["calls"]:
            self.figures.add(f"cpu {call}", name, (process.cpu_ms() - before) * 1000 / result["calls"])

    def _rate(self, name: str, path: Path, _: Process | None, call: str, n: int) -> None:
        result = self._run(name, path, call, IN_FLIGHT, n)
        self.figures.add(f"rate {call}", name, result["calls_per_s"])
        self.figures.add(f"errors {call}", name, result["errors"])
        self.figures.add(f"stalls {call}", name, result["stalls"])

    # -- single figures -----------------------------------------------------------------------------------

    def starts(self) -> None:
        """From the start of the process to a socket that accepts, and memory of a fresh process."""
        for turn in range(self.plan.starts):
            progress(f"start {turn + 1} of {self.plan.starts}")
            for target in self.random.sample(TARGETS, len(TARGETS)):
                process = target.start(self.directory, self.backend.sock, f"-start{turn}")
                self.figures.add("listening", target.name, process.listening_ms)
                process.end()

    def memory(self) -> None:
        """Resident memory: idle, after 10,000 calls, after messages of 15 MiB both ways."""
        progress("memory")
        for target in TARGETS:
            with ended([target.start(self.directory, self.backend.sock, "-memory")]) as (process,):
                wait_until(lambda path=process.sock: answers(path), 10, f"no answer through {target.name}")
                time.sleep(1)
                idle = process.memory_mb()
                load(process.sock, "Version", conc=8, n=10_000, seconds=20)
                time.sleep(0.3)
                grown = process.memory_mb() - idle
                for call in ("Answer15M", "Create15M"):
                    result = load(process.sock, call, conc=1, n=2, seconds=20)
                    if result["errors"]:
                        self.failures.append(f"{target.name}, {call}: {result['first_error']}")
                time.sleep(3)  # memory is returned to the kernel within a second or two
                for measure, value in (
                    ("idle", idle),
                    ("growth", grown),
                    ("after 15M", process.memory_mb()),
                    ("peak", process.memory_mb("VmHWM")),
                ):
                    self.figures.add(measure, target.name, value)

    def outages(self) -> None:
        """The runtime is killed and comes back after two seconds; measure when a new connection works
        again."""
        for turn in range(self.plan.outages):
            progress(f"outage {turn + 1} of {self.plan.outages}")
            for target in self.random.sample(TARGETS, len(TARGETS)):
                with ended([target.start(self.directory, self.backend.sock, f"-outage{turn}")]) as (process,):
                    wait_until(
                        lambda path=process.sock: answers(path), 10, f"no answer through {target.name}"
                    )
                    self.backend.end(hard=True)
                    end = time.perf_counter() + 2
                    while time.perf_counter() < end:
                        answers(process.sock)
                        time.sleep(0.05)
                    self.backend = start(
                        "the runtime", backend_argv(self.backend.sock), self.backend.sock, malloc=True
                    )
                    wait_until(lambda: answers(self.backend.sock), 10, "the runtime does not come back")
                    took = wait_until(
                        lambda path=process.sock: answers(path), 60, f"{target.name} does not come back"
                    )
                    self.figures.add("back", target.name, took * 1000)


def rows(figures: Figures) -> list[list[str]]:
    """The table's rows: measure, direct, topoproxy, plain, ratio, bar (if there is one in addition to
    Go's)."""
    ours, plain = TOPOPROXY.name, PLAIN.name
    out: list[list[str]] = []

    def line(
        text: str,
        unit: str,
        get: Callable[[str], float | None],
        *,
        ratio: bool = True,
        direct: bool = False,
        bar: int | None = None,
    ) -> None:
        compared = figures.ratio(get(ours), get(plain)) if ratio else None
        straight, value = number(get(DIRECT), unit) if direct else "", get(ours)
        missed = bar is not None and value is not None and round(value) > bar
        limit = "" if bar is None else f"{bar} {unit}{' MISSED' * missed}"
        out.append([text, straight, number(value, unit), number(get(plain), unit), number(compared), limit])

    for call, text, _ in LATENCY:
        added = [figures.added(f"p50 {call}", name, DIRECT) for name in (ours, plain)]
        straight = figures.median(f"p50 {call}", DIRECT)
        shown = [f"+{number(value, 'us')}" if value is not None else "-" for value in added]
        out.append([f"added p50, {text}", number(straight, "us"), *shown, number(figures.ratio(*added)), ""])
    for call, text, _ in RATES:
        line(
            f"calls per s, {IN_FLIGHT} in flight, {text}",
            "",
            lambda n, c=call: figures.median(f"rate {c}", n),
            direct=True,
        )
    bad = [
        f"{figures.total('errors Create205k', n)} / {figures.total('stalls Create205k', n)}" for n in NAMES
    ]
    out.append(
        ["errors / stalls of those 205 kB creates", *bad, "", "0 / 0" + " MISSED" * (bad[1] != "0 / 0")]
    )
    for call in ("Version", "Create"):
        line(f"CPU per 1000 calls, {call}", "ms", lambda n, c=call: figures.median(f"cpu {c}", n))
    line("memory, idle", "MB", lambda n: figures.median("idle", n), bar=40)
    line("memory, growth over 10,000 calls", "MB", lambda n: figures.median("growth", n), ratio=False, bar=3)
    line("memory, after 15 MiB messages", "MB", lambda n: figures.median("after 15M", n), bar=48)
    line("start to listening", "ms", lambda n: figures.median("listening", n), bar=120)
    line("runtime back to first good answer", "ms", lambda n: figures.median("back", n), bar=50)
    return out


def measure(plan: BenchPlan, seed: int) -> Bench:
    """Measure everything."""
    with tempfile.TemporaryDirectory(prefix="topoproxy-bench-") as directory:
        bench = Bench(Path(directory), plan, seed)
        try:
            bench.rounds()
            bench.starts()
            bench.memory()
            bench.outages()
        finally:
            bench.backend.end()
        return bench


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description="Measure topoproxy beside a direct connection and a plain proxy."
    )
    options.add_argument(
        "--rounds", type=int, default=0, metavar="N", help="rounds (default 5, with --quick 2)"
    )
    options.add_argument("--quick", action="store_true", help="about half a minute, rougher")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    options.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options.add_argument("--seed", type=int, default=int(time.time()), help="of the order of the targets")
    return options.parse_args()


def main() -> int:
    chosen = arguments()
    plan = QUICK if chosen.quick else BenchPlan(rounds=5)
    if chosen.rounds > 0:
        plan = BenchPlan(chosen.rounds, plan.share, plan.seconds, plan.starts, plan.outages)
    begun = time.perf_counter()
    try:
        bench = measure(plan, chosen.seed)
    except BenchError as error:
        progress(f"bench: {error}")
        return 1
    head = ["", DIRECT, TOPOPROXY.name, PLAIN.name, "x plain", "bar"]
    print(render(head, rows(bench.figures), markdown=chosen.markdown))
    took = time.perf_counter() - begun
    where = f"{os.cpu_count()} CPUs, Linux {platform.release()}, {interpreter()}"
    print(f"\n{plan.rounds} rounds in {took:.0f} s, {where}.")
    wrote = ", ".join(f"{name} {cpus}" for name, cpus in bench.cpus.items() if cpus)
    print(f"CPUs written into every CreateContainer, seen by the runtime: {wrote}.")
    progress("deciding")
    deciding, loop = measure_deciding()
    print("\n" + render(PLACE_HEAD, place_rows(deciding, loop), markdown=chosen.markdown))
    pools = measure_pools()
    print("\n" + render(POOLS_HEAD, pools_rows(pools, loop), markdown=chosen.markdown))
    print(f"\nCPU time in one process; a bare loop of a million steps takes {loop:.1f} ms of it.")
    for failure in bench.failures:
        print(f"FAILED: {failure}")
    if chosen.json:
        with contextlib.suppress(FileNotFoundError):
            chosen.json.unlink()
        chosen.json.write_text(
            json.dumps(
                {
                    "samples": bench.figures.plain(),
                    "deciding, ms": {figure.what: figure.samples for figure in deciding},
                    "pools, ms": {change.what: change.samples for change in pools},
                    "bare loop, ms": loop,
                    "failures": bench.failures,
                },
                indent=1,
            )
            + "\n"
        )
    return 1 if any(failure.startswith(TOPOPROXY.name) for failure in bench.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
