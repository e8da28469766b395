"""Figures of the cluster agent at a real API server: ``make bench-cluster`` prints them, or only some cases.

Latency is from the end of StartContainer to the event of a watch of the Numatopology that shows the
container's CPUs as taken; memory is the resident set of the agent; writes are counted by the API server.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from proxy.agent.watcher import WATCH_S
from proxy.demo import client as demo
from proxy.demo.client import DemoPod
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from proxy.topology.regular_machine import regular_machine
from tests.cluster.agent_process import (
    NUMATOPOLOGY,
    TOPOLOGY,
    AgentProcess,
    condition,
    free_cpus,
    running_agent,
    writes,
)
from tests.cluster.control_plane import ControlPlane, control_plane_skip_reason
from tests.cluster.upstream_crds import crd
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.waiting import wait_until

STATIC = "cpuManagerPolicy: static\nreconcilePeriod: 1h\n"
PODS = 250
FLEET_NODES, FLEET_PERIOD_S, WATCHES = 5000, 10, 3
FLEET_KINDS = ("numatopologies", "noderesourcetopologies", "nodes", "events")
Work = Callable[[DaemonNode, AgentProcess], None]


class FreeCpusWatch:
    """The times at which free CPUs of the Numatopology were seen, by a watch."""

    def __init__(self, plane: ControlPlane) -> None:
        self.seen: list[tuple[float, CpuSet]] = []
        collection = NUMATOPOLOGY.rpartition("/")[0]
        # Without a version, the API server waits until its cache is as new as etcd, and etcd 3.4 reports no
        # progress of a collection that does not change: such a watch ends with an error.
        since = plane.request("GET", collection)["metadata"]["resourceVersion"]
        request = urllib.request.Request(f"{plane.server}{collection}?watch=true&resourceVersion={since}")
        request.add_header("Authorization", "Bearer admin-token")
        self._answer = urllib.request.urlopen(request, timeout=600, context=plane._context)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._answer:
            item = json.loads(line)["object"]
            free = item["spec"]["numares"]["cpu"]["allocatable"]
            self.seen.append((time.monotonic(), CpuSet.parse(free) if free else CpuSet()))

    def first_without(self, cpus: CpuSet, requested: float, since: float) -> float:
        """Wait for an object that shows CPUs as taken.

        Args:
            cpus: The CPUs.
            asked: When the container was requested.
            since: When it had been started.

        Returns:
            The seconds from ``since``; 0 if the object was there before.
        """
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for at, free in self.seen:
                if at >= requested and not (free & cpus):
                    return max(0.0, at - since)
            time.sleep(0.002)
        raise TimeoutError(str(cpus))


def on_node(plane: ControlPlane, cores: int, work: Work, settings: str = "") -> None:
    """Run a function with a daemon on a machine of two sockets, and its agent with some settings."""
    machine = regular_machine(2, 1, cores, 2)
    with temporary_node(lambda directory: DaemonNode(directory, machine)) as node:
        more = settings.format(directory=node.directory)
        daemon = node.daemon(STATIC + more)

        def whole() -> None:
            with running_agent(plane, node.directory, more) as agent:
                wait_until(lambda: free_cpus(plane) is not None and condition(plane), 30)
                time.sleep(1.5)
                work(node, agent)

        run(daemon, lambda: asyncio.to_thread(whole), reconciled=True)


def latency(plane: ControlPlane, node: DaemonNode, gaps: Callable[[], float], count: int) -> list[float]:
    """Create containers with exclusive CPUs, and measure each; they end at once."""
    watched, found = FreeCpusWatch(plane), []
    with node.client() as client:
        for number in range(count):
            requested = time.monotonic()
            started = client.launch(DemoPod(f"p{number}", kube_qos=KubeQos.GUARANTEED, cpus=1))
            at = time.monotonic()
            cpus = CpuSet.parse(node.cpus(started.container_id))
            found.append((cpus, requested, at))
            time.sleep(gaps())
        return [watched.first_without(*each) for each in found]


def show(name: str, values: list[float]) -> None:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(f"{name}: p50 {statistics.median(ordered):.3f} s, p99 {p99:.3f} s, of {len(ordered)}")


def bound_pod(plane: ControlPlane, name: str) -> str:
    """Create a pod as the scheduler leaves it, with the usual fields; return its uid."""
    environment = [{"name": f"VARIABLE_{number}", "value": "x" * 40} for number in range(20)]
    resources = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    container = {"name": "main", "image": "x", "resources": resources, "env": environment}
    metadata = {"name": name, "labels": {"app": name}, "annotations": {"note": "x" * 200}}
    value = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    created = plane.create(
        "/api/v1/namespaces/demo/pods", {**value, "spec": {"nodeName": "n1", "containers": [container]}}
    )
    return str(created["metadata"]["uid"])


def timed(plane: ControlPlane, name: str, gaps: Callable[[], float], count: int) -> Work:
    """Return a function that measures latency and writes while pods arrive."""

    def work(node: DaemonNode, agent: AgentProcess) -> None:
        before, began = writes(plane, events=True), time.monotonic()
        show(f"object current, {name}", latency(plane, node, gaps, count))
        lasted = time.monotonic() - began
        found = writes(plane, events=True) - before
        print(f"writes meanwhile: {found} in {lasted:.0f} s, {found / lasted:.2f} per second")

    return work


def reading(uids: dict[str, str]) -> Work:
    """Return a function that measures the agent's memory with pods; ``uids`` has their names and UIDs."""

    def work(node: DaemonNode, agent: AgentProcess) -> None:
        with node.client() as client:
            for name, uid in uids.items():
                with mock.patch.object(demo.uuid, "uuid4", lambda uid=uid: uuid.UUID(uid)):
                    client.launch(DemoPod(name, kube_qos=KubeQos.BURSTABLE))
        time.sleep(10)
        known = json.loads((node.directory / "cluster/pods.json").read_text())
        assert all(uid in json.dumps(known) for uid in uids.values())
        print(f"memory of the agent at {PODS} pods, with clusterFacts: {agent.rss_kb / 1024:.1f} MiB")

    return work


@dataclass(frozen=True)
class Traffic:
    """What the API server has counted of our kinds of objects, by resource; then a mean.

    Attributes:
        requests: Writes, and their bytes.
        events: Events of watches, and their bytes.
    """

    requests: dict[str, tuple[float, float]]
    events: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, plane: ControlPlane) -> Traffic:
        text = plane.request("GET", "/metrics", raw=True)

        def counted(name: str) -> dict[str, tuple[float, float]]:
            found: dict[tuple[str, str], float] = {}
            for part, labels, value in re.findall(rf"(?m)^{name}_(count|sum){{([^}}]*)}} (\S+)", text):
                if resource := re.search(r'resource="(\w+)"', labels):
                    found[resource[1], part] = found.get((resource[1], part), 0) + float(value)
            return {kind: (found[kind, "count"], found[kind, "sum"]) for kind, part in found if part == "sum"}

        return cls(counted("apiserver_request_body_size_bytes"), counted("apiserver_watch_events_sizes"))

    def until(self, later: Traffic, changes: int) -> Traffic:
        """Return count and bytes for each of some changes."""

        def each(
            before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]
        ) -> dict[str, tuple[float, float]]:
            zero = 0.0, 0.0
            found = {}
            for kind in FLEET_KINDS:
                (n0, b0), (n1, b1) = before.get(kind, zero), after.get(kind, zero)
                found[kind] = (n1 - n0) / changes, (b1 - b0) / changes
            return found

        return Traffic(each(self.requests, later.requests), each(self.events, later.events))


def show_fleet(change: Traffic, stored: dict[str, tuple[int, int]]) -> None:
    """Print the cost of a change, and the cost of a fleet in which each node changes now and then.

    Args:
        change: Means of one change.
        stored: Bytes of the objects as a reader gets them, and of their metadata, which answer a write.
    """
    for kind in FLEET_KINDS:
        (writes, sent), (events, echoed) = change.requests[kind], change.events[kind]
        print(
            f"a change, {kind}: {writes:.1f} writes of {sent / max(writes, 0.1):.0f} bytes, "
            f"{events:.1f} events of {echoed / max(events, 0.1):.0f} bytes to the agent"
        )
    rate = FLEET_NODES / FLEET_PERIOD_S
    print(f"{FLEET_NODES} nodes of 512 CPUs, a change of each in {FLEET_PERIOD_S} s:")
    for kind in FLEET_KINDS:
        (writes, sent), (_, echoed) = change.requests[kind], change.events[kind]
        whole, answer = stored.get(kind, (0, 0))
        print(
            f"  {kind}: {rate * writes:.0f} writes per second, {rate * sent / 1e6:.1f} MB/s of requests, "
            f"{rate * writes * answer / 1e6:.1f} MB/s of answers, {rate * echoed / 1e6:.1f} MB/s of watches "
            f"of the agents, {rate * writes * whole / 1e6:.1f} MB/s to each reader"
        )
    watches = FLEET_NODES * WATCHES
    print(f"  watches: {watches} open, {watches / WATCH_S:.0f} opened per second")


def figures(plane: ControlPlane) -> None:
    def idle(node: DaemonNode, agent: AgentProcess) -> None:
        with node.client() as client:
            for number in range(PODS):
                client.launch(DemoPod(f"p{number}", kube_qos=KubeQos.BURSTABLE))
        time.sleep(3)
        before = writes(plane, events=True)
        time.sleep(60)
        print(f"writes in an idle minute: {writes(plane, events=True) - before}")
        print(f"memory of the agent at {PODS} pods: {agent.rss_kb / 1024:.1f} MiB")
        page = json.dumps(plane.get(NUMATOPOLOGY), separators=(",", ":"))
        print(f"Numatopology of 64 CPUs: {len(page)} bytes with the fields of the API server")

    def large(node: DaemonNode, agent: AgentProcess) -> None:
        stored: dict[str, tuple[int, int]] = {}
        with node.client() as client:
            for number in range(100):
                client.launch(DemoPod(f"p{number}", kube_qos=KubeQos.GUARANTEED, cpus=4))
        time.sleep(3)
        for path in (NUMATOPOLOGY, TOPOLOGY):
            found = plane.get(path)
            assert found is not None
            whole = len(json.dumps(found, separators=(",", ":")))
            metadata = len(json.dumps(found["metadata"], separators=(",", ":")))
            del found["metadata"]["managedFields"]
            bare = len(json.dumps(found, separators=(",", ":")))
            print(f"{found['kind']} of 512 CPUs: {whole} bytes, {bare} without managedFields")
            print(f"answer to a write of it: {metadata} bytes")
            stored[path.split("/")[4]] = whole, metadata
        print(f"memory of the agent on 512 CPUs: {agent.rss_kb / 1024:.1f} MiB")
        time.sleep(60)  # Events of these pods are late
        before = Traffic.of(plane)
        with node.client() as client:
            for number in range(10):
                client.launch(DemoPod(f"q{number}", kube_qos=KubeQos.GUARANTEED, cpus=4))
                time.sleep(FLEET_PERIOD_S)
        show_fleet(before.until(Traffic.of(plane), 10), stored)

    one = "cluster:\n  nodeResourceTopology: none\n"
    facts = "clusterFacts:\n  directory: {directory}/cluster\n"
    uids: dict[str, str] = {}
    cases: dict[str, tuple[int, str, Work]] = {
        "one": (64, one, timed(plane, "one object, 1 pod per second", lambda: 1.0, 100)),
        "two": (64, "", timed(plane, "two objects, 1 pod per second", lambda: 1.0, 100)),
        "fast": (64, "", timed(plane, "two objects, 4 pods per second", lambda: random.uniform(0, 0.5), 100)),
        "idle": (16, "", idle),
        "reading": (16, facts, reading(uids)),
        "large": (128, "", large),
    }
    for name in sys.argv[1:] or cases:
        cores, settings, work = cases[name]
        plane.node()
        if settings == facts:
            uids.update((name, bound_pod(plane, name)) for name in (f"p{number}" for number in range(PODS)))
        on_node(plane, cores, work, settings)
        for path in (NUMATOPOLOGY, TOPOLOGY, "/api/v1/nodes/n1"):
            if plane.get(path):
                plane.delete(path)


def main() -> None:
    if reason := control_plane_skip_reason():
        sys.exit(f"figures: {reason}")
    with tempfile.TemporaryDirectory(prefix="tp-plane-") as directory:
        plane = ControlPlane(Path(directory))
        try:
            plane.start_api()
            deploy = Path(__file__).parents[2] / "deploy" / "agent"
            for manifest in (deploy / "rbac.yaml", deploy / "node-restriction.yaml"):
                plane.install(manifest)
            for name in ("topology", "volcano"):
                plane.install(crd(name))
            plane.create(
                "/api/v1/namespaces",
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "demo"}},
            )
            figures(plane)
        finally:
            plane.close()


if __name__ == "__main__":
    main()
