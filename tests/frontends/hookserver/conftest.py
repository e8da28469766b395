"""A node on which a peer calls the hook server: a simulated peer, real gRPC, a stand-in runtime."""

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
from proxy.topology.regular_machine import regular_machine
from tests.testkit.waiting import until

MACHINE = regular_machine(2, 1, 4, 2)
SERVICE = "/runtime.v1alpha1.RuntimeHookService/"


class Hooks:
    """A client of the hook server, by Koordinator's hook protocol."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")

    def call_stage(self, stage: str, request: Any, timeout: float = 60.0) -> Any:
        return self._call(stage)(request, timeout=timeout, wait_for_ready=True)

    def start_stage(self, stage: str, request: Any) -> Any:
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
    """Calls the hook server around each CRI call and merges its responses, as koord-runtime-proxy does.

    Attributes:
        policy: ``Fail``: the client receives a refusal; else the CRI call continues unchanged.
        skips: Stages for which it does not call the hook server.
        log: The stage, the request and the response of each call.
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

    def call_stage(self, stage: str, request: Any) -> Any:
        if stage in self.skips:
            return None
        hook_request = copy.deepcopy(request)
        try:
            response = self.hooks.call_stage(stage, hook_request)
        except grpc.RpcError:
            if self.policy == "Fail":
                raise
            return None
        self.log.append((stage, hook_request, response))
        return response

    def call(self, method: str, request: Any) -> Any:
        handler = getattr(self, f"_{method}", None)
        return super().call(method, request) if handler is None else handler(copy.deepcopy(request))

    def _RunPodSandbox(self, request: cri.RunPodSandboxRequest) -> Any:  # noqa: N802
        config, hook_request = request.config, pb.PodSandboxHookRequest()
        hook_request.pod_meta.name, hook_request.pod_meta.uid = config.metadata.name, config.metadata.uid
        hook_request.pod_meta.namespace = config.metadata.namespace  # the attempt is never reported
        hook_request.labels.update(config.labels)
        hook_request.annotations.update(config.annotations)
        hook_request.cgroup_parent = config.linux.cgroup_parent
        response = self.call_stage("PreRunPodSandbox", hook_request)
        if response is not None:
            config.labels.update(response.labels)
            config.annotations.update(response.annotations)
            config.linux.cgroup_parent = response.cgroup_parent or config.linux.cgroup_parent
        response = super().call("RunPodSandbox", request)
        self._pods[response.pod_sandbox_id] = hook_request
        return response

    def _StopPodSandbox(self, request: cri.StopPodSandboxRequest) -> Any:  # noqa: N802
        try:
            return super().call("StopPodSandbox", request)
        finally:
            if (pod := self._pods.pop(request.pod_sandbox_id, None)) is not None:
                self.call_stage("PostStopPodSandbox", pod)

    def _CreateContainer(self, request: cri.CreateContainerRequest) -> Any:  # noqa: N802
        config, pod = request.config, self._pods[request.pod_sandbox_id]
        hook_request = pb.ContainerResourceHookRequest(pod_meta=pod.pod_meta)
        hook_request.pod_annotations.update(pod.annotations)
        hook_request.pod_labels.update(pod.labels)
        hook_request.container_meta.name = config.metadata.name
        hook_request.container_meta.attempt = config.metadata.attempt
        hook_request.container_annotations.update(config.annotations)
        hook_request.container_resources.ParseFromString(config.linux.resources.SerializeToString())
        hook_request.pod_cgroup_parent = request.sandbox_config.linux.cgroup_parent
        hook_request.container_envs.update({e.key: e.value.decode() for e in config.envs})
        if (response := self.call_stage("PreCreateContainer", hook_request)) is not None:
            self._merge(hook_request, response)
            config.annotations.update(hook_request.container_annotations)
            config.linux.resources.ParseFromString(hook_request.container_resources.SerializeToString())
            config.ClearField("envs")
            for key, value in response.container_envs.items():
                config.envs.add(key=key, value=value.encode())
        response = super().call("CreateContainer", request)
        hook_request.container_meta.id = response.container_id
        self._containers[response.container_id] = hook_request
        return response

    def _StartContainer(self, request: cri.StartContainerRequest) -> Any:  # noqa: N802
        hook_request = self._containers[request.container_id]
        self.call_stage("PreStartContainer", hook_request)
        try:
            return super().call("StartContainer", request)
        finally:
            self.call_stage("PostStartContainer", hook_request)

    def _StopContainer(self, request: cri.StopContainerRequest) -> Any:  # noqa: N802
        hook_request = self._containers.pop(request.container_id)
        try:
            return super().call("StopContainer", request)
        finally:
            self.call_stage("PostStopContainer", hook_request)

    def _UpdateContainerResources(self, request: cri.UpdateContainerResourcesRequest) -> Any:  # noqa: N802
        hook_request, new = self._containers[request.container_id], request.linux
        for name in ("cpu_period", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes"):
            if getattr(new, name) > 0:
                setattr(hook_request.container_resources, name, getattr(new, name))
        for name in ("cpu_quota", "cpuset_cpus", "cpuset_mems"):
            if getattr(new, name):
                setattr(hook_request.container_resources, name, getattr(new, name))
        if (response := self.call_stage("PreUpdateContainerResources", hook_request)) is not None:
            self._merge(hook_request, response)
        request.linux.ParseFromString(hook_request.container_resources.SerializeToString())
        return super().call("UpdateContainerResources", request)

    def _merge(self, hook_request: Any, response: Any) -> None:
        """The merge of Koordinator v1.8.0 pkg/runtimeproxy/resexecutor/cri/utils.go, updateResource."""
        hook_request.container_annotations.update(response.container_annotations)
        if not response.HasField("container_resources"):
            return
        into, new = hook_request.container_resources, response.container_resources
        for name in ("cpu_period", "cpu_shares", "memory_limit_in_bytes", "memory_swap_limit_in_bytes"):
            if getattr(new, name) > 0:
                setattr(into, name, getattr(new, name))
        into.cpu_quota = new.cpu_quota or into.cpu_quota
        into.oom_score_adj = new.oom_score_adj
        into.cpuset_cpus, into.cpuset_mems = new.cpuset_cpus, new.cpuset_mems
        into.unified.update(new.unified)


class Node:
    """The daemon, the stand-in runtime, the cgroups and the peer of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cgroups = FakeCgroups(directory / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1)
        self.runtime = StandInRuntime(directory / "runtime.sock", self.cgroups)
        self.socket = directory / "hooks.sock"
        self.daemon: Daemon
        self.serving: HookServerRunner
        self.peer: Peer

    def parse_config(self, text: str) -> Any:
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
        self.daemon = Daemon(self.parse_config(text), machine=MACHINE, cgroups=self.cgroups)
        await self.daemon.start()
        executor = self.daemon.executor
        assert executor is not None
        # The daemon's own hook server is not configured: the test starts one as the daemon would.
        self.serving = HookServerRunner(self.socket, executor, CallFlow(executor))
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
        """The CPUs in the container's cgroup."""
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).cpus)

    def make_daemon(self, text: str) -> Daemon:
        """A daemon with the given configuration on this node."""
        return Daemon(parse(text, "test"), machine=MACHINE, cgroups=self.cgroups)

    def peer_of(self, runtime: Path) -> Peer:
        """A peer that forwards its CRI calls to the given runtime socket."""
        return Peer(runtime, self.socket)

    def saved(self, container_id: str) -> cri.LinuxContainerResources:
        """The resources in the CreateContainer request that the runtime received."""
        return self.config(container_id).linux.resources

    def config(self, container_id: str) -> cri.ContainerConfig:
        """The configuration in the CreateContainer request that the runtime received."""
        calls = [c for c in self.runtime.calls if c.method == "CreateContainer"]
        record = self.runtime.containers[container_id]
        pod_requests = [c.request for c in calls if c.request.pod_sandbox_id == record.pod_id]
        config: cri.ContainerConfig = pod_requests[-1].config
        return config

    until = staticmethod(until)

    def owners(self) -> list[str]:
        return sorted(str(held.cpus) for held in self.executor.state.owners.values())


async def run_in_thread(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a client's blocking call in a thread, so that the daemon's event loop goes on."""
    return await asyncio.to_thread(work, *args, **kwargs)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="tp-") as directory:
        node = Node(Path(directory))
        node.runtime.start()
        yield node
        node.runtime.stop()


Scenario = Callable[[Node], Coroutine[Any, Any, None]]


@pytest.fixture
def run_scenario(node: Node) -> Callable[..., None]:
    """Run a scenario on a node with a hook server; ``faults``: internal errors of the daemon are expected."""

    def runner(
        scenario: Scenario,
        text: str = "cpuManagerPolicy: static\nreconcilePeriod: 200ms\n",
        *,
        faults: bool = False,
    ) -> None:
        async def run() -> None:
            await node.start(text)
            try:
                await scenario(node)
                assert faults or not node.executor.telemetry.value(metrics.INTERNAL_ERRORS)
            finally:
                await node.stop()

        asyncio.run(run())

    return runner


@pytest.fixture
def in_thread() -> Callable[..., Coroutine[Any, Any, Any]]:
    """Run a client's blocking call in a thread, so that the daemon's event loop goes on."""
    return run_in_thread
