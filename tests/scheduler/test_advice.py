"""Victims of a pod of higher priority, if objects do not show everything that pods hold."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from proxy.pools.topology_keys import CPU_OPTIONS
from proxy.scheduler import advice as advice_module
from proxy.scheduler.advice import choose_victims, find_moves
from proxy.scheduler.decision import NodeVerdict, evaluate
from proxy.scheduler.node_facts import SchedulableNode, join_facts
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.resource_topology import read_resource_topology
from tests.scheduler.objects import demand, node, numatopology, resource_topology
from tests.scheduler.test_memory import pod_requesting, published

GPU = "example.com/gpu"


def gpu_node() -> SchedulableNode:
    """A node whose two GPUs are held; its object shows CPUs of the pod, and no devices of it."""
    zones = resource_topology("n1", {numa: {"cpu": (8, 8), GPU: (1, 0)} for numa in (0, 1)})
    return node("n1", zones, pods={"low": "0-1"}, free="2-15")


@pytest.mark.parametrize(("gpus", "victims"), [(1, ("low",)), (3, None)])
def test_a_victim_gives_back_its_devices(gpus: int, victims: tuple[str, ...] | None) -> None:
    low = demand("low", 2, node="n1", devices={GPU: 1}, priority=0)
    wanted = demand("high", 2, devices={GPU: gpus}, priority=1000)
    assert choose_victims(gpu_node(), wanted, [low], ["low"]) == victims


def test_a_victim_without_devices_makes_no_room_for_them() -> None:
    low = demand("low", 2, node="n1", priority=0)
    wanted = demand("high", 2, devices={GPU: 1}, priority=1000)
    assert choose_victims(gpu_node(), wanted, [low], ["low"]) is None
    holder = demand("low", 2, node="n1", devices={GPU: 1}, priority=0)
    assert choose_victims(gpu_node(), wanted, [holder], ["low"], ["low"]) is None, "no object counts it yet"


@pytest.mark.parametrize(("cpus", "victims"), [(4, ("low",)), (9, None)])
def test_a_victim_gives_back_cpus_if_the_object_has_only_amounts(
    cpus: int, victims: tuple[str, ...] | None
) -> None:
    zones = read_resource_topology(resource_topology("n1", {numa: {"cpu": (8, 0)} for numa in (0, 1)}))
    amounts = join_facts("n1", None, None, zones)
    low = demand("low", 8, node="n1", priority=0)
    assert choose_victims(amounts, demand("high", cpus, priority=1000), [low], ["low"]) == victims


@pytest.mark.parametrize(("memory", "victims"), [("25Gi", ("low",)), ("33Gi", None)])
def test_a_victim_gives_back_its_memory(memory: str, victims: tuple[str, ...] | None) -> None:
    low = pod_requesting("12Gi", name="low")
    wanted = pod_requesting(memory, name="high")
    assert choose_victims(published(), wanted, [low], []) is None
    assert choose_victims(published(), wanted, [low], [low.key]) == (victims and (low.key,))


def test_devices_are_given_back_where_the_cpus_of_the_victim_are() -> None:
    """Under single-numa-node, the GPU of a pod of one container is on the NUMA node of its CPUs."""
    zones = resource_topology("n1", {numa: {"cpu": (8, 8), GPU: (1, 0)} for numa in (0, 1)})
    held = node("n1", zones, pods={"low": "0-1", "high": "2-7", "other": "8-9"}, free="10-15")
    pods = [
        demand("low", 2, node="n1", devices={GPU: 1}, priority=0),
        demand("high", 6, node="n1", priority=2000),
        demand("other", 2, node="n1", devices={GPU: 1}, priority=1),
    ]
    wanted = demand("wanted", 4, devices={GPU: 1}, priority=1000)
    assert choose_victims(held, wanted, pods, ["low"]) == ("low", "other")
    assert choose_victims(held, wanted, pods, ["other"]) == ("other",)
    assert choose_victims(held, wanted, pods[:2], ["low"]) is None


@pytest.mark.parametrize(("cpus", "victims"), [(4, ("low",)), (5, None)])
def test_a_victim_gives_back_cpus_if_the_object_names_no_pods(
    cpus: int, victims: tuple[str, ...] | None
) -> None:
    """The object is as Volcano's exporter writes it; whole cores become free."""
    zones = resource_topology("n1", {0: {"cpu": (8, 0)}, 1: {"cpu": (8, 0)}})
    zones["attributes"].append({"name": CPU_OPTIONS, "value": "full-pcpus-only=true"})
    raw = numatopology("n1", free="", reserved=2)
    for cpu, detail in raw["spec"]["cpuDetail"].items():
        detail["core"] = int(cpu) % 8 % 4
    found = join_facts("n1", None, read_numatopology(raw), read_resource_topology(zones))
    assert found.rules.options.full_pcpus_only
    low = demand("low", 4, node="n1", priority=0)
    assert choose_victims(found, demand("wanted", cpus, priority=1000), [low], ["low"]) == victims


def test_cpus_that_a_pod_is_shown_with_are_given_back_though_it_is_pending() -> None:
    found = node("n1", pods={"part": "0-3", "gone": "4-7", "other": "8-15"}, free="")
    part = demand("part", 4, 4, node="n1", priority=0)
    wanted = demand("wanted", 8, priority=1000)
    assert choose_victims(found, wanted, [part], ["part", "gone"], ["part"]) == ("part", "gone")


def test_the_overhead_of_a_victim_is_no_memory_of_a_numa_node() -> None:
    low = pod_requesting("1Gi", name="low")
    low = replace(low, needs={**low.needs, "memory": 64 << 30})
    assert choose_victims(published(), pod_requesting("25Gi", name="wanted"), [low], ["low"]) is None


def test_a_search_for_victims_on_a_large_node_takes_few_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of victims is found by halving, and the engine is not called if too few CPUs are free."""
    held = {f"p{number}": f"{2 * number}-{2 * number + 1}" for number in range(128)}
    full = node("n1", numa_nodes=2, cores=64, pods=held, free="")
    pods = [demand(name, 2, node="n1", priority=0) for name in held]
    decisions = 0

    def counting(*arguments: Any) -> NodeVerdict:
        nonlocal decisions
        decisions += 1
        return evaluate(*arguments)

    monkeypatch.setattr(advice_module, "evaluate", counting)
    victims = choose_victims(full, demand("high", 120, priority=1000), pods, ["p0"])
    assert victims is not None
    assert len(victims) in (60, 61), "those that kube-scheduler proposes stay"
    assert decisions < 30


def test_the_most_important_victim_that_is_not_needed_stays() -> None:
    held = {"small": "0-1", "other": "2-3", "large": "4-7", "high": "8-15"}
    full = node("n1", pods=held, free="")
    pods = [
        demand(name, count, node="n1", priority=priority)
        for name, count, priority in (("small", 2, 0), ("other", 2, 1), ("large", 4, 2), ("high", 8, 2000))
    ]
    assert choose_victims(full, demand("wanted", 6, priority=1000), pods, []) == ("small", "large")


def test_a_pod_of_which_its_node_shows_a_part_does_not_stand_in_its_own_way() -> None:
    table = NodeTable()
    table.put(node("n1", pods={"part": "0-3", "other": "12-15"}, free="4-11"))
    table.put(node("n2", pods={}, free="1-15", policy="restricted"))
    wanted = demand("wanted", 8)
    table.observe(demand("part", 4, 2, node="n1"), 0.0, running=False)
    assert [pending.pod for pending in table.pending("n1")] == ["part"]
    assert [move.moved for move in find_moves(table, wanted, ["n1", "n2"]) if move] == ["default/part"]
