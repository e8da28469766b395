"""States that break an invariant on purpose; no decision produces them."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.inflight import InflightCall, InflightCalls
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.pools.pools import CpuPools, Owner
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(1, 1, 4, 2)  # CPUs 0-7


def one(
    name: str, pool: Pool, cpus: str = "", *, hard: bool = True, phase: Phase = Phase.RUNNING
) -> Container:
    owner = name if pool is Pool.OWN else ""
    placement = Placement(pool, CpuSet.parse(cpus), Mask((0,)), (), hard)
    return Container(name, name, Pod("s", "u", "ns", "p"), Request(), placement, phase, 0, owner)


def state_of(*containers: Container, shared: str = "", be: str = "") -> NodeState:
    """Return a state; given pools replace the derived ones."""
    state = NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), (), containers)
    if not shared and not be:
        return state
    return structs.replace(state, pools=CpuPools(CpuSet.parse(shared), CpuSet.parse(be)))


OWN, SHARED, BE = Pool.OWN, Pool.SHARED, Pool.BE


@pytest.mark.parametrize(
    ("containers", "found"),
    [
        ([one("a", OWN, "0-1"), one("b", OWN, "2"), one("c", SHARED), one("d", BE)], []),
        ([one("a", OWN, "0-1"), one("b", OWN, "1-2")], ["CPUs 1 are owned by a and by b"]),
        ([one("a", OWN, "0"), one("b", OWN, "1"), one("c", OWN, "0")], ["CPUs 0 are owned by a and by c"]),
        ([one("a", OWN)], ["ns/p/a owns CPUs, and none are known"]),
        ([one("a", OWN, "0-7")], []),
        ([one("a", OWN, "0-7"), one("c", SHARED)], ["ns/p/c has no CPU"]),
        ([one("a", OWN, "5,8-9")], []),  # runs on 5 until its other CPUs are online again
        ([one("a", OWN, "8-9")], []),  # shares until its CPUs are online again
        ([one("a", OWN, "8-9", phase=Phase.EXITED), one("b", OWN, phase=Phase.EXITED)], []),
        ([one("a", OWN, "5-6"), one("c", SHARED)], []),
        ([one("a", OWN, "5-6", hard=False), one("d", BE)], []),
    ],
)
def test_what_is_wrong_is_named(containers: list[Container], found: list[str]) -> None:
    assert violations(state_of(*containers)) == found


@pytest.mark.parametrize(
    ("containers", "found"),
    [
        ([one("a", OWN, "5-6"), one("c", SHARED)], ["ns/p/c shares owned CPUs 6"]),
        ([one("a", OWN, "5-6"), one("d", BE)], ["ns/p/d shares owned CPUs 6"]),
        ([one("a", OWN, "5-6", hard=False), one("d", BE)], []),
        ([one("a", OWN, "5-6", hard=False), one("c", SHARED)], ["ns/p/c shares owned CPUs 6"]),
        ([one("c", SHARED), one("d", BE)], []),
    ],
)
def test_pools_that_differ_from_the_unowned_cpus_are_named(
    containers: list[Container], found: list[str]
) -> None:
    reported = violations(state_of(*containers, shared="6-7", be="6-7"))
    assert reported[0].startswith("the recorded pools are shared 6-7, BE 6-7; the owners leave shared ")
    assert reported[1:] == found


def test_a_batch_pod_on_another_pool_is_held_to_its_class() -> None:
    pod = Pod("s", "u", "ns", "p", qos=QosClass.BE)
    odd = changed_copy(one("c", SHARED), pod=pod)
    state = state_of(odd, one("a", OWN, "5", hard=False), shared="5-7", be="6-7")
    assert violations(state)[1:] == []
    state = state_of(odd, one("a", OWN, "5"), shared="5-7", be="6-7")
    assert violations(state)[1:] == ["ns/p/c shares owned CPUs 5"]


def test_offline_and_missing_cpus_are_named() -> None:
    state = state_of(one("c", SHARED), one("d", BE), shared="7-8", be="0-7")
    assert violations(state)[1:] == ["ns/p/c has CPUs 8 that are not online"]
    state = state_of(one("c", SHARED), one("d", BE), be="0")
    assert violations(state)[1:] == ["ns/p/c has no CPU"]


def test_owners_that_no_container_makes_are_named() -> None:
    state = state_of(one("a", OWN, "0"))
    late = structs.replace(state, owners={**state.owners, "b": Owner(CpuSet((1,)), excludes_be=True)})
    differ = "the recorded owners differ from those that follow from the containers"
    assert violations(late)[0] == f"{differ}: b"
    early = structs.replace(state, owners={})
    assert violations(early)[0] == f"{differ}: a"


def test_saved_cpus_of_a_removed_container_are_named() -> None:
    state = state_of(one("c", SHARED))
    known = state.with_runtime(state.runtime.with_saved("c", MACHINE.online))
    assert violations(known) == []
    stale = state.with_runtime(state.runtime.with_saved("gone", MACHINE.online))
    assert violations(stale) == ["a saved cpuset is recorded for container gone, which does not exist"]


def test_containers_that_are_confined_without_a_call_are_named() -> None:
    call = InflightCall(1, "c", MACHINE.online, confined=True)
    calls = InflightCalls().added(InflightCall(2, "d", MACHINE.online)).added(InflightCall(3, "c", CpuSet()))
    several = calls.added(call).updated(call)
    state = state_of(one("c", SHARED), one("d", BE))
    assert violations(structs.replace(state, inflight=several)) == []
    for confined in (frozenset[str](), frozenset({"c", "d"})):
        wrong = structs.replace(several, confined=confined)
        (found,) = violations(structs.replace(state, inflight=wrong))
        differing = "d" if confined else "c"
        assert found == f"the recorded confined containers differ from those of the calls: {differing}"


@pytest.mark.parametrize("qos", [QosClass.LSE, QosClass.LSR, QosClass.LS])
def test_a_strict_pod_owns_its_named_cpus(qos: QosClass) -> None:
    pod = Pod("s", "u", "ns", "p", qos=qos, cpuset=CpuSet((1, 2)))
    good = changed_copy(one("a", OWN, "1-2"), pod=pod)
    odd = changed_copy(one("a", OWN, "1"), pod=pod)
    assert violations(state_of(good)) == []
    strict = qos is not QosClass.LS
    assert violations(state_of(odd)) == (["ns/p/a owns CPUs 1 instead of 1-2"] if strict else [])
