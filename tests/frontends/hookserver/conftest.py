"""A node whose calls go through another program that asks us: a played peer, real gRPC, a stand-in."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as pb
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.calls.call_flow import CallFlow
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.client import CriClient
from proxy.demo.runtime import StandInRuntime
from proxy.frontends.hookserver.server import HookServerRunner
from proxy.telemetry import metrics
from proxy.topology.build import described
from tests.testkit.waiting import until

MACHINE = described(2, 1, 4, 2)
SERVICE = "/runtime.v1alpha1.RuntimeHookService/"


class Hooks:
    """A client of the protocol."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")

    def ask(self, stage: str, request: Any, timeout: float = 60.0) -> Any:
        return self._call(stage)(request, timeout=timeout, wait_for_ready=True)

    def begin(self, stage: str, request: Any) -> Any:
        return self._call(stage).future(request, wait_for_ready=True)

    def _call(self, stage: str) -> Any:
        kind = pb.PodSandboxHookResponse if "Sandbox" in stage else pb.ContainerResourceHookResponse
        return self._channel.unary_unary(
            f"{SERVICE}{stage}Hook",
            request_serializer=lambda r: r if isinstance(r, bytes) else r.SerializeToString(),
            response_deserializer=kind.FromString,
        )

    def close(self) -> None:
        self._channel.close()


class Peer(CriClient):
    """Asks before and after its calls, and puts the answers into them, as koord-runtime-proxy does.

    Attributes:
        policy: ``Fail``: a refusal goes to the client; else the call continues as it was.
        skips: Stages that it does not ask about.
        log: What was asked and answered.
    """

    def __init__(self, runtime: Path, hooks: Path) -> None:
        super().__init__(str(runtime))
        self.hooks = Hooks(hooks)
        self.policy = "Fail"
        self.skips: set[str] = set()
        self.log: list[tuple[str, Any, Any]] = []
        self._pods: dict[str, pb.PodSandboxHookRequest] = {}
        self._containers: dict[str, pb.ContainerResourceHookRequest] = {}

    def close(self) -> None:
        self.hooks.close()
        super().close()

    def ask(self, stage: str, request: Any) -> Any:
        if stage in self.skips:
            return None
        asked = copy.deepcopy(request)
        try:
            answer = self.hooks.ask(stage, asked)
        except grpc.RpcError:
            if self.policy == "Fail":
                raise
            return None
        self.log.append((stage, asked, answer))
        return answer

    def call(self, method: str, request: Any) -> Any:
        handler = getattr(self, f"_{method}", None)
        return super().call(method, request) if handler is None else handler(copy.deepcopy(request))

    def _RunPodSandbox(self, request: cri.RunPodSandboxRequest) -> Any:  # noqa: N802
        config, asked = request.config, pb.PodSandboxHookRequest()
        asked.pod_meta.name, asked.pod_meta.uid = config.metadata.name, config.metadata.uid
        asked.pod_meta.namespace = config.metadata.namespace  # the attempt is never reported
        asked.labels.update(config.labels)
        asked.annotations.update(config.annotations)
        asked.cgroup_parent = config.linux.cgroup_parent
        answer = self.ask("PreRunPodSandbox", asked)
        if answer is not None:
            config.labels.update(answer.labels)
            config.annotations.update(answer.annotations)
            config.linux.cgroup_parent = answer.cgroup_parent or config.linux.cgroup_parent
        made = super().call("RunPodSandbox", request)
        self._pods[made.pod_sandbox_id] = asked
        return made

    def _StopPodSandbox(self, request: cri.StopPodSandboxRequest) -> Any:  # noqa: N802
        try:
            return super().call("StopPodSandbox", request)
        finally:
            if (pod := self._pods.pop(request.pod_sandbox_id, None)) is not None:
                self.ask("PostStopPodSandbox", pod)

    def _CreateContainer(self, request: cri.CreateContainerRequest) -> Any:  # noqa: N802
        config, pod = request.config, self._pods[request.pod_sandbox_id]
        asked = pb.ContainerResourceHookRequest(pod_meta=pod.pod_meta)
        asked.pod_annotations.update(pod.annotations)
        asked.pod_labels.update(pod.labels)
        asked.container_meta.name = config.metadata.name
        asked.container_meta.attempt = config.metadata.attempt
        asked.container_annotations.update(config.annotations)
        asked.container_resources.ParseFromString(config.linux.resources.SerializeToString())
        asked.pod_cgroup_parent = request.sandbox_config.linux.cgroup_parent
        asked.container_envs.update({e.key: e.value.decode() for e in config.envs})
        if (answer := self.ask("PreCreateContainer", asked)) is not None:
            self._merge(asked, answer)
            config.annotations.update(asked.container_annotations)
            config.linux.resources.ParseFromString(asked.container_resources.SerializeToString())
            config.ClearField("envs")
            for key, value in answer.container_envs.items():
                config.envs.add(key=key, value=value.encode())
        made = super().call("CreateContainer", request)
        asked.container_meta.id = made.container_id
        self._containers[made.container_id] = asked
        return made

    def _StartContainer(self, request: cri.StartContainerRequest) -> Any:  # noqa: N802
        asked = self._containers[request.container_id]
        self.ask("PreStartContainer", asked)
        try:
            return super().call("StartContainer", request)
        finally:
            self.ask("PostStartContainer", asked)

    def _StopContainer(self, request: cri.StopContainerRequest) -> Any:  # noqa: N802
        asked = self._containers.pop(request.container_id)
        try:
            return super().call("StopContainer", request)
        finally:
            self.ask("PostStopContainer", asked)

    def _UpdateContainerResources(self, request: cri.UpdateContainerResourcesRequest) -> Any:  # noqa: N802
        asked, new = self._containers[request.container_id], request.linux
        for name in ("cpu_period", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes"):
            if getattr(new, name) > 0:
                setattr(asked.container_resources, name, getattr(new, name))
        for name in ("cpu_quota", "cpuset_cpus", "cpuset_mems"):
            if getattr(new, name):
                setattr(asked.container_resources, name, getattr(new, name))
        if (answer := self.ask("PreUpdateContainerResources", asked)) is not None:
            self._merge(asked, answer)
        request.linux.ParseFromString(asked.container_resources.SerializeToString())
        return super().call("UpdateContainerResources", request)

    def _merge(self, asked: Any, answer: Any) -> None:
        """The merge of Koordinator v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go, updateResource."""
        asked.container_annotations.update(answer.container_annotations)
        if not answer.HasField("container_resources"):
            return
        into, new = asked.container_resources, answer.container_resources
        for name in ("cpu_period", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes"):
            if getattr(new, name) > 0:
                setattr(into, name, getattr(new, name))
        into.cpu_quota = new.cpu_quota or into.cpu_quota
        into.oom_score_adj = new.oom_score_adj
        into.cpuset_cpus, into.cpuset_mems = new.cpuset_cpus, new.cpuset_mems
        into.unified.update(new.unified)


class Node:
    """Where everything of one test lies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cgroups = FakeCgroups(directory / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1)
        self.runtime = StandInRuntime(directory / "runtime.sock", self.cgroups)
        self.socket = directory / "hooks.sock"
        self.daemon: Daemon
        self.serving: HookServerRunner
        self.peer: Peer

    def configured(self, text: str) -> Any:
        return parse(
            f"""{text}
listen: unix://{self.directory}/cri.sock
adminSocket: unix://{self.directory}/admin.sock
runtime: unix://{self.directory}/runtime.sock
stateDir: {self.directory}/state
hooks:
  serverDirectory: ""
  directory: {self.directory}/no-hooks.d
  vendorDirectory: {self.directory}/no-hooks.d
""",
            "test",
        )

    async def start(self, text: str) -> None:
        self.daemon = Daemon(self.configured(text), machine=MACHINE, cgroups=self.cgroups)
        await self.daemon.start()
        executor, sync, start_update = self.daemon.executor, self.daemon.reconciler, self.daemon._start_update
        assert executor is not None
        assert sync is not None
        assert start_update is not None
        # The daemon itself serves nothing here: what is tried is what it would start.
        self.serving = HookServerRunner(
            self.socket, executor, start_update, CallFlow(executor, sync, start_update)
        )
        await self.serving.run()
        self.peer = Peer(self.directory / "runtime.sock", self.socket)

    async def stop(self) -> None:
        self.peer.close()
        await self.serving.stop()
        await self.daemon.stop()

    @property
    def executor(self) -> Any:
        return self.daemon.executor

    @property
    def pending(self) -> Any:
        return self.serving.servicer.pending

    def cpus(self, container_id: str) -> str:
        """What the kernel says."""
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).cpus)

    def made(self, text: str) -> Daemon:
        """A daemon of this node."""
        return Daemon(parse(text, "test"), machine=MACHINE, cgroups=self.cgroups)

    def peer_of(self, runtime: Path) -> Peer:
        """A peer before a runtime."""
        return Peer(runtime, self.socket)

    def saved(self, container_id: str) -> cri.LinuxContainerResources:
        """The resources that the runtime was sent when it made a container."""
        return self.config(container_id).linux.resources

    def config(self, container_id: str) -> cri.ContainerConfig:
        """What the runtime was sent when it made a container."""
        calls = [c for c in self.runtime.calls if c.method == "CreateContainer"]
        record = self.runtime.containers[container_id]
        named = [c.request for c in calls if c.request.pod_sandbox_id == record.pod_id]
        found: cri.ContainerConfig = named[-1].config
        return found

    until = staticmethod(until)

    def owners(self) -> list[str]:
        return sorted(str(held.cpus) for held in self.executor.state.owners.values())


async def off(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do a client's blocking work beside the daemon's loop."""
    return await asyncio.to_thread(work, *args, **kwargs)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="tp-") as directory:
        made = Node(Path(directory))
        made.runtime.start()
        yield made
        made.runtime.stop()


Scenario = Callable[[Node], Coroutine[Any, Any, None]]


@pytest.fixture
def run_scenario(node: Node) -> Callable[..., None]:
    """Run a scenario on a node that serves hooks; ``faults``: internal errors of the daemon are expected."""

    def runner(
        scenario: Scenario,
        text: str = "cpuManagerPolicy: static\nreconcilePeriod: 200ms\n",
        *,
        faults: bool = False,
    ) -> None:
        async def whole() -> None:
            await node.start(text)
            try:
                await scenario(node)
                assert faults or not node.executor.telemetry.value(metrics.INTERNAL_ERRORS)
            finally:
                await node.stop()

        asyncio.run(whole())

    return runner


@pytest.fixture
def beside() -> Callable[..., Coroutine[Any, Any, Any]]:
    """Do a client's blocking work beside the daemon's loop."""
    return off
