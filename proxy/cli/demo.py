"""``topoproxy demo``: runs a demonstration of exclusive CPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from proxy.cli.settings import PATH, FiniteRange

_PAUSE = 1.5


@click.command("demo")
@click.option(
    "--runtime",
    type=click.Choice(["standin", "containerd"]),
    default="standin",
    show_default=True,
    help="standin: an imitated node, without root. containerd: this machine's, with its real cgroups.",
)
@click.option(
    "--containerd-socket",
    type=PATH,
    default=Path("/run/containerd/containerd.sock"),
    show_default=True,
    help="With --runtime containerd: its socket; if no containerd answers there, a private one is started.",
)
@click.option(
    "--cgroup-version",
    type=click.Choice(["1", "2"]),
    default="1",
    show_default=True,
    help="With --runtime standin: the version of the imitated cgroup tree.",
)
@click.option(
    "--pause",
    type=FiniteRange(0, 60),
    metavar="SECONDS",
    default=None,
    show_default=f"{_PAUSE} in a terminal, otherwise 0",
    help="Seconds to wait after each step.",
)
@click.option("--fast", is_flag=True, help="Do not wait between steps.")
@click.option("--no-color", is_flag=True, help="No colours; NO_COLOR=1 does the same.")
@click.option(
    "--width",
    type=click.IntRange(60, 240),
    default=None,
    help="The width in columns; by default that of the terminal.",
)
@click.option(
    "--keep", is_flag=True, help="Keep its directory (configuration, log, cgroup tree) and print the path."
)
def demo(
    runtime: str,
    containerd_socket: Path,
    cgroup_version: str,
    pause: float | None,
    fast: bool,
    no_color: bool,
    width: int | None,
    keep: bool,
) -> None:
    """Demonstrate topoproxy on an imitated node, or on containerd.

    Pods of every QoS class come and go through the real proxy; after each step the cgroup files are read and
    compared with the rules. Ends with exit status 1 if a check fails.
    """
    from proxy.demo.demonstration import DemoOptions, run_demonstration
    from proxy.demo.terminal import Screen

    screen = Screen(colour=False if no_color else None, width=width)
    wait = 0.0 if fast else pause if pause is not None else _PAUSE if sys.stdout.isatty() else 0.0
    options = DemoOptions(runtime, containerd_socket, wait, keep, int(cgroup_version))
    if not run_demonstration(screen, options):
        raise SystemExit(1)
