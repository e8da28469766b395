"""The figures that topoproxy promises, measured with the Go kit and compared with the kit's own Go proxy.

    python bench/go_kit.py ../shared/bench         needs go; --binary FILE takes a kit that is already built

The kit is built outside of this tree, once for each state of its sources. Then the kit's fake runtime, its
transparent proxy (``mitm -mode raw``) and topoproxy run side by side; in each round the order of the targets
is shuffled; the table gives medians over the rounds, each as a multiple of Go's, with its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figures
from load import run_load
from procs import PLAIN, TOPOPROXY, BenchError, Process, Target, ended, interpreter, start, wait_until
from table import number, render

DIRECT, GO, TOPOPROXY_NAME = "direct", "go", TOPOPROXY.name
LATENCY = (
    ("Version", 1200, 0.35),
    ("ContainerStatus", 800, 0.35),
    ("ListContainers100", 800, 0.35),
    ("ListContainers1000", 300, 0.5),
    ("CreateContainer", 800, 0.6),
)
RATES = (("Version", 15_000, 1.8), ("CreateContainer", 6_000, 1.3))
LARGE = "CreateContainer200k"
IN_FLIGHT = 64


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the kit ------------------------------------------------------------------------------------------------


def build(kit: Path, target: str = "bench-go") -> Path | None:
    """Build the kit in the user's cache; if that is not possible, print the reason and return None."""
    sources = sorted(kit.glob("*.go"))
    if not sources:
        progress(f"{target} skipped: no Go sources in {kit}; name the kit's directory")
        return None
    digest = hashlib.sha256(b"\0".join(source.name.encode() + source.read_bytes() for source in sources))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "topoproxy" / "kit"
    directory = cache / digest.hexdigest()[:16]
    binary = directory / "cribench"
    if binary.exists():
        return binary
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")
    if go is None:
        progress(f"{target} skipped: there is no go on this machine (PATH, /usr/local/go/bin)")
        return None
    directory.mkdir(parents=True, exist_ok=True)
    for source in sources:
        (directory / source.name).write_bytes(source.read_bytes())
    progress(f"building the kit in {directory}")
    steps = (
        ["mod", "init", "cribench"],
        ["mod", "tidy"],
        ["build", "-buildvcs=false", "-o", "cribench.new", "."],
    )
    for step in steps:
        if step[1] == "init" and (directory / "go.mod").exists():
            continue
        done = subprocess.run(
            [go, *step], cwd=directory, capture_output=True, text=True, timeout=900, check=False
        )
        if done.returncode:
            progress(f"{target} skipped: go {' '.join(step)} failed: {done.stderr.strip()[-400:]}")
            return None
    (directory / "cribench.new").rename(binary)
    return binary


@dataclass(frozen=True, slots=True)
class Kit:
    """The kit's commands."""

    binary: Path

    def run(self, *args: str, seconds: float = 120) -> str:
        """Run a command to its end and return its output."""
        done = subprocess.run(
            [str(self.binary), *args], capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode:
            raise BenchError(f"cannot run cribench {args[0]}: {done.stderr.strip()[-300:]}")
        return done.stdout

    def load(
        self, target: Path, call: str, conc: int, n: int, seconds: float, expect: str = ""
    ) -> dict[str, Any]:
        args = ["load", "-target", str(target), "-call", call, "-conc", str(conc), "-n", str(n)]
        args += ["-dur", f"{seconds}s", "-timeout", "20s"] + (["-expect", expect] if expect else [])
        result: dict[str, Any] = json.loads(self.run(*args))
        return result

    def runtime(self, sock: Path) -> Process:
        return start(
            "the kit's runtime", [str(self.binary), "runtime", "-listen", str(sock)], sock, malloc=False
        )

    def target(self) -> Target:
        def argv(_: Path, sock: Path, runtime: Path) -> list[str]:
            return [str(self.binary), "mitm", "-mode", "raw", "-listen", str(sock), "-upstream", str(runtime)]

        return Target(GO, argv)


def answers(target: Path) -> bool:
    """Whether a new connection gets a good answer."""
    return (
        run_load(str(target), "Version", conc=1, n=1, dur=1, warm=0, stall=1, expect=b"containerd").errors
        == 0
    )


# -- measuring ----------------------------------------------------------------------------------------------


class GoKitBench:
    """One run: a directory, the kit's runtime, the targets, and the figures."""

    def __init__(self, kit: Kit, directory: Path, targets: Sequence[Target], seed: int) -> None:
        self.kit, self.directory, self.targets = kit, directory, targets
        self.names = (DIRECT, *(target.name for target in targets))
        self.random = random.Random(seed)
        self.figures = Figures()
        self.verdicts: dict[str, list[str]] = {}
        self.backend = kit.runtime(directory / "runtime.sock")

    def _ready(self, process: Process) -> None:
        wait_until(lambda: answers(process.sock), 20, f"no answer through {process.name}", process)

    def rounds(self, count: int) -> None:
        """Latency, CPU, throughput; all targets in turn."""
        with ended([]) as running:
            for target in self.targets:
                running.append(target.start(self.directory, self.backend.sock))
                self._ready(running[-1])
            paths = {DIRECT: self.backend.sock} | {process.name: process.sock for process in running}
            by_name = {process.name: process for process in running}
            cpus = self._written(paths)
            time.sleep(1)
            for turn in range(1, count + 1):
                progress(f"round {turn} of {count}")
                for call, n, _ in LATENCY:
                    for name in self.random.sample(self.names, len(self.names)):
                        self._latency(name, paths[name], by_name.get(name), call, n)
                for call, n, _ in RATES:
                    for name in self.random.sample(self.names, len(self.names)):
                        result = self.kit.load(
                            paths[name], call, IN_FLIGHT, n, 1.5, cpus[name] if call[0] == "C" else ""
                        )
                        self._count(f"{call} x{IN_FLIGHT}", name, result)
                        self.figures.add(f"rate {call}", name, result["calls_per_s"])
            self._large(paths, cpus)

    def _written(self, paths: dict[str, Path]) -> dict[str, str]:
        """The CPUs that each target writes: every later create must carry them to the runtime."""
        cpus = {DIRECT: "|120|"}
        for name in self.names[1:]:
            shown = run_load(str(paths[name]), "Create", conc=1, n=1, dur=5, warm=0)
            text = re.search(r"([0-9,-]+)\|([0-9,-]*)\|115\|", shown.sample or shown.first_error)
            if shown.errors or text is None:
                raise BenchError(
                    f"{name} passed a CreateContainer without CPUs: {shown.sample} {shown.first_error}"
                )
            cpus[name] = f"{text[1]}|{text[2]}|"
            progress(f"{name} writes cpuset.cpus {text[1]}, cpuset.mems {text[2] or '(none)'}")
        return cpus

    def _count(self, what: str, name: str, result: dict[str, Any]) -> None:
        if result["errors"]:
            self.verdicts.setdefault(name, []).append(
                f"{what}: {result['errors']} errors: {result.get('first_error')}"
            )

    def _latency(self, name: str, path: Path, process: Process | None, call: str, n: int) -> None:
        before = process.cpu_ms() if process else 0.0
        result = self.kit.load(path, call, 1, n, 2.0)
        self._count(call, name, result)
        self.figures.add(f"p50 {call}", name, result["p50_us"])
        if process and result["n"]:
            spent = (
                (process.cpu_ms() - before) * 1000 / (result["n"] + 50)
            )  # the kit calls 50 times before it counts
            self.figures.add(f"cpu {call}", name, spent)

    def _large(self, paths: dict[str, Path], cpus: dict[str, str]) -> None:
        """Requests beyond the windows, six runs; a call that stalls ends with its deadline, as an error."""
        for turn in range(1, 7):
            progress(f"205 kB, {IN_FLIGHT} in flight, run {turn} of 6")
            for name in self.random.sample(self.names, len(self.names)):
                want = cpus[name].replace("|120|", "|6000|") if name == DIRECT else cpus[name]
                result = self.kit.load(paths[name], LARGE, IN_FLIGHT, 1000, 3, want)
                self._count(f"{LARGE} x{IN_FLIGHT}", name, result)
                self.figures.add("large errors", name, result["errors"])
                self.figures.add("large rate", name, result["calls_per_s"])
                self.figures.add("large slowest", name, result["p99_us"] / 1000)

    def starts(self, count: int) -> None:
        """From the start of the process to a socket that accepts."""
        progress("starts")
        for turn in range(count):
            for target in self.random.sample(self.targets, len(self.targets)):
                process = target.start(self.directory, self.backend.sock, f"-start{turn}")
                self.figures.add("listening", target.name, process.listening_ms)
                process.end()

    def memory(self) -> None:
        """Idle, after 10,000 calls, after the checks, which send and get messages of 15 MiB."""
        for target in self.targets:
            progress(f"memory and checks: {target.name}")
            with ended([target.start(self.directory, self.backend.sock, "-memory")]) as (process,):
                self._ready(process)
                time.sleep(2)
                idle = process.memory_mb()
                self.kit.load(process.sock, "Version", 8, 10_000, 20)
                time.sleep(0.5)
                self.figures.add("idle", target.name, idle)
                self.figures.add("growth", target.name, process.memory_mb() - idle)
                self._checks(process)
                time.sleep(1)
                self.figures.add("after 15M", target.name, process.memory_mb())
                self.figures.add("peak", target.name, process.memory_mb("VmHWM"))

    def _checks(self, process: Process) -> None:
        through = self.kit.run("checks", "-target", str(process.sock))
        straight = self.kit.run("checks", "-target", str(self.backend.sock))
        different = differences(straight, through)
        self.figures.add("checks", process.name, len(different))
        self.verdicts.setdefault(process.name, []).extend(different)

    def outages(self, count: int) -> None:
        """The runtime is killed and comes back: the kit's ``recover`` at the same time, then a new
        connection."""
        for turn in range(1, count + 1):
            for target in self.targets:
                progress(f"outage {turn} of {count}: {target.name}")
                with ended([target.start(self.directory, self.backend.sock, f"-outage{turn}")]) as (process,):
                    self._ready(process)
                    self._outage(process)

    def _outage(self, process: Process) -> None:
        watch = subprocess.Popen(
            [str(self.kit.binary), "recover", "-target", str(process.sock), "-dur", "9s"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            time.sleep(1)
            self.backend.end(hard=True)
            time.sleep(2)
            self.backend = self.kit.runtime(self.backend.sock)
            back = time.time()
            took = wait_until(
                lambda: answers(process.sock), 60, f"{process.name} does not come back", process
            )
            self.figures.add("back", process.name, took * 1000)
            shown = json.loads(watch.communicate(timeout=30)[0])
        finally:
            watch.kill()
            watch.wait()
        self.figures.add("kept back", process.name, max(0.0, shown["up_unix"] - back))
        if shown["up_unix"] <= 0 or shown["codes"] not in {"[]", f"[Unavailable:{shown['failed_calls']}]"}:
            self.verdicts.setdefault(process.name, []).append(f"recover: {shown}")
            self.figures.add("recover wrong", process.name, 1)


_TIMINGS = (
    (r"[0-9.]+ ms\b", "T ms"),
    (r"cancels \d+->\d+", ""),
    (r"id=[0-9,-]*\|[0-9,-]*\|(\d+)\|\d+", r"id=\1"),
)


def _plain_lines(text: str) -> dict[str, str]:
    """The output of ``checks`` without times, without the cpuset, and with the cancels as a difference."""
    found = {}
    for line in text.strip().splitlines():
        name, _, value = line.partition(": ")
        passed = [f"+{int(b) - int(a)}" for a, b in re.findall(r"cancels (\d+)->(\d+)", value)]
        for pattern, instead in _TIMINGS:
            value = re.sub(pattern, instead, value)
        found[name] = " ".join((value, *passed))
    return found


def differences(straight: str, through: str) -> list[str]:
    """The differences of ``checks`` through a proxy from ``checks`` directly, apart from times and
    cpusets."""
    one, other = _plain_lines(straight), _plain_lines(through)
    names = dict.fromkeys((*one, *other))
    return [
        f"check {name!r}: {other.get(name, '(missing)')} instead of {one.get(name, '(nothing)')}"
        for name in names
        if one.get(name) != other.get(name)
    ]


# -- the table ----------------------------------------------------------------------------------------------


def _verdict(value: float | None, bar: float, *, least: bool = False) -> str:
    if value is None:
        return "not measured"
    return "ok" if (value >= bar if least else value <= bar) else "MISSED"


def rows(figures: Figures, names: Sequence[str]) -> list[list[str]]:
    """Measure, direct, Go, topoproxy (and more), topoproxy as a multiple of Go, bar, verdict."""
    out: list[list[str]] = []

    def line(text: str, values: dict[str, str], x: float | None, bar: str, verdict: str) -> None:
        out.append(
            [
                text,
                *(values.get(name, "") for name in names),
                number(x) if x is not None else "",
                bar,
                verdict,
            ]
        )

    for call, _, bar in LATENCY:
        added = {name: figures.added(f"p50 {call}", name, DIRECT) for name in names[1:]}
        x = figures.ratio(added[TOPOPROXY_NAME], added[GO])
        shown = {DIRECT: number(figures.median(f"p50 {call}", DIRECT), "us")}
        shown |= {name: f"+{number(value, 'us')}" for name, value in added.items()}
        line(f"added p50, {call}", shown, x, f"<= {bar} x", _verdict(x, bar))
    for call, _, bar in RATES:
        x = figures.ratio(figures.median(f"rate {call}", TOPOPROXY_NAME), figures.median(f"rate {call}", GO))
        shown = {name: number(figures.median(f"rate {call}", name)) for name in names}
        line(f"calls per s, {call} x{IN_FLIGHT}", shown, x, f">= {bar} x", _verdict(x, bar, least=True))
    shown = {name: str(figures.total("large errors", name)) for name in names}
    line(
        f"errors, {LARGE} x{IN_FLIGHT}, 6 runs",
        shown,
        None,
        "0",
        _verdict(figures.total("large errors", TOPOPROXY_NAME), 0),
    )
    x = figures.ratio(figures.median("large rate", TOPOPROXY_NAME), figures.median("large rate", GO))
    line(
        f"calls per s, {LARGE} x{IN_FLIGHT}",
        {n: number(figures.median("large rate", n)) for n in names},
        x,
        "",
        "",
    )
    for call, most in (("Version", 0.35), ("CreateContainer", None)):
        cpu = {name: figures.median(f"cpu {call}", name) for name in names[1:]}
        x = figures.ratio(cpu[TOPOPROXY_NAME], cpu[GO])
        shown = {name: number(value, "ms") for name, value in cpu.items()}
        judged = ("", "") if most is None else (f"<= {most} x", _verdict(x, most))
        line(f"CPU per 1000 {call}", shown, x, *judged)
    for text, measure, unit, limit in (
        ("memory, idle", "idle", "MB", 40.0),
        ("memory, growth over 10,000 calls", "growth", "MB", 3.0),
        ("memory, after 15 MiB messages", "after 15M", "MB", 60.0),
        ("start to listening", "listening", "ms", 200.0),
        ("runtime back to first good answer, new connection", "back", "ms", 50.0),
        ("the same, kubelet's own back-off (recover)", "kept back", "s", None),
        ("checks that differ from direct", "checks", "", 0.0),
    ):
        values = {name: figures.median(measure, name) for name in names[1:]}
        shown = {name: number(value, unit) for name, value in values.items()}
        if limit is None:
            line(text, shown, None, "", "")
        else:
            line(
                text,
                shown,
                None,
                f"<= {limit:g}{' ' + unit if unit else ''}",
                _verdict(values[TOPOPROXY_NAME], limit),
            )
    return out


def measure(kit: Kit, targets: Sequence[Target], rounds: int, seed: int) -> GoKitBench:
    """Measure everything."""
    with tempfile.TemporaryDirectory(prefix="topoproxy-bench-") as directory:
        bench = GoKitBench(kit, Path(directory), targets, seed)
        try:
            bench.rounds(rounds)
            bench.starts(5)
            bench.memory()
            bench.outages(2)
        finally:
            bench.backend.end()
        return bench


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description="Measure topoproxy beside the Go kit's transparent proxy.")
    options.add_argument(
        "kit", type=Path, nargs="?", default=Path("../shared/bench"), help="directory of the kit's sources"
    )
    options.add_argument("--binary", type=Path, help="a kit that is built already")
    options.add_argument("--rounds", type=int, default=9, metavar="N")
    options.add_argument("--plain", action="store_true", help="measure the plain grpc.aio proxy too")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    options.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options.add_argument("--seed", type=int, default=int(time.time()), help="of the order of the targets")
    return options.parse_args()


def main() -> int:
    chosen = arguments()
    binary = chosen.binary or build(chosen.kit)
    if binary is None:
        return 0
    kit = Kit(binary.resolve())
    before = os.getloadavg()[0]
    targets = (kit.target(), TOPOPROXY, *((PLAIN,) if chosen.plain else ()))
    try:
        bench = measure(kit, targets, max(1, chosen.rounds), chosen.seed)
    except (BenchError, subprocess.TimeoutExpired) as error:
        progress(f"bench-go: {error}")
        return 1
    table = rows(bench.figures, bench.names)
    print(render(["", *bench.names, "x go", "bar", ""], table, markdown=chosen.markdown))
    for name, reported in bench.verdicts.items():
        for text in reported:
            print(f"{name}: {text}")
    if chosen.json:
        with contextlib.suppress(FileNotFoundError):
            chosen.json.unlink()
        chosen.json.write_text(json.dumps(bench.figures.plain(), indent=1) + "\n")
    where = f"on {os.cpu_count()} CPUs, {interpreter()}"
    busy = f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after, {where}"
    print(f"\n{busy}: what else runs here is measured too" if before > 1 else f"\n{busy}")
    missed = [row[0] for row in table if row[-1] == "MISSED"]
    print(f"{len(missed)} missed{': ' + ', '.join(missed) if missed else ''}")
    return 1 if missed or bench.figures.total("recover wrong", TOPOPROXY_NAME) else 0


if __name__ == "__main__":
    sys.exit(main())
