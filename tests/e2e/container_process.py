"""Read the process of a running container from /proc."""

from __future__ import annotations

from pathlib import Path

from cri import cgroup_of
from private_runtime import wait_for


def pid_of(container: str) -> int:
    """Return the pid of a running container, once the process runs the container's program.

    A container is started when the runtime lets ``runc init`` continue, which then executes the program.
    Until the kernel has built the new process image (``begin_new_exec`` to ``create_elf_tables``), the
    command line and the environment are empty.
    """
    directory = cgroup_of(container)
    assert directory is not None
    pid = int((directory / "cgroup.procs").read_text().split()[0])
    process = Path("/proc") / str(pid)

    def runs_the_program() -> bool:
        args = (process / "cmdline").read_bytes().split(b"\0")
        return b"init" not in args and bool((process / "environ").read_bytes())

    wait_for("the container's program", runs_the_program)
    return pid


def inside(container: str, path: str) -> Path:
    """Return the path on the host of a path in a running container."""
    return Path(f"/proc/{pid_of(container)}/root") / path.lstrip("/")


def environment(container: str) -> dict[str, str]:
    """Return the environment of a running container's process."""
    entries = Path(f"/proc/{pid_of(container)}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
