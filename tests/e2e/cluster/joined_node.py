"""A node of a real cluster: containerd, daemon, kubelet and agent, and queries like those of `kubectl`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cri import IMAGE, RUNNING, Cpuset, cpuset_of

from proxy.agent.rejections.node_mark import KEY
from proxy.model.idset import CpuSet
from tests.cluster.agent_process import AgentProcess, free_cpus, running_agent
from tests.cluster.api_client import ApiError, Json
from tests.cluster.control_plane import ControlPlane

if TYPE_CHECKING:
    from daemon import DaemonProcess
    from private_runtime import PrivateRuntime
    from real_kubelet import RealKubelet

NODE = "n1"
DEMO = "/api/v1/namespaces/demo"
DEPLOYMENTS = "/apis/apps/v1/namespaces/demo/deployments"
PATIENCE_S = 60.0


PREFERS = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 100,
                "preference": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
                    ]
                },
            }
        ]
    }
}
"""The affinity of a pod that the scheduler binds to this node unless the node has a taint."""


def until(what: str, holds: Callable[[], Any], limit: float = PATIENCE_S) -> Any:
    """Wait until the check returns a true value, and return it; errors of the API server count as false."""
    end, last = time.monotonic() + limit, ""
    while time.monotonic() < end:
        try:
            if found := holds():
                return found
        except (ApiError, OSError, AssertionError, LookupError, TypeError) as error:
            last = f": {error!r}"
        time.sleep(0.05)
    raise TimeoutError(f"waited {limit:g} s for {what}{last}")


def container(cpus: str, *, whole: bool = True, name: str = "main") -> Json:
    """Return the spec of a container that sleeps; with ``whole`` its limits equal its requests."""
    amounts = {"cpu": cpus, "memory": "32Mi"}
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "36000"],
        "resources": {"requests": amounts, **({"limits": amounts} if whole else {})},
    }


def pod_spec(*containers: Json, **more: Any) -> Json:
    """Return the spec of a pod that ends at once when it is deleted."""
    return {
        "containers": list(containers),
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        **more,
    }


@dataclass(frozen=True)
class JoinedNode:
    """The node, and a client of its cluster.

    Attributes:
        plane: The control plane.
        runtime: The private runtime.
        daemon: The daemon between kubelet and the runtime.
        kubelet: The kubelet; its Node object is ``n1``.
    """

    plane: ControlPlane
    runtime: PrivateRuntime
    daemon: DaemonProcess
    kubelet: RealKubelet

    # -- changes -----------------------------------------------------------------------------------------

    def deploy(self, name: str, spec: Json, replicas: int = 1, **more: str) -> None:
        """Create a Deployment; ``more`` are further labels of its pods."""
        labels = {"app": name}
        template = {"metadata": {"labels": labels | more}, "spec": spec}
        self.plane.create(
            DEPLOYMENTS,
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name},
                "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
            },
        )

    def run(self, name: str, spec: Json, **metadata: Any) -> Json:
        """Create a pod without a controller."""
        metadata = {"name": name, **metadata}
        return self.plane.create(
            f"{DEMO}/pods", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        )

    def remove(self, name: str) -> None:
        """Delete a Deployment with its pods."""
        self.plane.request(
            "DELETE",
            f"{DEPLOYMENTS}/{name}",
            {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"},
        )

    def clear(self) -> None:
        """Delete everything that tests have created, and wait until no pod or sandbox is left on the node."""
        self.plane.delete(DEPLOYMENTS)
        until("no ReplicaSets", lambda: not self._items("/apis/apps/v1/namespaces/demo/replicasets"))
        self.plane.delete(f"{DEMO}/pods?gracePeriodSeconds=0")
        until("no pods", lambda: not self.pods())
        with self.runtime.client() as client:
            until("no sandboxes", lambda: not any(map(_is_ready, client.list_pods())))
        self.plane.delete(f"{DEMO}/events")
        unmarked = {"metadata": {"annotations": {KEY: None}}, "spec": {"taints": None}}
        self.plane.merge(f"/api/v1/nodes/{NODE}", unmarked)
        (self.daemon.directory / "agent.log").unlink(missing_ok=True)

    @contextlib.contextmanager
    def second_node(self) -> Iterator[None]:
        """Create another Node object, n2, without a kubelet, to which the scheduler can bind pods."""
        nodes, amounts = "/api/v1/nodes", self.node()["status"]
        self.plane.node("n2", **{"kubernetes.io/hostname": "n2"})
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
        status = {"conditions": [ready], **{key: amounts[key] for key in ("capacity", "allocatable")}}
        try:
            self.plane.merge(f"{nodes}/n2/status", {"status": status})
            yield
        finally:
            self.plane.delete(f"{nodes}/n2")

    # -- queries -----------------------------------------------------------------------------------------

    def _items(self, path: str) -> list[Json]:
        found: list[Json] = self.plane.request("GET", path)["items"]
        return found

    def pods(self, app: str = "") -> list[Json]:
        """List the pods, or those of a Deployment."""
        return self._items(f"{DEMO}/pods{f'?labelSelector=app%3D{app}' if app else ''}")

    def described(self, pod: Json) -> list[Json]:
        """Return the Events that `kubectl describe pod` lists (kubectl pkg/describe, PodDescriber)."""
        meta = pod["metadata"]
        about = {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"], "kind": "Pod"}
        fields = ",".join(f"involvedObject.{key}={value}" for key, value in about.items())
        return self._items(f"{DEMO}/events?fieldSelector={fields.replace('=', '%3D').replace(',', '%2C')}")

    def reported(self, pod: Json, reason: str) -> list[str]:
        """Return the messages of the Events of a pod with this reason."""
        return [each["message"] for each in self.described(pod) if each["reason"] == reason]

    def by_name(self, name: str) -> str:
        """Return the id of the running container of a static pod; empty if there is none."""
        with self.runtime.client() as client:
            found = [c for c in client.list() if c.labels.get("io.kubernetes.pod.name") == name]
        return next((c.id for c in found if c.state == RUNNING), "")

    def running(self, app: str, count: int = 1, limit: float = PATIENCE_S) -> list[Json]:
        """Wait until this number of pods of a Deployment runs on this node."""

        def found() -> list[Json]:
            pods = self.pods(app)
            here = [p for p in pods if p["spec"].get("nodeName") == NODE and is_running(p)]
            assert len(here) == count, [p["status"].get("conditions") for p in pods if p not in here]
            return here

        pods: list[Json] = until(f"{count} pods of {app} to run", found, limit)
        return pods

    def rejections(self, pod: Json) -> int:
        """Return how often the daemon has rejected a pod."""
        each = self.daemon.status()["rejections"]
        return sum(one["count"] for one in each if one["uid"] == pod["metadata"]["uid"])

    def node(self) -> Json:
        """Return the Node object."""
        found: Json = self.plane.request("GET", f"/api/v1/nodes/{NODE}")
        return found

    @contextlib.contextmanager
    def agent(self, settings: str = "", node: str = NODE, **more: Any) -> Iterator[AgentProcess]:
        """Run an agent for the daemon; on entry it has read the cluster."""
        files = self.daemon.directory / "cluster"
        facts, began = f"clusterFacts: {{directory: {files}}}\n", time.time()
        with running_agent(self.plane, self.daemon.directory, facts + settings, node, **more) as agent:
            until("the facts", lambda: (files / "pods.json").stat().st_mtime >= began)
            yield agent


def _is_ready(sandbox: Any) -> bool:
    return bool(sandbox.metadata.namespace == "demo" and sandbox.state == 0)  # SANDBOX_READY


def is_running(pod: Json) -> bool:
    """Return whether the one container of a pod runs."""
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all("running" in each["state"] for each in statuses)


def waiting(pod: Json) -> str:
    """Return the reason why the first container of a pod waits, as `kubectl get pods` shows it."""
    statuses = pod["status"].get("containerStatuses") or [{}]
    return str(statuses[0].get("state", {}).get("waiting", {}).get("reason", ""))


def kernel(pod: Json) -> Cpuset:
    """Read the cpuset of a pod's first container from the kernel."""
    return cpuset_of(pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2])


def is_free(node: JoinedNode, left: CpuSet) -> bool:
    """Return whether the Numatopology lists the remaining CPUs as free, except one for the shared floor."""
    text = free_cpus(node.plane)
    found = CpuSet.parse(text) if text else CpuSet()
    return text is not None and found <= left and len(found) == len(left) - 1


def one_cpu() -> Json:
    return pod_spec(container("1"), affinity=PREFERS)


def rejected(node: JoinedNode, app: str) -> Json:
    """Wait until kubelet shows a pod of a Deployment as rejected."""

    def found() -> Json | None:
        here = [p for p in node.pods(app) if p["spec"].get("nodeName") == NODE]
        return next((p for p in here if waiting(p) == "CreateContainerError"), None)

    pod: Json = until(f"a pod of {app} to be rejected", found)
    return pod


def uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])
