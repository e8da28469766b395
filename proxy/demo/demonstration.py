"""Runs the whole demonstration: sets up the environment, describes it, runs the steps, prints a summary."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.demo.environment import DemoEnvironment, containerd_environment, standin_environment
from proxy.demo.scenario import Scenario
from proxy.demo.snapshot import DemoError
from proxy.demo.step_runner import StepRunner
from proxy.demo.terminal import Screen
from proxy.model.errors import TopoproxyError
from proxy.model.machine import Machine

_NEXT_COMMANDS = (
    ("topology", "this machine as the proxy sees it"),
    ("simulate --help", "what would happen to your pods on described machines, and which would be rejected"),
    ("explain POD", "where topoproxy serve runs: why a container is on its CPUs, or why it was rejected"),
)
"""Commands, and what they show."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line.

    Attributes:
        runtime: ``standin`` or ``containerd``.
        socket: The containerd to look for.
        pause: Seconds to wait after each step.
        keep: Whether the directory stays.
        cgroup_version: Version of the imitated cgroup tree.
    """

    runtime: str = "standin"
    socket: Path = Path("/run/containerd/containerd.sock")
    pause: float = 0.0
    keep: bool = False
    cgroup_version: int = 1


def run_demonstration(screen: Screen, options: DemoOptions) -> bool:
    """Run the demonstration.

    Returns:
        True if all checks succeeded.

    Raises:
        TopoproxyError: The environment cannot be set up.
    """
    started = time.monotonic()
    with (
        _interruptible(),
        _directory(screen, options.keep) as directory,
        _environment(directory, options) as environment,
    ):
        _show_introduction(screen, environment)
        runner = StepRunner(environment, screen, options.pause)
        try:
            steps = Scenario(runner).steps()
            for step in steps:
                runner.run_step(step)
        except (DemoError, TopoproxyError) as error:
            screen.line()
            screen.failure(str(error))
            _show_log_end(screen, environment)
            return False
        screen.title(0, "That was it")
        screen.paragraph(
            f"{len(steps)} steps, {runner.checks} claims compared with the cgroup files and found true, "
            f"{time.monotonic() - started:.0f} s."
        )
        _show_next_commands(screen)
    return True


def _show_next_commands(screen: Screen) -> None:
    screen.line()
    screen.paragraph("To try next:")
    program = _program()
    for command, what in _NEXT_COMMANDS:
        screen.line(f"    {program} {command}")
        screen.paragraph(what, indent=6)


def _program() -> str:
    """Return the command for ``topoproxy``: its path if it is installed but not on the PATH."""
    installed = Path(sys.executable).with_name("topoproxy")
    if shutil.which("topoproxy") is not None or not installed.exists():
        return "topoproxy"
    with contextlib.suppress(OSError, ValueError):  # it is elsewhere, or the current directory was removed
        return str(installed.relative_to(Path.cwd()))
    return str(installed)


def _show_introduction(screen: Screen, environment: DemoEnvironment) -> None:
    screen.title(0, "topoproxy: containers run on the CPUs that were chosen for them")
    screen.paragraph(environment.about)
    screen.line()
    screen.paragraph(f"The machine: {_machine_text(environment.machine)}.")
    glyph = screen.glyph
    screen.paragraph(
        "Every step shows the CPUs from left to right: the owners before and after, then each container's "
        f"cgroup file: {glyph('■', '#')} may run there, {glyph('▲', '+')} gained, {glyph('✗', 'x')} left."
    )


def _machine_text(machine: Machine) -> str:
    def count(number: int, word: str) -> str:
        return f"{number} {word}{'' if number == 1 else 's'}"

    return ", ".join(
        (
            count(len(machine.packages), "socket"),
            count(len(machine.nodes), "NUMA node"),
            count(len(machine.cores), "core"),
            count(len(machine.cpus), "CPU"),
        )
    )


def _show_log_end(screen: Screen, environment: DemoEnvironment) -> None:
    """Show the end of the proxy's log: the reason is often there."""
    lines = environment.proxy.log.read_text(errors="replace").splitlines()[-8:]
    for line in lines:
        screen.line(screen.paint(f"    {line}", "2"))


def _environment(directory: Path, options: DemoOptions) -> contextlib.AbstractContextManager[DemoEnvironment]:
    if options.runtime == "containerd":
        return containerd_environment(directory, options.socket)
    return standin_environment(directory, version=options.cgroup_version)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that the started processes are ended."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _directory(screen: Screen, keep: bool) -> Iterator[Path]:
    # /tmp, not TMPDIR: a unix socket's path has 107 bytes at most.
    directory = Path(tempfile.mkdtemp(prefix="topoproxy-demo-", dir="/tmp"))
    try:
        yield directory
    finally:
        if keep:
            screen.paragraph(f"Its files are left in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
