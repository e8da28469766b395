"""CPUs of kubelet's CPU manager that its containers cannot have, and the words that name both sides."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.kubelet_cpus import changed_cpus, clashes
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import Held
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.topology.build import described

MACHINE = described(1, 1, 4, 2)
POD = Pod("s-own", "own", "ns", "own")
THEIRS = Pod("s-k", "k", "ns", "k")
OWNER = Container(
    "x", "c", POD, Request(), Placement(Pool.OWN, CpuSet.parse("2-3"), Mask()), Phase.RUNNING, owner="own/c"
)


def held(cpus: str, uid: str = "k", name: str = "c") -> Held:
    return {uid: {name: CpuSet.parse(cpus)}}


def node(kubelet: Held, *pods: Pod) -> NodeState:
    return NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), (POD, *pods), (OWNER,), kubelet)


@pytest.mark.parametrize(
    ("kubelet", "words"),
    [
        pytest.param({}, [], id="nothing held"),
        pytest.param(held("4-5"), [], id="free CPUs"),
        pytest.param(
            held("3-4"), ["CPUs 3-4 of kubelet's CPU manager: 3 belong to ns/own/c"], id="an owner's"
        ),
        pytest.param(
            held("4,99"), ["CPUs 4,99 of kubelet's CPU manager: this machine has no CPUs 99"], id="absent"
        ),
        pytest.param(held("2-3", "own"), [], id="its own"),
    ],
)
def test_cpus_with_an_owner_stay_with_it(kubelet: Held, words: list[str]) -> None:
    assert clashes(node(kubelet, THEIRS)) == [f"cannot let ns/k/c have {each}" for each in words]


def test_an_owner_that_has_other_cpus_already_is_named_with_them() -> None:
    state = node(held("4-5", "own"))
    clash = "cannot let ns/own/c have CPUs 4-5 of kubelet's CPU manager"
    assert clashes(state) == [f"{clash}: it has 2-3 already"]
    observed = structs.replace(state, mode=NodeMode.OBSERVE)
    assert clashes(observed) == [f"{clash}: it would have 2-3"]


def test_an_observed_owner_would_have_them() -> None:
    observed = structs.replace(node(held("3-4"), THEIRS), mode=NodeMode.OBSERVE)
    assert clashes(observed) == [
        "cannot let ns/k/c have CPUs 3-4 of kubelet's CPU manager: 3 would belong to ns/own/c"
    ]


def test_a_pod_that_kubelet_never_pins_clashes_with_none() -> None:
    assert clashes(node(held("3-4"), Pod("s-k", "k", "ns", "k", qos=QosClass.LS))) == []


def test_a_pod_that_is_not_known_is_named_by_its_uid() -> None:
    (words,) = clashes(node(held("3-4")))
    assert words.startswith("cannot let k/c have")


def test_what_came_and_went() -> None:
    came, went = changed_cpus(held("2-3"), {**held("3-4"), **held("7", "other")})
    assert (str(came), str(went)) == ("4,7", "2")
