"""The rules of the stock scheduler in ``topoproxy simulate --cluster``, against a real kube-scheduler."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from proxy.pools.pod_fields import read_amounts
from proxy.pools.pod_spec import pod_spec
from proxy.simulate.fleet.stock_scheduler import StockScheduler, stock_demand
from proxy.simulate.nodes import SimulatedNode
from tests.cluster.api_client import Json
from tests.cluster.control_plane import ControlPlane, control_plane_skip_reason

NAMESPACE = "calibration"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
BIND_S = 20.0
GPU = "example.com/gpu"
NODES = (
    {"cpu": "8", "memory": "16Gi", "pods": "40"},
    {"cpu": "8", "memory": "16Gi", "pods": "40"},
    {"cpu": "16", "memory": "16Gi", "pods": "40"},
    {"cpu": "4", "memory": "64Gi", "pods": "40"},
    {"cpu": "7500m", "memory": "15999Mi", "pods": "40", GPU: "2"},
    {"cpu": "12", "memory": "48Gi", "pods": "6"},
)
CONTAINERS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"limits": {"cpu": "1", "memory": "2Gi"}},),
    ({"requests": {"cpu": "250m"}},),
    ({"requests": {"memory": "1500Mi"}},),
    ({},),
    ({"limits": {"cpu": "3", "memory": "1Gi"}},),
    ({"limits": {"cpu": "500m", "memory": "256Mi"}}, {"requests": {"cpu": "100m"}}),
    ({"limits": {"cpu": "1", "memory": "1Gi", GPU: "1"}},),
)


class RecordedChoices(random.Random):
    """Records the nodes between which chance decides."""

    def __init__(self) -> None:
        super().__init__(1)
        self.among: list[int] = []

    def choice(self, seq: Sequence[Any]) -> Any:
        self.among = list(seq)
        return seq[0]


@pytest.fixture(scope="module")
def scheduled(plane: ControlPlane) -> Iterator[ControlPlane]:
    if reason := control_plane_skip_reason("kube-scheduler"):
        pytest.skip(reason)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    plane.create("/api/v1/namespaces", namespace)
    for number, offers in enumerate(NODES):
        metadata = {"name": f"cal-{number}"}
        ready = [{"type": "Ready", "status": "True"}]
        status = {"allocatable": offers, "capacity": offers, "conditions": ready}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
        plane.create("/api/v1/nodes", node)
    plane.start_scheduler()
    yield plane
    for number in range(len(NODES)):
        plane.delete(f"/api/v1/nodes/cal-{number}")


def pod_object(name: str, containers: Sequence[dict[str, Any]]) -> Json:
    listed = [{"name": f"c{at}", "image": "x", "resources": each} for at, each in enumerate(containers)]
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": listed}}


def simulated_nodes() -> list[SimulatedNode]:
    """The same nodes for the simulation, which reads only their names and what they offer."""
    nothing: Any = None
    return [
        SimulatedNode(f"cal-{at}", nothing, nothing, read_amounts(each, "")) for at, each in enumerate(NODES)
    ]


def bound(plane: ControlPlane, name: str) -> str:
    """Wait until a pod is bound, or is found to be unschedulable; returns the node, empty for none."""
    end = time.monotonic() + BIND_S
    while time.monotonic() < end:
        pod = plane.get(f"{PODS}/{name}")
        assert pod is not None
        if node := pod["spec"].get("nodeName"):
            return str(node)
        conditions = pod.get("status", {}).get("conditions", [])
        if any(each.get("reason") == "Unschedulable" for each in conditions):
            return ""
        time.sleep(0.01)
    raise TimeoutError(name)


def test_every_choice_of_the_real_scheduler_is_among_the_best_here(scheduled: ControlPlane) -> None:
    chance, order = RecordedChoices(), random.Random(3)
    stock = StockScheduler(simulated_nodes(), chance)
    ties = unschedulable = 0
    for number in range(70):
        raw = pod_object(f"p{number}", order.choice(CONTAINERS))
        scheduled.create(PODS, raw)
        node = bound(scheduled, f"p{number}")
        demand = stock_demand(pod_spec(raw))
        chance.among = []
        chosen = stock.choose(demand)
        best = [f"cal-{at}" for at in chance.among] or ([f"cal-{chosen}"] if chosen >= 0 else [""])
        assert node in best, (number, raw["spec"])
        if node:
            ties += len(best) > 1
            stock.take(int(node.removeprefix("cal-")), demand)
        else:
            unschedulable += 1
            scheduled.delete(f"{PODS}/p{number}")
    assert ties > 3
    assert unschedulable > 0


def test_equal_nodes_are_chosen_equally_often(scheduled: ControlPlane) -> None:
    found: Counter[str] = Counter()
    for name in [pod["metadata"]["name"] for pod in scheduled.request("GET", PODS)["items"]]:
        scheduled.request("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
    for number in range(40):
        scheduled.create(PODS, pod_object(f"first{number}", ({"limits": {"cpu": "1", "memory": "2Gi"}},)))
        found[bound(scheduled, f"first{number}")] += 1
        scheduled.request("DELETE", f"{PODS}/first{number}?gracePeriodSeconds=0")
    demand = stock_demand(pod_spec(pod_object("x", ({"limits": {"cpu": "1", "memory": "2Gi"}},))))
    here = Counter(
        f"cal-{StockScheduler(simulated_nodes(), random.Random(seed)).choose(demand)}" for seed in range(400)
    )
    assert set(found) == set(here)
    for name, count in here.items():
        assert abs(found[name] / 40 - count / 400) < 0.3
