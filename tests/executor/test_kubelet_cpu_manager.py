"""A node beside kubelet's CPU manager: its state file is real, and read as on a node."""

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
from proxy.backends.kubelet.checkpoint_writer import none_state, static_state, write_text
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
"""Two CPUs, as kubelet asks for a container that it has pinned: the quota is off."""


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
        write_text(self.directory, static_state(ALL, self.held, reserved=CpuSet([15])))

    @property
    def default(self) -> str:
        taken = CpuSet()
        for pod in self.held.values():
            for cpus in pod.values():
                taken |= cpus
        return str(ALL - taken)

    def beside(self, w: Any, **settings: Any) -> None:
        """Have a world look at this kubelet."""
        found = KubeletCpuManagerReader(
            KubeletSettings(**settings), str(self.directory), "", lambda: w.executor.state.node.topology
        )
        w.beside(found)


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    return Kubelet(tmp_path)


@pytest.fixture
def node(live: Callable[..., None], kubelet: Kubelet) -> Callable[..., None]:
    """A day on a node where kubelet has policy static and we have none, unless settings say otherwise."""

    def run(day: Callable[[Any], Any], **more: Any) -> None:
        async def whole(w: Any) -> None:
            kubelet.write()
            kubelet.beside(w)
            await w.sync.once()
            try:
                await day(w)
            finally:
                await asyncio.to_thread(w.executor.kubelet_cpus.close)

        live(whole, reconciled=False, **{"static": False, **more})

    return run


async def update(w: Any, container_id: str, cpus: str) -> str:
    """An update of kubelet's reconcile loop; gives the set that reaches the runtime."""
    message = pb.UpdateContainerResourcesRequest(container_id=container_id)
    message.linux.cpuset_cpus = cpus
    call = await w.call("UpdateContainerResources", message)
    assert call.refused is None
    sent = pb.UpdateContainerResourcesRequest.FromString(call.sent).linux
    w.runtime.specs[container_id] = sent.cpuset_cpus
    if container_id in w.cgroups.sets:  # the runtime writes what it is sent
        if w.cgroups.sets[container_id] != CpuSet.parse(sent.cpuset_cpus):
            w.log.append(f"update {container_id} {sent.cpuset_cpus}")
        w.cgroups.sets[container_id] = CpuSet.parse(sent.cpuset_cpus)
    w.wire.finished(call, 0)
    return sent.cpuset_cpus


def unlike(why: str) -> str:
    """What is reported of an assignment of kubelet's that cannot be followed."""
    return f'kubelet\'s CPU manager cannot be followed reason="{why}"'


def problems(w: Any) -> list[str]:
    return [str(entry["what"]) for entry in w.executor.telemetry.problems()]


def test_what_kubelet_gave_leaves_the_pools_before_the_container_is_there(node, kubelet) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS", "burstable"), cpuset_cpus="0-15")
        be = await w.run(await w.pod("be", "", "besteffort"), cpuset_cpus="0-15")
        kubelet.gives("g", c="2-3")
        await w.sync.once()
        await w.quiet()
        assert (w.on(ls), w.on(be)) == ("0-1,4-15", "0-1,4-15")
        assert w.executor.state.owners["g/c"].cpus == CpuSet([2, 3])
        pinned = await w.run(await w.pod("g"), **WHOLE, cpuset_cpus="2-3")
        assert w.on(pinned) == "2-3"
        w.check()
        await w.stop(pinned)
        assert w.on(ls) == "0-1,4-15", "it may come back as long as kubelet keeps them for it"
        kubelet.takes_back("g")
        await w.sync.once()
        await w.quiet()
        assert (w.on(ls), w.on(be)) == ("0-15", "0-15")
        w.check()
        assert problems(w) == []

    node(day)


@pytest.mark.parametrize("ours", [False, True])
def test_a_pinned_set_is_reserved_from_the_file_to_the_create(node, kubelet, ours: bool) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS", "burstable"))
        kubelet.gives("g", c="2,10")
        # No comparison in between: the owner's own create has to look.
        refused = await w.begin(await w.pod("lsr", "LSR", "burstable", "2-3"))
        assert refused.refused is not None
        assert "CPU 2 is owned by g/c (by kubelet's CPU manager) already" in refused.refused[1]
        await w.until(lambda: w.on(ls) == "0-1,3-9,11-15")
        lse = await w.run(await w.pod("lse", "LSE", "", "4-5"), **WHOLE)
        if ours:
            picked = await w.run(await w.pod("own"), **WHOLE)
            assert CpuSet.parse(w.on(picked)).isdisjoint(CpuSet.parse("2,4-5,10"))
        pinned = await w.run(await w.pod("g"), **WHOLE, cpuset_cpus="2,10")
        assert (w.on(pinned), w.on(lse)) == ("2,10", "4-5")
        w.check()

    node(day, static=ours)


def test_a_pod_that_we_choose_for_as_a_whole_keeps_off_what_kubelet_gave(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", c="0,8")
        total = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
        sandbox = await w.pod("lsr", "LSR", total=total)
        own = await w.run(sandbox, **total)
        assert CpuSet.parse(w.on(own)).isdisjoint(CpuSet([0, 8]))
        assert len(CpuSet.parse(w.on(own))) == 2
        w.check()

    node(day, static=True)


def test_reconcile_traffic_changes_nothing(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", c="2-3")
        kubelet.gives("h", c="4-5", d="6-7")
        pods = {uid: await w.pod(uid) for uid in ("g", "h")}
        pinned = {
            await w.run(pods["g"], "c", **WHOLE, cpuset_cpus="2-3"): "2-3",
            await w.run(pods["h"], "c", **WHOLE, cpuset_cpus="4-5"): "4-5",
            await w.run(pods["h"], "d", **WHOLE, cpuset_cpus="6-7"): "6-7",
        }
        lsr = await w.run(await w.pod("lsr", "LSR", "burstable", "8-9"), cpuset_cpus=kubelet.default)
        shared = [await w.run(await w.pod(f"p{i}", "", "burstable"), cpuset_cpus="0-15") for i in range(4)]
        be = await w.run(await w.pod("be", "BE", "besteffort"), cpuset_cpus=kubelet.default)
        await w.sync.once()
        await w.quiet()
        before, w.log[:] = dict(w.cgroups.sets), []
        for turn in range(5):
            for container_id, cpus in pinned.items():
                assert await update(w, container_id, cpus) == cpus
            assert await update(w, lsr, kubelet.default) == "8-9"
            for container_id in shared:
                assert await update(w, container_id, kubelet.default) == "0-1,10-15"
            assert await update(w, be, kubelet.default) == "0-1,8-15"
            await w.quiet()
            if turn % 2:
                await w.sync.once()
                await w.quiet()
        assert w.cgroups.sets == before
        assert [line for line in w.log if line.startswith(("kernel", "update", "runtime"))] == []
        assert w.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 0
        w.check()

    node(day)


def test_an_app_container_takes_over_the_cpus_of_an_init_container(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", a="2-3", z="2-3")
        sandbox = await w.pod("g")
        init = await w.run(sandbox, "z", **WHOLE, cpuset_cpus="2-3")
        assert w.on(init) == "2-3"
        await w.stop(init)
        app = await w.run(sandbox, "a", **WHOLE, cpuset_cpus="2-3")
        assert w.on(app) == "2-3"
        assert problems(w) == []
        w.check()

    node(day)


def test_entries_of_pods_that_others_decide_count_for_nothing(node, kubelet) -> None:
    async def day(w: Any) -> None:
        for uid in ("ls", "be", "sys", "lsr"):
            kubelet.gives(uid, c={"ls": "2-3", "be": "4-5", "sys": "6-7", "lsr": "8-9"}[uid])
        await w.sync.once()
        assert str(w.executor.state.pools.shared) == "0-1,10-15", "these pods are not known yet"
        ls = await w.run(await w.pod("ls", "LS"), **WHOLE, cpuset_cpus="2-3")
        await w.pod("be", "BE")
        await w.pod("sys", "SYSTEM")
        lsr = await w.run(await w.pod("lsr", "LSR", "", "8-9"), **WHOLE, cpuset_cpus="8-9")
        await w.sync.once()
        await w.quiet()
        assert (w.on(ls), w.on(lsr)) == ("0-7,10-15", "8-9")
        assert problems(w) == []
        w.check()

    node(day)


def test_an_entry_that_overlaps_an_owner_is_reported_and_ignored(node, kubelet) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS", "burstable"))
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"), **WHOLE)
        kubelet.gives("g", c="3-4")
        for other in ("12", "13", "14"):
            await w.sync.once()
            kubelet.gives("h", c=other)
        await w.sync.once()
        await w.quiet()
        assert (w.on(lse), w.on(ls)) == ("2-3", "0-1,5-13,15")
        reported = [e for e in w.executor.telemetry.problems() if "kubelet's CPU manager" in str(e["what"])]
        assert [e["what"] for e in reported] == [
            unlike("cannot let g/c have CPUs 3-4 of kubelet's CPU manager: 3 belong to ns/lse/c")
        ]
        assert reported[0]["count"] == 1, "reported once, not at each look"
        pinned = await w.run(await w.pod("g"), **WHOLE, cpuset_cpus="3-4")
        assert 3 not in CpuSet.parse(w.on(pinned))
        w.check()
        assert violations(w.executor.state) == []

    node(day)


def test_an_entry_with_the_last_shared_cpu_is_reported_and_ignored(node, kubelet) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS", "burstable"))
        await w.run(await w.pod("lse", "LSE", "", "8-15"), **WHOLE)
        kubelet.gives("g", c="0-7")
        await w.sync.once()
        await w.quiet()
        assert w.on(ls) == "0-7"
        assert problems(w) == [
            unlike(
                "cannot let g/c have CPUs 0-7 of kubelet's CPU manager: the shared pool would be left empty"
            )
        ]
        w.check()

    node(day)


def test_a_running_container_with_new_cpus_of_kubelet_stays(node, kubelet) -> None:
    """If its state file was deleted, kubelet assigns CPUs again, also to running containers."""

    async def day(w: Any) -> None:
        kubelet.gives("g", c="2-3")
        pinned = await w.run(await w.pod("g"), **WHOLE, cpuset_cpus="2-3")
        kubelet.gives("g", c="4-5")
        await w.sync.once()
        assert await update(w, pinned, "4-5") == "2-3"
        assert problems(w) == [
            unlike("cannot let ns/g/c have CPUs 4-5 of kubelet's CPU manager: it has 2-3 already")
        ]
        w.check()

    node(day)


def test_a_machine_without_these_cpus_is_reported(node, kubelet) -> None:
    async def day(w: Any) -> None:
        far = static_state(CpuSet.parse("0-31"), {"g": {"c": CpuSet.parse("15-17")}})
        write_text(kubelet.directory, far)
        await w.sync.once()
        assert problems(w) == [
            unlike("cannot let g/c have CPUs 15-17 of kubelet's CPU manager: this machine has no CPUs 16-17")
        ]
        assert str(w.executor.state.pools.shared) == "0-14"

    node(day)


def test_a_torn_file_keeps_the_old_content_and_is_reported(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", c="2-3")
        await w.sync.once()
        state = kubelet.directory / "cpu_manager_state"
        whole = state.read_bytes()
        state.write_bytes(whole[: len(whole) // 2])
        await w.sync.once()
        assert w.executor.state.owners["g/c"].cpus == CpuSet([2, 3])
        assert any("cannot use kubelet's state file" in words for words in problems(w))
        kubelet.takes_back("g")
        await w.sync.once()
        assert w.executor.state.owners == {}
        assert node_page(w.executor)["kubelet"]["problems"] == []

    node(day)


def test_a_restart_knows_what_kubelet_gave_before_it_takes_anybody_in(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", c="2-3")
        kubelet.gives("coming", c="6-7")
        pinned = await w.run(await w.pod("g"), **WHOLE, cpuset_cpus="2-3")
        w.runtime.details[pinned] = RuntimeDetail(f"/kubepods/podg/{pinned}", 2048, -1, 100_000, 0, "2-3")
        for entries in (dict(w.ledger.entries), {}):  # with its ledger, and from the runtime alone
            w.ledger.entries = entries
            await asyncio.to_thread(w.executor.kubelet_cpus.close)
            w.boot()
            kubelet.beside(w)
            # Guaranteed, whole CPUs, created but not started: its CPUs are chosen when it is taken in.
            w.runtime.pods["s-x"] = RuntimePod("s-x", "x", "ns", "x", 0, True, {}, {})
            w.runtime.containers["x"] = RuntimeContainer("x", "s-x", "c", 0, "CREATED")
            w.runtime.details["x"] = RuntimeDetail("/kubepods/podx/x", 2048, 200_000, 100_000)
            await w.sync.once()
            await w.quiet()
            owners = w.executor.state.owners
            assert (owners["g/c"].cpus, owners["coming/c"].cpus) == (CpuSet([2, 3]), CpuSet([6, 7]))
            assert owners["x/c"].cpus.isdisjoint(CpuSet.parse("2-3,6-7"))
            assert w.on(pinned) == "2-3"
            assert violations(w.executor.state) == []

    node(day, static=True)


def test_a_container_named_by_a_call_is_adopted_beside_kubelets_cpus(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", c="0,8")
        w.runtime.pods["s-x"] = RuntimePod("s-x", "x", "ns", "x", 0, True, {}, {})
        w.runtime.containers["x"] = RuntimeContainer("x", "s-x", "c", 0, "CREATED")
        w.runtime.details["x"] = RuntimeDetail("/kubepods/podx/x", 2048, 200_000, 100_000)
        w.runtime.specs["x"] = "0-15"
        await w.start("x")
        assert len(CpuSet.parse(w.on("x"))) == 2
        assert CpuSet.parse(w.on("x")).isdisjoint(CpuSet([0, 8]))
        w.check()

    node(day, static=True)


def test_a_look_that_hangs_costs_its_deadline_and_is_reported(live) -> None:
    class Hangs:
        def __init__(self) -> None:
            self.go = __import__("threading").Event()

        def look(self) -> CpuManager:
            self.go.wait(60)
            return CpuManager()

        def refresh(self) -> None:
            pass

    async def day(w: Any) -> None:
        port = Hangs()
        w.beside(port)
        lse = await w.create(await w.pod("lse", "LSE", "", "2-3"), **WHOLE)
        assert w.executor.state.owners["lse"].cpus == CpuSet([2, 3])
        assert lse in w.executor.state.containers
        assert problems(w) == ["cannot read kubelet's state file: the file system does not answer"]
        port.go.set()
        await asyncio.to_thread(w.executor.kubelet_cpus.close)

    live(day, static=False, call_timeout=0.3)


def test_a_fault_in_looking_costs_no_container(live) -> None:
    class Broken:
        def look(self) -> CpuManager:
            raise KeyError("oops")

        def refresh(self) -> None:
            raise KeyError("oops")

    async def day(w: Any) -> None:
        w.beside(Broken())
        await w.sync.once()
        own = await w.run(await w.pod("g"), **WHOLE)
        assert len(CpuSet.parse(w.on(own))) == 2
        await w.until(lambda: problems(w) == ["internal error fault=\"KeyError: 'oops'\""])
        await asyncio.to_thread(w.executor.kubelet_cpus.close)

    live(day)


def test_containers_that_own_nothing_do_not_wait_for_a_look(live) -> None:
    class Counts:
        looks = 0

        def look(self) -> CpuManager:
            self.looks += 1
            return CpuManager()

        def refresh(self) -> None:
            pass

    async def day(w: Any) -> None:
        port = Counts()
        w.beside(port)
        await w.run(await w.pod("ls", "LS"), **WHOLE)
        await w.run(await w.pod("be", "", "besteffort"), cpu_shares=2)
        await w.run(await w.pod("b", "", "burstable"), **WHOLE)
        await w.run(await w.pod("fraction"), cpu_shares=512, cpu_quota=50_000, cpu_period=100_000)
        assert port.looks == 0
        await w.run(await w.pod("g"), **WHOLE)
        assert port.looks == 1
        await asyncio.to_thread(w.executor.kubelet_cpus.close)

    live(day)


def test_the_status_says_what_kubelet_does_and_where_that_is_known_from(node, kubelet) -> None:
    async def day(w: Any) -> None:
        (kubelet.directory / "config.yaml").write_text(
            "kind: KubeletConfiguration\ncpuManagerPolicy: static\nreservedSystemCPUs: '0'\n"
            "cpuManagerPolicyOptions:\n  full-pcpus-only: 'true'\ntopologyManagerPolicy: restricted\n"
        )
        kubelet.gives("g", c="2-3")
        await w.pod("g")
        await w.sync.once()
        page = node_page(w.executor)["kubelet"]
        assert json.loads(json.dumps(page))["held"] == [
            {"pod": "ns/g", "uid": "g", "container": "c", "cpus": "2-3"}
        ]
        text = " ".join(render(node_page(w.executor), 200).split())
        file = kubelet.directory / "config.yaml"
        for words in (
            f"cpuManagerPolicy static {file}",
            f"cpuManagerPolicyOptions full-pcpus-only=true {file}",
            f"reservedSystemCPUs 0 {file}",
            f"topologyManagerPolicy restricted {file}",
            f"topologyManagerScope container kubelet's default, {file} does not set it",
            f"CPUs of all other containers 0-1,4-15 {kubelet.directory}/cpu_manager_state",
            "2-3 ns/g/c",
        ):
            assert words in text, words

    node(day)


def test_a_node_without_kubelet_says_nothing_of_it(live, tmp_path) -> None:
    async def day(w: Any) -> None:
        Kubelet(tmp_path).beside(w)
        await w.sync.once()
        assert problems(w) == []
        assert "Kubelet" not in render(node_page(w.executor))
        await asyncio.to_thread(w.executor.kubelet_cpus.close)

    live(day, reconciled=False)


def test_kubelet_that_changes_to_none_gives_everything_back(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", c="2-3")
        await w.sync.once()
        os.unlink(kubelet.directory / "cpu_manager_state")
        await w.sync.once()
        assert w.executor.state.owners == {}
        write_text(kubelet.directory, none_state())
        await w.sync.once()
        assert w.executor.kubelet_cpus.manager.policy == "none"
        assert str(w.executor.state.pools.shared) == "0-15"

    node(day)


class Chance:
    """What may happen on a node beside kubelet, in any order."""

    def __init__(self, w: Any, kubelet: Kubelet, seed: int) -> None:
        self.w, self.kubelet = w, kubelet
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
            self.running.append(await self.w.run(await self.w.pod(uid), **WHOLE, cpuset_cpus=named))

    async def a_scheduler_gives(self) -> None:
        qos = self.rolls.choice(["LSE", "LSR"])
        await self._try(await self.w.pod(f"s{self.number}", qos, "", self._two_of(CpuSet(range(15)))))

    async def the_node_gives(self) -> None:
        await self._try(await self.w.pod(f"g{self.number}"))

    async def _try(self, sandbox: str) -> None:
        call = await self.w.begin(sandbox, **WHOLE, cpuset_cpus=self.kubelet.default)
        if call.refused is None:
            self.running.append(self.w.finish(call, f"c-{sandbox}"))
            await self.w.start(self.running[-1])

    async def somebody_goes(self) -> None:
        if self.running:
            gone = self._one_of(self.running)
            await self.w.stop(gone)
            await self.w.remove(gone)

    async def kubelet_takes_back(self) -> None:
        there = {self.w.executor.state.containers[c].pod.uid for c in self.running}
        for uid in [uid for uid in self.kubelet.held if uid not in there and uid not in self.coming]:
            self.kubelet.takes_back(uid)

    async def kubelet_reconciles(self) -> None:
        await self.w.sync.once()
        for container_id in self.running:
            await update(self.w, container_id, self.kubelet.default)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ours", [False, True])
def test_whatever_comes_in_whatever_order_nothing_overlaps(node, kubelet, seed: int, ours: bool) -> None:
    async def day(w: Any) -> None:
        await w.run(await w.pod("ls", "LS", "burstable"))
        await w.run(await w.pod("be", "BE", "besteffort"))
        chance = Chance(w, kubelet, seed)
        events = [getattr(chance, name) for name in vars(Chance) if not name.startswith("_")]
        for chance.number in range(20):
            await chance.rolls.choice(events)()
            await w.quiet()
            w.check()
        await w.sync.once()
        await w.quiet()
        w.check()
        assert w.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

    node(day, static=ours)


def test_cpus_that_kubelet_assigns_and_takes_back_are_reported(node, kubelet) -> None:
    async def day(w: Any) -> None:
        kubelet.gives("g", c="2-3")
        await w.executor.kubelet_cpus.look()
        assert w.logged[-1] == 'kubelet\'s CPU manager changed its assignments came=2-3 went=""'
        kubelet.takes_back("g")
        kubelet.gives("h", c="3-4")
        await w.executor.kubelet_cpus.look()
        assert w.logged[-1] == "kubelet's CPU manager changed its assignments came=4 went=2"

    node(day)
