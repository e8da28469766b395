"""Detecting whether kubelet runs: it writes its state file from memory, so it must not run while we write.

Three signs, each of which can fail: a process of that name (kubelet may run inside another program), a
process that listens at its sockets (a dead kubelet leaves them behind, so one connects), and its health port
(which may be switched off, or be another). One sign is enough. Everything here may block for a short time.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

NAMES = ("kubelet", "hyperkube", "kubelite", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s")
"""Process names (``comm``) of kubelet and of programs that have it inside."""
SOCKETS = ("pod-resources/kubelet.sock", "device-plugins/kubelet.sock")
HEALTH = ("127.0.0.1", 10248)
PATIENCE_S = 1.0


def signs_of_kubelet(directory: Path, procfs: Path, health: tuple[str, int] = HEALTH) -> tuple[str, ...]:
    """List the signs that kubelet runs.

    Args:
        directory: kubelet's directory.
        procfs: Used in place of /proc.
        health: Where its health port is.
    """
    return (*_processes(procfs), *_listening(directory), *_healthy(health))


def _processes(procfs: Path) -> Iterator[str]:
    try:
        entries = [entry for entry in procfs.iterdir() if entry.name.isdigit()]
    except OSError:
        return
    for entry in sorted(entries, key=lambda entry: int(entry.name)):
        try:
            name = (entry / "comm").read_text(errors="replace").strip()
            if name in NAMES and _alive(entry):
                yield f"process {entry.name} is {name}"
        except OSError:
            continue  # it has ended meanwhile


def _alive(entry: Path) -> bool:
    """Return whether a process is alive: neither a zombie nor dead."""
    # The name in brackets may have blanks and brackets of its own.
    after = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return not after or after[0] not in ("Z", "X")


def _listening(directory: Path) -> Iterator[str]:
    for name in SOCKETS:
        path = directory / name
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(PATIENCE_S)
                client.connect(str(path))
        except OSError:
            continue
        yield f"a process listens at {path}"


def _healthy(health: tuple[str, int]) -> Iterator[str]:
    try:
        with socket.create_connection(health, timeout=PATIENCE_S):
            pass
    except OSError:
        return
    yield f"its health port {health[0]}:{health[1]} answers"
