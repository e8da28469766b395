"""A device plugin whose devices are files, so that a test in another process can control it.

    python file_plugin.py DIRECTORY SOCKETS RESOURCE

Each file in DIRECTORY/devices is a device and contains ``healthy`` or ``unhealthy`` and its NUMA nodes. Each
allocation is appended to DIRECTORY/allocated as a line. While DIRECTORY/hold exists, Allocate waits and
creates DIRECTORY/held.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxy.device_kit.api import AllocateAnswer, DeviceMount, DeviceNode, DevicePlugin, PluginDevice, serve

HOLD_S = 60.0


class FilePlugin(DevicePlugin):
    """Reports files as devices."""

    period_s = 0.1

    def __init__(self, directory: Path, resource: str) -> None:
        self.resource = resource
        self._directory = directory

    def devices(self) -> Iterator[PluginDevice]:
        for file in sorted((self._directory / "devices").iterdir()):
            health, *nodes = file.read_text().split()
            yield PluginDevice(file.name, health == "healthy", tuple(map(int, nodes)))

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        end = time.monotonic() + HOLD_S
        while (self._directory / "hold").exists() and time.monotonic() < end:
            (self._directory / "held").touch()
            time.sleep(0.02)
        with (self._directory / "allocated").open("a") as log:
            log.write(",".join(ids) + "\n")
        return AllocateAnswer(
            envs={"DEVICES": ",".join(ids)},
            annotations={f"{self.resource}-devices": ",".join(ids)},
            mounts=(DeviceMount(str(self._directory / "library"), "/library", read_only=True),),
            devices=tuple(DeviceNode("/dev/null", f"/dev/{name}", "rw") for name in ids),
        )


if __name__ == "__main__":
    serve(FilePlugin(Path(sys.argv[1]), sys.argv[3]), directory=Path(sys.argv[2]))
