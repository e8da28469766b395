"""``topoproxy simulate --cluster`` decides as a real kube-scheduler with the real extender does.

The nodes of the simulation are read from the objects of the API server, and each choice is compared.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from proxy.engine.pod_dry_run import dry_run
from proxy.pools.pod_spec import pod_spec
from proxy.scheduler.scores import Strategy
from proxy.simulate.documents import documents
from proxy.simulate.fleet.fleet_pods import fleet_pods
from proxy.simulate.fleet.recorded import recorded_nodes
from proxy.simulate.fleet.schedulers import ExtendedFleetScheduler
from proxy.simulate.pods import pod_template_of
from tests.cluster.extender_process import SCHEDULER
from tests.cluster.fake_fleet import NUMATOPOLOGIES, PODS
from tests.cluster.scheduling_cluster import SchedulingCluster

SIZES = (7, 7, 3, 10, 5)
BIND_S = 30.0


class RecordedChance(random.Random):
    """Records the nodes between which chance decides; takes the first one."""

    among: Sequence[int] = ()

    def choice(self, seq: Sequence[Any]) -> Any:
        self.among = list(seq)
        return seq[0]


def until(found: Callable[[], Any], what: str) -> Any:
    """Wait for something that is true."""
    end = time.monotonic() + BIND_S
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.02)
    raise TimeoutError(what)


def outcome(scheduling: SchedulingCluster, name: str) -> str:
    """Return the node of a pod: ``-`` if the pod is unschedulable, empty if that is not known yet."""
    pod = scheduling.plane.get(f"{PODS}/{name}") or {}
    if node := pod["spec"].get("nodeName"):
        return str(node)
    conditions = pod.get("status", {}).get("conditions", [])
    return "-" if any(each.get("reason") == "Unschedulable" for each in conditions) else ""


def is_shown(scheduling: SchedulingCluster, name: str, node: str) -> bool:
    """Return whether the object of a node lists a pod."""
    uid = (scheduling.plane.get(f"{PODS}/{name}") or {})["metadata"]["uid"]
    listed = (scheduling.plane.get(f"{NUMATOPOLOGIES}/{node}") or {})["spec"].get("podAllocations") or []
    return any(each["uid"] == uid for each in listed)


def test_every_choice_is_among_the_best_of_the_simulation(scheduling: SchedulingCluster) -> None:
    items = scheduling.plane.request("GET", "/api/v1/nodes")["items"]
    nodes = [{**each, "apiVersion": "v1", "kind": "Node"} for each in items]
    topologies = scheduling.plane.request("GET", NUMATOPOLOGIES)["items"]
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": [*nodes, *topologies]})
    simulated_nodes = recorded_nodes(documents(objects.encode(), "cluster")).simulated_nodes
    names = [simulated_node.name for simulated_node in simulated_nodes]
    chance, order = RecordedChance(), random.Random(4)
    scheduler = ExtendedFleetScheduler(simulated_nodes, chance, 100, 10, Strategy.FEWEST_NUMA_NODES)
    unschedulable = ties = 0
    for number in range(36):
        cpus = order.choice(SIZES)
        limits = {"cpu": cpus, "memory": "1Gi"}
        containers = [{"name": "main", "image": "x", "resources": {"limits": limits}}]
        raw = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"same{number}", "namespace": "fleet"}}
        raw["spec"] = {"schedulerName": SCHEDULER, "containers": containers}
        scheduling.plane.create(PODS, raw)
        (pod,) = fleet_pods([pod_template_of(pod_spec(raw)).copy(f"same{number}", number)])
        chance.among = ()
        chosen = scheduler.choose(pod)
        best = [names[at] for at in chance.among or ([chosen] if chosen >= 0 else [])] or ["-"]
        node = until(lambda: outcome(scheduling, f"same{number}"), f"same{number}")  # noqa: B023
        assert node in best, (number, cpus, best)
        if node == "-":
            unschedulable += 1
            scheduling.plane.delete(f"{PODS}/same{number}")
            continue
        ties += len(best) > 1
        at = names.index(node)
        arrival = scheduler.bind(at, pod)
        assert arrival is not None
        done = dry_run(simulated_nodes[at].state, arrival)
        assert done.verdict.admitted
        simulated_nodes[at].state = done.state
        scheduler.bound(at, pod, done, simulated_nodes[at])
        until(lambda: is_shown(scheduling, f"same{number}", node), f"same{number} on {node}")  # noqa: B023
    assert not scheduling.fleet.rejected
    assert unschedulable > 2
    assert ties > 2
    scheduling.fleet.clear()
