"""A node in memory: executor and interceptors between a simulated client and a simulated runtime."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.api.cri import api_pb2 as pb
from proxy.backends.runtime.quirks import QUIRKS
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.executor.context import ExecutorOptions
from proxy.executor.former_calls import FormerCalls, RelayedCall
from proxy.executor.kernel_ports import CpusetValue
from proxy.executor.node_executor import NodeExecutor, Ports
from proxy.executor.runtime_ports import Limits, RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.executor.runtime_sync import RuntimeSync
from proxy.frontends.cri.call import CriCallFlow, InterceptedCall
from proxy.frontends.cri.messages import create_suffix, update_suffix
from proxy.model.errors import CgroupError, RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from proxy.telemetry.port import Telemetry
from proxy.topology.regular_machine import regular_machine
from tests.testkit.captured_log import CapturedLog
from tests.testkit.waiting import until

MACHINE = regular_machine(2, 1, 4, 2)


class MemoryLedger:
    """A ledger that a test can inspect and make fail."""

    def __init__(self, log: list[str]) -> None:
        self.entries: dict[str, Mapping[str, object]] = {}
        self.problem = ""
        self.log = log

    def write(self, changes: Mapping[str, Mapping[str, object] | None]) -> None:
        for key, value in changes.items():
            self.log.append(f"ledger {'+' if value is not None else '-'}{key[:2]}")
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value

    def close(self) -> None:
        pass


@dataclass
class MemoryCgroups:
    """Cgroups by container id; ``broken`` ids refuse to be written."""

    log: list[str]
    sets: dict[str, CpuSet] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    version: int = 1
    mems: dict[str, Mask] = field(default_factory=dict)
    """Memory nodes; a container that is not in it is not bound."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A write finds its group and writes it with no end of the group in between, as in the kernel."""

    def replace(self, container_id: str, cpus: CpuSet) -> None:
        """Write the set of a container that has a group."""
        with self.lock:
            if container_id in self.sets:
                self.sets[container_id] = cpus

    def end(self, container_id: str) -> None:
        """Remove the group of a container, if it has one."""
        with self.lock:
            self.sets.pop(container_id, None)

    def find(self, parent: str, container_id: str) -> str | None:
        return container_id if container_id in self.sets else None

    def read(self, path: str) -> CpusetValue:
        cpus = self.sets.get(path) if path else None
        if cpus is None:
            return CpusetValue(MACHINE.online, MACHINE.memory_nodes, MACHINE.online, MACHINE.memory_nodes)
        mems = self.mems.get(path, Mask())
        return CpusetValue(cpus, mems, cpus, mems or MACHINE.memory_nodes)

    def cpus(self, path: str) -> CpuSet:
        return self.read(path).effective_cpus

    def memory_nodes(self, path: str) -> Mask:
        return self.mems.get(path, Mask())

    def pod_group(self, parent: str) -> str | None:
        return None

    def children(self, path: str) -> Sequence[str]:
        return ()

    def write_all(
        self,
        paths: Sequence[str],
        cpus: CpuSet,
        known: CpuSet | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[bool | None]:
        return [None] * len(paths)

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, adjust_below: bool = True) -> bool:
        with self.lock:
            return self._write(path, cpus, mems)

    def _write(self, path: str, cpus: CpuSet | None, mems: Mask | None) -> bool:
        if path not in self.sets:
            raise CgroupError("cannot write: gone", errno.ENOENT)
        if path in self.broken:
            raise CgroupError(f"cannot write {path}: busy", errno.EBUSY)
        if mems is not None and mems != self.mems.get(path, Mask()):
            assert mems, "an empty set must never be written"
            self.mems[path] = mems
            self.log.append(f"mems {path} {mems}")
            if cpus is None:
                return True
        if cpus is None:
            return False
        assert cpus, "an empty set must never be written"
        if self.sets[path] == cpus:
            return False
        self.sets[path] = cpus
        self.log.append(f"kernel {path} {cpus}")
        return True


@dataclass
class MemoryCpuGroups:
    """CFS quotas by path, under the kernel's rules of cgroup v1 (all periods are the same).

    Threads read them while the test adds and removes groups, so they are listed from a copy.
    """

    log: list[str]
    quotas: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def find(self, parent: str, container_id: str) -> str | None:
        path = f"{parent.strip('/')}/{container_id}"
        return path if path in self.quotas else None

    def pod_group(self, parent: str) -> str | None:
        path = parent.strip("/")
        return path if path in self.quotas and path.rpartition("/")[2].startswith("pod") else None

    def quota(self, path: str) -> int:
        quota = self.quotas.get(path)
        if quota is None:
            raise CgroupError(f"cannot read {path}: gone", errno.ENOENT)
        return quota

    def set_quota(self, path: str, quota: int) -> bool:
        if self.quota(path) == quota:
            return False
        self.write(path, quota)
        self.log.append(f"quota {path} {quota}")
        return True

    def write(self, path: str, quota: int) -> None:
        """Write the quota as any process may."""
        assert quota == -1 or quota >= 1000
        if path in self.broken:
            raise CgroupError(f"cannot write {path}: busy", errno.EBUSY)
        if quota > 0:
            parts = path.split("/")
            above = [self.quotas.get("/".join(parts[:n]), -1) for n in range(1, len(parts))]
            limit = next((q for q in reversed(above) if q > 0), quota)
            below = max((q for p, q in self.quotas.copy().items() if p.startswith(f"{path}/")), default=-1)
            if quota > limit or quota < below:
                raise CgroupError(f"cannot write {path}: {below} to {limit}", errno.EINVAL)
        self.quotas[path] = quota


class PlayedRuntime:
    """The runtime: its pods and containers, and the calls that the daemon itself makes."""

    def __init__(self, log: list[str], cgroups: MemoryCgroups, cpu: MemoryCpuGroups) -> None:
        self.log = log
        self.cgroups = cgroups
        self.cpu = cpu
        self.quotas: dict[str, int] = {}
        self.pods: dict[str, RuntimePod] = {}
        self.containers: dict[str, RuntimeContainer] = {}
        self.details: dict[str, RuntimeDetail] = {}
        self.specs: dict[str, str] = {}
        self.down = False
        self.update_error: Exception | None = None
        self.on_update: Callable[[str], None] | None = None
        self.updates: list[tuple[str, str, Limits]] = []

    def _up(self) -> None:
        if self.down:
            raise UnavailableError("cannot reach the runtime: down")

    def version(self) -> str:
        self._up()
        return "played 1"

    def cgroup_driver(self) -> str:
        self._up()
        return "cgroupfs"

    def list_pods(self) -> Sequence[RuntimePod]:
        self._up()
        return list(self.pods.values())

    def list_containers(self, container_id: str = "") -> Sequence[RuntimeContainer]:
        self._up()
        return [c for c in self.containers.values() if container_id in ("", c.id)]

    def detail(self, container_id: str) -> RuntimeDetail:
        self._up()
        if container_id not in self.containers:
            raise RuntimeCallError("cannot ask: not found", 5)
        return self.details.get(container_id, RuntimeDetail(f"/kubepods/burstable/podx/{container_id}"))

    def group(self, container_id: str) -> str | None:
        """Return the group with the CFS quota of a started container."""
        return next((path for path in self.cpu.quotas.copy() if path.endswith(f"/{container_id}")), None)

    def limit(self, container_id: str, quota: int) -> None:
        """Apply an update to the quota: save it if it is set, and write the saved one."""
        if quota:
            self.quotas[container_id] = quota
        path = self.group(container_id)
        if path is not None:
            self.cpu.write(path, self.quotas.get(container_id) or -1)

    def update_cpuset(self, container_id: str, cpus: CpuSet, mems: Mask | None, cpu_quota: int = 0) -> None:
        self._up()
        if self.update_error is not None:
            raise self.update_error
        if self.on_update is not None:
            self.on_update(container_id)
        self.specs[container_id] = str(cpus)
        self.limit(container_id, cpu_quota)
        self.log.append(f"runtime {container_id} {cpus}" + (f" quota {cpu_quota}" if cpu_quota else ""))
        self.cgroups.replace(container_id, cpus)

    def update_limits(
        self, container_id: str, cpus: CpuSet | None, mems: Mask | None, limits: Limits
    ) -> None:
        self._up()
        if self.update_error is not None:
            raise self.update_error
        self.updates.append((container_id, "" if cpus is None else str(cpus), limits))
        self.limit(container_id, limits.cpu_quota)
        if cpus is not None:
            self.specs[container_id] = str(cpus)
            self.cgroups.replace(container_id, cpus)

    def raw_lists(self) -> tuple[bytes, bytes]:
        self._up()
        pods = [
            pb.PodSandbox(
                id=p.id,
                metadata=pb.PodSandboxMetadata(
                    name=p.name, uid=p.uid, namespace=p.namespace, attempt=p.attempt
                ),
                state=pb.SANDBOX_READY if p.ready else pb.SANDBOX_NOTREADY,
                labels=p.labels,
                annotations=p.annotations,
                runtime_handler="handled",
            )
            for p in self.pods.values()
        ]
        containers = [
            pb.Container(
                id=c.id,
                pod_sandbox_id=c.sandbox_id,
                metadata=pb.ContainerMetadata(name=c.name, attempt=c.attempt),
                image=pb.ImageSpec(image="listed"),
                labels={"listed": c.name},
            )
            for c in self.containers.values()
        ]
        return (
            pb.ListPodSandboxResponse(items=pods).SerializeToString(),
            pb.ListContainersResponse(containers=containers).SerializeToString(),
        )

    def close(self) -> None:
        pass


class PlayedCall(InterceptedCall):
    """A call that the proxy holds."""

    def __init__(self, method: str, message: Any, log: list[str]) -> None:
        self.method = method
        self.body = message.SerializeToString()
        self.context: object = None
        self.done = self.decided = False
        self.sent: bytes | None = None
        self.refused: tuple[int, str] | None = None
        self.over = asyncio.Event()
        self.log = log

    def _once(self) -> None:
        if self.over.is_set():
            self.log.append("answered twice")  # an assertion error would be lost in the task that raises it
        assert not self.over.is_set()
        self.decided = True

    def replace_body(self, body: bytes) -> None:
        self.body = body

    def place(self, cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> None:
        suffix = create_suffix if self.method == "CreateContainer" else update_suffix
        self.release(self.body + suffix(cpus, mems, quota))

    def release(self, body: bytes | None = None) -> None:
        self._once()
        self.sent = self.body if body is None else body
        self.log.append(f"forward {self.method}")
        self.over.set()

    def refuse(self, code: int, message: str) -> None:
        self._once()
        self.refused = (code, message)
        self.done = True
        self.over.set()


class World:
    """The executor with fake kernel, runtime and ledger, and helpers that send a client's calls."""

    def __init__(
        self,
        options: ExecutorOptions,
        *,
        static: bool = True,
        entries: Any = None,
        rules: Any = None,
        sources: Any = None,
        plugins: Any = None,
    ) -> None:
        self.log: list[str] = []
        self.logged: list[str] = []
        self.now = 1000.0
        self.cgroups = MemoryCgroups(self.log)
        self.cpu = MemoryCpuGroups(self.log)
        self.runtime = PlayedRuntime(self.log, self.cgroups, self.cpu)
        self.ledger = MemoryLedger(self.log)
        self.ledger.entries.update(entries or {})
        self.options = options
        self.static = static
        self.rules = rules or {}
        """More of what a node is: policy, scope, options, memory."""
        self.kubelet, self.hardware = sources or (None, None)
        """Ports that report what the CRI does not carry."""
        self.plugins = plugins
        self.serial = 0
        self.parents: dict[str, str] = {}
        self.machine = MACHINE
        self.boot()

    def boot(self, relayed: Iterable[RelayedCall] = ()) -> None:
        """Start (again) with the content of the ledger and the calls that the old daemon still relays."""
        node = Node(self.machine, CpuTopology.of(self.machine), self.static, **self.rules)
        self.executor = NodeExecutor(
            node,
            self.cgroups,
            self.runtime,
            self.ledger,
            self.options,
            Telemetry(CapturedLog(self.logged), lambda: self.now),
            lambda: self.now,
            ports=lambda context: Ports(
                hardware=lambda known: None if known is self.machine else self.machine,
                kubelet=self.kubelet,
                devices=self.hardware,
                device_plugins=self.plugins,
                cpu_groups=self.cpu,
            ),
        )
        self.call_tracker, self.sync = self.executor.call_tracker, self.executor.reconciler
        self.call_tracker.former_calls.expect(relayed)
        self.executor.recovery.recover(dict(self.ledger.entries))
        self.wire = CriCallFlow(self.executor)

    def make_runtime_sync(self) -> RuntimeSync:
        """Make another runtime sync, which the test starts and closes."""
        executor = self.executor
        return RuntimeSync(
            executor, self.call_tracker, executor.quotas, executor.mems, executor.unit_properties
        )

    def use_kubelet_cpus(self, port: Any) -> None:
        """Make the node read the files of kubelet's CPU manager from now on."""
        self.executor.kubelet_cpus._port = port

    def played(self, method: str, message: Any) -> PlayedCall:
        return PlayedCall(method, message, self.log)

    async def call(self, method: str, message: Any) -> PlayedCall:
        call = self.played(method, message)
        self.wire.request(call)
        await asyncio.wait_for(call.over.wait(), 60)
        return call

    until = staticmethod(until)

    async def quiet(self) -> None:
        """Wait until all queued work is done."""
        for _ in range(3):
            await asyncio.sleep(0.02)
            await self.executor.kernel.run(lambda: None)
            await self.call_tracker.lookups.run(lambda: None)
            await self.executor.recorder.run(lambda: None)

    def limit_waits(self, part: Any, method: str, seconds: float) -> None:
        """Limit the waits of one method of a part; all other waits of a call keep their limit.

        A short ``call_timeout`` limits every wait, so that a slow machine fails the steps that must succeed.

        Args:
            part: A part of the executor.
            method: The name of a coroutine function that reads ``call_timeout`` when it begins.
            seconds: Its limit from now on.
        """
        plain, executor = getattr(part, method), self.executor

        async def limited(*args: Any) -> Any:
            options = executor.options
            executor.options = structs.replace(options, call_timeout=seconds)
            try:
                return await plain(*args)
            finally:
                executor.options = options

        setattr(part, method, limited)

    async def clear_log(self) -> None:
        """Empty the log once the ledger's thread has written what is queued."""
        await self.executor.ledger_writer.flush()
        self.log.clear()

    async def begin_pod(
        self, uid: str, qos: str = "", kube: str = "", cpus: str = "", **more: Any
    ) -> PlayedCall:
        """Request a sandbox; return when the call has been forwarded to the runtime or refused."""
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(
                name=uid, uid=uid, namespace=more.get("namespace", "ns"), attempt=more.get("attempt", 0)
            ),
            labels={"koordinator.sh/qosClass": qos} if qos else {},
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=more.get("parent", f"/kubepods/{kube}/pod{uid}".replace("//", "/"))
            ),
        )
        if "total" in more:
            config.linux.resources.CopyFrom(pb.LinuxContainerResources(**more["total"]))
        status = more.get("annotation", f'{{"cpuset":"{cpus}"}}' if cpus else "")
        if status:
            config.annotations["scheduling.koordinator.sh/resource-status"] = status
        return await self.call("RunPodSandbox", pb.RunPodSandboxRequest(config=config))

    def make_pod(self, call: PlayedCall, sandbox: str, quota: int = -1) -> None:
        """Make a sandbox at the runtime; its response has not arrived yet."""
        config = pb.RunPodSandboxRequest.FromString(call.body).config
        meta = config.metadata
        self.parents[sandbox] = config.linux.cgroup_parent.strip("/")
        self.cpu.quotas.setdefault(self.parents[sandbox], quota)
        self.runtime.pods[sandbox] = RuntimePod(
            sandbox, meta.uid, meta.namespace, meta.name, 0, True, dict(config.labels),
            dict(config.annotations),
        )  # fmt: skip

    async def pod(self, uid: str, qos: str = "", kube: str = "", cpus: str = "", **more: Any) -> str:
        call = await self.begin_pod(uid, qos, kube, cpus, **more)
        if call.refused is not None and more.get("may_be_refused"):
            self.wire.finished(call, None)
            return call.refused[1]
        assert call.sent == call.body
        sandbox: str = more.get("sandbox", f"s-{uid}")
        self.make_pod(call, sandbox, more.get("quota", -1))
        self.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id=sandbox).SerializeToString())
        self.wire.finished(call, 0)
        return sandbox

    async def begin(self, sandbox: str, name: str = "c", **resources: Any) -> PlayedCall:
        """Request a container; return when the call has been forwarded to the runtime or refused."""
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        request.config.metadata.name = name
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**resources))
        return await self.call("CreateContainer", request)

    def finish(self, call: PlayedCall, container_id: str) -> str:
        """Make the container at the runtime and complete the call."""
        request = pb.CreateContainerRequest.FromString(call.sent or b"")
        self.runtime.specs[container_id] = request.config.linux.resources.cpuset_cpus
        self.runtime.quotas[container_id] = request.config.linux.resources.cpu_quota
        self.wire.response(call, pb.CreateContainerResponse(container_id=container_id).SerializeToString())
        self.wire.finished(call, 0)
        meta = request.config.metadata
        self.runtime.containers[container_id] = RuntimeContainer(
            container_id, request.pod_sandbox_id, meta.name, meta.attempt, "CREATED"
        )
        return container_id

    async def create(self, sandbox: str, name: str = "c", **resources: Any) -> str:
        call = await self.begin(sandbox, name, **resources)
        assert call.refused is None, call.refused
        self.serial += 1
        return self.finish(call, f"{sandbox}-{name}-{self.serial}")

    def _state(self, container_id: str, state: str) -> None:
        old = self.runtime.containers[container_id]
        self.runtime.containers[container_id] = RuntimeContainer(
            old.id, old.sandbox_id, old.name, old.attempt, state
        )

    async def start(self, container_id: str) -> PlayedCall:
        call = await self.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
        if call.refused is None:
            self.cgroups.sets[container_id] = CpuSet.parse(self.runtime.specs[container_id])
            parent = self.parents.get(self.runtime.containers[container_id].sandbox_id)
            if parent is not None:
                self.cpu.quotas[f"{parent}/{container_id}"] = -1
                self.runtime.limit(container_id, 0)
            self.wire.finished(call, 0)
            self._state(container_id, "RUNNING")
            await self.quiet()
        return call

    async def run_with_sum(self, sandbox: str, container_id: str, **resources: int) -> None:
        """Create and start the only container of a pod; the create also carries the sum of the pod."""
        message = pb.CreateContainerRequest(pod_sandbox_id=sandbox)
        message.config.metadata.name = "c"
        for carried in (message.config.linux.resources, message.sandbox_config.linux.resources):
            carried.CopyFrom(pb.LinuxContainerResources(**resources))
        self.finish(await self.call("CreateContainer", message), container_id)
        await self.start(container_id)

    async def run(self, sandbox: str, name: str = "c", **resources: Any) -> str:
        container_id = await self.create(sandbox, name, **resources)
        await self.start(container_id)
        return container_id

    async def update(self, container_id: str, **resources: Any) -> Any:
        """Send a client's update; return the resources that reached the runtime."""
        request = pb.UpdateContainerResourcesRequest(
            container_id=container_id, linux=pb.LinuxContainerResources(**resources)
        )
        call = await self.call("UpdateContainerResources", request)
        forwarded = pb.UpdateContainerResourcesRequest.FromString(call.sent or b"").linux
        if forwarded.cpuset_cpus:
            self.runtime.specs[container_id] = forwarded.cpuset_cpus
            self.cgroups.sets[container_id] = CpuSet.parse(forwarded.cpuset_cpus)
        self.runtime.limit(container_id, forwarded.cpu_quota)
        self.wire.finished(call, 0)
        await self.quiet()
        return forwarded

    def end(self, container_id: str) -> None:
        """End a container without a call."""
        self.cgroups.end(container_id)
        self.cpu.quotas.pop(self.runtime.group(container_id) or "", None)
        self._state(container_id, "EXITED")

    async def stop(self, container_id: str) -> None:
        call = await self.call("StopContainer", pb.StopContainerRequest(container_id=container_id))
        self.end(container_id)
        self.wire.finished(call, 0)
        await self.quiet()

    async def remove(self, container_id: str) -> None:
        call = await self.call("RemoveContainer", pb.RemoveContainerRequest(container_id=container_id))
        self.end(container_id)
        del self.runtime.containers[container_id]
        self.wire.finished(call, 0)
        await self.quiet()

    def on(self, container_id: str) -> str:
        """Return the CPUs that the kernel has for a container."""
        return str(self.cgroups.sets[container_id])

    def check(self) -> None:
        """Check that no CPU has two owners, no container shares owned CPUs, and the kernel follows."""
        state = self.executor.state
        assert violations(state) == []
        for container_id, cpus in self.cgroups.sets.items():
            assert cpus == state.desired_cpus(state.containers[container_id]), container_id

    async def hand_over(self, *calls: PlayedCall) -> CriCallFlow:
        """Hand the node over to another process.

        Args:
            calls: Calls that have been forwarded to the runtime and have no response yet.

        Returns:
            The call flow of the old process, which takes the responses of these calls.
        """
        former, earlier, successors = self.wire, self.call_tracker.former_calls, list[FormerCalls]()

        def over(name: str) -> None:
            successors[0].over(name)

        earlier.report_ends_to(over)
        relayed = [*former.hand_over(lambda code, message: None, lambda: calls, over), *earlier.relayed]
        await self.close(handing_over=True)
        self.boot(relayed)
        successors.append(self.call_tracker.former_calls)
        return former

    async def close(self, *, handing_over: bool = False) -> None:
        await self.executor.close(handing_over=handing_over)
        self.sync.close()
        self.call_tracker.close()


Scenario = Callable[[World], Coroutine[Any, Any, None]]


@pytest.fixture
def run_scenario() -> Callable[..., None]:
    """Run a scenario in a ``World``; with ``reconciled=False`` the test itself starts the first reconcile."""

    def runner(
        scenario: Scenario,
        *,
        reconciled: bool = True,
        static: bool = True,
        entries: Any = None,
        rules: Any = None,
        sources: Any = None,
        plugins: Any = None,
        **options: Any,
    ) -> None:
        async def whole() -> None:
            world = World(
                ExecutorOptions(**{"call_timeout": 30.0, "quirks": QUIRKS, **options}),
                static=static,
                entries=entries,
                rules=rules,
                sources=sources,
                plugins=plugins,
            )
            if reconciled:
                await world.sync.once()
            try:
                await scenario(world)
            finally:
                await world.close()
            assert "answered twice" not in world.log

        asyncio.run(whole())

    return runner
