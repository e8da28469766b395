"""A node with directories of hooks, for the end-to-end tests."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bed import wait_for
from daemon import PROGRAM, Daemon

from proxy.admin.client import query_admin

if TYPE_CHECKING:
    from cri import Cri

HEAD = "from proxy.hooks import api\nAPI_VERSION = 1\n"


class HookedNode:
    """A daemon, a client of it, and the hooks that are put into its directories.

    Attributes:
        directory: Where its hook files are.
        servers: Where its hook servers are named.
    """

    def __init__(self, daemon: Daemon, cri: Cri, directory: Path) -> None:
        self.daemon = daemon
        self.cri = cri
        self.directory = directory / "hooks.d"
        self.servers = directory / "hookserver.d"

    # Hooks.

    def put(self, name: str, text: str, *, wait: bool = True) -> None:
        """Put a hook file there as a whole; what every hook begins with is added."""
        draft = self.directory / f".{name}.new"
        draft.write_text(HEAD + textwrap.dedent(text))
        draft.replace(self.directory / f"{name}.py")
        if wait:
            self.runs(name)

    def name_server(self, name: str, socket: Path, policy: str, *points: str) -> None:
        """Name a hook server as koordlet does, and wait until it is asked."""
        reported = {"remote-endpoint": str(socket), "failure-policy": policy, "runtime-hooks": points}
        (self.servers / f"{name}.json").write_text(json.dumps(reported))
        self.runs(name)

    def runs(self, name: str) -> None:
        """Wait until a hook is in use."""
        wait_for(f"hook {name} to be in use", lambda: self.hook(name)["state"] == "running")

    def hooks(self) -> dict[str, dict[str, Any]]:
        """What the daemon says of each of its hooks."""
        answer: Any = query_admin(self.daemon.directory / "admin.sock", "/status", timeout=20)
        return {entry["name"]: entry for entry in answer.get("hooks", {}).get("hooks", [])}

    def hook(self, name: str) -> dict[str, Any]:
        """What the daemon says of one; no state as long as it does not know it."""
        return self.hooks().get(name, {"state": ""})

    def problems(self) -> str:
        """All that is wrong, as the daemon's status has it."""
        answer: Any = query_admin(self.daemon.directory / "admin.sock", "/status", timeout=20)
        return json.dumps(answer["problems"])

    def command(self, *words: str) -> str:
        """Run ``topoproxy hooks``, which must succeed; returns what it prints."""
        done = subprocess.run(
            [PROGRAM, "hooks", *words, "--config", self.daemon.directory / "config.yaml"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def labels_of(cri: Cri, container: str) -> dict[str, str]:
    """A container's labels, as the runtime has them."""
    return dict(cri.status(container).status.labels)
