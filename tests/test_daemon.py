"""The whole daemon in this process, with the stand-in runtime and an imitated cgroup tree."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.admin.client import query_admin
from proxy.admin.status_text import render
from proxy.cli.main import cli
from proxy.demo.client import CriClient, DemoPod
from proxy.frontends.cri.acceptor import Acceptor
from proxy.model.errors import CannotCreateError, CgroupError, ConfigError, LockedError
from proxy.pools.node_keys import RESERVATION
from proxy.process import _serve
from proxy.sockets.unix_socket import Listener
from tests.testkit.daemon import DaemonNode, run, temporary_node


@pytest.fixture
def node() -> Iterator[DaemonNode]:
    with temporary_node() as made:
        yield made


def test_a_daemon_places_and_reports(node: DaemonNode) -> None:
    daemon = node.daemon("cpuManagerPolicy: static\nreconcilePeriod: 200ms\n")

    async def scenario() -> None:
        ls = await node.launch(DemoPod("ls", "LS"))
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        assert (node.cpus(ls), node.cpus(lse)) == ("0-1,4-15", "2-3")
        page = daemon.parts.pages.status()
        assert (page["ready"], page["mode"], page["violations"]) == (True, "enforce", [])
        assert page["runtime"]["connected"] is True
        assert page["exclusive"][0]["pod"].endswith("/lse")
        with CriClient(node.directory / "cri.sock") as client:
            await asyncio.to_thread(client.launch, DemoPod("more", "LS"))
            assert daemon.parts.pages.status()["clients"] > 0
        async with asyncio.timeout(30):
            while daemon.parts.pages.status()["clients"]:
                await asyncio.sleep(0.05)
        node.runtime.exit(lse)
        async with asyncio.timeout(30):
            while node.cpus(ls) != "0-15":
                await asyncio.sleep(0.05)

    run(daemon, scenario)
    assert not (node.directory / "cri.sock").exists()
    assert not (node.directory / "admin.sock").exists()


def test_a_new_daemon_restores_all_containers(node: DaemonNode) -> None:
    ids: list[str] = []

    async def before() -> None:
        ids.append(await node.launch(DemoPod("ls", "LS")))
        ids.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))

    run(node.daemon(), before)
    held = [node.cpus(i) for i in ids]
    again = node.daemon()

    async def after() -> None:
        assert again.executor is not None
        await asyncio.wait_for(again.executor.reconciled.wait(), 30)
        assert {str(o.cpus) for o in again.executor.state.owners.values()} == {"2-3"}

    run(again, after)
    assert [node.cpus(i) for i in ids] == held == ["0-1,4-15", "2-3"]


def test_a_stop_stops_accepting_before_it_closes_the_socket(
    node: DaemonNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    stop_accepting, close = Acceptor.stop_accepting, Listener.close

    def recorded_stop(acceptor: Acceptor) -> None:
        order.append("stop accepting")
        stop_accepting(acceptor)

    def recorded_close(listener: Listener, *, keep_lock: bool = False) -> None:
        order.append("close")
        close(listener, keep_lock=keep_lock)

    async def scenario() -> None:
        order.clear()

    monkeypatch.setattr(Acceptor, "stop_accepting", recorded_stop)
    monkeypatch.setattr(Listener, "close", recorded_close)
    run(node.daemon(), scenario)
    assert order[:2] == ["stop accepting", "close"]


def test_a_runtime_that_comes_later(node: DaemonNode) -> None:
    node.runtime.stop()
    daemon = node.daemon()

    async def scenario() -> None:
        assert daemon.parts.pages.status()["runtime"]["connected"] is False
        await asyncio.sleep(0.2)
        await asyncio.to_thread(node.runtime.start)
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        assert node.cpus(lse) == "2-3"
        assert daemon.parts.pages.status()["runtime"]["connected"] is True

    run(daemon, scenario)


def test_the_readiness_page_gives_the_reasons(node: DaemonNode) -> None:
    node.runtime.stop()
    daemon = node.daemon("reconcilePeriod: 200ms\n")

    async def readyz() -> tuple[int, str]:
        reply = daemon.parts.pages.readyz()
        return reply.status, str(reply.answer)

    async def scenario() -> None:
        async with asyncio.timeout(30):
            while "[-]runtime failed: cannot read the version of the runtime" not in (await readyz())[1]:
                await asyncio.sleep(0.02)
        code, text = await readyz()
        assert code == 503
        assert "[-]state failed: the state has not been compared with the runtime yet" in text
        assert text.endswith("[+]workers ok\nreadyz check failed\n")
        page = daemon.parts.pages.status()
        assert (page["ready"], page["runtime"]["connected"]) == (False, False)
        assert page["runtime"]["reason"].startswith("cannot ")
        status_text = render(page)
        assert "NOT CONNECTED: cannot read the version of the runtime" in status_text
        assert "NOT READY: the state has not been compared" in status_text
        assert "No problems." not in status_text
        await asyncio.to_thread(node.runtime.start)
        async with asyncio.timeout(30):
            while (await readyz())[0] != 200:
                await asyncio.sleep(0.02)
        assert (await readyz())[1] == "[+]runtime ok\n[+]state ok\n[+]workers ok\nreadyz check passed\n"
        assert (await asyncio.to_thread(query_admin, node.directory / "admin.sock", "/readyz")) == (
            await readyz()
        )[1]
        assert "No problems." in render(daemon.parts.pages.status())

    run(daemon, scenario)


def test_the_status_page_has_the_age_of_the_last_call(node: DaemonNode) -> None:
    daemon = node.daemon()

    async def scenario() -> None:
        assert daemon.parts.pages.status()["calls"] == {"clients": [], "last_s": None, "methods": {}}
        await node.launch(DemoPod("ls", "LS"))
        calls = daemon.parts.pages.status()["calls"]
        assert 0 <= calls["last_s"] < 30
        assert {"CreateContainer", "RunPodSandbox", "StartContainer"} <= set(calls["methods"])
        assert all(0 <= seconds < 30 for seconds in calls["methods"].values())
        assert ", last call 0s ago (CreateContainer " in render(daemon.parts.pages.status())
        with node.client() as client:
            await asyncio.to_thread(client.version)
            mine = [
                each for each in daemon.parts.pages.status()["calls"]["clients"] if each["last_s"] is not None
            ]
            assert os.getpid() in [each["pid"] for each in mine]

    run(daemon, scenario, reconciled=True)


def test_passthrough_mode_only_relays(node: DaemonNode) -> None:
    daemon = node.daemon("mode: passthrough\n", cgroups=None)

    async def scenario() -> None:
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        assert node.cpus(lse) == "0-15"
        assert daemon.executor is None
        assert daemon.parts.pages.status()["mode"] == "passthrough"

    run(daemon, scenario)
    assert not (node.directory / "state").exists()


@pytest.mark.parametrize(
    ("text", "parts", "error"),
    [
        ("cgroupRoot: /nonexistent\n", {"cgroups": None}, CgroupError),
        ('reservedSystemCPUs: "0-15"\n', {}, ConfigError),
        ('reservedSystemCPUs: "99"\n', {}, ConfigError),
    ],
)
def test_a_failed_start_leaves_no_files(
    node: DaemonNode, text: str, parts: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        asyncio.run(node.daemon(text, **parts).start())
    assert not (node.directory / "cri.sock").exists()
    run(node.daemon(), lambda: asyncio.sleep(0))


def test_a_second_daemon_for_a_socket_or_state_directory_is_refused(node: DaemonNode) -> None:
    async def scenario() -> None:
        with pytest.raises(LockedError, match=r"cannot listen on .*cri.sock: "):
            await node.daemon().start()
        with pytest.raises(LockedError, match="cannot use the state directory"):
            await node.daemon(name="other").start()
        assert not (node.directory / "other.sock").exists()
        assert (node.directory / "cri.sock").exists()

    run(node.daemon(), scenario)


def test_a_state_directory_that_cannot_be_created_is_an_error(node: DaemonNode) -> None:
    (node.directory / "state").write_text("a file")
    with pytest.raises(CannotCreateError, match="cannot make the state directory"):
        asyncio.run(node.daemon().start())


def test_unused_signals_have_no_effect(node: DaemonNode) -> None:
    async def scenario() -> None:
        before = signal.getsignal(signal.SIGTERM)
        serving = asyncio.create_task(_serve(node.daemon()))
        async with asyncio.timeout(30):  # before this point a signal would end the tests
            while signal.getsignal(signal.SIGTERM) is before or not (node.directory / "admin.sock").exists():
                await asyncio.sleep(0.02)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        assert node.cpus(await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))) == "2-3"
        assert not serving.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 30)

    asyncio.run(scenario())


def test_a_removed_socket_is_reported(node: DaemonNode) -> None:
    daemon = node.daemon()

    async def scenario() -> None:
        (node.directory / "cri.sock").unlink()
        async with asyncio.timeout(30):
            while not any("was removed" in p["what"] for p in daemon.parts.pages.status()["problems"]):
                await asyncio.sleep(0.1)

    run(daemon, scenario)


def test_a_changed_node_object_takes_effect_while_the_daemon_runs(node: DaemonNode) -> None:
    path = node.directory / "node.json"
    path.write_text('{"metadata": {"name": "worker-7", "uid": "u-7", "annotations": {}}}')
    daemon = node.daemon(f"reconcilePeriod: 200ms\nkoordinator: {{nodeObject: {path}}}\n")

    def run_command(*args: str) -> str:
        at = f"unix://{node.directory}/admin.sock"
        done = CliRunner().invoke(cli, [*args, "--admin", at, "--timeout", "60"])
        assert done.exit_code == 0, done.output
        return done.stdout

    async def scenario() -> None:
        ls = await node.launch(DemoPod("ls", "LS"))
        assert node.cpus(ls) == "0-15"
        reserved = json.dumps({"reservedCPUs": "0-1", "applyPolicy": "Sometimes"})
        node_object = {"metadata": {"name": "worker-7", "annotations": {RESERVATION: reserved}}}
        path.write_text(json.dumps(node_object))
        async with asyncio.timeout(60):
            while node.cpus(ls) != "2-15":
                await asyncio.sleep(0.05)
        page = await asyncio.to_thread(run_command, "status")
        assert f"Settings of the node (Node object: {path})" in page
        assert f"reservedCPUs  0-1        annotation {RESERVATION} of the Node object" in page
        where = "annotation node.koordinator.sh/reservation"
        assert f"Ignored node label or annotation: {where}: applyPolicy 'Sometimes'" in page
        report = json.loads(await asyncio.to_thread(run_command, "report"))
        assert report["metadata"]["name"] == "worker-7"
        reported = json.loads(report["metadata"]["annotations"][RESERVATION])
        assert reported == {"reservedCPUs": "0-1", "applyPolicy": "Sometimes"}
        numbers = await asyncio.to_thread(run_command, "status", "--metrics")
        for line in (
            'topoproxy_pool_cpus{pool="shared"} 14',
            'topoproxy_containers{pool="shared"} 1',
            "topoproxy_rules_changed_total 1",
            "topoproxy_node_object_readable 1",
            'topoproxy_bad_input_total{kind="overlap"} 0',
        ):
            assert f"\n{line}\n" in numbers

    run(daemon, scenario)
