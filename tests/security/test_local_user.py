"""A local user without root cannot reach a running daemon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.runtime import StandInRuntime
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(1, 1, 4, 1)
ANOTHER_USER = 65534
ATTEMPTS = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
def connect(path):
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
def read(path):
    open(path).close()
def write(path):
    open(path, "a").close()
directory = sys.argv[2]
for what, name in (
    (connect, "cri.sock"), (connect, "admin.sock"), (connect, "hooks.sock"), (os.listdir, "state"),
    (read, "state/ledger.jsonl"), (write, "cri.sock.lock"), (os.unlink, "cri.sock"), (write, "new"),
):
    try:
        what(os.path.join(directory, name))
    except PermissionError:
        continue
    except OSError as error:
        print(what.__name__, name, error)
    else:
        print(what.__name__, name, "was possible")
print("end")
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with the mode of /run/topoproxy: other users may traverse it."""
    with tempfile.TemporaryDirectory(prefix="tp-") as made:
        Path(made).chmod(0o711)
        yield Path(made)


def attempts(user: int, directory: Path) -> list[str]:
    command = [sys.executable, "-I", "-c", ATTEMPTS, str(user), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_another_user_reaches_no_socket_and_no_state(directory: Path) -> None:
    cgroups = FakeCgroups(directory / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1)
    runtime = StandInRuntime(directory / "runtime.sock", cgroups)
    runtime.start()
    (directory / "runtime.sock").chmod(0o660)
    config = parse(
        f"""
listen: unix://{directory}/cri.sock
adminSocket: unix://{directory}/admin.sock
runtime: unix://{directory}/runtime.sock
stateDir: {directory}/state
hooks: {{serve: "unix://{directory}/hooks.sock"}}
""",
        "test",
    )

    async def tried() -> tuple[list[str], list[str]]:
        daemon = Daemon(config, machine=MACHINE, cgroups=cgroups)
        await daemon.start()
        try:
            async with asyncio.timeout(60):
                while not (directory / "hooks.sock").exists():
                    await asyncio.sleep(0.05)
            found = await asyncio.to_thread(attempts, ANOTHER_USER, directory)
            return found, await asyncio.to_thread(attempts, 0, directory)
        finally:
            await daemon.stop()

    try:
        found, of_root = asyncio.run(tried())
    finally:
        runtime.stop()
    assert found == ["end"]
    assert len(of_root) == 9  # root succeeds with all attempts, so the attempts themselves work
    assert all(line.endswith("was possible") for line in of_root[:-1])
