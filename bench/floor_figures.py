"""The least cost of a relay in Python, compared with Go and topoproxy: the floor of ``make bench-go``'s bars.

    make bench-floor                             two minutes; needs go and the sources of the Go proxy
    make bench-floor BENCH_ARGS="--rounds 3"     half a minute, rougher
    make bench-floor BENCH_ARGS="--busy 2"       beside two processes that compute

The kit's fake runtime, its transparent proxy in Go (``mitm -mode raw``), ``bare_forwarder.py`` and topoproxy
run side by side; one call after the other, all targets in each round, in shuffled order. "added" is the
median over the rounds of a target's p50 minus that of the direct connection in the same round. The bare
forwarder adds only system calls and switches between processes: no proxy in Python can add less. topoproxy is
measured as it is by default, and with ``busyPoll: 0``, which takes less CPU time and, on a machine with an
idle CPU, adds more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from go_kit import DIRECT, GO, Kit, build, progress
from procs import BENCH, TOPOPROXY, BenchError, Target, ended, interpreter
from table import number, render

BARE = Target(
    "bare Python",
    lambda _, sock, runtime: [
        *(sys.executable, str(BENCH / "bare_forwarder.py")),
        *("--listen", str(sock), "--runtime", str(runtime)),
    ],
    malloc=True,
)


def sleeping_argv(own: Path, sock: Path, runtime: Path) -> list[str]:
    """Return the command line of a topoproxy that never polls."""
    argv = TOPOPROXY.argv(own, sock, runtime)
    config = Path(argv[argv.index("--config") + 1])
    config.write_text(config.read_text() + "busyPoll: 0\n")
    return argv


SLEEPING = Target("topoproxy, no polls", sleeping_argv, malloc=TOPOPROXY.malloc)
CALLS = (("Version", 1200), ("ContainerStatus", 800), ("CreateContainer", 800))
HEAD = ("", "p50 direct", "", "added", "x go", "CPU per 1000", "x go")
Samples = dict[tuple[str, str], list[tuple[float, float]]]
"""p50 in microseconds and CPU of 1000 calls in milliseconds of each round, by call and target."""


@contextmanager
def computing(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that compute all the time, at the usual priority."""
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def measure(kit: Kit, rounds: int, directory: Path) -> Samples:
    """Measure all targets.

    Raises:
        BenchError: A call failed.
    """
    found: Samples = {}
    with ended([kit.runtime(directory / "runtime.sock")]) as running:
        runtime = running[0].sock
        targets = {
            target.name: target.start(directory, runtime)
            for target in (kit.target(), BARE, TOPOPROXY, SLEEPING)
        }
        running += targets.values()
        time.sleep(1)
        for turn in range(rounds):
            progress(f"round {turn + 1} of {rounds}")
            for call, count in CALLS:
                for name in random.sample([DIRECT, *targets], len(targets) + 1):
                    process = targets.get(name)
                    before = process.cpu_ms() if process else 0.0
                    result = kit.load(process.sock if process else runtime, call, 1, count, 2.0)
                    if result["errors"]:
                        raise BenchError(f"{name}, {call}: {result['errors']} errors")
                    # The kit calls 50 times before it counts.
                    cpu = (process.cpu_ms() - before) * 1000 / (result["n"] + 50) if process else 0.0
                    found.setdefault((call, name), []).append((result["p50_us"], cpu))
    return found


def rows(found: Samples) -> list[list[str]]:
    """Return the table's rows: one for each call and target."""
    lines = []
    for call, _ in CALLS:
        straight = [p50 for p50, _ in found[call, DIRECT]]
        added, cpu = {}, {}
        for name in (GO, BARE.name, TOPOPROXY.name, SLEEPING.name):
            samples = found[call, name]
            added[name] = statistics.median(a - b for (a, _), b in zip(samples, straight, strict=True))
            cpu[name] = statistics.median(spent for _, spent in samples)
            first = [call, number(statistics.median(straight), "us")] if name == GO else ["", ""]
            shown = [f"+{number(added[name], 'us')}", f"{added[name] / added[GO]:.2f}"]
            lines.append([*first, name, *shown, number(cpu[name], "ms"), f"{cpu[name] / cpu[GO]:.2f}"])
    return lines


def main() -> int:
    options = argparse.ArgumentParser(description="Measure what a relay in Python costs at least.")
    options.add_argument(
        "kit", type=Path, nargs="?", default=Path("../shared/bench"), help="directory of the kit's sources"
    )
    options.add_argument("--rounds", type=int, default=9, metavar="N")
    options.add_argument(
        "--busy", type=int, default=0, metavar="N", help="run this many processes that compute meanwhile"
    )
    chosen = options.parse_args()
    binary = build(chosen.kit, "bench-floor")
    if binary is None:
        return 0
    with tempfile.TemporaryDirectory(prefix="topoproxy-bench-") as directory, computing(chosen.busy):
        try:
            found = measure(Kit(binary.resolve()), max(1, chosen.rounds), Path(directory))
        except BenchError as error:
            progress(f"bench-floor: {error}")
            return 1
    print(render(HEAD, rows(found)))
    beside = f", beside {chosen.busy} processes that compute" if chosen.busy else ""
    print(f"\n{interpreter()}{beside}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
