"""Releases by a whole daemon with the stand-in runtime and an imitated cgroup tree."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from pathlib import Path

import pytest

from proxy.backends.kubelet.checkpoint_writer import static_state
from proxy.backends.ledger import open_ledger
from proxy.config import Config
from proxy.demo.client import DemoPod
from proxy.model.errors import (
    InputError,
    LockedError,
    PermissionDeniedError,
    TopoproxyError,
    UnavailableError,
)
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase
from proxy.release import offline
from proxy.release.on_demand import RELEASE_RECORD
from tests.release.leaving_node import ALL, MACHINE, Node, command
from tests.testkit.waiting import until


def test_every_container_gets_all_cpus_back(node: Node) -> None:
    ids: list[str] = []

    async def scenario() -> None:
        ids.append(await node.launch(DemoPod("ls", "LS")))
        ids.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))
        assert [node.cpus(i) for i in ids] == ["0-1,4-15", "2-3"]
        assert node.mems(ids[1]) == "0"
        await node.release(daemon)
        ids.append(await node.launch(DemoPod("direct", "LS"), "runtime"))
        assert [node.cpus(i) for i in ids] == [ALL] * 3
        assert [node.mems(i) for i in ids] == ["0-1"] * 3
        # From now on the daemon only relays: a new owner gets no CPUs, and no container moves.
        ids.append(await node.launch(DemoPod("late", "LSE", cpuset="4-5")))
        passes = daemon.parts.pages.status()["counters"]["passes"]
        await until(lambda: daemon.parts.pages.status()["counters"]["passes"] > passes + 2)
        assert [node.cpus(i) for i in ids] == [ALL] * 4

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)

    again = node.daemon()

    async def after() -> None:
        assert again.parts.pages.status()["mode"] == "released"
        assert again.executor is not None
        await asyncio.wait_for(again.executor.reconciled.wait(), 30)
        assert [node.cpus(i) for i in ids] == [ALL] * 4
        answer = await node.query("/release/undo", act=True)
        assert answer["stage"] == ""
        assert again.parts.pages.status()["mode"] == "enforce"
        await until(lambda: [node.cpus(i) for i in ids[:2]] == ["0-1,6-15", "2-3"])
        await until(lambda: node.cpus(ids[3]) == "4-5")
        lsr = await node.launch(DemoPod("lsr", "LSR", cpuset="6-7"))
        assert node.cpus(lsr) == "6-7"

    node.run_scenario(again, after)


def left_fence(node: Node, container_id: str) -> str:
    """Narrow the cgroup of a container's pod, as a daemon leaves it that is killed within a call."""
    found = node.cgroups.find("", container_id)
    assert found is not None
    group = found.rpartition("/")[0]
    node.cgroups.files.write(group, "cpuset.cpus", "0-1,4-15\n")
    return group


def effective(node: Node, group: str) -> str:
    return str(node.cgroups.read(group).effective_cpus)


@pytest.mark.parametrize("node", [2], indirect=True)
@pytest.mark.parametrize("offline", [False, True])
def test_a_fence_that_a_killed_daemon_has_left_is_lifted(node: Node, *, offline: bool) -> None:
    ids: list[str] = []

    async def before() -> None:
        ids.append(await node.launch(DemoPod("ls", "LS")))
        ids.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))

    node.run_scenario(node.daemon(), before)
    group = left_fence(node, ids[0])
    again = node.daemon()

    async def after() -> None:
        assert node.cpus(ids[0]) == "0-1,4-15"
        if not offline:
            await node.release(again)

    node.run_scenario(again, after)
    if offline:
        assert command(node, "--offline").exit_code == 0
    assert (effective(node, group), node.cpus(ids[0])) == (ALL, ALL)


@pytest.mark.parametrize("node", [2], indirect=True)
@pytest.mark.parametrize("ends", ["owner", "container"])
def test_a_fence_is_lifted_although_a_container_ends_during_the_release(
    node: Node, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    async def scenario() -> None:
        executor = daemon.executor
        assert executor is not None
        ls = await node.launch(DemoPod("ls", "LS"))
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        group = left_fence(node, ls)
        once = executor.quotas.once

        async def first() -> None:  # the release has begun, and has written nothing yet
            monkeypatch.undo()
            with node.client() as client:
                await asyncio.to_thread(client.stop, lse if ends == "owner" else ls)
            await until(
                lambda: executor.state.containers[lse if ends == "owner" else ls].phase is Phase.EXITED
            )
            await once()

        monkeypatch.setattr(executor.quotas, "once", first)
        await node.release(daemon)
        assert effective(node, group) == ALL
        if ends == "owner":
            assert node.cpus(ls) == ALL

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)


@pytest.mark.parametrize("node", [2], indirect=True)
def test_a_fence_is_lifted_although_an_owner_has_ended_just_before_the_release(node: Node) -> None:
    """The pools have its CPUs already, but the write that widens the fence is still queued."""

    async def scenario() -> None:
        executor, free = daemon.executor, threading.Event()
        assert executor is not None
        ls = await node.launch(DemoPod("ls", "LS"))
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        group = left_fence(node, ls)
        busy = executor.kernel.submit(free.wait, 30)
        with node.client() as client:
            await asyncio.to_thread(client.stop, lse)
        await until(lambda: executor.state.containers[lse].phase is Phase.EXITED)
        asyncio.get_running_loop().call_later(0.2, free.set)
        await node.release(daemon)
        assert await busy
        assert (effective(node, group), node.cpus(ls)) == (ALL, ALL)

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)


@pytest.mark.parametrize("node", [2], indirect=True)
def test_the_fence_of_a_pod_without_running_containers_is_lifted(node: Node) -> None:
    async def scenario() -> None:
        ls = await node.launch(DemoPod("ls", "LS"))
        await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        group = left_fence(node, ls)
        with node.client() as client:
            await asyncio.to_thread(client.stop, ls)
        await node.release(daemon)
        assert effective(node, group) == ALL

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)


def test_the_command_releases_reports_and_undoes(node: Node) -> None:
    async def scenario() -> None:
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        with pytest.raises(LockedError, match="without --offline"):
            await asyncio.to_thread(command, node, "--offline")
        done = await asyncio.to_thread(command, node)
        assert done.stdout.startswith("released: 1 container has what it would have without topoproxy (1 ")
        assert node.cpus(lse) == ALL
        done = await asyncio.to_thread(command, node, "--json")
        assert json.loads(done.stdout)["stage"] == "released"
        done = await asyncio.to_thread(command, node, "--undo")
        assert done.stdout == "containers are placed again\n"
        await until(lambda: node.cpus(lse) == "2-3")
        with pytest.raises(InputError, match="the node is not released"):
            await asyncio.to_thread(command, node, "--undo")

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)


def test_a_slow_release_is_reported(node: Node) -> None:
    async def scenario() -> None:
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        node.runtime.stop()
        with pytest.raises(
            TopoproxyError, match=r"^cannot release everything in 1\.5 s: .*the daemon continues"
        ):
            await asyncio.to_thread(command, node, "--timeout", "1.5")
        assert node.cpus(lse) == ALL

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)


@pytest.mark.parametrize("mode", ["observe", "passthrough"])
def test_a_release_without_containers(node: Node, mode: str) -> None:
    async def scenario() -> None:
        done = await asyncio.to_thread(command, node)
        assert done.stdout.startswith(f"there is nothing to release: in {mode} mode no container is moved")
        refused = {"observe": r"the node is not released \(mode observe\)", "passthrough": "--offline --undo"}
        with pytest.raises(InputError, match=refused[mode]):
            await asyncio.to_thread(command, node, "--undo")
        assert daemon.parts.pages.status()["mode"] == mode

    daemon = node.daemon(f"mode: {mode}")
    node.run_scenario(daemon, scenario)


def test_a_released_node_stays_released_in_mode_observe(node: Node) -> None:
    ids: list[str] = []

    async def scenario() -> None:
        ids.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))
        await node.release(daemon)

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)
    observing = node.daemon("mode: observe")

    async def observed() -> None:
        assert observing.parts.pages.status()["mode"] == "released"
        done = await asyncio.to_thread(command, node, "--undo")
        assert done.stdout == "the release is undone; in observe mode no container is moved\n"
        assert observing.parts.pages.status()["mode"] == "observe"
        assert observing.executor is not None
        await asyncio.wait_for(observing.executor.reconciled.wait(), 30)

    node.run_scenario(observing, observed)
    assert node.cpus(ids[0]) == ALL
    enforcing = node.daemon()

    async def enforced() -> None:
        assert enforcing.parts.pages.status()["mode"] == "enforce"
        await until(lambda: node.cpus(ids[0]) == "2-3")

    node.run_scenario(enforcing, enforced)


def test_a_release_continues_in_mode_observe(node: Node) -> None:
    ids: list[str] = []

    async def scenario() -> None:
        ids.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))
        assert daemon.executor is not None
        await daemon.executor.ledger_writer.flush()

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)
    ledger, _ = open_ledger(node.directory / "state", MACHINE.fingerprint)
    ledger.write({RELEASE_RECORD: {"stage": "releasing", "since": 1.0}})
    ledger.close()
    observing = node.daemon("mode: observe")

    async def observed() -> None:
        await until(lambda: observing.parts.pages.status()["mode"] == "released")
        assert node.cpus(ids[0]) == ALL

    node.run_scenario(observing, observed)


def test_without_a_daemon(node: Node) -> None:
    ids: list[str] = []

    async def scenario() -> None:
        ids.append(await node.launch(DemoPod("ls", "LS")))
        ids.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))
        assert daemon.executor is not None
        await daemon.executor.ledger_writer.flush()

    assert "has no ledger" in command(node, "--offline").stdout
    with pytest.raises(InputError, match="not released"):
        command(node, "--offline", "--undo")
    with pytest.raises(UnavailableError, match="topoproxy release --offline"):
        command(node)
    daemon = node.daemon()
    node.run_scenario(daemon, scenario)
    assert [node.cpus(i) for i in ids] == ["0-1,4-15", "2-3"]
    node.runtime.stop()
    with pytest.raises(TopoproxyError, match="run it again"):
        command(node, "--offline", "--timeout", "1.5")
    assert [node.cpus(i) for i in ids] == [ALL, ALL]
    node.runtime.start()
    # Independently of the current configuration, the ledger is from a time when containers were moved.
    done = command(node, "--offline", config="mode: observe")
    assert done.stdout.startswith("released: 2 containers")
    assert (
        command(node, "--offline", "--undo").stdout == "containers are placed again when the daemon starts\n"
    )
    with pytest.raises(InputError, match="not released"):
        command(node, "--offline", "--undo")


def test_without_a_daemon_and_without_permission(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "stat", denied)
    config = Config(state_dir=node.directory / "state")
    with pytest.raises(PermissionDeniedError, match=r"cannot use the state directory .*: Permission denied"):
        offline.release(config, 1, print)
    with pytest.raises(PermissionDeniedError, match=r"cannot use the state directory .*: Permission denied"):
        offline.undo(config)


def test_a_stop_releases_and_a_start_takes_over_again(node: Node) -> None:
    ids: list[str] = []

    async def scenario() -> None:
        ids.append(await node.launch(DemoPod("lse", "LSE", cpuset="2-3")))

    node.run_scenario(node.daemon("releaseAtStop: true"), scenario)
    assert node.cpus(ids[0]) == ALL
    again = node.daemon("releaseAtStop: true")

    async def after() -> None:
        await until(lambda: node.cpus(ids[0]) == "2-3")
        assert again.parts.pages.status()["mode"] == "enforce"

    node.run_scenario(again, after)
    assert node.cpus(ids[0]) == ALL


def test_kubelets_file_names_the_cpus_of_each_container(node: Node) -> None:
    """An owner whose CPUs differ from those in kubelet, and a shared container, under policy static."""

    async def scenario() -> None:
        web = await node.launch(DemoPod("web", "LS"))
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        assert daemon.executor is not None
        uid = daemon.executor.state.containers[lse].pod.uid
        (node.directory / "kubelet").mkdir()
        text = static_state(MACHINE.online, {uid: {"main": CpuSet.parse("8-9")}}, reserved=CpuSet([0]))
        (node.directory / "kubelet/cpu_manager_state").write_text(text)
        await node.release(daemon)
        assert (node.cpus(lse), node.cpus(web)) == ("8-9", "0-7,10-15")

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)
