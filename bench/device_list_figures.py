"""Measures the time of a device list from a plugin to the state of the node: a command by itself

    .venv/bin/python bench/device_list_figures.py

A plugin in a process of its own sends lists of 1,000 devices, each with a NUMA node, to a daemon. The time
runs from the arrival of the message, in the thread that reads it, until the event loop has the devices in the
state of the node: reading, the two threads' waits for each other, the comparison of the lists, and the
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from procs import environment
from table import number, render

from proxy.backends.device_plugins import endpoint
from proxy.engine.node_events import DevicesChanged
from tests.testkit.daemon import DaemonNode, run
from tests.testkit.device_plugin import ScriptedPlugin, device
from tests.testkit.waiting import until

DEVICES, ROUNDS, LIMIT_MS = 1000, 50, 20.0
PAUSE_S = 0.15
"""The pause between two lists; lists that come within a tenth of a second replace each other."""


def plugin(directory: Path) -> None:
    """Run as the plugin: each list differs from the previous one in the health of one device."""
    listed = [device(f"device-{n:04}", n % 8) for n in range(DEVICES)]
    played = ScriptedPlugin(directory, listed).start()
    played.register(directory / "kubelet.sock")
    for number_of_list in range(10 * ROUNDS):
        time.sleep(PAUSE_S)
        changed = device("device-0000", 0, healthy=number_of_list % 2 == 1)
        played.update(changed, *listed[1:])


def measure(rounds: int = ROUNDS) -> list[float]:
    """Return the milliseconds of each list."""
    arrived, took = [0.0], list[float]()
    put = endpoint.ListFeed.put

    def noted(self: endpoint.ListFeed, message: bytes) -> None:
        arrived[0] = time.perf_counter()
        put(self, message)

    endpoint.ListFeed.put = noted  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory(prefix="df-") as base:
            _follow(Path(base), rounds, arrived, took)
    finally:
        endpoint.ListFeed.put = put  # type: ignore[method-assign]
    return took[:rounds]  # one more when the plugin ends


def _follow(base: Path, rounds: int, arrived: list[float], took: list[float]) -> None:
    one, directory = DaemonNode(base), base / "plugins"
    one.runtime.start()
    daemon: Any = one.daemon(f"devicePlugins: {{enabled: true, socketDirectory: {directory}}}\n")

    async def scenario() -> None:
        store, handle = daemon.executor.store, daemon.executor.store.handle

        def timed(event: Any) -> Any:
            result = handle(event)
            if isinstance(event, DevicesChanged) and event.devices is not None:
                assert len(store.state.devices.registered[event.resource]) == DEVICES
                took.append(1000 * (time.perf_counter() - arrived[0]))
            return result

        store.handle = timed
        await until((directory / "kubelet.sock").exists)
        command = [sys.executable, __file__, "--plugin", str(directory)]
        with subprocess.Popen(command, env=environment(malloc=False)) as process:
            try:
                await until(lambda: len(took) >= rounds, 10 + 2 * PAUSE_S * rounds, 0.05)
            finally:
                process.kill()
        await asyncio.sleep(0.1)

    try:
        run(daemon, scenario)
    finally:
        one.runtime.stop()


HEAD = ("a list of devices", "devices", "lists", "p50", "p99", "slowest", "bar")


def rows(took: list[float]) -> list[list[str]]:
    ordered = sorted(took)
    return [
        [
            "from its arrival to the state",
            str(DEVICES),
            str(len(took)),
            *(
                f"{number(ms)} ms"
                for ms in (statistics.median(took), ordered[len(took) * 99 // 100], ordered[-1])
            ),
            f"{number(LIMIT_MS)} ms",
        ]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plugin", help=argparse.SUPPRESS)
    directory = parser.parse_args().plugin
    if directory:
        plugin(Path(directory))
        return 0
    took = measure()
    print(render(HEAD, rows(took)))
    return int(statistics.median(took) >= LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
