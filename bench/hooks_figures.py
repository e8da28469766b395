"""Measures the time that hooks add to a CreateContainer: a command by itself

    .venv/bin/python bench/hooks_figures.py            two minutes
    .venv/bin/python bench/hooks_figures.py --quick    half a minute, rougher

One daemon for each row, all at once, the same 5.5 kB request at each in turn, in shuffled order, several
rounds; "added" is the median of a round's p50 minus that of the daemon without hooks in the same round. The
second row is another daemon without hooks, and shows the noise; the third has a hook for other calls.

The runtime lists the sandbox of the request, as each runtime that kubelet calls does. Before a create in a
sandbox that is neither known nor listed, the daemon would request the runtime's lists, and the run would
measure that request instead.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import json

from load import run_load
from procs import BENCH, TOPOPROXY, BenchError, Process, Target, backend_argv, ended, start, wait_until
from run import load
from table import number, render

NONE = "no hooks"
FIELD = """
from proxy.hooks.api import Adjustment, PreCreateContainer

API_VERSION = 1


def pre_create_container(event: PreCreateContainer) -> Adjustment:
    return Adjustment(annotations={{"hook-{0}": str(event.decision.cpus)}})
"""
PURE = FIELD.replace("API_VERSION = 1\n", "API_VERSION = 1\nPURE = True\n")
ELSEWHERE = """
from proxy.hooks.api import PreStopPodSandbox

API_VERSION = 1


def pre_stop_pod_sandbox(event: PreStopPodSandbox) -> None:
    return None
"""
ROWS: dict[str, tuple[dict[str, str], float | None]] = {
    NONE: ({}, None),
    "no hooks, again": ({}, None),
    "a hook of other calls": ({"10-other.py": ELSEWHERE}, None),
    "one hook that sets an annotation": ({"10-one.py": FIELD.format(1)}, 60),
    "ten such hooks": ({f"{n}-ten.py": FIELD.format(n) for n in range(10, 20)}, 300),
    "one such hook that is PURE": ({"10-pure.py": PURE.format(1)}, 60),
    "ten of these": ({f"{n}-pure.py": PURE.format(n) for n in range(10, 20)}, 300),
    "one hook server (Python)": ({"server.json": ""}, 1000),
}
"""By name of a row: the files in the daemon's directories, and the bar in microseconds."""
HEAD = ("CreateContainer 5.5 kB, one after the other", "p50", "added", "times", "bar")


def _argv(files: dict[str, str], directory: Path, sock: Path, runtime: Path) -> list[str]:
    """Write a daemon's hooks and configuration; gives the command line that starts it."""
    argv = TOPOPROXY.argv(directory, sock, runtime)
    hooks, servers = directory / "hooks.d", directory / "hookserver.d"
    hooks.mkdir(mode=0o755, exist_ok=True)
    servers.mkdir(mode=0o755, exist_ok=True)
    for name, text in files.items():
        if name.endswith(".py"):
            (hooks / name).write_text(text)
            continue
        registration = {"remote-endpoint": str(runtime.parent / "hooks.sock"), "failure-policy": "Fail"}
        (servers / name).write_text(json.dumps(registration | {"runtime-hooks": ["PreCreateContainer"]}))
    config = Path(argv[argv.index("--config") + 1])
    section = {
        "directory": str(hooks),
        "vendorDirectory": str(directory / "none"),
        "serverDirectory": str(servers),
    }
    section["failurePolicy"] = "Fail"  # a hook that does not answer must be noticed
    config.write_text(config.read_text() + f"hooks: {json.dumps(section)}\n")
    return argv


def _started(name: str, directory: Path, runtime: Path, untouched: int) -> tuple[Process, int]:
    """Start a daemon, and wait until its hooks change creates; gives the daemon and the bytes that the
    runtime gets."""
    files, seen = ROWS[name][0], [0]
    target = Target(name, lambda own, sock, to: _argv(files, own, sock, to))
    process = target.start(directory, runtime)
    changes = any("PreCreateContainer" in text for text in files.values()) or "server.json" in files

    def ready() -> bool:
        shown = run_load(str(process.sock), "Create", conc=1, n=1, dur=1, warm=0, stall=1)
        if shown.errors or not shown.sample.partition("|")[0]:
            return False
        seen[0] = int(shown.sample.split("|")[3])
        return (seen[0] > untouched) is changes

    wait_until(ready, 20, f"no create as it should be through the daemon with {name}", process)
    return process, seen[0]


def measure(rounds: int, calls: int, directory: Path) -> dict[str, list[float]]:
    """Measure all rows; gives the p50 of each round in microseconds."""
    runtime = directory / "runtime.sock"
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    argv = backend_argv(runtime, "--sandbox")
    with ended([start("the runtime", argv, runtime, malloc=True)]) as running:
        server = directory / "hooks.sock"
        argv = [sys.executable, str(BENCH / "hook_server.py"), "--listen", str(server)]
        running.append(start("the hook server", argv, server, malloc=False))
        daemons, untouched = {}, 1 << 20
        for name in ROWS:
            daemons[name], seen = _started(name, directory, runtime, untouched)
            running.append(daemons[name])
            untouched = min(untouched, seen)
        for turn in range(rounds):
            print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            for name in random.sample(list(ROWS), len(ROWS)):
                result = load(daemons[name].sock, "Create", conc=1, n=calls, seconds=10)
                if result["errors"]:
                    raise BenchError(f"{name}: {result['errors']} errors, first: {result['first_error']}")
                found[name].append(result["p50_us"])
    return found


def rows(found: dict[str, list[float]]) -> list[list[str]]:
    table = []
    for name, (_, bar) in ROWS.items():
        p50 = statistics.median(found[name])
        more = statistics.median(a - b for a, b in zip(found[name], found[NONE], strict=True))
        missed = " MISSED" if bar is not None and more >= bar else ""
        table.append(
            [
                name,
                number(p50, "us"),
                "" if name == NONE else f"{more:+.0f} us",
                f"{statistics.median(a / b for a, b in zip(found[name], found[NONE], strict=True)):.2f}",
                "" if bar is None else f"{bar:g} us{missed}",
            ]
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="hk") as directory:
        table = rows(measure(3 if quick else 9, 150 if quick else 400, Path(directory)))
    print(render(HEAD, table))
    return int(any("MISSED" in cell for row in table for cell in row))


if __name__ == "__main__":
    sys.exit(main())
