"""The status page of whole daemons, byte for byte.

Each page is the answer of a daemon with the stand-in runtime, with ids, paths and times replaced by fixed
ones. ``make golden`` writes the files again; review the difference before you commit it.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import proxy.frontends.cri.client_watch as client_watch
from proxy.admin.client import query_admin
from proxy.admin.status_text import render
from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from tests.reload.node import FileNode
from tests.testkit.daemon import run
from tests.testkit.waiting import LIMIT_S, until

PAGES = Path(__file__).parent / "golden"
WIDTH = 120
NOW = 1_700_000_000.0
TIMES = {"uptime_s": 93_784.2, "last_s": 2.0, "age_s": 0.0, "last": NOW - 5, "at": NOW - 5, "first": NOW - 60}
SETTINGS = "cpuManagerPolicy: static\nreconcilePeriod: 10s\n"


class GoldenNode(FileNode):
    """A node with cgroup v2 and a kubelet directory of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, version=2)
        self.settings = f"kubelet: {{stateDir: {directory}/kubelet}}\n"
        (directory / "kubelet").mkdir()

    async def page(self) -> Any:
        """Return the answer of ``/status``."""
        return await asyncio.to_thread(query_admin, self.directory / "admin.sock", "/status", 30)

    async def calm(self, clients: int = 0) -> Any:
        """Return the answer once this number of clients is connected and all containers are reconciled."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                answer = await self.page()
                if answer["clients"] == clients and not any(row["differs"] for row in answer["containers"]):
                    return answer
                await asyncio.sleep(0.02)

    async def pods(self) -> list[str]:
        """Run a pod of each kind; return the ids of their containers."""
        specs = (
            DemoPod("web", "LS"),
            DemoPod("batch", "BE", KubeQos.BEST_EFFORT),
            DemoPod("trading", "LSE", KubeQos.GUARANTEED, "2-3", cpus=2),
            DemoPod("search", "LSR", KubeQos.GUARANTEED, "4", cpus=1),
            DemoPod("database", kube_qos=KubeQos.GUARANTEED, cpus=2),
        )
        return [await self.launch(spec) for spec in specs]


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenNode]:
    made = GoldenNode(tmp_path_factory.mktemp("g"))
    made.runtime.start()
    yield made
    made.runtime.stop()


def fixed(answer: Any, directory: Path) -> Any:
    """Replace the values that differ from run to run."""
    ids = {row["id"]: f"{number:02x}" * 16 for number, row in enumerate(answer["containers"], 0xC0)}

    def text(raw: str) -> str:
        for old, new in ids.items():
            raw = raw.replace(old, new)
        return re.sub(r"\b[0-9]+ s\b", "5 s", raw.replace(str(directory), "/run/node"))

    def value(name: str, held: Any) -> Any:
        if isinstance(held, dict):
            return {key: value("methods" if name == "methods" else key, each) for key, each in held.items()}
        if isinstance(held, list):
            return [value(name, each) for each in held]
        if isinstance(held, str):
            return text(held)
        if name == "methods" and held is not None:
            return 60.0
        return TIMES[name] if name in TIMES and held is not None else held

    whole: Any = value("", answer)
    return {**whole, "version": "1.2.3", "pid": 4242}


def compare(name: str, answer: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compare the page with its file, or write the file."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    page = render(fixed(answer, directory), WIDTH)
    monkeypatch.undo()
    file = PAGES / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(page)
    assert page == file.read_text(), f"{file}: make golden writes it again"
    return page


@pytest.fixture
def golden(node: GoldenNode, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a scenario with a daemon, and compare the page at its end; the scenario may return the answer."""

    def check(
        name: str, scenario: Callable[[Daemon], Any], text: str = "", *, reconciled: bool = True
    ) -> None:
        answers: list[Any] = []

        async def answered() -> None:
            answers.append(await scenario(daemon) or await node.calm())

        daemon = node.from_file(SETTINGS + text)
        run(daemon, answered, reconciled=reconciled)
        compare(name, answers[0], node.directory, monkeypatch)

    return check


def test_the_page_shows_a_ready_node(node: GoldenNode, golden: Callable[..., None]) -> None:
    async def scenario(daemon: Daemon) -> Any:
        await node.pods()
        with node.client() as client:
            await asyncio.to_thread(client.version)
            return await node.calm(clients=1)

    golden("ready", scenario)


def test_the_page_shows_a_disconnected_runtime(node: GoldenNode, golden: Callable[..., None]) -> None:
    node.runtime.stop()

    async def scenario(daemon: Daemon) -> None:
        await until(lambda: daemon.parts.reconciler is not None and daemon.parts.reconciler.failure)

    golden("not-connected", scenario, reconciled=False)


async def try_launch(node: GoldenNode, spec: DemoPod) -> None:
    """Try to run a pod twice; kubelet would retry without end."""
    for _ in range(2):
        with pytest.raises(TopoproxyError):
            await node.launch(spec)


def test_the_page_shows_what_enforce_would_do(node: GoldenNode, golden: Callable[..., None]) -> None:
    async def scenario(daemon: Daemon) -> None:
        await node.pods()
        await node.launch(DemoPod("rival", "LSE", KubeQos.GUARANTEED, "3,5", cpus=2))
        executor = daemon.executor
        assert executor is not None
        for _ in range(2):
            passes = executor.telemetry.registry.page()["reconciles"]
            executor.reconcile_requested.set()
            await until(lambda passes=passes: executor.telemetry.registry.page()["reconciles"] > passes)

    golden("observing", scenario, "mode: observe\n")


def test_the_page_shows_pods_that_are_only_observed(node: GoldenNode, golden: Callable[..., None]) -> None:
    async def scenario(daemon: Daemon) -> None:
        await node.pods()

    golden("staged", scenario, "enforce: {podSelector: {matchLabels: {koordinator.sh/qosClass: LSE}}}\n")


def test_the_page_shows_a_released_node(node: GoldenNode, golden: Callable[..., None]) -> None:
    async def scenario(daemon: Daemon) -> None:
        await node.pods()
        await asyncio.to_thread(query_admin, node.directory / "admin.sock", "/release/start", 30, act=True)
        await until(
            lambda: daemon.parts.pages is not None and daemon.parts.pages.status()["mode"] == "released"
        )

    golden("released", scenario)


def test_the_page_shows_a_drifted_cpuset(node: GoldenNode, golden: Callable[..., None]) -> None:
    async def scenario(daemon: Daemon) -> Any:
        web, *_ = await node.pods()
        await node.calm()
        assert daemon.executor is not None
        path = node.cgroups.find("", web)
        assert path is not None
        held = asyncio.Event()
        loop = asyncio.get_running_loop()
        # The kernel worker is busy: a value written by another program stays until the worker is free.
        working = daemon.executor.kernel.submit(
            lambda: asyncio.run_coroutine_threadsafe(held.wait(), loop).result()
        )
        node.cgroups.write(path, CpuSet.parse("0-15"), None)
        answer = await node.page()
        held.set()
        await working
        return answer

    golden("drifting", scenario, "settle: {enabled: false}\n")


def test_the_page_shows_refused_containers(node: GoldenNode, golden: Callable[..., None]) -> None:
    async def scenario(daemon: Daemon) -> None:
        await node.launch(DemoPod("trading", "LSE", KubeQos.GUARANTEED, "2-3", cpus=2))
        await try_launch(node, DemoPod("rival", "LSE", KubeQos.GUARANTEED, "3,5", cpus=2))
        await try_launch(node, DemoPod("huge", kube_qos=KubeQos.GUARANTEED, cpus=40))

    golden("rejected", scenario)


def test_the_page_reports_that_no_client_is_connected(
    node: GoldenNode, golden: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPORT_AFTER_S", "PERIOD_S"):
        monkeypatch.setattr(client_watch, name, 0.05)
    (node.directory / "kubelet" / "kubeadm-flags.env").write_text(
        'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/containerd/containerd.sock"\n'
    )

    async def scenario(daemon: Daemon) -> None:
        await node.launch(DemoPod("web", "LS"))
        assert daemon.executor is not None
        await until(daemon.executor.telemetry.problems)

    golden("no-client", scenario)


def test_the_page_shows_a_refused_reload(node: GoldenNode, golden: Callable[..., None]) -> None:
    async def scenario(daemon: Daemon) -> None:
        await node.launch(DemoPod("web", "LS"))
        page = await node.reload(daemon, f"{SETTINGS}moed: observe\n")
        assert page["reload"]["result"] == "refused"

    golden("reload-refused", scenario)
