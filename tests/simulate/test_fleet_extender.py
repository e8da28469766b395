"""A fleet simulation decides as the live extender: the same nodes and pods, compared node by node.

The live side is ``proxy.extender.service`` as kube-scheduler calls it, with an API server in memory.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.engine.pod_dry_run import dry_run, without_pod
from proxy.model.idset import CpuSet
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.pod_spec import pod_spec
from proxy.scheduler.node_facts import join_facts
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.pod_demand import read_demand
from proxy.scheduler.scores import Strategy
from proxy.simulate.documents import documents
from proxy.simulate.fleet.fleet_pods import FleetPod, fleet_pods
from proxy.simulate.fleet.fleet_run import FleetRun
from proxy.simulate.fleet.fleet_simulation import FleetSettings, fleet_of
from proxy.simulate.fleet.recorded import recorded_nodes
from proxy.simulate.fleet.schedulers import ExtendedFleetScheduler
from proxy.simulate.nodes import SimulatedNode
from proxy.simulate.pods import pod_template_of
from tests.extender.running_extender import NODES, NUMATOPOLOGIES, PODS, ClusterApi, RunningExtender
from tests.scheduler.objects import Json, numatopology, pod
from tests.testkit.waiting import LIMIT_S

KINDS: tuple[Json, ...] = (
    {"cpus": (2,)},
    {"cpus": (4,)},
    {"cpus": (7,)},
    {"cpus": (3, 2)},
    {"cpus": ("500m",)},
    {"cpus": (2,), "labels": {"koordinator.sh/qosClass": "LSR"}},
    {"cpus": (3,), "annotations": {"volcano.sh/numa-topology-policy": "restricted"}},
)
POLICIES = ("single-numa-node", "single-numa-node", "restricted", "best-effort")
FINAL_SCALE = 10
"""What kube-scheduler multiplies the scores of extenders by, besides their weight."""


class Twins:
    """One cluster twice: as the simulation has it, and as objects that the extender follows."""

    def __init__(self, nodes: int, pods: int, percentage: int, strategy: Strategy) -> None:
        self.api = ClusterApi()
        self.chance = random.Random(5)
        self.shapes: dict[str, Json] = {}
        for number in range(nodes):
            self.shapes[f"n{number}"] = {"policy": self.chance.choice(POLICIES), "cores": 4}
            self.api.add_node(f"n{number}", **self.shapes[f"n{number}"])
        items = [{**each, "kind": "Node"} for each in self.api.collections[NODES].values()]
        items += [{**each, "kind": "Numatopology"} for each in self.api.collections[NUMATOPOLOGIES].values()]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self.simulated_nodes = recorded_nodes(documents(text.encode(), "cluster")).simulated_nodes
        self.names = [simulated_node.name for simulated_node in self.simulated_nodes]
        self.scheduler = ExtendedFleetScheduler(self.simulated_nodes, self.chance, percentage, 10, strategy)
        self.raws: list[Json] = []
        simulated_pods = []
        for number in range(pods):
            kind = self.chance.choice(KINDS)
            more = {key: value for key, value in kind.items() if key != "cpus"}
            raw = pod(f"p{number}", *kind["cpus"], uid="p", **more)
            simulated_pods.append(pod_template_of(pod_spec(raw)).copy(f"p{number}", number))
            raw["metadata"]["uid"] = f"p-{number}"
            self.raws.append(raw)
        self.pods = fleet_pods(simulated_pods)

    def simulated(self, pod: FleetPod) -> tuple[list[str], dict[str, int], int]:
        """Return the candidates, the extender's scores of those that fit, and the choice."""
        queried: list[list[str]] = []
        given: list[tuple[Sequence[str], list[int]]] = []
        table = self.scheduler._table
        plain_filter, plain_scores = table.filter, table.scores

        def recorded_filter(demand: Any, names: Any = None) -> Any:
            queried.append(list(names))
            return plain_filter(demand, names)

        def recorded_scores(demand: Any, names: Any, strategy: Any) -> list[int]:
            scores = plain_scores(demand, names, strategy)
            if len(names) > 1:
                given.append((names, scores))
            return scores

        if self.scheduler._stock.examines_all:
            names = [self.names[at] for at in self.scheduler.fitting(pod)]
            chosen = self.scheduler.choose(pod)
            ranking = self.scheduler._rankings[pod.kind]
            scores = {self.names[at]: score for at, score in ranking.scores().items()}
            return names, scores, chosen
        table.filter, table.scores = recorded_filter, recorded_scores  # type: ignore[method-assign]
        chosen = self.scheduler.choose(pod)
        table.filter, table.scores = plain_filter, plain_scores  # type: ignore[method-assign]
        names, found = given[0] if given else ([], [])
        return queried[0] if queried else [], dict(zip(names, found, strict=True)), chosen

    def publish(self, simulated_node: SimulatedNode) -> None:
        """Write the object of a node, as its agent does."""
        held: dict[str, CpuSet] = {}
        for each in simulated_node.state.containers.values():
            held[each.pod.uid] = held.get(each.pod.uid, CpuSet()) | each.placement.exclusive
        state = {uid: str(cpus) for uid, cpus in held.items() if cpus}
        spec = numatopology(simulated_node.name, **self.shapes[simulated_node.name], pods=state)["spec"]
        spec["numares"]["cpu"]["allocatable"] = str(simulated_node.ownable)
        self.api.put(NUMATOPOLOGIES, simulated_node.name, spec=spec)

    async def arrive(self, number: int, at: int, extender: RunningExtender) -> None:
        """Make the simulation and the extender bind a pod to a node, and the node admit it."""
        pod, raw, simulated_node = self.pods[number], self.raws[number], self.simulated_nodes[at]
        arrival = self.scheduler.bind(at, pod)
        problem = await extender.bind(raw, simulated_node.name)
        assert (arrival is None) == bool(problem), problem
        if arrival is None:
            return
        named = self.api.bindings[-1]["metadata"]["annotations"].get(RESOURCE_STATUS, "")
        assert arrival.pod.cpuset == (CpuSet.parse(json.loads(named)["cpuset"]) if named else None)
        outcome = dry_run(simulated_node.state, arrival)
        assert outcome.verdict.admitted
        simulated_node.state = outcome.state
        self.scheduler.bound(at, pod, outcome, simulated_node)
        raw["spec"]["nodeName"], raw["status"] = simulated_node.name, {"phase": "Running"}
        if named:
            raw["metadata"]["annotations"] = {**raw["metadata"]["annotations"], RESOURCE_STATUS: named}
        self.api.add_pod(raw)
        self.publish(simulated_node)

    def leave(self, number: int, at: int) -> None:
        """Make a pod end."""
        pod, simulated_node = self.pods[number], self.simulated_nodes[at]
        simulated_node.state = without_pod(simulated_node.state, pod.simulated_pod.arrival.pod.sandbox_id)
        self.scheduler.removed(at, pod, simulated_node)
        self.api.remove(PODS, f"default/p{number}")
        self.publish(simulated_node)


async def settled(twins: Twins, extender: RunningExtender) -> None:
    """Wait until the extender has received all written objects."""
    async with asyncio.timeout(LIMIT_S):
        while any(extender.table.pending(name) for name in twins.names) or any(
            (node := extender.table.node(simulated_node.name)) is None or node.free != simulated_node.ownable
            for simulated_node in twins.simulated_nodes
        ):
            await asyncio.sleep(0.001)


async def compare(twins: Twins) -> Counter[str]:
    """Let all pods arrive and some leave; return how often each case occurred."""
    met: Counter[str] = Counter()
    running: dict[int, int] = {}
    extender = RunningExtender(twins.api, twins.scheduler._strategy)
    async with extender.following():
        keeping = asyncio.ensure_future(extender.lease.renew_until_lost())
        for number, each in enumerate(twins.pods):
            candidates, scores, chosen = twins.simulated(each)
            raw = twins.raws[number]
            if not candidates:
                met["no room"] += 1
                continue
            answer = await extender.call("filter", Pod=raw, NodeNames=candidates)
            assert answer["Error"] == ""
            assert set(answer["NodeNames"]) == set(scores), (number, raw["spec"])
            ordered = await extender.call("prioritize", Pod=raw, NodeNames=answer["NodeNames"])
            if ordered:
                assert {name["Host"]: name["Score"] for name in ordered} == {
                    name: score // FINAL_SCALE for name, score in scores.items()
                }
            else:
                assert len(set(scores.values())) < 2
            assert extender.table.evaluations == twins.scheduler._table.evaluations
            met.update(set(answer["FailedNodes"].values()))
            met["scores"] += len(set(scores.values())) > 1
            if chosen < 0:
                met["nowhere"] += 1
                continue
            await twins.arrive(number, chosen, extender)
            running[number] = chosen
            if number % 3 == 0:
                gone = twins.chance.choice(sorted(running))
                twins.leave(gone, running.pop(gone))
            await settled(twins, extender)
            met["bound"] += 1
        keeping.cancel()
    return met


@pytest.mark.parametrize(
    ("nodes", "pods", "percentage", "strategy"),
    [
        (24, 220, 100, Strategy.FEWEST_NUMA_NODES),
        (24, 120, 100, Strategy.MOST_ALLOCATED),
        (130, 60, 50, Strategy.FEWEST_NUMA_NODES),
    ],
)
def test_every_node_gets_the_verdict_and_the_score_of_the_live_extender(
    nodes: int, pods: int, percentage: int, strategy: Strategy
) -> None:
    met = asyncio.run(compare(Twins(nodes, pods, percentage, strategy)))
    assert met["bound"] > pods // 3
    assert met["scores"] > 5
    if percentage == 100:
        assert met["TopologyAffinityError"] > 10
        assert met["NotEvaluated"] > 3
        assert met["nowhere"] > 0


@pytest.mark.parametrize("labels", [{}, {"koordinator.sh/qosClass": "LSR"}], ids=["Guaranteed", "LSR"])
def test_pods_that_run_already_count_for_the_scores_and_are_not_pending(labels: dict[str, str]) -> None:
    annotations = {RESOURCE_STATUS: '{"cpuset": "0-3"}'} if labels else {}
    raw = pod("r1", 4, uid="r1", node="n1", labels=labels, annotations=annotations)
    nodes = [
        numatopology("n1", pods={"r1": "0-3"}, free="4-15"),
        numatopology("n2", pods={}, free="0-3,8-15"),
    ]
    items = [{**each, "kind": "Numatopology"} for each in nodes]
    offers = {"cpu": "16", "memory": "64Gi", "pods": "110"}
    for name in ("n1", "n2"):
        status = {"allocatable": offers, "capacity": offers}
        items.append({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [*items, raw, pod("new", 2, uid="new")]})
    fleet = fleet_of(documents(text.encode(), "cluster"), (), FleetSettings())
    strategy = Strategy.MOST_ALLOCATED
    scheduler = ExtendedFleetScheduler(fleet.simulated_nodes, random.Random(1), 100, 10, strategy)
    run = FleetRun(scheduler.name, fleet.simulated_nodes, scheduler, [2])
    assert run.place_running(fleet.running, fleet.shown) == []
    table, demand = scheduler._table, fleet.coming[0].demand
    assert [table.pending(name) for name in ("n1", "n2")] == [(), ()]

    live = NodeTable()
    for each in nodes:
        name = each["metadata"]["name"]
        live.put(join_facts(name, None, read_numatopology(each), None))
        live.put_allocatable(name, fleet.simulated_nodes[0].offers)
    live.observe(read_demand(raw), 0.0, running=True)
    expected = live.scores(demand, ["n1", "n2"], strategy)
    assert table.scores(demand, ["n1", "n2"], strategy) == expected
    assert expected[0] > expected[1]
    assert scheduler.choose(fleet.coming[0]) == 0
