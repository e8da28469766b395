"""A node with hook directories, for the end-to-end tests."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon import PROGRAM, DaemonProcess
from private_runtime import wait_for

from proxy.admin.client import query_admin

if TYPE_CHECKING:
    from cri import Cri

HEAD = "from proxy.hooks import api\nAPI_VERSION = 1\n"


class HookedNode:
    """A daemon, a client of it, and the hooks that are put into its directories.

    Attributes:
        directory: The directory of its hook files.
        servers: The directory of the configurations of its hook servers.
    """

    def __init__(self, daemon: DaemonProcess, cri: Cri, directory: Path) -> None:
        self.daemon = daemon
        self.cri = cri
        self.directory = directory / "hooks.d"
        self.servers = directory / "hookserver.d"

    # Hooks.

    def put_hook(self, name: str, text: str, *, wait: bool = True) -> None:
        """Write a hook file atomically, with the common header of all hooks."""
        draft = self.directory / f".{name}.new"
        draft.write_text(HEAD + textwrap.dedent(text))
        draft.replace(self.directory / f"{name}.py")
        if wait:
            self.wait_until_in_use(name)

    def register_server(self, name: str, socket: Path, policy: str, *points: str) -> None:
        """Register a hook server as koordlet does, and wait until the daemon uses it."""
        config = {"remote-endpoint": str(socket), "failure-policy": policy, "runtime-hooks": points}
        (self.servers / f"{name}.json").write_text(json.dumps(config))
        self.wait_until_in_use(name)

    def wait_until_in_use(self, name: str) -> None:
        """Wait until a hook is in use."""
        wait_for(f"hook {name} to be in use", lambda: self.hook(name)["state"] == "running")

    def hooks(self) -> dict[str, dict[str, Any]]:
        """Return the daemon's status of each of its hooks."""
        answer: Any = query_admin(self.daemon.directory / "admin.sock", "/status", timeout=20)
        return {entry["name"]: entry for entry in answer.get("hooks", {}).get("hooks", [])}

    def hook(self, name: str) -> dict[str, Any]:
        """Return the daemon's status of a hook; an empty state if the daemon does not know the hook."""
        return self.hooks().get(name, {"state": ""})

    def problems(self) -> str:
        """Return the problems in the daemon's status, as JSON."""
        answer: Any = query_admin(self.daemon.directory / "admin.sock", "/status", timeout=20)
        return json.dumps(answer["problems"])

    def command(self, *args: str) -> str:
        """Run ``topoproxy hooks``, which must succeed; returns its output."""
        done = subprocess.run(
            [PROGRAM, "hooks", *args, "--config", self.daemon.directory / "config.yaml"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def labels_of(cri: Cri, container: str) -> dict[str, str]:
    """Return the labels of a container from the runtime."""
    return dict(cri.status(container).status.labels)
