"""Honest and hostile pods on a node in memory, and all output of the daemon about them.

``Tenants`` plays the same honest pods with and without hostile pods between its steps. It
returns what the honest pods observe: the answers to their calls, their records in the ledger, and their
CPUs in the kernel.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hostile_pods import NAMESPACE, NOT_UTF8, HonestPod, HostilePod, with_invalid_utf8

from proxy.api.cri import api_pb2 as pb
from proxy.assembly import options_of
from proxy.backends.ledger import open_ledger
from proxy.config.load import parse
from proxy.engine.invariants import violations
from proxy.executor.rules_from_config import node_rules
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.executor.status_data import node_page
from proxy.model.idset import CpuSet
from proxy.model.workload import Pool
from proxy.observe.explain_data import history_page
from tests.executor.conftest import MACHINE, PlayedCall, World
from tests.testkit.changed_copy import changed_copy

CPUS = len(MACHINE.online)
LARGEST_MESSAGE = 2_000
HOLD_MS = 20.0
REFERENCE_MS = 12.0
"""CPU time of the loop in ``slowness`` on the machine for which ``HOLD_MS`` was chosen."""
FLOOR = 2
"""CPUs: one core with its threads, which is more than 5 % of the machine in memory."""
CONFIG = """
apiVersion: topoproxy/v1
kind: TopoproxyConfiguration
cpuManagerPolicy: static
reservedSystemCPUs: 0,8
callTimeout: 2s
koordinator:
  systemCPUs: 1,9
"""


DAY = (
    HonestPod("shop", parent="burstable"),
    HonestPod("agent", "SYSTEM", "burstable", namespace="kube-system"),
    HonestPod("lse", "LSE", cpus="2-3", whole=2),
    HonestPod("batch", "BE", "besteffort"),
    HonestPod("lsr", "LSR", cpus="4", whole=1),
    HonestPod("whole", whole=2),
    HonestPod("plain", parent="besteffort"),
    HonestPod("late", "LSR", cpus="7", whole=1),
    HonestPod("ls", "LS", "burstable"),
)


class Raw:
    """A message that is already encoded."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def SerializeToString(self) -> bytes:  # noqa: N802 - as protobuf's
        return self.raw


def texts(value: object) -> Iterator[str]:
    """Yield every text in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from texts(inner)
    elif isinstance(value, Sequence | set | frozenset):
        for inner in value:
            yield from texts(inner)


def slowness() -> float:
    """Return how much slower this CPU is now than the one for which ``HOLD_MS`` was chosen; at least 1.

    Load on the other thread of a core can double the CPU time of the code under test.
    """
    times = []
    for _ in range(3):
        begun, total = time.thread_time(), 0
        for number in range(200_000):
            total += number
        times.append((time.thread_time() - begun) * 1000)
    return max(1.0, *(took / REFERENCE_MS for took in times))


class Timed:
    """The longest that the loop was held by anything but the test, CPU time of its thread in milliseconds."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.what = ""

    def note(self, took: float, what: str) -> None:
        if took > self.worst:
            self.worst, self.what = took, what

    def call(self, what: str, work: Callable[[], Any]) -> Any:
        """Time something that runs on the loop."""
        begun = time.thread_time()
        try:
            return work()
        finally:
            self.note((time.thread_time() - begun) * 1000, what)

    def watch(self, monkeypatch: Any, test: asyncio.Task[Any]) -> None:
        """Time every callback of the loop that is not a step of the test itself."""
        run = asyncio.Handle._run

        def timed(handle: Any) -> None:
            callback = handle._callback
            if getattr(callback, "__self__", None) is test:
                run(handle)
            else:
                self.call(repr(callback)[:200], lambda: run(handle))

        monkeypatch.setattr(asyncio.Handle, "_run", timed)


class Node(World):
    """The node in memory with a real ledger and the rules of a configuration file."""

    def __init__(self, directory: Path, config: str = CONFIG) -> None:
        self.state_dir = directory
        read = parse(config, "the test")
        node = node_rules(read, MACHINE)
        own = ("machine", "topology", "static", "pool_placements")
        rules = {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if f.init}
        rules = {name: value for name, value in rules.items() if name not in own}
        super().__init__(options_of(read), static=node.static, rules=rules)

    def boot(self) -> None:
        self.ledger, _ = open_ledger(self.state_dir, MACHINE.fingerprint)  # type: ignore[assignment]
        super().boot()


class Tenants:
    """A sequence of honest pods, with hostile ones between the steps."""

    def __init__(self, directory: Path) -> None:
        self.node = Node(directory)
        self.seen: dict[str, Any] = {}
        self.messages: list[str] = []
        self.hostile: set[str] = set()
        self.honest: dict[str, str] = {}
        self.timed = Timed()
        self.serial = 0
        self.longest = 0

    # -- calls --------------------------------------------------------------------------------------------

    async def _call(self, method: str, raw: bytes) -> PlayedCall:
        node = self.node
        call = PlayedCall(method, Raw(raw), node.log)
        self.timed.call(f"request {method}", lambda: node.wire.request(call))
        await asyncio.wait_for(call.over.wait(), 60)
        if call.refused is not None:
            self.messages.append(call.refused[1])
        return call

    def _end(self, call: PlayedCall, answer: Any) -> None:
        wire = self.node.wire
        self.timed.call("response", lambda: wire.response(call, answer.SerializeToString()))
        self.timed.call("finished", lambda: wire.finished(call, 0))

    async def _sandbox(
        self, name: str, config: pb.PodSandboxConfig, listed: RuntimePod
    ) -> tuple[str, PlayedCall]:
        raw = with_invalid_utf8(pb.RunPodSandboxRequest(config=config).SerializeToString())
        call = await self._call("RunPodSandbox", raw)
        sandbox = f"s-{name}"
        if call.refused is not None:
            self.node.wire.finished(call, None)
            return "", call
        self._end(call, pb.RunPodSandboxResponse(pod_sandbox_id=sandbox))
        self.node.parents[sandbox] = config.linux.cgroup_parent.strip("/")
        self.node.cpu.quotas.setdefault(self.node.parents[sandbox], -1)
        self.node.runtime.pods[sandbox] = changed_copy(listed, id=sandbox)
        return sandbox, call

    async def _container(
        self, sandbox: str, config: pb.PodSandboxConfig, resources: Mapping[str, int]
    ) -> tuple[str, PlayedCall, bytes]:
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, sandbox_config=config)
        request.config.metadata.name = "main"
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**resources))
        raw = with_invalid_utf8(request.SerializeToString())
        call = await self._call("CreateContainer", raw)
        container_id = f"c-{sandbox}"
        if call.refused is not None:
            self.node.wire.finished(call, None)
            return "", call, raw
        assert call.sent is not None
        request = pb.CreateContainerRequest.FromString(call.sent.replace(NOT_UTF8, b"x" * len(NOT_UTF8)))
        cpus = request.config.linux.resources.cpuset_cpus
        runtime = self.node.runtime
        runtime.specs[container_id] = cpus
        runtime.quotas[container_id] = request.config.linux.resources.cpu_quota
        runtime.containers[container_id] = RuntimeContainer(container_id, sandbox, "main", 0, "CREATED")
        parent = config.linux.cgroup_parent
        reported = {name: value for name, value in resources.items() if name != "memory_limit_in_bytes"}
        runtime.details[container_id] = RuntimeDetail(
            f"{parent}/{container_id}", cpuset_cpus=cpus, **reported
        )
        self._end(call, pb.CreateContainerResponse(container_id=container_id))
        return container_id, call, raw

    async def _start(self, container_id: str) -> None:
        node = self.node
        raw = pb.StartContainerRequest(container_id=container_id).SerializeToString()
        call = await self._call("StartContainer", raw)
        if call.refused is not None:
            return
        node.cgroups.sets[container_id] = CpuSet.parse(node.runtime.specs[container_id]) or MACHINE.online
        parent = node.parents[node.runtime.containers[container_id].sandbox_id]
        node.cpu.quotas[f"{parent}/{container_id}"] = -1
        node.runtime.limit(container_id, 0)
        self.timed.call("finished", lambda: node.wire.finished(call, 0))
        node._state(container_id, "RUNNING")

    # -- pods ---------------------------------------------------------------------------------------------

    async def good(self, pod: HonestPod) -> None:
        """Run one honest pod."""
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=pod.name, uid=f"u-{pod.name}", namespace=pod.namespace),
            labels=pod.labels,
            annotations=pod.annotations,
            linux=pb.LinuxPodSandboxConfig(cgroup_parent=_parent(pod.parent, pod.name)),
        )
        config.linux.resources.CopyFrom(pb.LinuxContainerResources(**pod.resources))
        listed = RuntimePod(
            "", f"u-{pod.name}", pod.namespace, pod.name, 0, True, pod.labels, pod.annotations
        )
        sandbox, ran = await self._sandbox(pod.name, config, listed)
        self.seen[f"{pod.name} sandbox"] = ran.refused or ran.sent
        container_id, made, raw = await self._container(sandbox, config, pod.resources)
        self.seen[f"{pod.name} create"] = made.refused or (made.sent or b"")[len(raw) :]
        if container_id:
            self.honest[pod.name] = container_id
            await self._start(container_id)
        pools = self.node.executor.state.pools
        self.seen[f"{pod.name} pools"] = (str(pools.shared), str(pools.be), str(pools.system))
        self._floor()

    async def bad(self, pod: HostilePod, name: str = "") -> None:
        """Try to run one hostile pod."""
        self.serial += 1
        unique = f"evil-{self.serial}"
        uid = f"u-{unique}"
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name or unique, uid=uid, namespace=NAMESPACE),
            labels=pod.labels,
            annotations=pod.annotations,
            linux=pb.LinuxPodSandboxConfig(cgroup_parent=_parent(pod.parent, unique)),
        )
        config.linux.resources.CopyFrom(pb.LinuxContainerResources(**pod.resources))
        annotations = {k: _read(v) for k, v in pod.annotations.items()}
        listed = RuntimePod("", uid, NAMESPACE, name or unique, 0, True, pod.labels, annotations)
        self.node.executor.reconcile_requested.clear()
        before = self.node.executor.telemetry.problems()
        sandbox, _ = await self._sandbox(unique, config, listed)
        if sandbox:
            container_id, call, raw = await self._container(sandbox, config, pod.resources)
            if container_id:
                if call.sent == raw and not self.node.runtime.specs[container_id]:
                    undecided = self.node.executor.reconcile_requested.is_set()
                    assert undecided, f"{pod.kind}: forwarded undecided, and no reconcile follows"
                    assert self.node.executor.telemetry.problems() != before, (
                        "forwarded undecided without a message"
                    )
                self.hostile.add(container_id)
                await self._start(container_id)
        if self.node.executor.reconcile_requested.is_set():
            await self.node.quiet()
            await self.node.sync.once()
        self._floor()

    def _floor(self) -> None:
        state = self.node.executor.state
        online = state.node.machine.online
        assert len(state.pools.shared) >= min(FLOOR, len(online)), state.pools
        for container_id in self.hostile & set(state.containers):
            assert state.containers[container_id].placement.pool is not Pool.OWN, container_id
            assert not state.desired_cpus(state.containers[container_id]) & CpuSet.parse("1,9"), (
                "SYSTEM's CPUs"
            )

    # -- the end ------------------------------------------------------------------------------------------

    async def restart(self) -> None:
        """Stop the daemon normally, and start it again with its ledger."""
        await self.node.executor.ledger_writer.flush()
        self._listen()
        await self.node.close()
        self.node.ledger.close()
        self.node.boot()
        for _ in range(
            3
        ):  # calls that the earlier daemon forwarded have ended once the runtime answers other calls
            await self.node.sync.once()
            self.node.now += 10
        self._floor()

    def _listen(self) -> None:
        """Collect all output of the daemon."""
        executor = self.node.executor
        self.messages += self.node.logged
        self.messages += texts(self.timed.call("status", lambda: node_page(executor)))
        self.messages += texts(history_page(executor.history, {}))
        for container in executor.state.containers.values():
            self.messages += texts(history_page(executor.history, {"query": container.id}))

    async def end(self) -> dict[str, Any]:
        """Compare kernel and state, and return what the honest pods observe."""
        node = self.node
        await node.quiet()
        await node.sync.once()
        await node.quiet()
        await node.executor.ledger_writer.flush()
        state = node.executor.state
        assert violations(state) == []
        for container_id in self.hostile:
            on = node.cgroups.sets.get(container_id, CpuSet())
            known = state.containers.get(container_id)
            lent = (
                known is not None and known.placement.pool is Pool.BE
            )  # BE pods may borrow CPUs of LSR pods
            for owner in state.owners.values():
                assert not on & owner.cpus or (lent and not owner.excludes_be), (
                    f"{container_id} runs on {owner.cpus}"
                )
        self._listen()
        self.longest = max(len(message.encode()) for message in self.messages)
        for message in self.messages:
            assert len(message.encode()) <= LARGEST_MESSAGE, f"{len(message)} characters: {message[:300]}"
        self.seen["kernel"] = {name: str(node.cgroups.sets.get(i)) for name, i in self.honest.items()}
        self.seen["specs"] = {name: node.runtime.specs[i] for name, i in self.honest.items()}
        self.seen["ledger"] = {
            key: value
            for name in sorted(self.honest)
            for key in (f"p/s-{name}", f"c/c-s-{name}")
            if (value := dict(node.ledger.entries.get(key, {}))) is not None
        }
        assert all(self.seen["ledger"].values()), "an honest pod's record is missing"
        return self.seen

    async def close(self) -> None:
        await self.node.close()
        self.node.ledger.close()


def _parent(kube: str, name: str) -> str:
    return f"/kubepods/{kube}/pod{name}".replace("//", "/")


def _read(text: str) -> str:
    """Return a text as it appears in a list of the runtime that is decoded with replacement."""
    return with_invalid_utf8(text.encode(errors="surrogatepass")).decode(errors="replace")


Visits = Sequence[tuple[int, HostilePod, str]]
"""Before which honest step, which pod, and its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """The results of a scenario.

    Attributes:
        seen: What the honest pods observe.
        held_ms, held_by: How long the loop was held at most, and by what.
        longest: Bytes of the longest message.
    """

    seen: dict[str, Any]
    held_ms: float
    held_by: str
    longest: int


def play(visits: Visits, restart_at: int = 5) -> Played:
    """Play the honest pods with these pods between their steps, and a restart before one of them."""

    async def scenario() -> Played:
        with tempfile.TemporaryDirectory(prefix="tp-") as directory, pytest.MonkeyPatch.context() as patch:
            tenants = Tenants(Path(directory))
            task = asyncio.current_task()
            assert task is not None
            tenants.timed.watch(patch, task)
            try:
                await tenants.node.sync.once()
                for step, honest in enumerate(DAY):
                    for before, pod, name in visits:
                        if before == step:
                            await tenants.bad(pod, name)
                    if step == restart_at:
                        await tenants.restart()
                    await tenants.good(honest)
                seen = await tenants.end()
            finally:
                await tenants.close()
            return Played(seen, tenants.timed.worst, tenants.timed.what, tenants.longest)

    return asyncio.run(scenario())
