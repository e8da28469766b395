"""Random scenarios of a node with pods of all QoS classes, and everything that changes its CPUs.

In addition to overlapping calls of kubelet: annotations good and bad, kubelet's state file (a real one), a
Node object with a reservation that changes, BE suppression, CPUs that go offline, containers that end by
themselves or were made while the daemon was away, and the daemon's own restarts. Checked between any two
steps, at the kernel: no container that shares is on the CPUs of an owner that was allowed to start, and no BE
container on those of an LSE pod. Checked when no call is in flight: the kernel matches the state,
kubelet's reconcile updates move no container, and when all have ended the node is as it was at first.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.backends.kubelet.checkpoint_writer import static_state, write_cpu_state
from proxy.backends.kubelet.cpu_manager import KubeletCpuManagerReader
from proxy.backends.kubelet.settings import KubeletSettings
from proxy.engine.invariants import violations
from proxy.engine.node_events import KubeletCpusRead
from proxy.engine.state import NodeState
from proxy.engine.suppression import SuppressionEnded
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.model.idset import CpuSet, union
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.machine import Machine
from proxy.model.workload import Phase, Pool, QosClass
from proxy.telemetry import metrics
from tests.testkit.be_load import used_beside_be
from tests.testkit.changed_copy import changed_copy

PREFIX = "scheduling.koordinator.sh/"
STATUSES = (
    *[""] * 8,
    '{"cpuset":"4-5"}',
    '{"cpuset":"5,13"}',
    '{"cpuset":"2-3,10-11"}',
    '{"cpuset":"12-20"}',
    '{"cpuset":"0-15"}',
    '{"cpuset":"7-"}',
    "no JSON",
    '{"numaNodeResources":[{"node":1,"resources":{"cpu":"2"}}]}',
    '{"numaNodeResources":[{"node":0,"resources":{"kubernetes.io/batch-cpu":"2000"}}]}',
    '{"cpuSharedPools":[{"socket":0,"node":0}]}',
)
SPECS = (
    *[""] * 5,
    '{"requiredCPUBindPolicy":"FullPCPUs"}',
    '{"preferredCPUBindPolicy":"SpreadByPCPUs"}',
    '{"preferredCPUBindPolicy":"ConstrainedBurst"}',
    '{"requiredCPUBindPolicy":"Sideways"}',
)
LABELS = ("LSE", "LSE", "LSR", "LSR", "LS", "LS", "BE", "SYSTEM", "", "", "GOLD")
PARENTS = ("/kubepods", "/kubepods", "/kubepods/burstable", "/kubepods/besteffort")
AMOUNTS = (
    {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000},
    {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000},
    {"cpu_shares": 512, "cpu_quota": 50_000, "cpu_period": 100_000},
    {"cpu_shares": 2},
)
HELD = ("1,9", "6-7", "14", "3")
RESERVATIONS = ("", "0", "0,8", "1")
BATCHES, MOST = 20, 8


class FakeNodeObject:
    """A Node object with a reservation that can be changed."""

    source, problem = "a Node object", ""

    def __init__(self) -> None:
        self.reserved = ""

    def read(self) -> NodeMeta:
        text = json.dumps({"reservedCPUs": self.reserved, "applyPolicy": "Default"})
        return NodeMeta("n", annotations={"node.koordinator.sh/reservation": text} if self.reserved else {})

    def close(self) -> None:
        pass


class ListableDict(dict[str, Any]):
    """A dictionary that may be listed in one thread and changed in another."""

    def values(self) -> Any:
        return self.copy().values()


class RandomScenario:
    """A client with concurrent calls, the runtime, and all other programs of the node."""

    def __init__(self, world: Any, seed: int, directory: Path) -> None:
        self.world = world
        self.dice = random.Random(seed)
        self.directory = directory
        self.node_object = FakeNodeObject()
        self.held: dict[str, dict[str, CpuSet]] = {}
        self.whole: Machine = world.machine
        world.runtime.containers = ListableDict()
        world.runtime.pods = ListableDict()
        self.pods: dict[str, dict[str, Any]] = {}
        """The existing sandboxes, and the resources that their containers request."""
        self.started: dict[str, CpuSet] = {}
        """CPUs of containers that own some and were allowed to start."""
        self.hard: set[str] = set()
        self.foreign: set[str] = set()
        """Containers that were made while the daemon was away, until they are adopted."""
        self.serial = 0
        self.busy: set[str] = set()
        self.attach()

    def attach(self) -> None:
        """Make a new executor read kubelet's state file and the Node object."""
        self.write_state()
        executor = self.world.executor
        port = KubeletCpuManagerReader(
            KubeletSettings(), str(self.directory), "", lambda: self.world.executor.state.node.topology
        )
        self.world.use_kubelet_cpus(port)
        executor.node_policy._source = self.node_object

    def write_state(self) -> None:
        write_cpu_state(self.directory, static_state(CpuSet(range(16)), self.held))

    # -- invariants at any moment -------------------------------------------------------------------------

    def look(self) -> None:
        state = self.world.executor.state
        for container_id, cpus in self.world.cgroups.sets.copy().items():
            container = state.containers.get(container_id)
            if container is None or container_id in self.foreign or container.placement.pool is Pool.OWN:
                continue
            batch = container.placement.pool is Pool.BE
            for owner, own in self.started.items():
                if not (batch and owner not in self.hard):
                    assert cpus.isdisjoint(own), f"{container.ref} is on {cpus}, {own} belong to {owner}"

    async def yield_at_random(self) -> None:
        for _ in range(self.dice.choice((0, 1, 2, 5))):
            await asyncio.sleep(0)
        if self.dice.random() < 0.3:
            await asyncio.sleep(0.001)
        self.look()

    # -- kubelet ------------------------------------------------------------------------------------------

    async def call(self, method: str, message: Any) -> Any:
        call = await self.world.call(method, message)
        if call.refused is not None:
            self.world.wire.finished(call, None)
        await self.yield_at_random()
        return call

    async def arrives(self) -> None:
        self.serial += 1
        uid = f"u{self.serial}"
        label, parent = self.dice.choice(LABELS), self.dice.choice(PARENTS)
        amount = self.dice.choice(AMOUNTS)
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=uid, uid=uid, namespace="ns"),
            labels={"koordinator.sh/qosClass": label} if label else {},
            linux=pb.LinuxPodSandboxConfig(cgroup_parent=f"{parent}/pod{uid}"),
        )
        for key, text in (("status", self.dice.choice(STATUSES)), ("spec", self.dice.choice(SPECS))):
            if text:
                config.annotations[f"{PREFIX}resource-{key}"] = text
        if self.dice.random() < 0.6:
            config.linux.resources.CopyFrom(pb.LinuxContainerResources(**amount))
        call = await self.call("RunPodSandbox", pb.RunPodSandboxRequest(config=config))
        if call.refused is not None:
            return
        if self.dice.random() < 0.1:
            self.world.wire.finished(call, 2)
            return
        sandbox = f"s-{uid}"
        answer = pb.RunPodSandboxResponse(pod_sandbox_id=sandbox)
        labels, annotations = dict(config.labels), dict(config.annotations)
        self.world.runtime.pods[sandbox] = RuntimePod(sandbox, uid, "ns", uid, 0, True, labels, annotations)
        self.world.wire.response(call, answer.SerializeToString())
        self.world.wire.finished(call, 0)
        self.pods[sandbox] = {"amount": amount, "parent": f"{parent}/pod{uid}", "uid": uid}

    async def creates(self, sandbox: str) -> None:
        amount = self.pods[sandbox]["amount"]
        name = self.dice.choice(("c0", "c1"))
        if any(c.name == name and c.state != "EXITED" for c in self.inside(sandbox)):
            return
        self.serial += 1
        attempt, container_id = self.serial, f"x{self.serial}"
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.config.metadata.name, request.config.metadata.attempt = name, attempt
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**amount))
        online = self.world.executor.state.node.machine.online
        call = await self.call("CreateContainer", request)
        pod = self.world.executor.state.pods.get(sandbox)
        if call.refused is not None:
            return
        given = pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus
        if pod is not None and pod.qos in (QosClass.LSE, QosClass.LSR):
            assert not pod.problem, "a strict pod whose annotation is no good must not run"
            if pod.cpuset:
                lacks = pod.cpuset - CpuSet.parse(given)
                assert CpuSet.parse(given) <= pod.cpuset
                assert lacks.isdisjoint(online & self.world.executor.state.node.machine.online), lacks
        if self.dice.random() < 0.1:
            self.world.wire.finished(call, self.dice.choice((2, None)))
            return
        self.world.runtime.specs[container_id] = given
        self.world.runtime.containers[container_id] = RuntimeContainer(
            container_id, sandbox, name, attempt, "CREATED"
        )
        await self.yield_at_random()
        self.world.wire.response(
            call, pb.CreateContainerResponse(container_id=container_id).SerializeToString()
        )
        self.world.wire.finished(call, 0)
        if self.dice.random() < 0.5:
            await self.starts(container_id)

    async def starts(self, container_id: str) -> None:
        call = await self.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
        if call.refused is not None:
            return
        if self.dice.random() < 0.1:
            self.world.wire.finished(call, 2)
            return
        self.runs(container_id)
        await self.yield_at_random()
        self.world.wire.finished(call, 0)

    def runs(self, container_id: str) -> None:
        """Record that the runtime has started a container."""
        ours = self.world.executor.state.containers.get(container_id)
        if ours is not None and ours.placement.pool is Pool.OWN:
            self.started[container_id] = ours.placement.exclusive
            if ours.placement.excludes_be or ours.pod.qos is QosClass.LSE:
                self.hard.add(container_id)
        self.world.cgroups.sets[container_id] = CpuSet.parse(self.world.runtime.specs[container_id])
        self.world._state(container_id, "RUNNING")

    async def updates(self, container_id: str) -> None:
        """Send an update as kubelet's reconcile loop does, with the set that it assumes."""
        request = pb.UpdateContainerResourcesRequest(container_id=container_id)
        request.linux.cpuset_cpus = self.dice.choice(("", "0-15", "3", "0-2,4-15"))
        call = await self.call("UpdateContainerResources", request)
        there = self.world.runtime.containers.get(container_id)
        if there is None or there.state == "EXITED":
            self.world.wire.finished(call, 2)
            return
        cpus = pb.UpdateContainerResourcesRequest.FromString(call.sent).linux.cpuset_cpus
        if cpus:
            self.world.runtime.specs[container_id] = cpus
            if container_id in self.world.cgroups.sets:
                self.world.cgroups.sets[container_id] = CpuSet.parse(cpus)
        await self.yield_at_random()
        self.world.wire.finished(call, 0)

    def dies(self, container_id: str) -> None:
        self.started.pop(container_id, None)
        self.hard.discard(container_id)
        self.world.cgroups.sets.pop(container_id, None)
        if container_id in self.world.runtime.containers:
            self.world._state(container_id, "EXITED")

    async def stops(self, container_id: str) -> None:
        call = await self.call("StopContainer", pb.StopContainerRequest(container_id=container_id))
        self.dies(container_id)
        await self.yield_at_random()
        self.world.wire.finished(call, self.dice.choice((0, 0, None)))

    async def exits(self, container_id: str) -> None:
        """End a container without a report."""
        if container_id in self.world.cgroups.sets:
            self.dies(container_id)

    async def goes(self, sandbox: str) -> None:
        call = await self.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        for container in self.inside(sandbox):
            self.dies(container.id)
        await self.yield_at_random()
        self.world.wire.finished(call, 0)
        call = await self.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        for container in self.inside(sandbox):
            self.world.runtime.containers.pop(container.id, None)
        self.world.runtime.pods.pop(sandbox, None)
        self.pods.pop(sandbox, None)
        await self.yield_at_random()
        self.world.wire.finished(call, 0)

    # -- other programs -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """kubelet's CPU manager assigns or releases CPUs."""
        if self.held and self.dice.random() < 0.5:
            self.held.pop(self.dice.choice(sorted(self.held)))
        else:
            uid = self.dice.choice(("k1", "k2", *(pod["uid"] for pod in self.pods.values())))
            self.held[uid] = {"c0": CpuSet.parse(self.dice.choice(HELD))}
        self.write_state()

    def suppress(self, used: float) -> None:
        """Do what the executor does with a reading of usage."""
        store = self.world.executor.store
        for event in used_beside_be(store.state, used):
            store.handle(event)

    def plug(self, gone: set[int]) -> None:
        """Take CPUs offline, and bring others online."""
        if not gone:
            self.world.machine = self.whole
            return
        left = CpuSet(i for i in range(16) if i not in gone)
        nodes = tuple(changed_copy(n, cpus=n.cpus & left) for n in self.whole.nodes)
        cpus = tuple(c for c in self.whole.cpus if c.id in left)
        self.world.machine = changed_copy(self.whole, cpus=cpus, nodes=nodes)

    async def restart(self) -> None:
        """Stop the daemon, change the node, and start it again, at times without its ledger."""
        await self.world.executor.ledger_writer.flush()
        before = self.world.executor.state.with_be_limit(None)  # after a start BE is not suppressed
        await self.world.close()
        sandboxes = sorted(self.pods)
        behind = bool(sandboxes) and self.dice.random() < 0.3
        if behind:
            self.serial += 1
            container_id, sandbox = f"x{self.serial}", self.dice.choice(sandboxes)
            self.foreign.add(container_id)
            self.world.runtime.containers[container_id] = RuntimeContainer(
                container_id, sandbox, "late", self.serial, "CREATED"
            )
            parent = self.pods[sandbox]["parent"]
            self.world.runtime.details[container_id] = RuntimeDetail(
                f"{parent}/{container_id}", 2, 0, 0, 0, ""
            )
            self.world.runtime.specs[container_id] = "0-15"
            if self.dice.random() < 0.5:
                self.runs(container_id)
        self.world.boot()
        self.attach()
        await self.settle()
        self.foreign.clear()
        if not behind:
            assert self.world.executor.state.owners == before.owners
            assert self.world.executor.state.pools == before.pools
            for container in self.world.executor.state.containers.values():
                assert container.placement == before.containers[container.id].placement

    # -- the run ------------------------------------------------------------------------------------------

    def inside(self, sandbox: str) -> list[Any]:
        return [c for c in self.world.runtime.containers.values() if c.sandbox_id == sandbox]

    def chosen(self) -> Coroutine[Any, Any, None] | None:
        """Choose an action of kubelet; one at a time for a pod."""
        free = sorted(set(self.pods) - self.busy)
        what = self.dice.random()
        if not free or (what < 0.2 and len(self.pods) < MOST):
            return self.arrives() if len(self.pods) < MOST else None
        sandbox = self.dice.choice(free)
        self.busy.add(sandbox)
        inside = sorted(self.inside(sandbox), key=lambda c: c.id)
        if what < 0.4 or not inside:
            return self.creates(sandbox)
        if what > 0.93:
            return self.goes(sandbox)
        container = self.dice.choice(inside)
        if what < 0.65 and container.state == "CREATED":
            return self.starts(container.id)
        if what < 0.78 and container.state != "EXITED":
            return self.updates(container.id)
        return self.exits(container.id) if what < 0.84 else self.stops(container.id)

    async def batch(self) -> None:
        """Make some concurrent calls, with or without a reconcile, and then actions of other programs."""
        self.busy.clear()
        works = [work for _ in range(self.dice.randint(1, 6)) if (work := self.chosen()) is not None]
        if self.dice.random() < 0.3:
            works.append(self.world.sync.once())
        await asyncio.gather(*works)
        what = self.dice.random()
        if what < 0.15:
            self.hold()
        elif what < 0.3:
            self.suppress(self.dice.randrange(16))
        elif what < 0.4:
            self.plug(set(self.dice.sample(range(16), self.dice.choice((0, 1, 3)))))
        elif what < 0.5:
            self.node_object.reserved = self.dice.choice(RESERVATIONS)

    async def settle(self) -> None:
        """Reconcile twice: lost calls are resolved, and each container is on the CPUs of the state."""
        for _ in range(2):
            self.world.now += 10
            await self.world.sync.once()
            while tasks := list(self.world.executor._tasks):
                await asyncio.gather(*tasks)
            await self.world.executor.kernel.run(lambda: None)

    def holds(self) -> None:
        """Check the invariants that hold when no call is in flight."""
        state: NodeState = self.world.executor.state
        running = [c for c in state.containers.values() if c.phase is not Phase.EXITED]
        online = state.node.machine.online
        assert violations(state) == []
        there = {c.id for c in self.world.runtime.containers.values() if c.state != "EXITED"}
        assert {c.id for c in running} == there
        owned = union((c.placement.exclusive | c.placement.replacement).bits for c in running)
        held = union(cpus.bits for names in state.kubelet_cpus.values() for cpus in names.values())
        left = state.node.shareable - CpuSet.from_bits(owned | held)
        assert left <= state.pools.shared, "pools have their CPUs back"
        for container_id, cpus in self.world.cgroups.sets.items():
            assert cpus == state.desired_cpus(state.containers[container_id])
            assert cpus
            assert cpus <= online
        self.look()

    async def reconcile(self) -> None:
        """kubelet's updates for all containers, and reconciles: none moves, and nothing is written."""
        before, written = (
            self.world.cgroups.sets.copy(),
            len([line for line in self.world.log if "kernel " in line]),
        )
        for container_id in sorted(before):
            await self.updates(container_id)
        await self.settle()
        assert self.world.cgroups.sets == before
        assert len([line for line in self.world.log if "kernel " in line]) == written
        assert self.world.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 0

    async def run(self) -> None:
        await self.settle()
        first = self.world.executor.state
        for turn in range(BATCHES):
            await self.batch()
            await self.settle()
            self.holds()
            if turn % 5 == 2:
                await self.reconcile()
            if turn % 5 == 4:
                await self.restart()
                self.holds()
        for sandbox in sorted(self.pods):
            await self.goes(sandbox)
        self.held.clear()
        self.write_state()
        self.world.executor.store.handle(SuppressionEnded(0.0, "it ends"))
        self.plug(set())
        self.node_object.reserved = ""
        await self.settle()
        self.holds()
        await self.world.executor.ledger_writer.flush()
        await self.world.executor.kernel.run(lambda: None)
        state = self.world.executor.state
        assert state.pools == first.pools
        assert not [*state.owners, *state.pods, *state.containers, *self.world.ledger.entries]
        assert self.world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0


@pytest.mark.parametrize("static", [True, False], ids=["ours", "kubelets"])
@pytest.mark.parametrize("seed", range(16))
def test_random_calls_of_all_qos_classes_keep_the_invariants(
    run_scenario, tmp_path: Path, seed: int, *, static: bool
) -> None:
    async def scenario(world: Any) -> None:
        await RandomScenario(world, seed, tmp_path).run()

    rules = {"system": CpuSet.parse("15")} if seed % 3 == 0 else None
    run_scenario(scenario, static=static, rules=rules, call_timeout=0.5)


def test_cpus_kubelet_held_for_a_sharer_return_at_once(run_scenario) -> None:
    """The new container owns nothing by its annotation: other containers need no reconcile."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.executor.store.handle(KubeletCpusRead(CpuManager(), {"g": {"c": CpuSet((4, 5))}}))
        await world.quiet()
        assert world.on(ls) == "0-3,6-15"
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        bound = '{"numaNodeResources":[{"node":1,"resources":{"cpu":"2"}}]}'
        sandbox = await world.pod("g", annotation=bound)
        await world.quiet()
        assert world.on(ls) == "0-3,6-15"
        call = await world.begin(sandbox, **AMOUNTS[0])
        await world.quiet()
        assert world.on(ls) == "0-15"
        world.wire.finished(call, 13)
        await world.quiet()
        assert world.on(ls) == "0-3,6-15", "the create has failed, and kubelet will retry"
        assert world.executor.telemetry.value(metrics.RECONCILES) == passes
        world.check()

    run_scenario(scenario, static=False)


def test_cpus_that_kubelet_holds_are_followed_when_a_sandbox_is_made(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.executor.store.handle(KubeletCpusRead(CpuManager(), {"g": {"c": CpuSet((4, 5))}}))
        await world.quiet()
        sandbox = await world.pod("g", "LS")
        await world.quiet()
        assert world.on(ls) == "0-15", "kubelet's CPU manager does not place LS pods"
        await world.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        world.check()

    run_scenario(scenario, static=False)
