"""A state that is wrong on purpose: nothing that places would make it."""

from __future__ import annotations

import pytest

from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.place.cputopo import CpuTopology
from proxy.plan.invariants import violations
from proxy.plan.node import Node
from proxy.plan.state import NodeState
from proxy.pools.pools import Pools
from proxy.topology.build import described

MACHINE = described(1, 1, 4, 2)  # CPUs 0-7


def one(
    name: str, pool: Pool, cpus: str = "", *, hard: bool = True, phase: Phase = Phase.RUNNING
) -> Container:
    owner = name if pool is Pool.OWN else ""
    placement = Placement(pool, CpuSet.parse(cpus), Mask((0,)), (), hard)
    return Container(name, name, Pod("s", "u", "ns", "p"), Request(), placement, phase, 0, owner)


def wrong(*containers: Container, shared: str = "6-7", be: str = "6-7") -> list[str]:
    state = NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), (), containers)
    pools = Pools(CpuSet.parse(shared), CpuSet.parse(be))
    return violations(NodeState(state.node, state.pods, state.containers, state.owners, pools))


OWN, SHARED, BE = Pool.OWN, Pool.SHARED, Pool.BE


@pytest.mark.parametrize(
    ("containers", "found"),
    [
        ([one("a", OWN, "0-1"), one("b", OWN, "2"), one("c", SHARED), one("d", BE)], []),
        ([one("a", OWN, "0-1"), one("b", OWN, "1-2")], ["CPUs 1 are owned by a and by b"]),
        ([one("a", OWN, "0"), one("b", OWN, "1"), one("c", OWN, "0")], ["CPUs 0 are owned by a and by c"]),
        ([one("a", OWN)], ["ns/p/a has no CPU"]),
        ([one("a", OWN, "5,8-9")], []),  # runs on 5 until the others are back
        ([one("a", OWN, "8-9")], ["ns/p/a has CPUs 8-9 that are not online"]),
        ([one("a", OWN, "8-9", phase=Phase.EXITED), one("b", OWN, phase=Phase.EXITED)], []),
        ([one("a", OWN, "5-6"), one("c", SHARED)], ["ns/p/c shares owned CPUs 6"]),
        ([one("a", OWN, "5-6"), one("d", BE)], ["ns/p/d shares owned CPUs 6"]),
        ([one("a", OWN, "5-6", hard=False), one("d", BE)], []),
        ([one("a", OWN, "5-6", hard=False), one("c", SHARED)], ["ns/p/c shares owned CPUs 6"]),
    ],
)
def test_what_is_wrong_is_named(containers: list[Container], found: list[str]) -> None:
    assert wrong(*containers) == found


def test_an_empty_pool_is_named() -> None:
    assert wrong(one("c", SHARED), one("d", BE), shared="", be="0") == ["ns/p/c has no CPU"]
