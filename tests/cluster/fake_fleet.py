"""A fleet of nodes as objects, which admit pods by the engine and publish what they hold some time later.

To a scheduler, a node of the fleet behaves like kubelet, the daemon and its agent: a bound pod is admitted or
fails with kubelet's reason, and the agent's object of the node follows after a delay.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

from proxy.agent.objects.node_page import NodePage, read_node_page
from proxy.agent.objects.node_resource_topology import collection_path, koordinator_topology, nfd_topology
from proxy.agent.objects.numatopology import numatopology
from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.pod_dry_run import dry_run
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, union
from proxy.model.options import Scope, TopologyPolicy
from proxy.observe.node_description import describe_node
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.scheduler.node_facts import machine_of
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.pod_demand import read_demand
from tests.cluster.api_client import ApiError, Json
from tests.cluster.control_plane import ControlPlane
from tests.scheduler.objects import numatopology as imitated_numatopology
from tests.scheduler.objects import pod

PODS = "/api/v1/namespaces/fleet/pods"
NUMATOPOLOGIES = "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies"
CRD = Path(__file__).parents[2] / "deploy" / "scheduler" / "numatopology-crd.yaml"
BOUND = f"{PODS}?fieldSelector=spec.nodeName%21%3D"
POD_TYPE_META = {"apiVersion": "v1", "kind": "Pod"}
POLL_S = 0.15


FORMS: dict[str, tuple[str, Callable[[NodePage], Json]]] = {
    "numatopology": (NUMATOPOLOGIES, numatopology),
    "nfd": (collection_path("v1alpha2"), nfd_topology),
    "koordinator": (collection_path("v1alpha1"), koordinator_topology),
}
"""Objects that describe a node: their collection, and what makes one."""


class FleetNode:
    """One node: the engine's state, and the pods on it."""

    def __init__(self, name: str, numa_nodes: int, cores: int, scope: Scope = Scope.CONTAINER) -> None:
        self.name = name
        shape = imitated_numatopology(name, numa_nodes=numa_nodes, cores=cores)
        memory = tuple((numa, "memory", 64 << 30) for numa in range(numa_nodes))
        machine = machine_of(read_numatopology(shape).cpus, {}, memory)
        node = Node(
            machine,
            CpuTopology.of(machine),
            static=True,
            reserved=CpuSet([0]),
            policy=TopologyPolicy.SINGLE_NUMA_NODE,
            scope=scope,
        )
        self.state = NodeState.empty(node)

    def admit(self, raw: Json) -> str:
        """Admit a pod; returns the reason of the rejection, empty if it is admitted."""
        demand = read_demand(raw)
        outcome = dry_run(self.state, demand.arrival())
        self.state = outcome.state
        return "" if outcome.verdict.admitted else outcome.verdict.reason or "Rejected"

    def end(self, uid: str) -> None:
        gone = [each.id for each in self.state.containers.values() if each.pod.uid == uid]
        pods = [each.sandbox_id for each in self.state.pods.values() if each.uid == uid]
        self.state = self.state.changed(drop=gone)
        for sandbox in pods:
            self.state = self.state.without_pod(sandbox)

    def published(self, form: str = "numatopology") -> Json:
        """Return what the agent publishes about the node."""
        _, make = FORMS[form]
        return make(read_node_page(describe_node(self.state, self.name)))

    def cpus_of_other_owners(self, raw: Json) -> CpuSet:
        """Return the CPUs that the annotation of an arriving pod names although another pod owns them."""
        return _annotated_cpus(raw) & CpuSet.from_bits(
            union(each.cpus.bits for each in self.state.owners.values())
        )

    def aligned(self) -> int:
        """Count containers whose CPUs are on one NUMA node."""
        numa_nodes = self.state.node.machine.nodes
        owners = self.state.owners.values()
        return sum(any(owner.cpus <= numa.cpus for numa in numa_nodes) for owner in owners)


def _annotated_cpus(raw: Json) -> CpuSet:
    text = raw["metadata"].get("annotations", {}).get(RESOURCE_STATUS, "{}")
    return CpuSet.parse(json.loads(text).get("cpuset", ""))


class BoundPods:
    """The pods that are bound to nodes, by a watch: a list of all pods costs as much as many binds."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._pods: dict[str, Json] = {}
        self._version = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start = self._thread.start

    def current(self) -> dict[str, Json]:
        """Return the pods by uid."""
        return dict(self._pods)

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                if not self._version:
                    found = self._plane.request("GET", BOUND)
                    self._pods = {
                        each["metadata"]["uid"]: {**POD_TYPE_META, **each} for each in found["items"]
                    }
                    self._version = found["metadata"]["resourceVersion"]
                self._follow()
            except (ApiError, OSError, ValueError, http.client.HTTPException):  # a line may end in the middle
                self._version = ""
                time.sleep(POLL_S)  # the API server is away

    def _follow(self) -> None:
        path = f"{BOUND}&watch=true&allowWatchBookmarks=true&timeoutSeconds=3&resourceVersion={self._version}"
        connection = self._plane.connect()
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": "Bearer admin-token"})
            with contextlib.closing(connection.getresponse()) as answer:
                if answer.status != 200:
                    raise OSError(f"{answer.status}: {answer.read(500)!r}")
                for line in answer:
                    self._handle(json.loads(line))

    def _handle(self, event: Json) -> None:
        if event["type"] == "ERROR":
            raise OSError(event["object"].get("message"))
        metadata = event["object"]["metadata"]
        self._version = metadata["resourceVersion"]
        if event["type"] == "DELETED":
            self._pods.pop(metadata["uid"], None)
        elif event["type"] != "BOOKMARK":
            self._pods[metadata["uid"]] = event["object"]


class FakeFleet:
    """The nodes, and the outcomes of the pods that were bound to them.

    Attributes:
        rejected: Pods that their node has rejected, by name.
        admitted: Names of pods to their nodes.
        avoidable: How many pods their node has rejected while another one would have admitted them.
        delay_s: Mean seconds until the object of a node shows what has changed.
        form: Which object the nodes publish.
    """

    def __init__(
        self,
        plane: ControlPlane,
        nodes: int,
        *,
        numa_nodes: int = 4,
        cores: int = 4,
        delay_s: float = 1.0,
        scope: Scope = Scope.CONTAINER,
    ) -> None:
        self.plane = plane
        self.nodes = {f"f{n}": FleetNode(f"f{n}", numa_nodes, cores, scope) for n in range(nodes)}
        self.rejected: dict[str, str] = {}
        self.admitted: dict[str, str] = {}
        self.avoidable = 0
        self._taken_again = 0
        self.form = "numatopology"
        self.times: list[float] = []
        self._bound = BoundPods(plane)
        self._seen: dict[str, str] = {}
        self.delay_s = delay_s
        self._due: dict[str, float] = {}
        self._unsent: dict[str, Json] = {}
        self._end = threading.Event()
        self._pool = ThreadPoolExecutor(8)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._chance = random.Random(5)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Create the objects, and begin to admit pods."""
        self.plane.install(CRD)
        for name in ("fleet",):
            if self.plane.get(f"/api/v1/namespaces/{name}") is None:
                self.plane.create("/api/v1/namespaces", {"metadata": {"name": name}})
        # msgspec 0.22 describes a type at its first use, and crashes if several threads do so at once.
        next(iter(self.nodes.values())).published()
        list(self._pool.map(self._create, self.nodes.values()))
        self._bound.start()
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        self._bound.stop()
        self._pool.shutdown()
        if self.error:
            raise self.error

    def create_node(self, name: str) -> None:
        """Create the Node object of a node."""
        self.plane.node(name)
        cpus = len(self.nodes[name].state.node.machine.online) - 1
        offers = {"cpu": str(cpus), "memory": "256Gi", "pods": "250"}
        ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "imitated"}]
        status = {"capacity": offers, "allocatable": offers, "conditions": ready}
        self.plane.merge(f"/api/v1/nodes/{name}/status", {"status": status})

    def publish_as(self, form: str) -> None:
        """Delete the objects that describe the nodes, and publish those of a form from now on."""
        self.plane.delete(FORMS[self.form][0])
        self.form = form
        list(self._pool.map(self._publish, self.nodes))

    def create_pods(self, prefix: str, sizes: list[int], scheduler: str, *, lsr_every: int = 0) -> None:
        """Create pods at once; every ``lsr_every``-th has class LSR: the extender chooses its CPUs."""

        def made(number: int) -> Json:
            labels = {"koordinator.sh/qosClass": "LSR"} if lsr_every and number % lsr_every == 0 else {}
            return pod(f"{prefix}{number}", sizes[number], labels=labels, schedulerName=scheduler)

        self.create(made, len(sizes))

    def create(self, made: Callable[[int], Json], count: int) -> None:
        """Create pods at once, from their numbers."""

        def create(number: int) -> None:
            raw = made(number)
            del raw["metadata"]["uid"], raw["metadata"]["namespace"]
            self.plane.create(PODS, raw)

        list(self._pool.map(create, range(count)))

    @property
    def decided_count(self) -> int:
        """How many pods their nodes have admitted or rejected."""
        return len(self.admitted) + len(self.rejected)

    def until_settled(self, count: int, quiet_s: float = 6.0, most_s: float = 120.0) -> float:
        """Wait until this number of pods is bound, or no more are; returns the seconds to the last bind."""
        began = last = time.monotonic()
        done = self.decided_count
        while done < count and time.monotonic() - last < quiet_s and time.monotonic() - began < most_s:
            time.sleep(0.1)
            if self.decided_count != done:
                done, last = self.decided_count, time.monotonic()
        return last - began

    def rate(self, began: float) -> float:
        """Return the pods that were bound per second, without the last tenth of them."""
        times = sorted(when for when in self.times if when >= began)
        some = times[: len(times) * 9 // 10]
        return len(some) / (some[-1] - began) if some else 0.0

    def clear(self) -> None:
        """Delete all pods."""
        while True:
            try:
                self.plane.delete(f"{PODS}?gracePeriodSeconds=0")
                break
            except OSError:  # the API server may have deleted some
                time.sleep(POLL_S)
        while self._seen or self._due or self._unsent:
            assert self.error is None, self.error
            time.sleep(0.1)
        self.rejected.clear()
        self.admitted.clear()
        self.avoidable = self._taken_again = 0

    def double_bookings(self) -> int:
        """Count CPUs that two pods of one node own, or that a pod was given while another one owned them.

        On real nodes, count the CPUs that the annotations of two pods name.
        """
        owned = Counter(
            (node.name, cpu)
            for node in self.nodes.values()
            for owner in node.state.owners.values()
            for cpu in owner.cpus
        )
        elsewhere = Counter(
            (each["spec"]["nodeName"], cpu)
            for each in self._bound.current().values()
            if each["spec"]["nodeName"] not in self.nodes
            for cpu in _annotated_cpus(each)
        )
        found = sum(count > 1 for times in (owned, elsewhere) for count in times.values())
        return found + self._taken_again

    def aligned(self) -> int:
        """Count pods whose CPUs are on one NUMA node; each of them has one container."""
        return sum(node.aligned() for node in self.nodes.values())

    def fits_somewhere(self, size: int) -> bool:
        """Return whether a node would admit a pod that requests this number of CPUs."""
        demand = read_demand(pod("asked", size))
        return any(dry_run(node.state, demand.arrival()).verdict.admitted for node in self.nodes.values())

    def room_for(self, sizes: Iterable[int]) -> int:
        """Count pods that nodes would admit one after the other."""
        states, found = [node.state for node in self.nodes.values()], 0
        for number, size in enumerate(sizes):
            arrival = read_demand(pod(f"asked{number}", size)).arrival()
            for at, state in enumerate(states):
                outcome = dry_run(state, arrival)
                if outcome.verdict.admitted:
                    states[at] = outcome.state
                    found += 1
                    break
        return found

    def figures(self, count: int) -> str:
        return f"{len(self.admitted)} of {count} pods run, {len(self.rejected)} rejected on the node"

    # -- inside -------------------------------------------------------------------------------------------

    def _create(self, node: FleetNode) -> None:
        self.create_node(node.name)
        self._publish(node.name)

    def _run(self) -> None:
        while not self._end.wait(POLL_S):
            try:
                self._step()
            except (ApiError, OSError):
                continue  # the API server is away
            except BaseException as error:
                self.error = error
                return

    def _step(self) -> None:
        # Pods on real nodes are left to those nodes.
        bound = {k: v for k, v in self._bound.current().items() if v["spec"]["nodeName"] in self.nodes}
        changed = set()
        for uid in [uid for uid in self._seen if uid not in bound]:
            name = self._seen.pop(uid)
            self.nodes[name].end(uid)
            changed.add(name)
        new = [each for uid, each in bound.items() if uid not in self._seen]
        # As in kubelet: the pods of one update are handled in the order of creation.
        self.times += [time.monotonic()] * len(new)
        new.sort(key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]))
        for each in new:
            self._admit(each)
        changed |= {each["spec"]["nodeName"] for each in new}
        now = time.monotonic()
        for name in changed:
            self._due.setdefault(name, now + self.delay_s * self._chance.uniform(0.5, 1.5))
        # What an API server does not accept while it is down is sent again in the next step.
        list(self._pool.map(self._send_status, list(self._unsent)))
        list(self._pool.map(self._publish, [name for name, when in self._due.items() if when <= now]))

    def _admit(self, raw: Json) -> None:
        name, node = raw["metadata"]["name"], raw["spec"]["nodeName"]
        self._seen[raw["metadata"]["uid"]] = node
        self._taken_again += len(self.nodes[node].cpus_of_other_owners(raw))
        reason = self.nodes[node].admit(raw)
        if reason:
            self.rejected[name] = f"{node}: {reason}"
            self.avoidable += self.fits_somewhere(read_demand(raw).exclusive_cpus)
        else:
            self.admitted[name] = node
        status = {"phase": "Failed", "reason": reason} if reason else {"phase": "Running"}
        self._unsent[f"{PODS}/{name}/status"] = {"status": status}

    def _send_status(self, path: str) -> None:
        try:
            self.plane.merge(path, self._unsent[path])
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # the pod has been deleted since
                raise
        self._unsent.pop(path, None)

    def _publish(self, name: str) -> None:
        self.plane.apply(self.nodes[name].published(self.form))
        self._due.pop(name, None)
