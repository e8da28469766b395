"""Measured processes: started in a directory of their own, watched through /proc, ended by their id."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
# Large reads neither map nor unmap memory. For the tools and the plain proxy; topoproxy sets it by itself.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}


class BenchError(Exception):
    """A measurement could not be made."""


def interpreter() -> str:
    """Name the Python that runs the processes, with its path.

    The path matters: the packages of distributions are compiled with profile-guided optimization, but a
    Python that was compiled by hand often is not, and then everything takes longer.
    """
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return f"Python {platform.python_version()} ({executable})"


def environment(*, malloc: bool) -> dict[str, str]:
    """The environment of a process, either with the malloc thresholds or without any.

    Python keeps its bytecode in files, as on a node: compiling at each start takes time and memory.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MALLOC_", "NOTIFY_", "LISTEN_")) and key != "PYTHONDONTWRITEBYTECODE"
    }
    return kept | (MALLOC if malloc else {})


def wait_until(probe: Callable[[], bool], seconds: float, what: str, running: Process | None = None) -> float:
    """Poll until ``probe`` holds; gives the seconds until then.

    Raises:
        BenchError: It did not hold in time, or the process ended.
    """
    begun = time.perf_counter()
    while not probe():
        if time.perf_counter() - begun > seconds:
            raise BenchError(f"{what}: not within {seconds:g} s{running.log_tail() if running else ''}")
        if running is not None and running.popen.poll() is not None:
            raise BenchError(f"{what}: it ended with code {running.popen.returncode}{running.log_tail()}")
        time.sleep(0.001)
    return time.perf_counter() - begun


def connects(path: Path) -> bool:
    """Return whether a process listens there."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


@dataclass(slots=True)
class Process:
    """A child process with its socket."""

    name: str
    popen: subprocess.Popen[bytes]
    sock: Path
    log: Path
    listening_ms: float = 0.0
    pid: int = field(init=False)

    def __post_init__(self) -> None:
        self.pid = self.popen.pid

    def log_tail(self) -> str:
        text = self.log.read_text(errors="replace").strip()[-600:]
        return f"\n{text}" if text else ""

    def cpu_ms(self) -> float:
        """User and system time so far, of all threads, including those that have ended."""
        clock = (
            ~self.pid << 3 | 2
        )  # Linux: the CPU clock of another process, by its id (clock_getcpuclockid(3))
        return time.clock_gettime_ns(clock) / 1e6

    def memory_mb(self, key: str = "VmRSS") -> float:
        """Resident memory now (VmRSS) or at most (VmHWM), MB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024 / 1e6
        raise BenchError(f"cannot read the memory of {self.name}: no {key} in /proc/{self.pid}/status")

    def end(self, *, hard: bool = False) -> None:
        """End the process, and wait until it has exited."""
        if self.popen.poll() is None:
            self.popen.kill() if hard else self.popen.terminate()
            try:
                self.popen.wait(5)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()


def start(
    name: str,
    argv: Sequence[str],
    sock: Path,
    *,
    malloc: bool,
    seconds: float = 10.0,
    extra_environment: Mapping[str, str] | None = None,
) -> Process:
    """Start a process and wait until its socket accepts; ``listening_ms`` says how long that took.

    Args:
        name: Its name in messages.
        argv: The command line.
        sock: Where it listens.
        malloc: Whether to set the malloc thresholds for it.
        seconds: How long the start may take.
        extra_environment: Environment variables to add.
    """
    sock.unlink(missing_ok=True)
    log = sock.with_suffix(".log")
    with log.open("ab") as output:
        popen = subprocess.Popen(  # the argument vector is ours
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(malloc=malloc) | dict(extra_environment or {}),
            cwd=sock.parent,
        )
    process = Process(name, popen, sock, log)
    try:
        took = wait_until(lambda: connects(sock), seconds, f"cannot start {name}", process)
    except BaseException:
        process.end(hard=True)
        raise
    process.listening_ms = took * 1000
    return process


@dataclass(frozen=True, slots=True)
class Target:
    """Something to measure.

    Attributes:
        name: As in the tables.
        argv: Makes the command line from the directory, the socket to listen on and the runtime's socket.
        malloc: Whether to set the malloc thresholds for it.
        extra_environment: Environment variables to add.
    """

    name: str
    argv: Callable[[Path, Path, Path], list[str]]
    malloc: bool = False
    extra_environment: Mapping[str, str] | None = None

    def start(self, directory: Path, runtime: Path, tag: str = "") -> Process:
        """Start the target with its own directory."""
        own = directory / f"{self.name.replace(' ', '-')}{tag}"
        own.mkdir(exist_ok=True)
        sock = own / "cri.sock"
        return start(
            self.name,
            self.argv(own, sock, runtime),
            sock,
            malloc=self.malloc,
            extra_environment=self.extra_environment,
        )


def backend_argv(sock: Path, *more: str) -> list[str]:
    return [sys.executable, str(BENCH / "backend.py"), "--listen", str(sock), *more]


_INSTALLED_PROGRAM = Path(sys.executable).parent / "topoproxy"
PROGRAM = [str(_INSTALLED_PROGRAM)] if _INSTALLED_PROGRAM.exists() else [sys.executable, "-m", "proxy"]


def _topoproxy(directory: Path, sock: Path, runtime: Path) -> list[str]:
    from proxy.backends.cgroup.fake.cpuset import FakeCgroups
    from proxy.model.idset import CpuSet, Mask

    online = Path("/sys/devices/system/cpu/online").read_text().strip()
    nodes = Path("/sys/devices/system/node/online")
    mask = Mask.parse(nodes.read_text().strip()) if nodes.exists() else Mask([0])
    FakeCgroups(directory / "cgroup", CpuSet.parse(online), mask, 2)
    config = directory / "config.yaml"
    config.write_text("apiVersion: topoproxy/v1\nkind: TopoproxyConfiguration\n")
    options = {
        "--config": config,
        "--listen": f"unix://{sock}",
        "--runtime": f"unix://{runtime}",
        "--admin": f"unix://{directory / 'admin.sock'}",
        "--state-dir": directory / "state",
        "--cgroup-root": directory / "cgroup",
    }
    return [*PROGRAM, "serve", *(str(part) for pair in options.items() for part in pair)]


def _plain(directory: Path, sock: Path, runtime: Path) -> list[str]:
    return [sys.executable, str(BENCH / "plain_proxy.py"), "--listen", str(sock), "--runtime", str(runtime)]


TOPOPROXY = Target("topoproxy", _topoproxy)
PLAIN = Target("plain grpc.aio", _plain, malloc=True)


def checkout(name: str, root: Path) -> Target:
    """Make a target of the sources in a checkout, run with the packages of this process.

    Raises:
        BenchError: There are no sources, or other ones would be run.
    """
    extra_environment = {"PYTHONPATH": str(root)}
    argv = [sys.executable, "-c", "import proxy.daemon; print(proxy.__file__)"]
    env = environment(malloc=False) | extra_environment
    done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise BenchError(f"cannot run topoproxy of {root}: {done.stderr.strip()[-400:]}")
    if Path(done.stdout.strip()).parent != root / "proxy":
        raise BenchError(f"cannot run topoproxy of {root}: {done.stdout.strip()} is imported")

    def command(directory: Path, sock: Path, runtime: Path) -> list[str]:
        return [sys.executable, "-m", "proxy", *_topoproxy(directory, sock, runtime)[len(PROGRAM) :]]

    return Target(name, command, extra_environment=extra_environment)


@contextlib.contextmanager
def ended(processes: list[Process]) -> Iterator[list[Process]]:
    """End all processes of the list when the block is left, the newest first."""
    try:
        yield processes
    finally:
        for process in reversed(processes):
            process.end()
