"""A node whose daemon has its configuration from a file, and reloads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.load import load, override
from proxy.config.machine_checks import start_config
from proxy.config.origin import Origin
from proxy.daemon import Daemon
from tests.testkit.daemon import DaemonNode


class FileNode(DaemonNode):
    """Writes ``config.yaml`` and creates daemons from it."""

    @property
    def file(self) -> Path:
        """The configuration file."""
        return self.directory / "config.yaml"

    def write(self, text: str) -> None:
        """Write the configuration: the paths of the node, and more lines."""
        self.file.write_text(self.configuration(text))

    def from_file(self, text: str = "", options: dict[str, tuple[str, str]] | None = None) -> Daemon:
        """Write the configuration and create a daemon from it."""
        self.write(text)
        config, _ = start_config(override(load(self.file), options or {}), self.machine)
        origin = Origin(self.file, FrozenMapping(options or {}), trusted=False)
        return Daemon(replace(config, origin=origin), machine=self.machine, cgroups=self.cgroups)

    async def reload(self, daemon: Daemon, text: str | None = None) -> dict[str, Any]:
        """Write other lines (None: leave the file), reload, and return the status of the reload."""
        if text is not None:
            self.write(text)
        assert daemon.parts.reload is not None
        page: dict[str, Any] = await daemon.parts.reload.action()
        return page
