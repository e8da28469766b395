"""Programs of Koordinator for the tests: its runtime proxy, and a hook server made of koordlet's packages.

``build.sh`` builds them; ``TOPOPROXY_KOORDINATOR`` names their directory.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cri import Cri
from private_runtime import end_process, wait_for

DIRECTORY = os.environ.get("TOPOPROXY_KOORDINATOR") or ""
PROGRAMS = ("koord-runtime-proxy", "hookserver")

INSIDE = """
mount -t tmpfs none /etc && mkdir -p /etc/runtime/hookserver.d &&
    mount --bind "$0" /etc/runtime/hookserver.d && exec "$@"
"""
"""Run a program with its own /etc, because its directory of hook servers is a constant."""


def koordinator_skip_reason() -> str:
    """Return why Koordinator's programs cannot run; an empty string if they can."""
    if not DIRECTORY:
        return "Koordinator's programs are not named: make test-koordinator"
    missing = [name for name in PROGRAMS if not os.access(Path(DIRECTORY, name), os.X_OK)]
    return f"no {', '.join(missing)} in {DIRECTORY} (TOPOPROXY_KOORDINATOR)" if missing else ""


class Program:
    """A process of Koordinator; ``log`` has its output."""

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
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def _must_live(self) -> None:
        if not self.lives():
            raise RuntimeError(f"the process has ended: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Stop the process."""
        if self._process is not None:
            end_process(self._process)
            self._process = None


class RuntimeProxy(Program):
    """koord-runtime-proxy in front of a runtime.

    Attributes:
        socket: The socket on which it listens.
        servers: Its directory of hook servers; it watches the directory for new files.
    """

    def __init__(self, directory: Path, runtime: Path) -> None:
        super().__init__(directory, "koord-runtime-proxy")
        self.socket = directory / "koord.sock"
        self.servers = directory / "hookserver.d"
        self.servers.mkdir(exist_ok=True)
        self._runtime = runtime

    def start(self, cgroup: str) -> None:
        """Start the proxy and wait until it forwards a call."""
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
        """Return a client that is connected to the proxy."""
        return Cri(self.socket, cgroup)


class KoordletHookServer(Program):
    """koordlet's hook server, with its plugins for CPUs and GPUs; it registers itself in a directory."""

    def __init__(self, directory: Path, servers: Path) -> None:
        super().__init__(directory, "hookserver")
        self.socket = directory / "koordlet.sock"
        self._servers = servers

    def start(self, shared: str, policy: str = "Fail", manager: str = "none") -> None:
        """Start the hook server and wait until it has registered.

        Args:
            shared: The CPUs of the node's shared pool, as koordlet would read them from the cluster.
            policy: The failure policy that it registers.
            manager: Kubelet's CPU manager policy, as koordlet would read it.
        """
        program = str(Path(DIRECTORY, "hookserver"))
        options = [f"--shared={shared}", f"--policy={policy}", f"--manager={manager}"]
        self._run([program, f"--socket={self.socket}", f"--directory={self._servers}", *options, "-v=5"])

        def registered() -> bool:
            self._must_live()
            return (self._servers / "koordlet.json").is_file()

        wait_for("koordlet's hook server to register", registered, limit=30)
