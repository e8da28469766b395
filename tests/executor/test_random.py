"""Random calls that overlap in every way, with failures and cancellations, and reconciles in between.

The simulated runtime has three steps: a call is forwarded to it, executed, answered. Between any two of
them anything else may happen. The invariant is checked all the time: no running container
of a pool is on a CPU of a container with CPUs of its own that was allowed to start. At the end everything is
removed, and nothing may be left.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from proxy.engine.state import NodeState
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import LocatedDevice
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import TWO_CPUS

KINDS = (
    ("LS", "burstable", "", {}),
    ("LS", "burstable", "", {}),
    ("", "besteffort", "", {}),
    ("LSE", "", "0-1", {}),
    ("LSE", "", "4-5,12", {}),
    ("LSR", "", "8-9", {}),
    ("LSR", "", "1-2", {}),
    ("", "", "", TWO_CPUS),
    ("", "", "", TWO_CPUS),
)
STEPS, DAYS = 80, 12


class SnapshotDict(dict[str, Any]):
    """A dictionary that may be listed in one thread and changed in another."""

    def values(self) -> Any:
        return self.copy().values()


class RandomClient:
    """A client with concurrent calls, and the runtime that it calls."""

    def __init__(self, world: Any, seed: int, *, wild: bool) -> None:
        self.world = world
        self.dice = random.Random(seed)
        self.wild = wild
        self.faulty = False
        world.runtime.containers = SnapshotDict()
        world.runtime.pods = SnapshotDict()
        self.slow("list_containers", after=True)
        self.slow("update_cpuset", after=False)
        self.serial = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.kinds: dict[str, tuple[str, str, str, dict[str, int]]] = {}
        self.alive: set[str] = set()
        """Containers that exist at the runtime."""
        self.busy: set[str] = set()
        """Containers and sandboxes with a call of the client on its way."""
        self.exclusive: dict[str, tuple[CpuSet, bool]] = {}
        """CPUs of containers that own some and were allowed to start."""
        self.faults: list[str] = []

    def slow(self, name: str, *, after: bool) -> None:
        """Delay a call of the daemon at the runtime, before or after its effect."""
        plain = getattr(self.world.runtime, name)
        dice = random.Random(self.dice.random())

        def slowly(*args: Any) -> Any:
            time.sleep(dice.choice((0, 0.002, 0.005)))
            answer = plain(*args)
            time.sleep(dice.choice((0, 0.002, 0.005)) if after else 0)
            return answer

        setattr(self.world.runtime, name, slowly)

    async def yield_at_random(self) -> None:
        """Yield to other tasks: not at all, for some turns of the loop, or for a while."""
        for _ in range(self.dice.choice((0, 1, 2, 5))):
            await asyncio.sleep(0)
        if self.dice.random() < 0.3:
            await asyncio.sleep(0.001)
        self.look()

    def look(self) -> None:
        """Check the invariant at the kernel."""
        for container_id, cpus in self.world.cgroups.sets.items():
            container = self.world.executor.state.containers.get(container_id)
            pool = "own" if container is None else container.placement.pool.value
            for owner, (own, hard) in self.exclusive.items():
                if pool == "own" or (pool == "be" and not hard) or cpus.isdisjoint(own):
                    continue
                self.faults.append(f"{container_id} ({pool}) runs on {cpus}, {own} belong to {owner}")

    async def call(self, method: str, message: Any) -> Any:
        call = await self.world.call(method, message)
        if call.refused is not None:
            self.world.wire.finished(call, None)
            return None
        await self.yield_at_random()
        return call

    def look_at_asides(self) -> None:
        """No pod owns CPUs set aside for another pod, and the tracked memory matches a recount."""
        state = self.world.executor.state
        for pod in state.pods.values():
            for owner, held in state.owners.items():
                if pod.reserved_for_pod is not None and not owner.startswith(f"{pod.key}/"):
                    assert held.cpus.isdisjoint(pod.reserved_for_pod.cpus), (owner, pod.key)
        if state.memory is not None:
            again = NodeState.of(state.node, state.pods.values(), state.containers.values())
            assert again.memory.assignments == state.memory.assignments

    # -- what the client does -----------------------------------------------------------------------------

    async def pod(self) -> None:
        self.serial += 1
        kind = self.dice.choice(KINDS)
        uid = f"u{self.serial}"
        more = {"total": kind[3], "quota": 200_000, "may_be_refused": True}
        sandbox = await self.world.pod(uid, kind[0], kind[1], kind[2], **more)
        if sandbox in self.world.runtime.pods:
            self.kinds[sandbox] = kind

    async def create(self, sandbox: str) -> None:
        kind = self.kinds.get(sandbox)
        if kind is None:
            return
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.config.metadata.name = "c"
        request.config.metadata.attempt = self.serial
        self.serial += 1
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**kind[3]))
        call = await self.call("CreateContainer", request)
        if call is None:
            return
        fate = self.dice.random()
        if fate < 0.1:
            self.world.wire.finished(call, self.dice.choice((2, 13)))
            return
        if fate < 0.15:
            self.world.wire.finished(call, None)
            return
        pod = self.world.runtime.pods.get(sandbox)
        if pod is None or not pod.ready:  # a stopped sandbox takes no container
            self.world.wire.finished(call, 5 if pod is None else 2)
            return
        self.serial += 1
        container_id = f"x{self.serial}"
        forwarded = pb.CreateContainerRequest.FromString(call.sent)
        self.world.runtime.specs[container_id] = forwarded.config.linux.resources.cpuset_cpus
        self.world.runtime.quotas[container_id] = forwarded.config.linux.resources.cpu_quota
        self.world.runtime.containers[container_id] = RuntimeContainer(
            container_id, sandbox, "c", forwarded.config.metadata.attempt, "CREATED"
        )
        self.alive.add(container_id)
        await self.yield_at_random()
        if fate < 0.2:
            self.world.wire.finished(call, None)
            return
        answer = pb.CreateContainerResponse(container_id=container_id).SerializeToString()
        self.world.wire.response(call, answer)
        self.world.wire.finished(call, 0)

    async def start(self, container_id: str) -> None:
        call = await self.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
        if call is None:
            return
        there = self.world.runtime.containers.get(container_id)
        if self.dice.random() < 0.1 or there is None or there.state != "CREATED":
            self.world.wire.finished(call, 2)
            return
        orphan = self.dice.random() < 0.1
        if orphan:  # its client disconnects, and the runtime executes the call later nevertheless
            self.world.wire.finished(call, None)
            await self.yield_at_random()
            there = self.world.runtime.containers.get(container_id)
            if there is None or there.state != "CREATED":
                return
        held = self.world.executor.state.containers.get(container_id)
        if held is not None and held.placement.pool.value == "own":
            self.exclusive[container_id] = (held.placement.exclusive, held.placement.excludes_be)
        self.world.cgroups.sets[container_id] = CpuSet.parse(self.world.runtime.specs[container_id])
        self.world.cpu.quotas[f"{self.world.parents[there.sandbox_id]}/{container_id}"] = -1
        self.world.runtime.limit(container_id, 0)
        self.world._state(container_id, "RUNNING")
        await self.yield_at_random()
        if not orphan:
            self.world.wire.finished(call, 0)

    async def update(self, container_id: str) -> None:
        request = pb.UpdateContainerResourcesRequest(container_id=container_id)
        request.linux.cpuset_cpus = self.dice.choice(("", "0-15", "3"))
        request.linux.cpu_quota = self.dice.choice((0, 0, 150_000))
        call = await self.call("UpdateContainerResources", request)
        if call is None:
            return
        there = self.world.runtime.containers.get(container_id)
        if self.dice.random() < 0.2 or there is None or there.state == "EXITED":
            self.world.wire.finished(call, self.dice.choice((2, None)))
            return
        orphan = self.dice.random() < 0.1
        if orphan:
            self.world.wire.finished(call, None)
            await self.yield_at_random()
            there = self.world.runtime.containers.get(container_id)
            if there is None or there.state == "EXITED":
                return
        forwarded = pb.UpdateContainerResourcesRequest.FromString(call.sent).linux
        cpus = forwarded.cpuset_cpus
        self.world.runtime.specs[container_id] = cpus
        self.world.runtime.limit(container_id, forwarded.cpu_quota)
        if container_id in self.world.cgroups.sets:
            self.world.cgroups.sets[container_id] = CpuSet.parse(cpus)
        await self.yield_at_random()
        if not orphan:
            self.world.wire.finished(call, 0)

    def inside(self, sandbox: str) -> list[str]:
        return sorted(c.id for c in self.world.runtime.containers.values() if c.sandbox_id == sandbox)

    def _dead(self, container_id: str) -> None:
        self.exclusive.pop(container_id, None)
        self.world.cgroups.end(container_id)
        self.world.cpu.quotas.pop(self.world.runtime.group(container_id) or "", None)
        if container_id in self.world.runtime.containers:
            self.world._state(container_id, "EXITED")

    async def stop(self, container_id: str) -> None:
        call = await self.call("StopContainer", pb.StopContainerRequest(container_id=container_id))
        if self.dice.random() < 0.1:
            self.world.wire.finished(call, None)
            return
        self._dead(container_id)
        await self.yield_at_random()
        self.world.wire.finished(call, self.dice.choice((0, 0, 0, None)))

    async def remove(self, container_id: str) -> None:
        call = await self.call("RemoveContainer", pb.RemoveContainerRequest(container_id=container_id))
        self._dead(container_id)
        self.world.runtime.containers.pop(container_id, None)
        self.alive.discard(container_id)
        await self.yield_at_random()
        self.world.wire.finished(call, self.dice.choice((0, 0, 0, None)))

    async def drop(self, sandbox: str) -> None:
        call = await self.call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        for container_id in self.inside(sandbox):
            self._dead(container_id)
        if (pod := self.world.runtime.pods.get(sandbox)) is not None:
            self.world.runtime.pods[sandbox] = changed_copy(pod, ready=False)
        await self.yield_at_random()
        self.world.wire.finished(call, 0)
        call = await self.call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
        for container_id in self.inside(sandbox):
            self._dead(container_id)
            self.world.runtime.containers.pop(container_id, None)
            self.alive.discard(container_id)
        self.world.runtime.pods.pop(sandbox, None)
        self.world.cpu.quotas.pop(self.world.parents[sandbox], None)
        self.kinds.pop(sandbox, None)
        await self.yield_at_random()
        self.world.wire.finished(call, 0)

    async def exit(self, container_id: str) -> None:
        """End a container without a report."""
        if container_id in self.world.cgroups.sets:
            self._dead(container_id)

    async def compare(self) -> None:
        await self.world.sync.once()

    # -- the run ------------------------------------------------------------------------------------------

    def begin(self, key: str, work: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
        if key in self.busy and not self.wild:
            return
        self.busy.add(key)

        async def whole() -> None:
            try:
                await work(*args)
            finally:
                self.busy.discard(key)

        task = asyncio.get_running_loop().create_task(whole())
        self.tasks.add(task)

    def act(self) -> None:
        """Start a random call; one at a time for a container, as kubelet does for a pod."""
        sandboxes = sorted(self.kinds)
        what = self.dice.random()
        if what < 0.15 or not sandboxes:
            self.begin("new", self.pod)
            return
        sandbox = self.dice.choice(sandboxes)
        inside = self.inside(sandbox)
        if what < 0.4 or not inside:
            self.begin(sandbox, self.create, sandbox)
            return
        if what > 0.9:
            if what > 0.93:
                self.begin("pass", self.compare)
            else:
                self.begin(sandbox, self.drop, sandbox)
            return
        state = self.world.runtime.containers[container_id := self.dice.choice(inside)].state
        if what < 0.65 and state == "CREATED":
            self.begin(sandbox, self.start, container_id)
        elif what < 0.75:
            self.begin(container_id, self.update, container_id)
        elif what < 0.83:
            self.begin(sandbox, self.stop, container_id)
        elif what < 0.86:
            self.begin(sandbox, self.exit, container_id)
        else:
            self.begin(sandbox, self.remove, container_id)

    async def settle_down(self) -> None:
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        assert [r for r in results if r is not None] == []
        self.world.now += 10
        await self.world.sync.once()
        await self.world.quiet()
        self.world.now += 10
        await self.world.sync.once()
        await self.world.quiet()

    async def run(self) -> None:
        for _ in range(STEPS):
            self.act()
            await self.yield_at_random()
            assert self.faults == []
            self.look_at_asides()
        await self.settle_down()
        self.world.check()
        self.check_quotas()
        state = self.world.executor.state
        running = {c.id for c in self.world.runtime.containers.values() if c.state != "EXITED"}
        known = {c.id for c in state.containers.values() if c.phase.value != "exited"}
        assert known == running
        owners = {state.containers[i].owner for i in running if state.containers[i].owner}
        assert set(state.owners) == owners
        for sandbox in sorted(self.kinds):
            self.begin(sandbox, self.drop, sandbox)
        await self.settle_down()
        self.check_nothing_is_left()
        assert self.faults == []

    def check_quotas(self) -> None:
        """A container that owns CPUs has no quota, nor has its pod; all others have their own quota."""
        state, kernel = self.world.executor.state, self.world.cpu.quotas
        owning = {
            c.pod.sandbox_id for c in state.containers.values() if c.owner and c.phase.value != "exited"
        }
        for sandbox in self.kinds:
            assert kernel[self.world.parents[sandbox]] == (-1 if sandbox in owning else 200_000), sandbox
        for container_id in self.world.cgroups.sets:
            container = state.containers[container_id]
            found = kernel[self.world.runtime.group(container_id)]
            saved = self.world.runtime.quotas.get(container_id) or -1
            assert found == (-1 if container.owner else saved), container_id

    def check_nothing_is_left(self) -> None:
        executor = self.world.executor
        assert violations(executor.state) == []
        assert str(executor.state.pools.shared) == str(executor.state.pools.be) == "0-15"
        assert executor.state.memory == executor.state.node.memory
        for rest in (
            executor.state.pods,
            executor.state.containers,
            executor.state.owners,
            executor.state.runtime.saved,
            executor.state.runtime.lost_creates,
            executor.state.runtime.awaiting_sync,
            executor.quotas.known.records,
            executor.quotas.known.unsent,
            executor.state.inflight.calls,
            executor.state.runtime.arriving_sandboxes,
            self.world.ledger.entries,
        ):
            assert not rest
        faults = [each for each in executor.telemetry.problems() if each["message"] == "internal error"]
        assert self.faulty or not faults


class SlowSources:
    """A kubelet that knows some pods, answers slowly, and fails at times."""

    knows_pods, knows_devices = True, True

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def pod_requests(self, uid: str, namespace: str, name: str) -> Any:
        time.sleep(self.dice.choice((0, 0.001, 0.005)))
        if self.dice.random() < 0.1:
            raise OSError("gone")
        amounts = {"cpu": self.dice.choice((1000, 2000, 3000)), "memory": 1 << 20}
        return (
            (PodRequests(uid, (ContainerResources("c", ContainerKind.APP, amounts, amounts),)), "kubelet")
            if int(uid[1:]) % 2
            else None
        )

    def devices(self, namespace: str, pod: str, container: str) -> Any:
        time.sleep(self.dice.choice((0, 0.001)))
        return (
            (LocatedDevice("/dev/a", nodes=Mask([self.dice.randint(0, 1)])),)
            if self.dice.random() < 0.3
            else None
        )

    def allocatable(self) -> Any:
        return {}

    def close(self) -> None:
        pass


RULES: dict[str, dict[str, Any]] = {
    "no-policy": {},
    "by-pod": {
        "policy": TopologyPolicy.RESTRICTED,
        "scope": Scope.POD,
        "reserved_memory": {0: {"memory": 1}},
    },
    "by-container": {"policy": TopologyPolicy.BEST_EFFORT, "reserved_memory": {0: {"memory": 1}}},
}


@pytest.mark.parametrize("seed", range(DAYS // 2))
@pytest.mark.parametrize(("rules", "with_sources"), [("by-pod", False), *((rules, True) for rules in RULES)])
def test_random_calls_under_a_topology_policy_keep_the_invariants(
    run_scenario, seed: int, rules: str, *, with_sources: bool
) -> None:
    async def scenario(world: Any) -> None:
        play = RandomClient(world, seed, wild=seed % 2 == 1)
        play.faulty = with_sources
        await play.run()

    # A start without its client is waited for until a reconcile shows it; no timer causes a reconcile here.
    run_scenario(
        scenario,
        rules=RULES[rules],
        sources=(SlowSources(seed), None) if with_sources else None,
        call_timeout=0.3,
    )


def test_a_sandbox_that_is_being_stopped_takes_no_container(run_scenario) -> None:
    """A container created after the stop has ended all containers would run without its CPUs."""

    async def scenario(world: Any) -> None:
        play = RandomClient(world, 0, wild=True)
        play.dice.random = lambda: 0.5  # type: ignore[method-assign]  # no call fails by chance
        await world.run(await world.pod("ls", "LS", "burstable"))
        sandbox = await world.pod("lse", "LSE", "", "2-3")
        play.kinds[sandbox] = ("LSE", "", "2-3", {})
        plain, moments = play.yield_at_random, 0

        async def create_behind_the_stop() -> None:
            nonlocal moments
            moments += 1
            if moments == 2:  # the runtime has stopped the sandbox, and has not answered yet
                play.yield_at_random = plain  # type: ignore[method-assign]
                await play.create(sandbox)
                for container_id in play.inside(sandbox):
                    await play.start(container_id)
                play.yield_at_random = slowly  # type: ignore[method-assign]

        async def slowly() -> None:
            await world.quiet()
            play.look()

        play.yield_at_random = create_behind_the_stop  # type: ignore[method-assign]
        await play.drop(sandbox)
        assert moments == 2
        assert play.faults == []
        assert not play.alive

    run_scenario(scenario)


@pytest.mark.parametrize("seed", range(DAYS))
@pytest.mark.parametrize("wild", [False, True], ids=["one-by-one", "wild"])
def test_random_calls_keep_the_invariants(run_scenario, seed: int, *, wild: bool) -> None:
    """``wild``: calls for one pod overlap too, as they may when kubelet restarts in the middle."""

    async def scenario(world: Any) -> None:
        runtime_sync = world.make_runtime_sync()
        syncing = asyncio.create_task(runtime_sync.run())
        try:
            await RandomClient(world, seed, wild=wild).run()
        finally:
            syncing.cancel()
            await asyncio.gather(syncing, return_exceptions=True)
            await asyncio.to_thread(runtime_sync.close)

    run_scenario(scenario, settle_per_second=1000, call_timeout=0.5)
