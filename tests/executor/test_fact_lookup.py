"""A node with kubelet's CPU manager: its state file is real, and read as on a node."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.status_text import render
from proxy.api.cri import api_pb2 as pb
from proxy.backends.kubelet.checkpoint_writer import none_state, static_state, write_cpu_state
from proxy.backends.kubelet.cpu_manager import KubeletCpuManagerReader
from proxy.backends.kubelet.settings import KubeletSettings
from proxy.engine.invariants import violations
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.executor.status_data import node_page
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.telemetry import metrics

ALL = CpuSet.parse("0-15")
WHOLE = {"cpu_shares": 2048, "cpu_quota": -1, "cpu_period": 100_000}
"""Two CPUs, as kubelet requests them for a container that it has pinned: the quota is off."""


class Kubelet:
    """The state file of a kubelet under policy static, written as kubelet does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.held: dict[str, dict[str, CpuSet]] = {}

    def gives(self, uid: str, **cpus: str) -> None:
        self.held[uid] = {name: CpuSet.parse(text) for name, text in cpus.items()}
        self.write()

    def takes_back(self, uid: str) -> None:
        del self.held[uid]
        self.write()

    def write(self) -> None:
        write_cpu_state(self.directory, static_state(ALL, self.held, reserved=CpuSet([15])))

    @property
    def default(self) -> str:
        taken = CpuSet()
        for pod in self.held.values():
            for cpus in pod.values():
                taken |= cpus
        return str(ALL - taken)

    def attach_to(self, world: Any, **settings: Any) -> None:
        """Return a world that reads this kubelet's files."""
        found = KubeletCpuManagerReader(
            KubeletSettings(**settings), str(self.directory), "", lambda: world.executor.state.node.topology
        )
        world.use_kubelet_cpus(found)


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    return Kubelet(tmp_path)


@pytest.fixture
def node(run_scenario: Callable[..., None], kubelet: Kubelet) -> Callable[..., None]:
    """Run a scenario with kubelet's policy static; topoproxy's is none unless ``more`` sets it."""

    def run(scenario: Callable[[Any], Any], **more: Any) -> None:
        async def whole(world: Any) -> None:
            kubelet.write()
            kubelet.attach_to(world)
            await world.sync.once()
            try:
                await scenario(world)
            finally:
                await asyncio.to_thread(world.executor.kubelet_cpus.close)

        run_scenario(whole, reconciled=False, **{"static": False, **more})

    return run


async def update(world: Any, container_id: str, cpus: str) -> str:
    """Send an update as kubelet's reconcile loop does; return the set that reaches the runtime."""
    message = pb.UpdateContainerResourcesRequest(container_id=container_id)
    message.linux.cpuset_cpus = cpus
    call = await world.call("UpdateContainerResources", message)
    assert call.refused is None
    sent = pb.UpdateContainerResourcesRequest.FromString(call.sent).linux
    world.runtime.specs[container_id] = sent.cpuset_cpus
    if container_id in world.cgroups.sets:  # the runtime writes the set that it receives
        if world.cgroups.sets[container_id] != CpuSet.parse(sent.cpuset_cpus):
            world.log.append(f"update {container_id} {sent.cpuset_cpus}")
        world.cgroups.sets[container_id] = CpuSet.parse(sent.cpuset_cpus)
    world.wire.finished(call, 0)
    return sent.cpuset_cpus


def cannot_be_followed(why: str) -> str:
    """Return the problem of an assignment of kubelet's that cannot be followed."""
    return f'kubelet\'s CPU manager cannot be followed reason="{why}"'


def problems(world: Any) -> list[str]:
    return [str(entry["what"]) for entry in world.executor.telemetry.problems()]


def test_cpus_assigned_by_kubelet_leave_the_pools_before_the_container_exists(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS", "burstable"), cpuset_cpus="0-15")
        be = await world.run(await world.pod("be", "", "besteffort"), cpuset_cpus="0-15")
        kubelet.gives("g", c="2-3")
        await world.sync.once()
        await world.quiet()
        assert (world.on(ls), world.on(be)) == ("0-1,4-15", "0-1,4-15")
        assert world.executor.state.owners["g/c"].cpus == CpuSet([2, 3])
        pinned = await world.run(await world.pod("g"), **WHOLE, cpuset_cpus="2-3")
        assert world.on(pinned) == "2-3"
        world.check()
        await world.stop(pinned)
        assert world.on(ls) == "0-1,4-15", "the container may return while kubelet keeps the CPUs"
        kubelet.takes_back("g")
        await world.sync.once()
        await world.quiet()
        assert (world.on(ls), world.on(be)) == ("0-15", "0-15")
        world.check()
        assert problems(world) == []

    node(scenario)


@pytest.mark.parametrize("ours", [False, True])
def test_a_pinned_set_is_reserved_from_the_file_to_the_create(node, kubelet, ours: bool) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS", "burstable"))
        kubelet.gives("g", c="2,10")
        # No reconcile in between: the owner's create itself has to read the file.
        refused = await world.begin(await world.pod("lsr", "LSR", "burstable", "2-3"))
        assert refused.refused is not None
        assert "CPU 2 is owned by g/c (by kubelet's CPU manager) already" in refused.refused[1]
        await world.until(lambda: world.on(ls) == "0-1,3-9,11-15")
        lse = await world.run(await world.pod("lse", "LSE", "", "4-5"), **WHOLE)
        if ours:
            picked = await world.run(await world.pod("own"), **WHOLE)
            assert CpuSet.parse(world.on(picked)).isdisjoint(CpuSet.parse("2,4-5,10"))
        pinned = await world.run(await world.pod("g"), **WHOLE, cpuset_cpus="2,10")
        assert (world.on(pinned), world.on(lse)) == ("2,10", "4-5")
        world.check()

    node(scenario, static=ours)


def test_a_pod_placed_as_a_whole_avoids_cpus_assigned_by_kubelet(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="0,8")
        total = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
        sandbox = await world.pod("lsr", "LSR", total=total)
        own = await world.run(sandbox, **total)
        assert CpuSet.parse(world.on(own)).isdisjoint(CpuSet([0, 8]))
        assert len(CpuSet.parse(world.on(own))) == 2
        world.check()

    node(scenario, static=True)


def test_kubelets_reconcile_updates_change_nothing(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="2-3")
        kubelet.gives("h", c="4-5", d="6-7")
        pods = {uid: await world.pod(uid) for uid in ("g", "h")}
        pinned = {
            await world.run(pods["g"], "c", **WHOLE, cpuset_cpus="2-3"): "2-3",
            await world.run(pods["h"], "c", **WHOLE, cpuset_cpus="4-5"): "4-5",
            await world.run(pods["h"], "d", **WHOLE, cpuset_cpus="6-7"): "6-7",
        }
        lsr = await world.run(await world.pod("lsr", "LSR", "burstable", "8-9"), cpuset_cpus=kubelet.default)
        shared = [
            await world.run(await world.pod(f"p{i}", "", "burstable"), cpuset_cpus="0-15") for i in range(4)
        ]
        be = await world.run(await world.pod("be", "BE", "besteffort"), cpuset_cpus=kubelet.default)
        await world.sync.once()
        await world.quiet()
        before, world.log[:] = dict(world.cgroups.sets), []
        for turn in range(5):
            for container_id, cpus in pinned.items():
                assert await update(world, container_id, cpus) == cpus
            assert await update(world, lsr, kubelet.default) == "8-9"
            for container_id in shared:
                assert await update(world, container_id, kubelet.default) == "0-1,10-15"
            assert await update(world, be, kubelet.default) == "0-1,8-15"
            await world.quiet()
            if turn % 2:
                await world.sync.once()
                await world.quiet()
        assert world.cgroups.sets == before
        assert [line for line in world.log if line.startswith(("kernel", "update", "runtime"))] == []
        assert world.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 0
        world.check()

    node(scenario)


def test_an_app_container_takes_over_the_cpus_of_an_init_container(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", a="2-3", z="2-3")
        sandbox = await world.pod("g")
        init = await world.run(sandbox, "z", **WHOLE, cpuset_cpus="2-3")
        assert world.on(init) == "2-3"
        await world.stop(init)
        app = await world.run(sandbox, "a", **WHOLE, cpuset_cpus="2-3")
        assert world.on(app) == "2-3"
        assert problems(world) == []
        world.check()

    node(scenario)


def test_entries_of_pods_that_kubelet_does_not_place_are_ignored(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        for uid in ("ls", "be", "sys", "lsr"):
            kubelet.gives(uid, c={"ls": "2-3", "be": "4-5", "sys": "6-7", "lsr": "8-9"}[uid])
        await world.sync.once()
        assert str(world.executor.state.pools.shared) == "0-1,10-15", "these pods are not known yet"
        ls = await world.run(await world.pod("ls", "LS"), **WHOLE, cpuset_cpus="2-3")
        await world.pod("be", "BE")
        await world.pod("sys", "SYSTEM")
        lsr = await world.run(await world.pod("lsr", "LSR", "", "8-9"), **WHOLE, cpuset_cpus="8-9")
        await world.sync.once()
        await world.quiet()
        assert (world.on(ls), world.on(lsr)) == ("0-7,10-15", "8-9")
        assert problems(world) == []
        world.check()

    node(scenario)


def test_an_entry_that_overlaps_an_owner_is_reported_and_ignored(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS", "burstable"))
        lse = await world.run(await world.pod("lse", "LSE", "", "2-3"), **WHOLE)
        kubelet.gives("g", c="3-4")
        for other in ("12", "13", "14"):
            await world.sync.once()
            kubelet.gives("h", c=other)
        await world.sync.once()
        await world.quiet()
        assert (world.on(lse), world.on(ls)) == ("2-3", "0-1,5-13,15")
        reported = [
            e for e in world.executor.telemetry.problems() if "kubelet's CPU manager" in str(e["what"])
        ]
        assert [e["what"] for e in reported] == [
            cannot_be_followed("cannot let g/c have CPUs 3-4 of kubelet's CPU manager: 3 belong to ns/lse/c")
        ]
        assert reported[0]["count"] == 1, "reported once, not at each read"
        pinned = await world.run(await world.pod("g"), **WHOLE, cpuset_cpus="3-4")
        assert 3 not in CpuSet.parse(world.on(pinned))
        world.check()
        assert violations(world.executor.state) == []

    node(scenario)


def test_an_entry_with_the_last_shared_cpu_is_reported_and_ignored(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS", "burstable"))
        await world.run(await world.pod("lse", "LSE", "", "8-15"), **WHOLE)
        kubelet.gives("g", c="0-7")
        await world.sync.once()
        await world.quiet()
        assert world.on(ls) == "0-7"
        assert problems(world) == [
            cannot_be_followed(
                "cannot let g/c have CPUs 0-7 of kubelet's CPU manager: the shared pool would be left empty"
            )
        ]
        world.check()

    node(scenario)


def test_a_running_container_with_new_cpus_of_kubelet_stays(node, kubelet) -> None:
    """If kubelet's state file was deleted, kubelet assigns CPUs again, also to running containers."""

    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="2-3")
        pinned = await world.run(await world.pod("g"), **WHOLE, cpuset_cpus="2-3")
        kubelet.gives("g", c="4-5")
        await world.sync.once()
        assert await update(world, pinned, "4-5") == "2-3"
        assert problems(world) == [
            cannot_be_followed("cannot let ns/g/c have CPUs 4-5 of kubelet's CPU manager: it has 2-3 already")
        ]
        world.check()

    node(scenario)


def test_a_machine_without_these_cpus_is_reported(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        far = static_state(CpuSet.parse("0-31"), {"g": {"c": CpuSet.parse("15-17")}})
        write_cpu_state(kubelet.directory, far)
        await world.sync.once()
        assert problems(world) == [
            cannot_be_followed(
                "cannot let g/c have CPUs 15-17 of kubelet's CPU manager: this machine has no CPUs 16-17"
            )
        ]
        assert str(world.executor.state.pools.shared) == "0-14"

    node(scenario)


def test_a_torn_file_keeps_the_old_content_and_is_reported(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="2-3")
        await world.sync.once()
        state = kubelet.directory / "cpu_manager_state"
        whole = state.read_bytes()
        state.write_bytes(whole[: len(whole) // 2])
        await world.sync.once()
        assert world.executor.state.owners["g/c"].cpus == CpuSet([2, 3])
        assert any("cannot use kubelet's state file" in problem for problem in problems(world))
        kubelet.takes_back("g")
        await world.sync.once()
        assert world.executor.state.owners == {}
        assert node_page(world.executor)["kubelet"]["problems"] == []

    node(scenario)


def test_a_restart_reads_kubelets_assignments_before_it_adopts_containers(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="2-3")
        kubelet.gives("coming", c="6-7")
        pinned = await world.run(await world.pod("g"), **WHOLE, cpuset_cpus="2-3")
        world.runtime.details[pinned] = RuntimeDetail(f"/kubepods/podg/{pinned}", 2048, -1, 100_000, 0, "2-3")
        for entries in (dict(world.ledger.entries), {}):  # with its ledger, and from the runtime alone
            world.ledger.entries = entries
            await asyncio.to_thread(world.executor.kubelet_cpus.close)
            world.boot()
            kubelet.attach_to(world)
            # Guaranteed, whole CPUs, created but not started: its CPUs are chosen when it is adopted.
            world.runtime.pods["s-x"] = RuntimePod("s-x", "x", "ns", "x", 0, True, {}, {})
            world.runtime.containers["x"] = RuntimeContainer("x", "s-x", "c", 0, "CREATED")
            world.runtime.details["x"] = RuntimeDetail("/kubepods/podx/x", 2048, 200_000, 100_000)
            await world.sync.once()
            await world.quiet()
            owners = world.executor.state.owners
            assert (owners["g/c"].cpus, owners["coming/c"].cpus) == (CpuSet([2, 3]), CpuSet([6, 7]))
            assert owners["x/c"].cpus.isdisjoint(CpuSet.parse("2-3,6-7"))
            assert world.on(pinned) == "2-3"
            assert violations(world.executor.state) == []

    node(scenario, static=True)


def test_a_container_named_by_a_call_is_adopted_off_kubelets_cpus(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="0,8")
        world.runtime.pods["s-x"] = RuntimePod("s-x", "x", "ns", "x", 0, True, {}, {})
        world.runtime.containers["x"] = RuntimeContainer("x", "s-x", "c", 0, "CREATED")
        world.runtime.details["x"] = RuntimeDetail("/kubepods/podx/x", 2048, 200_000, 100_000)
        world.runtime.specs["x"] = "0-15"
        await world.start("x")
        assert len(CpuSet.parse(world.on("x"))) == 2
        assert CpuSet.parse(world.on("x")).isdisjoint(CpuSet([0, 8]))
        world.check()

    node(scenario, static=True)


def test_a_read_of_kubelets_file_that_hangs_is_limited_and_reported(run_scenario) -> None:
    class Hangs:
        def __init__(self) -> None:
            self.go = __import__("threading").Event()

        def read(self) -> CpuManager:
            self.go.wait(60)
            return CpuManager()

        def refresh(self) -> None:
            pass

    async def scenario(world: Any) -> None:
        port = Hangs()
        world.use_kubelet_cpus(port)
        reread = world.executor.kubelet_cpus.reread
        world.limit_waits(world.executor.kubelet_cpus, "reread", 0.3)
        lse = await world.create(await world.pod("lse", "LSE", "", "2-3"), **WHOLE)
        assert world.executor.state.owners["lse"].cpus == CpuSet([2, 3])
        assert lse in world.executor.state.containers
        assert problems(world) == ["cannot read kubelet's state file: the file system does not answer"]
        port.go.set()
        await reread()
        assert problems(world) == [], "the file was read again"
        await asyncio.to_thread(world.executor.kubelet_cpus.close)

    run_scenario(scenario, static=False)


def test_a_fault_while_reading_kubelets_file_affects_no_container(run_scenario) -> None:
    class Broken:
        def read(self) -> CpuManager:
            raise KeyError("oops")

        def refresh(self) -> None:
            raise KeyError("oops")

    async def scenario(world: Any) -> None:
        world.use_kubelet_cpus(Broken())
        await world.sync.once()
        own = await world.run(await world.pod("g"), **WHOLE)
        assert len(CpuSet.parse(world.on(own))) == 2
        await world.until(lambda: problems(world) == ["internal error fault=\"KeyError: 'oops'\""])
        await asyncio.to_thread(world.executor.kubelet_cpus.close)

    run_scenario(scenario)


def test_containers_without_own_cpus_do_not_wait_for_kubelets_file(run_scenario) -> None:
    class Counts:
        looks = 0

        def read(self) -> CpuManager:
            self.looks += 1
            return CpuManager()

        def refresh(self) -> None:
            pass

    async def scenario(world: Any) -> None:
        port = Counts()
        world.use_kubelet_cpus(port)
        await world.run(await world.pod("ls", "LS"), **WHOLE)
        await world.run(await world.pod("be", "", "besteffort"), cpu_shares=2)
        await world.run(await world.pod("b", "", "burstable"), **WHOLE)
        await world.run(await world.pod("fraction"), cpu_shares=512, cpu_quota=50_000, cpu_period=100_000)
        assert port.looks == 0
        await world.run(await world.pod("g"), **WHOLE)
        assert port.looks == 1
        await asyncio.to_thread(world.executor.kubelet_cpus.close)

    run_scenario(scenario)


def test_the_status_shows_kubelets_policy_and_its_source(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        (kubelet.directory / "config.yaml").write_text(
            "kind: KubeletConfiguration\ncpuManagerPolicy: static\nreservedSystemCPUs: '0'\n"
            "cpuManagerPolicyOptions:\n  full-pcpus-only: 'true'\ntopologyManagerPolicy: restricted\n"
        )
        kubelet.gives("g", c="2-3")
        await world.pod("g")
        await world.sync.once()
        page = node_page(world.executor)["kubelet"]
        assert json.loads(json.dumps(page))["held"] == [
            {"pod": "ns/g", "uid": "g", "container": "c", "cpus": "2-3"}
        ]
        text = " ".join(render(node_page(world.executor), 200).split())
        file = kubelet.directory / "config.yaml"
        for expected in (
            f"cpuManagerPolicy static {file}",
            f"cpuManagerPolicyOptions full-pcpus-only=true {file}",
            f"reservedSystemCPUs 0 {file}",
            f"topologyManagerPolicy restricted {file}",
            f"topologyManagerScope container kubelet's default, {file} does not set it",
            f"CPUs of all other containers 0-1,4-15 {kubelet.directory}/cpu_manager_state",
            "2-3 ns/g/c",
        ):
            assert expected in text, expected

    node(scenario)


def test_the_status_of_a_node_without_kubelet_omits_it(run_scenario, tmp_path) -> None:
    async def scenario(world: Any) -> None:
        Kubelet(tmp_path).attach_to(world)
        await world.sync.once()
        assert problems(world) == []
        assert "Kubelet" not in render(node_page(world.executor))
        await asyncio.to_thread(world.executor.kubelet_cpus.close)

    run_scenario(scenario, reconciled=False)


def test_kubelets_change_to_policy_none_releases_all_its_cpus(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="2-3")
        await world.sync.once()
        os.unlink(kubelet.directory / "cpu_manager_state")
        await world.sync.once()
        assert world.executor.state.owners == {}
        write_cpu_state(kubelet.directory, none_state())
        await world.sync.once()
        assert world.executor.kubelet_cpus.manager.policy == "none"
        assert str(world.executor.state.pools.shared) == "0-15"

    node(scenario)


class RandomKubelet:
    """Random events on a node with kubelet's CPU manager."""

    def __init__(self, world: Any, kubelet: Kubelet, seed: int) -> None:
        self.world, self.kubelet = world, kubelet
        self.rolls = random.Random(seed)
        self.coming: list[str] = []
        self.running: list[str] = []
        self.number = 0

    def _two_of(self, free: CpuSet) -> str:
        return str(CpuSet(self.rolls.sample(list(free), 2)))

    def _one_of(self, names: list[str]) -> str:
        return names.pop(self.rolls.randrange(len(names)))

    async def kubelet_gives(self) -> None:
        free = CpuSet.parse(self.kubelet.default) - CpuSet([15])
        if len(free) > 5:
            self.coming.append(f"k{self.number}")
            self.kubelet.gives(self.coming[-1], c=self._two_of(free))

    async def a_pinned_container_comes(self) -> None:
        if self.coming:
            uid = self._one_of(self.coming)
            named = str(self.kubelet.held[uid]["c"])
            self.running.append(await self.world.run(await self.world.pod(uid), **WHOLE, cpuset_cpus=named))

    async def a_scheduler_gives(self) -> None:
        qos = self.rolls.choice(["LSE", "LSR"])
        await self._try(await self.world.pod(f"s{self.number}", qos, "", self._two_of(CpuSet(range(15)))))

    async def the_node_gives(self) -> None:
        await self._try(await self.world.pod(f"g{self.number}"))

    async def _try(self, sandbox: str) -> None:
        call = await self.world.begin(sandbox, **WHOLE, cpuset_cpus=self.kubelet.default)
        if call.refused is None:
            self.running.append(self.world.finish(call, f"c-{sandbox}"))
            await self.world.start(self.running[-1])

    async def somebody_goes(self) -> None:
        if self.running:
            gone = self._one_of(self.running)
            await self.world.stop(gone)
            await self.world.remove(gone)

    async def kubelet_takes_back(self) -> None:
        there = {self.world.executor.state.containers[c].pod.uid for c in self.running}
        for uid in [uid for uid in self.kubelet.held if uid not in there and uid not in self.coming]:
            self.kubelet.takes_back(uid)

    async def kubelet_reconciles(self) -> None:
        await self.world.sync.once()
        for container_id in self.running:
            await update(self.world, container_id, self.kubelet.default)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ours", [False, True])
def test_random_events_never_make_owners_overlap(node, kubelet, seed: int, ours: bool) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("ls", "LS", "burstable"))
        await world.run(await world.pod("be", "BE", "besteffort"))
        chance = RandomKubelet(world, kubelet, seed)
        events = [getattr(chance, name) for name in vars(RandomKubelet) if not name.startswith("_")]
        for chance.number in range(20):
            await chance.rolls.choice(events)()
            await world.quiet()
            world.check()
        await world.sync.once()
        await world.quiet()
        world.check()
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

    node(scenario, static=ours)


def test_cpus_that_kubelet_assigns_and_releases_are_reported(node, kubelet) -> None:
    async def scenario(world: Any) -> None:
        kubelet.gives("g", c="2-3")
        await world.executor.kubelet_cpus.reread()
        assert world.logged[-1] == 'kubelet\'s CPU manager changed its assignments came=2-3 went=""'
        kubelet.takes_back("g")
        kubelet.gives("h", c="3-4")
        await world.executor.kubelet_cpus.reread()
        assert world.logged[-1] == "kubelet's CPU manager changed its assignments came=4 went=2"

    node(scenario)
