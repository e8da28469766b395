"""Imitated nodes whose objects the agent publishes.

Each node has a daemon and an agent process. :class:`ImitatedNodes` does what kubelets do: it sends the
sandbox and the container of each pod that is bound to a node to the daemon of that node, and reports the pod
as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.demo import client as demo
from proxy.demo.client import NAMESPACE, QOS_LABEL, STATUS_ANNOTATION, DemoPod, StartedPod
from proxy.model.errors import RuntimeCallError
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from tests.cluster.agent_process import running_agent
from tests.cluster.api_client import Json
from tests.cluster.control_plane import ControlPlane
from tests.testkit.daemon import DaemonNode, temporary_node

SETTINGS = (
    "cpuManagerPolicy: static\nreservedSystemCPUs: '0'\nreconcilePeriod: 1h\n"
    "topologyManagerPolicy: single-numa-node\ntopologyManagerScope: pod\n"
)
NAMES = ("n1", "n2", "n3")
ON_NUMA = (CpuSet.parse("0-3,8-11"), CpuSet.parse("4-7,12-15"))
"""The CPUs of the two NUMA nodes of each node. CPU 0 is reserved; 2 CPUs of each stay in the shared pool."""
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
BIND_S = 60.0


@dataclass
class PlacedPod:
    """A pod that its node has started: the CPUs of its container, or why the node has rejected it."""

    node: str
    started: StartedPod | None = None
    cpus: CpuSet = field(default_factory=CpuSet)
    annotated: str = ""
    rejected: str = ""

    @property
    def aligned(self) -> bool:
        """True if all CPUs are on one NUMA node."""
        return bool(self.cpus) and any(self.cpus <= numa for numa in ON_NUMA)


class ImitatedNodes:
    """The nodes, and the outcomes of the pods that were bound to them."""

    def __init__(self, plane: ControlPlane, nodes: dict[str, DaemonNode]) -> None:
        self.plane = plane
        self.nodes = nodes
        self.placed: dict[str, PlacedPod] = {}

    def pod(self, name: str, cpus: int, scheduler: str, **metadata: Any) -> None:
        """Create a Guaranteed pod for a scheduler."""
        amounts = {"cpu": str(cpus), "memory": "64Mi"}
        container = {"name": "main", "image": "x", "resources": {"requests": amounts, "limits": amounts}}
        priority = metadata.pop("priority", None)
        spec: Json = {"schedulerName": scheduler, "containers": [container]}
        if priority:
            spec["priorityClassName"] = priority
        value = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}
        self.plane.create(PODS, value)

    def end(self, name: str) -> str:
        """Delete a pod; return the node that it was on."""
        self.plane.delete(f"{PODS}/{name}?gracePeriodSeconds=0")
        return self.placed[name].node

    def until(self, holds: Callable[[], object], seconds: float = BIND_S) -> float:
        """Do what kubelets do until something holds; return the seconds that this took."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < seconds, {name: vars(it) for name, it in self.placed.items()}
            self._step()
            time.sleep(0.1)
        return time.monotonic() - began

    def until_placed(self, *names: str) -> float:
        return self.until(lambda: all(name in self.placed for name in names))

    def for_seconds(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, seconds + BIND_S)

    def figures(self) -> str:
        rejected = sum(bool(each.rejected) for each in self.placed.values())
        aligned = sum(each.aligned for each in self.placed.values())
        return f"{len(self.placed)} bound, {aligned} aligned, {rejected} rejected"

    def _step(self) -> None:
        pods = {each["metadata"]["name"]: each for each in self.plane.request("GET", PODS)["items"]}
        for name, pod in pods.items():
            if pod["spec"].get("nodeName") and name not in self.placed:
                self.placed[name] = self._launched(pod)
                if not self.placed[name].rejected:
                    status = {"status": {"phase": "Running"}}
                    self.plane.request(
                        "PATCH", f"{PODS}/{name}/status", status, "application/merge-patch+json"
                    )
        for name in [name for name in self.placed if name not in pods]:
            gone = self.placed.pop(name)
            if gone.started is not None:
                with self.nodes[gone.node].client() as client:
                    client.end_pod(gone.started)

    def _launched(self, pod: Json) -> PlacedPod:
        metadata, node = pod["metadata"], self.nodes[pod["spec"]["nodeName"]]
        status = json.loads(metadata.get("annotations", {}).get(STATUS_ANNOTATION, "{}"))
        cpus = int(pod["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        qos = metadata.get("labels", {}).get(QOS_LABEL, "")
        spec = DemoPod(metadata["name"], qos, KubeQos.GUARANTEED, status.get("cpuset", ""), cpus)
        placed = PlacedPod(pod["spec"]["nodeName"], annotated=spec.cpuset)
        with pytest.MonkeyPatch.context() as patch, node.client() as client:
            patch.setattr(demo.uuid, "uuid4", lambda: uuid.UUID(metadata["uid"]))
            try:
                placed.started = client.launch(spec)
            except RuntimeCallError as error:
                placed.rejected = str(error)
            else:
                placed.cpus = CpuSet.parse(node.cpus(placed.started.container_id))
        return placed


def on_nodes(plane: ControlPlane, test: Callable[[ImitatedNodes], None], *, agents: bool = True) -> None:
    """Run a test with three Nodes with a daemon each; the test is in a thread, the daemons on the loop.

    Args:
        plane: The API server.
        test: What is run.
        agents: Whether each node has an agent, too.
    """
    with contextlib.ExitStack() as stack:
        nodes = {name: stack.enter_context(temporary_node()) for name in NAMES}
        for name in NAMES:
            _node(plane, name)

        def work() -> None:
            with contextlib.ExitStack() as processes:
                for name, node in nodes.items() if agents else ():
                    processes.enter_context(running_agent(plane, node.directory, "", name))
                test(ImitatedNodes(plane, nodes))

        async def whole() -> None:
            daemons = [node.daemon(SETTINGS) for node in nodes.values()]
            try:
                for daemon in daemons:
                    await daemon.start()
                for daemon in daemons:
                    assert daemon.executor is not None
                    async with asyncio.timeout(60):
                        await daemon.executor.reconciled.wait()
                await asyncio.to_thread(work)
            finally:
                for daemon in daemons:
                    await daemon.stop()

        try:
            asyncio.run(whole())
        finally:
            plane.delete(f"{PODS}?gracePeriodSeconds=0")
            for name in NAMES:
                plane.delete(f"/api/v1/nodes/{name}")


def _node(plane: ControlPlane, name: str) -> None:
    plane.node(name)
    amounts = {"cpu": "16", "memory": "120Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "imitated"}
    status = {"capacity": amounts, "allocatable": {**amounts, "cpu": "15"}, "conditions": [ready]}
    plane.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, "application/merge-patch+json")
