"""Victims of a pod of higher priority, where objects do not show all that pods hold."""

from __future__ import annotations

import pytest

from proxy.scheduler.advice import choose_victims
from proxy.scheduler.node_facts import SchedulableNode, join_facts
from tests.scheduler.objects import demand, node, read_resource_topology, resource_topology
from tests.scheduler.test_memory import published, wanting

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
def test_a_victim_gives_back_cpus_where_the_object_has_only_amounts(
    cpus: int, victims: tuple[str, ...] | None
) -> None:
    zones = read_resource_topology(resource_topology("n1", {numa: {"cpu": (8, 0)} for numa in (0, 1)}))
    amounts = join_facts("n1", None, None, zones)
    low = demand("low", 8, node="n1", priority=0)
    assert choose_victims(amounts, demand("high", cpus, priority=1000), [low], ["low"]) == victims


@pytest.mark.parametrize(("memory", "victims"), [("25Gi", ("low",)), ("33Gi", None)])
def test_a_victim_gives_back_its_memory(memory: str, victims: tuple[str, ...] | None) -> None:
    low = wanting("12Gi", name="low")
    wanted = wanting(memory, name="high")
    assert choose_victims(published(), wanted, [low], []) is None
    assert choose_victims(published(), wanted, [low], [low.key]) == (victims and (low.key,))
