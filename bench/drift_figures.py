"""Measures how soon another program's write to a cpuset is repaired: a command by itself, as root, a minute

    .venv/bin/python bench/drift_figures.py

A real containerd with real cgroups (the private runtime of the end-to-end tests), a real daemon with its
defaults. The time runs from the return of the writer until the kernel holds the right set. Each container is
written to once in each row: the daemon repairs repeated writes more slowly, on purpose.

- direct write: one write to ``cpuset.cpus``, by this process;
- runc update: ``UpdateContainerResources`` at the runtime's own socket, past the daemon;
- by the clock: a direct write if the kernel does not report writes. For this the daemon is started with an
  inotify that refuses.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

import daemon
from cri import cgroup_of, online
from private_runtime import PrivateRuntime, skip_reason, wait_for
from table import number, render

from proxy.model.idset import CpuSet

HEAD = ("drift repaired after", "median", "worst", "bar", "times")
SHARERS, ROUNDS = 12, 5
SOON_S, CLOCK_S, LIMIT_S = 1.0, 10.0, 60.0
PROGRAM_WITHOUT_INOTIFY = """#!{python}
import sys
import proxy.backends.cgroup.inotify
from proxy.model.errors import CgroupError


def refuse(*_):
    raise CgroupError("cannot watch cpusets for writes by others: not in this measurement", 24)


proxy.backends.cgroup.inotify.InotifyWrites.__init__ = refuse
from proxy.__main__ import main

sys.exit(main())
"""
"""The daemon's program, but without reports of writes."""


@contextmanager
def node(
    directory: Path, runtime: PrivateRuntime, program: Path
) -> Iterator[tuple[daemon.ModeledNode, list[str]]]:
    """Start a daemon with its defaults, an owner and sharers; gives the sharers."""
    daemon.PROGRAM = program
    proxy = daemon.DaemonProcess(directory, runtime, {"reconcilePeriod": "10s"})
    proxy.start()
    try:
        with proxy.client() as client:
            found = daemon.ModeledNode(runtime, proxy, client)
            found.spawn("lse", last_cpu())
            sharers = [found.spawn("ls") for _ in range(SHARERS)]
            wait_until_quiet(proxy)
            yield found, sharers
    finally:
        runtime.clear()
        proxy.stop()


def last_cpu() -> CpuSet:
    return CpuSet([max(online())])


def wait_until_quiet(proxy: daemon.DaemonProcess) -> None:
    """Wait until nothing more is written or sent to the runtime."""

    def still() -> bool:
        before = counts(proxy)
        time.sleep(1)
        return counts(proxy) == before

    wait_for("the daemon to come to rest", still, LIMIT_S)


def counts(proxy: daemon.DaemonProcess) -> list[int]:
    counters = proxy.status()["counters"]
    return [counters.get(name, 0) for name in ("cpusets_written", "settled", "drift_repaired")]


def file_of(container: str) -> Path:
    directory = cgroup_of(container)
    assert directory is not None
    return directory / "cpuset.cpus"


def seconds_to_repair(file: Path, write: Callable[[], None], pause: float = 0) -> float:
    """Write after a pause, and return the seconds until the former content is back."""
    right = file.read_text()
    time.sleep(pause)
    write()
    begun = time.perf_counter()
    while file.read_text() != right:
        if time.perf_counter() - begun > LIMIT_S:
            raise SystemExit(f"not put back within {LIMIT_S:g} s: {file}")
        time.sleep(0.0005)
    return time.perf_counter() - begun


def direct(file: Path) -> Callable[[], None]:
    def write() -> None:
        fd = os.open(file, os.O_WRONLY)
        os.write(fd, str(online()).encode())
        os.close(fd)

    return write


def row(what: str, seconds: list[float], bar: float) -> tuple[list[str], bool]:
    missed = max(seconds) >= bar
    figures = [number(statistics.median(seconds) * 1000, "ms"), number(max(seconds) * 1000, "ms")]
    return [what, *figures, f"{bar:g} s" + (" MISSED" if missed else ""), str(len(seconds))], missed


def measure(directory: Path, runtime: PrivateRuntime) -> list[tuple[list[str], bool]]:
    program, deaf = daemon.PROGRAM, directory / "deaf"
    deaf.write_text(PROGRAM_WITHOUT_INOTIFY.format(python=sys.executable))
    deaf.chmod(0o755)
    with node(directory / "notified", runtime, program) as (found, sharers):
        assert found.daemon.status()["drift"]["not_watched"] == ""
        straight = [seconds_to_repair(file := file_of(one), direct(file), pause=0.1) for one in sharers]
        wait_until_quiet(found.daemon)
        with runtime.client() as behind:
            updates = [
                seconds_to_repair(file_of(one), lambda one=one: behind.update(one, cpuset_cpus=str(online())))
                for one in sharers
            ]
        wars = found.daemon.status()["drift"]["wars"]
        assert not wars, wars
    clock = []
    with node(directory / "deaf.d", runtime, deaf) as (found, sharers):
        assert found.daemon.status()["drift"]["watched"] == 0
        for one in sharers[:ROUNDS]:
            time.sleep(random.uniform(0, CLOCK_S / 2))
            clock.append(seconds_to_repair(file := file_of(one), direct(file)))
    return [
        row("a direct write", straight, SOON_S),
        row("a runc update behind our back", updates, SOON_S),
        row("a direct write, by the clock alone", clock, CLOCK_S),
    ]


def main() -> int:
    reason = skip_reason()
    if reason:
        print(f"drift: not measured, {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="topoproxy-drift-") as name:
        runtime = PrivateRuntime(Path(name) / "bed").start()
        try:
            rows = measure(Path(name), runtime)
        finally:
            runtime.stop()
    print(render(HEAD, [figures for figures, _ in rows]))
    return int(any(missed for _, missed in rows))


if __name__ == "__main__":
    sys.exit(main())
