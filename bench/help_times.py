"""Measures ``--help`` of each command: the best of some runs of a new process, in milliseconds.

    make help-times

Ends with 1 if a command takes longer than the limit. Not a test: a busy machine would fail it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator

import click

from proxy.cli.main import cli

BOUND_MS = 150.0


def commands(command: click.Command, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the names of each command and of its groups; groups are included."""
    yield names
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (each := command.get_command(context, name)) is not None:
                yield from commands(each, (*names, name))


def best_ms(names: tuple[str, ...], runs: int) -> float:
    """Return the shortest time of some runs."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "proxy", *names, "--help"], check=True, stdout=subprocess.DEVNULL
        )
        times.append(time.perf_counter() - begin)
    return min(times) * 1000


def main() -> int:
    """Print the times, the longest first."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=5)
    runs = options.parse_args().runs
    rows = sorted(((best_ms(names, runs), " ".join(names)) for names in commands(cli)), reverse=True)
    for milliseconds, names in rows:
        print(f"{milliseconds:6.0f} ms  topoproxy {names}".rstrip())
    print(f"longest {rows[0][0]:.0f} ms, bound {BOUND_MS:.0f} ms, {len(rows)} commands")
    return int(rows[0][0] > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main())
