"""A whole daemon in this process, with the stand-in runtime and an imitated cgroup tree.

A test takes a node, creates daemons on it and runs a scenario while a daemon is running::

    with temporary_node() as node:
        daemon = node.daemon("reconcilePeriod: 200ms\\n")

        async def scenario() -> None:
            container = await node.launch(PodSpec("web", "LS"))
            await until(lambda: node.cpus(container) == "0-15")

        run(daemon, scenario)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.config.load import parse
from proxy.config.origin import Origin
from proxy.daemon import Daemon
from proxy.demo.client import CriClient, DemoPod
from proxy.demo.runtime import StandInRuntime
from proxy.executor.background import Threads
from proxy.frontends.cri.relay_loop import RelayLoop
from proxy.topology.regular_machine import regular_machine
from tests.testkit.answers import check_answer
from tests.testkit.waiting import LIMIT_S, wait_until

MACHINE = regular_machine(2, 1, 4, 2)
"""Two sockets with one NUMA node each, 4 cores of 2 threads: 16 CPUs."""


class DaemonNode:
    """The files, cgroups and runtime of one test.

    Attributes:
        directory: All files of the node are below this directory.
        machine: The machine that daemons are given.
        cgroups: The imitated cgroup tree.
        runtime: The container runtime; it is not started yet. A subclass may replace it.
        settings: Lines of configuration that all daemons of a subclass have.
    """

    settings = ""

    def __init__(self, directory: Path, machine: Any = MACHINE, version: int = 1) -> None:
        self.directory = directory
        self.machine = machine
        self.cgroups = FakeCgroups(directory / "cgroup", machine.online, machine.memory_nodes, version)
        self.runtime: Any = StandInRuntime(directory / "runtime.sock", self.cgroups)

    def configuration(self, text: str = "", name: str = "cri") -> str:
        """Return a configuration with the paths of this node.

        Args:
            text: More lines.
            name: Begins the names of the daemon's two sockets, so that several daemons can run.
        """
        admin = "admin" if name == "cri" else f"{name}-admin"
        paths = (
            f"listen: unix://{self.directory}/{name}.sock\n"
            f"adminSocket: unix://{self.directory}/{admin}.sock\n"
            f"runtime: unix://{self.directory}/runtime.sock\n"
            f"stateDir: {self.directory}/state\n"
        )
        return "\n".join(part.strip("\n") for part in (text, self.settings, paths) if part)

    def daemon(self, text: str = "", name: str = "cri", file: Path | None = None, **parts: Any) -> Daemon:
        """Create a daemon.

        Args:
            text: More lines of its configuration.
            name: As for ``configuration``.
            file: What it reads at a reload.
            parts: Replace the machine and the cgroups that it is given.
        """
        parts = {"machine": self.machine, "cgroups": self.cgroups, **parts}
        origin = None if file is None else Origin(file, trusted=False)
        return Daemon(replace(parse(self.configuration(text, name), "test"), origin=origin), **parts)

    def client(self, name: str = "cri") -> CriClient:
        """Connect to a socket of the node: ``cri`` is the daemon's, ``runtime`` the runtime's own."""
        return CriClient(str(self.directory / f"{name}.sock"))

    async def launch(self, spec: DemoPod, name: str = "cri") -> str:
        """Run a pod with one container through a socket; return the container's id."""

        def work() -> str:
            with self.client(name) as client:
                return client.launch(spec).container_id

        return await asyncio.to_thread(work)

    def cpus(self, container_id: str) -> str:
        """Return the CPUs of the container's cgroup as a list, or "" if it has no cgroup."""
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).cpus)


AnyNode = TypeVar("AnyNode", bound=DaemonNode)


@contextlib.contextmanager
def temporary_node(make: Callable[[Path], AnyNode] = DaemonNode) -> Iterator[AnyNode]:  # type: ignore[assignment]
    """Create a node in a short temporary directory (socket paths are limited) and start its runtime."""
    with tempfile.TemporaryDirectory(prefix="tp-") as directory:
        node = make(Path(directory))
        node.runtime.start()
        try:
            yield node
        finally:
            node.runtime.stop()
            join_left_threads()
            # A call whose client has gone continues in the runtime, and writes a cgroup that is removed next.
            with contextlib.suppress(TimeoutError):  # a test that failed may still hold one
                wait_until(lambda: all(call.done for call in node.runtime.calls), LIMIT_S)


def join_left_threads() -> None:
    """Wait for threads that daemons left behind at their end: they still write files that are removed next.

    On a busy machine, a step of the shutdown that usually takes milliseconds does not end in time.
    """
    for thread in threading.enumerate():
        pool = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(pool, Threads) and pool._closed:
            thread.join(LIMIT_S)


def run(
    daemon: Any, scenario: Callable[[], Coroutine[Any, Any, object]], *, reconciled: bool = False
) -> None:
    """Start the daemon, run the scenario, and stop the daemon whatever happened.

    At the end of the scenario, the status must match its JSON Schema.

    Args:
        daemon: What :meth:`DaemonNode.daemon` returned.
        scenario: A coroutine function without arguments.
        reconciled: Whether to wait for the first reconcile with the runtime before the scenario.
    """

    async def whole() -> None:
        await daemon.start()
        try:
            if reconciled:
                async with asyncio.timeout(LIMIT_S):
                    await daemon.executor.reconciled.wait()
            await scenario()
            if daemon.parts.pages is not None:
                check_answer(json.loads(json.dumps(daemon.parts.pages.status(), default=str)))
        finally:
            await daemon.stop()

    with asyncio.Runner(loop_factory=RelayLoop) as runner:
        runner.run(whole())
