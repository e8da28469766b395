"""CPUs of kubelet's CPU manager that its containers cannot have, and the messages that name both sides."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.handle import handle
from proxy.engine.kubelet_cpus import changed_cpus, clashes
from proxy.engine.node import Node
from proxy.engine.node_effects import Change
from proxy.engine.pod_events import SandboxStopped
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules
from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import Held
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request, SetAside
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(1, 1, 4, 2)
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
    ("kubelet", "expected"),
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
def test_kubelets_container_does_not_get_cpus_that_have_an_owner(kubelet: Held, expected: list[str]) -> None:
    assert clashes(node(kubelet, THEIRS)) == [f"cannot let ns/k/c have {each}" for each in expected]


def test_an_owner_that_has_other_cpus_already_is_named_with_them() -> None:
    state = node(held("4-5", "own"))
    clash = "cannot let ns/own/c have CPUs 4-5 of kubelet's CPU manager"
    assert clashes(state) == [f"{clash}: it has 2-3 already"]
    observed = structs.replace(state, mode=NodeMode.OBSERVE)
    assert clashes(observed) == [f"{clash}: it would have 2-3"]


def test_cpus_of_an_observed_owner_are_reported_in_the_conditional() -> None:
    observed = structs.replace(node(held("3-4"), THEIRS), mode=NodeMode.OBSERVE)
    assert clashes(observed) == [
        "cannot let ns/k/c have CPUs 3-4 of kubelet's CPU manager: 3 would belong to ns/own/c"
    ]


def test_a_pod_that_kubelet_never_pins_clashes_with_none() -> None:
    assert clashes(node(held("3-4"), Pod("s-k", "k", "ns", "k", qos=QosClass.LS))) == []


def test_a_pod_that_is_not_known_is_named_by_its_uid() -> None:
    (expected,) = clashes(node(held("3-4")))
    assert expected.startswith("cannot let k/c have")


def owning(key: str, cpus: str, pod: Pod, pool: Pool = Pool.OWN) -> Container:
    placement = Placement(pool, CpuSet.parse(cpus), Mask())
    owner = f"{pod.uid}/{key}" if pool is Pool.OWN else ""
    return Container(f"{pod.uid}-{key}", key, pod, Request(), placement, Phase.RUNNING, owner=owner)


ASIDE = Pod(
    "s-a", "a", "ns", "aside", reserved_for_pod=SetAside(None, preferred=True, cpus=CpuSet.parse("4-5"))
)
NAMED = structs.replace(THEIRS, cpuset=CpuSet.parse("3-4"))
REST = "0-1,4-7"
"""All CPUs but those of the owner."""


@pytest.mark.parametrize(
    ("kubelet", "more", "expected"),
    [
        pytest.param({"c": "5-6"}, [ASIDE], ["c 5-6: 5 belong to ns/aside"], id="set aside for a pod"),
        pytest.param(
            {"c": "3,5"},
            [ASIDE],
            ["c 3,5: 3 belong to ns/own/c", "c 3,5: 5 belong to ns/aside"],
            id="of an owner and of a pod",
        ),
        pytest.param(
            {"c": "3-4"},
            [owning("a", "4", Pod("s-b", "b", "ns", "b"))],
            ["c 3-4: 4 belong to ns/b/a", "c 3-4: 3 belong to ns/own/c"],
            id="of two owners, in the order of their names",
        ),
        pytest.param(
            {"c": "3,99"},
            [],
            ["c 3,99: 3 belong to ns/own/c", "c 3,99: this machine has no CPUs 99"],
            id="of an owner, and absent",
        ),
        pytest.param(
            {"b": "3", "a": "2"},
            [],
            ["a 2: 2 belong to ns/own/c", "b 3: 3 belong to ns/own/c"],
            id="of two containers",
        ),
        pytest.param({"init": "4-5", "c": "4-5"}, [], [], id="in common with an init container"),
        pytest.param({"c": REST}, [], [f"c {REST}: the shared pool would be left empty"], id="all others"),
        pytest.param(
            {"c": REST}, [owning("c", "", THEIRS, Pool.SHARED)], [], id="all others, of a container"
        ),
        pytest.param({"c": "3-4"}, [NAMED], [], id="of a pod whose annotation names CPUs"),
    ],
)
def test_cpus_that_a_container_of_kubelet_cannot_have_are_named(
    kubelet: dict[str, str], more: list[Pod | Container], expected: list[str]
) -> None:
    pods = {pod.uid: pod for pod in (POD, THEIRS, *more) if isinstance(pod, Pod)}
    there = [OWNER, *(each for each in more if isinstance(each, Container))]
    theirs = {"k": {name: CpuSet.parse(cpus) for name, cpus in kubelet.items()}}
    rules = Node(MACHINE, CpuTopology.of(MACHINE))
    found = clashes(NodeState.of(rules, pods.values(), there, theirs))
    sentences = [sentence.split(" ", 2) for sentence in expected]
    assert found == [
        f"cannot let ns/k/{name} have CPUs {cpus} of kubelet's CPU manager: {cause}"
        for name, cpus, cause in ((name, cpus.rstrip(":"), cause) for name, cpus, cause in sentences)
    ]


@pytest.mark.parametrize(("cpus", "clash"), [("2-3", False), ("2-4", False), ("2", True), ("3-4", True)])
def test_an_owner_may_have_fewer_cpus_than_kubelet_assigns(cpus: str, *, clash: bool) -> None:
    assert (
        clashes(node(held(cpus, "own")))
        == [f"cannot let ns/own/c have CPUs {cpus} of kubelet's CPU manager: it has 2-3 already"] * clash
    )


def test_new_and_resolved_clashes_are_listed() -> None:
    came, went = changed_cpus(held("2-3"), {**held("3-4"), **held("7", "other")})
    assert (str(came), str(went)) == ("4,7", "2")


def test_cpus_below_the_floor_of_the_shared_pool_are_named_with_the_floor() -> None:
    floors = changed_copy(Node(MACHINE, CpuTopology.of(MACHINE)), admission=AdmissionRules(floor=5))
    state = NodeState.of(floors, (POD, THEIRS), (OWNER,), held("4-5"))
    (message,) = clashes(state)
    assert "the shared pool must keep 5 CPUs of this node" in message


def test_containers_leave_the_cpus_of_kubelet_that_were_set_aside_for_an_ended_pod() -> None:
    sharing = owning("s", "", Pod("s-b", "b", "ns", "b"), Pool.SHARED)
    rules, pods = Node(MACHINE, CpuTopology.of(MACHINE)), (POD, THEIRS, ASIDE, sharing.pod)
    before = NodeState.of(rules, pods, (OWNER, sharing), held("5-6"))
    assert before.pools.shared == CpuSet.parse("0-1,4-5,7")
    after, effects = handle(before, SandboxStopped("s-a"))
    assert after.pools.shared == CpuSet.parse("0-1,4,7")
    (change,) = (effect for effect in effects if isinstance(effect, Change))
    assert (change.after, list(change.moved)) == (after, [sharing.id])
