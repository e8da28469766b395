"""Runs ``systemctl``: every node with systemd has the command, and it needs no connection to D-Bus."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from proxy.model.errors import TopoproxyError

SHOWN = ("ActiveState", "SubState", "Result", "MainPID", "ControlGroup", "NRestarts")


def systemctl(words: Sequence[str], limit: float) -> str:
    """Run ``systemctl``.

    Args:
        words: Its arguments.
        limit: Seconds that it may take.

    Returns:
        What it prints.

    Raises:
        TopoproxyError: It fails, or takes longer.
    """
    what = f"systemctl {' '.join(words)}"
    try:
        done = subprocess.run(  # noqa: S603  the words are ours
            ["systemctl", *words],  # noqa: S607  the command of the node's PATH
            capture_output=True,
            text=True,
            timeout=max(limit, 1.0),
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise TopoproxyError(f"cannot run {what}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise TopoproxyError(f"cannot run {what}: it takes more than {limit:.0f} s") from None
    if done.returncode:
        cause = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise TopoproxyError(f"cannot run {what}: {cause[0]}")
    return done.stdout


def enabled_state(unit: str) -> str:
    """Return ``enabled``, ``disabled``, ``masked`` and so on; empty where there is no such unit."""
    try:
        done = subprocess.run(  # noqa: S603
            ["systemctl", "is-enabled", unit],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def unit_state(unit: str) -> dict[str, str]:
    """Return the properties that describe the state of a unit; empty where they cannot be read."""
    try:
        text = systemctl(["show", unit, "-p", ",".join(SHOWN)], 10)
    except TopoproxyError:
        return {}
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
