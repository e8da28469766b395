"""Koordinator's own programs, for a test: its runtime proxy, and a hook server of koordlet's parts.

``build.sh`` makes them; ``TOPOPROXY_KOORDINATOR`` names their directory.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bed import end_process, wait_for
from cri import Cri

DIRECTORY = os.environ.get("TOPOPROXY_KOORDINATOR") or ""
PROGRAMS = ("koord-runtime-proxy", "hookserver")

INSIDE = """
mount -t tmpfs none /etc && mkdir -p /etc/runtime/hookserver.d &&
    mount --bind "$0" /etc/runtime/hookserver.d && exec "$@"
"""
"""Gives a program an /etc of its own: the directory of hook servers is a constant in it."""


def why_not_koordinator() -> str:
    """Return the reason why nothing of Koordinator's can be run here, or an empty string."""
    if not DIRECTORY:
        return "Koordinator's programs are not named: make test-koordinator"
    missing = [name for name in PROGRAMS if not os.access(Path(DIRECTORY, name), os.X_OK)]
    return f"no {', '.join(missing)} in {DIRECTORY} (TOPOPROXY_KOORDINATOR)" if missing else ""


class Program:
    """A process of Koordinator's; what it says is in ``log``."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.log = directory / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None

    def _run(self, command: list[str]) -> None:
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
            )

    def lives(self) -> bool:
        """Return whether it runs."""
        return self._process is not None and self._process.poll() is None

    def _must_live(self) -> None:
        if not self.lives():
            raise RuntimeError(f"it has ended: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            end_process(self._process)
            self._process = None


class RuntimeProxy(Program):
    """koord-runtime-proxy before a runtime.

    Attributes:
        socket: Where it listens.
        servers: Its directory of hook servers; it is notified of files in it at once.
    """

    def __init__(self, directory: Path, runtime: Path) -> None:
        super().__init__(directory, "koord-runtime-proxy")
        self.socket = directory / "koord.sock"
        self.servers = directory / "hookserver.d"
        self.servers.mkdir(exist_ok=True)
        self._runtime = runtime

    def start(self, cgroup: str) -> None:
        """Start it and wait until it hands on a call."""
        program = str(Path(DIRECTORY, "koord-runtime-proxy"))
        ends = [f"--koord-runtimeproxy-endpoint={self.socket}"]
        ends += [f"--remote-runtime-service-endpoint={self._runtime}"]
        space = ["unshare", "--mount", "--propagation", "private"]
        self._run([*space, "sh", "-c", INSIDE, str(self.servers), program, *ends])

        def answers() -> bool:
            self._must_live()
            with self.client(cgroup) as client:
                return bool(client.version(timeout=2).runtime_name)

        wait_for("koord-runtime-proxy to answer", answers, limit=30, pause=0.1)

    def client(self, cgroup: str) -> Cri:
        """A client that speaks through it."""
        return Cri(self.socket, cgroup)


class HookServer(Program):
    """koordlet's hook server, with its plugins for CPUs and GPUs; it registers itself in a directory."""

    def __init__(self, directory: Path, servers: Path) -> None:
        super().__init__(directory, "hookserver")
        self.socket = directory / "koordlet.sock"
        self._servers = servers

    def start(self, shared: str, policy: str = "Fail", manager: str = "none") -> None:
        """Start it and wait until it is registered.

        Args:
            shared: The CPUs of the node's shared pool, as koordlet would read them from the cluster.
            policy: What it registers.
            manager: Kubelet's CPU manager policy, as koordlet would read it.
        """
        program = str(Path(DIRECTORY, "hookserver"))
        reported = [f"--shared={shared}", f"--policy={policy}", f"--manager={manager}"]
        self._run([program, f"--socket={self.socket}", f"--directory={self._servers}", *reported, "-v=5"])

        def registered() -> bool:
            self._must_live()
            return (self._servers / "koordlet.json").is_file()

        wait_for("koordlet's hook server to register", registered, limit=30)
