"""The longest time between two turns of the event loop while a daemon starts with running containers

    .venv/bin/python bench/start_figures.py                    half a minute: 1000 containers, five rounds
    .venv/bin/python bench/start_figures.py --containers 3000

In each round a daemon starts twice, in a separate process, with a runtime that runs the containers: without a
ledger, so that it adopts all of them, and with the ledger that the first start has written. A task that only
waits for its next turn runs from the moment when the socket is served until three seconds after the first
reconcile. At that time calls that the previous daemon may have left in flight are given up. The table shows
the longest wait, and the most CPU time that the loop's thread has used within one wait. The rest of a wait is
the time of other threads, and of other processes on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from messages import container
from procs import BENCH, BenchError, ended, start
from reconcile_figures import paths_of
from table import render

from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.topology.regular_machine import regular_machine

CONTAINERS, ROUNDS, AFTER_S, BAR_MS = 1000, 5, 3.0, 20.0
TOP = "kubepods"
MACHINE = regular_machine(2, 1, 16, 2)
HEAD = (
    "start",
    "longest wait for a turn, median",
    "most",
    "CPU time in one, median",
    "most",
    "reconciled after",
)


class TurnProbe:
    """Waits for its next turn, again and again.

    Attributes:
        wall, cpu: The longest wait, and the most CPU time of this thread in one; seconds.
    """

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        wall, cpu = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            before_wall, before_cpu, wall, cpu = wall, cpu, time.perf_counter(), time.thread_time()
            self.wall, self.cpu = max(self.wall, wall - before_wall), max(self.cpu, cpu - before_cpu)


async def started(directory: Path, count: int) -> dict[str, float]:
    """Start a daemon in a directory; gives the results of the probe, and the duration."""
    text = f"""
listen: unix://{directory}/cri.sock
adminSocket: unix://{directory}/admin.sock
runtime: unix://{directory}/runtime.sock
stateDir: {directory}/state
"""
    groups = FakeCgroups(directory / "groups", MACHINE.online, MACHINE.memory_nodes, 2)
    daemon = Daemon(parse(text, "bench"), machine=MACHINE, cgroups=groups)
    probe = TurnProbe()
    begun = time.perf_counter()
    await daemon.start()
    task = asyncio.create_task(probe.run())
    try:
        executor = daemon.executor
        assert executor is not None
        async with asyncio.timeout(60):
            await executor.reconciled.wait()
        took = time.perf_counter() - begun
        await asyncio.sleep(AFTER_S)
        task.cancel()
        if len(executor.state.containers) != count:
            raise BenchError(f"the daemon knows {len(executor.state.containers)} of {count} containers")
        return {"wall": probe.wall * 1e3, "cpu": probe.cpu * 1e3, "took": took}
    finally:
        task.cancel()
        await daemon.stop()


def measure(count: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Start daemons, each in a separate process."""
    found: dict[str, list[dict[str, float]]] = {"without a ledger": [], "with a ledger": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="ts") as name, ended([]) as all_:
            directory = Path(name)
            tree = FakeCgroups(directory / "groups", MACHINE.online, MACHINE.memory_nodes, 2)
            paths = [TOP, f"{TOP}/burstable"]
            paths += [path for number in range(count) for path in paths_of(container(number), TOP)]
            for path in paths:
                tree.mkdir(path)
            sock = directory / "runtime.sock"
            argv = [sys.executable, str(BENCH / "reconcile_figures.py"), "--runtime", str(sock)]
            argv += ["--top", TOP, "--containers", str(count)]
            all_.append(start("the runtime", argv, sock, malloc=True))
            argv = [sys.executable, __file__, "--containers", str(count), "--start", name]
            for results in found.values():
                done = subprocess.run(argv, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise BenchError(done.stderr.strip().splitlines()[-1])
                results.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def rows(found: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return the table."""
    table = []
    for what, results in found.items():
        cells = [what]
        for key in ("wall", "cpu"):
            times = [each[key] for each in results]
            cells += [f"{statistics.median(times):.1f} ms", f"{max(times):.1f} ms"]
        table.append([*cells, f"{statistics.median(each['took'] for each in results):.2f} s"])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--containers", type=int, default=CONTAINERS, help=f"how many run ({CONTAINERS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often all is done ({ROUNDS})")
    parser.add_argument("--start", type=Path, metavar="DIRECTORY", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.start:
        print(json.dumps(asyncio.run(started(chosen.start, chosen.containers))))
        return 0
    try:
        found = measure(chosen.containers, chosen.rounds)
    except BenchError as error:
        print(f"start: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.containers} containers, {chosen.rounds} rounds; the bar is {BAR_MS:g} ms between turns")
    print(render(HEAD, rows(found)))
    return int(statistics.median(each["wall"] for each in found["without a ledger"]) > BAR_MS)


if __name__ == "__main__":
    sys.exit(main())
