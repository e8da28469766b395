"""The missing resources that a refusal reports; the reported amount would have been enough."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.shortfall import holders_of
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules
from proxy.model.explanation import Shortfall
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import LocatedDevice, Phase, Pod, QosClass, Request, SetAside
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)  # node 0: 0-3,8-11; node 1: 4-7,12-15
GPUS = {"gpu": {i: RegisteredDevice(i, Mask([n])) for i, n in (("a", 0), ("b", 1), ("c", 1))}}


def taken(cpus: str, scope: Scope = Scope.CONTAINER, **more: object) -> NodeState:
    """Return a node on which a container owns CPUs already."""
    fields = {"static": True, "policy": TopologyPolicy.SINGLE_NUMA_NODE, "scope": scope} | more
    state = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), **fields))
    if not cpus:
        return state
    lse = Pod("s-x", "x", "ns", "x", 0, QosClass.LSE, cpuset=CpuSet.parse(cpus))
    return place(state, lse, "c", 0, Request(), "x/c").state


def lacks(state: NodeState, request: Request, *containers: ContainerResources) -> tuple[Shortfall, ...]:
    pod = Pod("s", "u", "ns", "p", requests=PodRequests("u", containers) if containers else None)
    result = admit(state, pod, request)
    plan = place(result.state, result.pod, "c", 0, request, "t") if result.verdict.admitted else result
    assert not plan.verdict.admitted
    assert plan.explanation is not None
    return tuple(changed_copy(lack, holders=()) for lack in plan.explanation.shortfalls)


def whole(cpus: int, mib: int = 0, *devices: LocatedDevice) -> Request:
    return Request(cpus * 1024, cpus * 100_000, 100_000, mib * MIB, devices=devices)


def resources(
    name: str, cpus: int, kind: ContainerKind = ContainerKind.APP, gpus: int = 0
) -> ContainerResources:
    amounts = {"cpu": cpus * 1000, **({"gpu": gpus} if gpus else {})}
    return ContainerResources(name, kind, amounts, amounts)


def cpus(node: int, wanted: int, free: int) -> Shortfall:
    return Shortfall("cpu", Mask([node]), wanted, free)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize(
    ("there", "wanted", "missing"),
    [
        ("0-3,4-6", 6, (cpus(1, 6, 5),)),  # node 1 lacks one, node 0 two
        ("0-3,4-7", 6, (cpus(0, 6, 4),)),  # equal shortfalls: the lower node
        ("0-2,4-6", 8, (cpus(0, 8, 5),)),  # a whole node would hold it
        ("0-3", 9, (Shortfall("cpu", Mask([0]), 9, 4, most=8),)),  # no node ever holds it
    ],
)
def test_missing_cpus_are_reported(
    there: str, wanted: int, missing: tuple[Shortfall, ...], scope: Scope
) -> None:
    assert lacks(taken(there, scope), whole(wanted)) == missing
    assert lacks(taken(there, scope), whole(wanted), resources("c", wanted)) == missing


def test_reserved_cpus_do_not_count_as_room() -> None:
    assert lacks(taken("1-3,4-7", reserved=CpuSet([0])), whole(8)) == (cpus(1, 8, 4),)
    assert lacks(taken("1-2,4-7", reserved=CpuSet([0])), whole(7)) == (cpus(0, 7, 5),)


def test_the_shortfall_of_a_pod_is_computed_for_all_its_containers() -> None:
    containers = resources("i", 7, ContainerKind.INIT), resources("c", 3), resources("d", 3)
    assert lacks(taken("0-1,4-5", Scope.POD), whole(7), *containers) == (cpus(0, 7, 6),)


def test_nodes_without_the_devices_do_not_help() -> None:
    near, both = LocatedDevice("a", "v/gpu", Mask([1])), LocatedDevice("b", "v/nic", Mask([0, 1]))
    assert lacks(taken("0-3,4-7"), whole(6, 0, near)) == (cpus(1, 6, 4),)
    assert lacks(taken("0-3,4-7"), whole(6, 0, both)) == ()


def test_memory_that_others_hold_is_lacking() -> None:
    state = taken("0-3,4-5", reserved_memory={0: {"memory": 10 * MIB}})
    assert lacks(state, whole(7, 80)) == (cpus(1, 7, 6),)
    plan = place(state, Pod("s-m", "m", "ns", "m"), "c", 0, Request(512, memory_limit=95 * MIB), "m/c")
    assert lacks(plan.state, whole(7, 80)) == (cpus(0, 7, 4),)
    assert lacks(plan.state, whole(7, 95)) == (
        cpus(1, 7, 6),
        Shortfall("memory", Mask([1]), 95 * MIB, 5 * MIB),
    )


def test_a_node_without_enough_memory_is_reported_before_one_without_enough_cpus() -> None:
    state = taken("0-2", reserved_memory={0: {"memory": 4 * MIB}})
    request = Request(512, memory_limit=97 * MIB)  # only node 1 can hold it
    state = place(state, Pod("s-m", "m", "ns", "m"), "c", 0, request, "m/c").state
    assert lacks(state, whole(6, 90)) == (Shortfall("memory", Mask([1]), 90 * MIB, 3 * MIB),)


def test_a_shortfall_names_cpus_first_then_memory_then_devices() -> None:
    gpus = {"gpu": {"a": GPUS["gpu"]["a"]}}  # only node 0 could hold the container
    state = taken("1-3,9-11", reserved_memory={1: {"memory": 10 * MIB}}, devices=gpus)
    held = {"memory": 60 * MIB, "gpu": 1}
    requests = PodRequests("f", (ContainerResources("c", ContainerKind.APP, held, held),))
    first = Pod("s-f", "f", "ns", "f", requests=requests)
    plan = place(state.with_pod(first), first, "c", 0, Request(memory_limit=60 * MIB), "f/c")
    amounts = {"cpu": 4000, "memory": 95 * MIB, "gpu": 1}
    wanted = ContainerResources("c", ContainerKind.APP, amounts, amounts)
    found = lacks(plan.state, whole(4, 95), wanted)
    assert [each.resource for each in found] == ["cpu", "memory", "gpu"]


def test_devices_that_topoproxy_assigns() -> None:
    state = taken("4-5", devices=GPUS)
    first = Pod("s-f", "f", "ns", "f", requests=PodRequests("f", (resources("c", 1, gpus=1),)))
    state = place(state.with_pod(first), first, "c", 0, whole(1), "f/c").state
    assert state.devices.available("gpu") == {"b", "c"}
    assert lacks(state, whole(7), resources("c", 7, gpus=2)) == (cpus(1, 7, 6),)
    assert lacks(state, whole(8), resources("c", 8, gpus=1)) == (cpus(1, 8, 6),)
    assert lacks(state, whole(7), resources("c", 7, gpus=1)) == (Shortfall("gpu", Mask([0]), 1, 0),), (
        "no CPU is missing"
    )


@pytest.mark.parametrize("wanted", range(2, 9))
@pytest.mark.parametrize("there", ["0-3,4-7", "0-2,8,4-7,12", "1-3,4-6"])
def test_the_reported_amount_would_have_been_enough(there: str, wanted: int) -> None:
    state = taken(there)
    if place(state, Pod("s", "u", "ns", "p"), "c", 0, whole(wanted), "t").verdict.admitted:
        return
    (lack,) = lacks(state, whole(wanted))
    assert lack.nodes is not None
    room = MACHINE.nodes[lack.nodes.first()].cpus
    owner = state.containers["x/c"]
    kept = CpuSet(sorted(owner.placement.exclusive & room)[lack.wanted - lack.free :])
    own = changed_copy(owner.placement, exclusive=(owner.placement.exclusive - room) | kept)
    freed = state.changed(put=[changed_copy(owner, placement=own)])
    assert place(freed, Pod("s", "u", "ns", "p"), "c", 0, whole(wanted), "t").verdict.admitted
    tight = CpuSet(sorted(owner.placement.exclusive & room)[lack.wanted - lack.free - 1 :])
    own = changed_copy(owner.placement, exclusive=(owner.placement.exclusive - room) | tight)
    short = state.changed(put=[changed_copy(owner, placement=own)])
    assert not place(short, Pod("s", "u", "ns", "p"), "c", 0, whole(wanted), "t").verdict.admitted


NONE = {"policy": TopologyPolicy.NONE}
FLOOR = {"admission": AdmissionRules(floor=3, numa_floor=2)}


def own(state: NodeState, cpus: str) -> NodeState:
    """Reduce the CPUs of the owner to these."""
    owner = state.containers["x/c"]
    placement = changed_copy(owner.placement, exclusive=CpuSet.parse(cpus))
    return state.changed(put=[changed_copy(owner, placement=placement)])


@pytest.mark.parametrize(
    "rules", [{}, FLOOR, {"reserved": CpuSet([0, 8])}, {"reserved": CpuSet([0]), **FLOOR}]
)
@pytest.mark.parametrize("there", ["1-3,4-7", "1-2,9,4-7,12-13", "1-3,4-6,10-11,14"])
@pytest.mark.parametrize("wanted", range(2, 17))
def test_without_a_policy_the_amount_for_the_machine_would_have_been_enough(
    rules: dict[str, object], there: str, wanted: int
) -> None:
    state = taken(there, **NONE, **rules)
    pod = Pod("s", "u", "ns", "p")
    if place(state, pod, "c", 0, whole(wanted), "t").verdict.admitted:
        return
    (lack,) = lacks(state, whole(wanted))
    assert (lack.nodes, lack.wanted) == (None, wanted)
    assert lack.most is not None
    held = sorted(state.containers["x/c"].placement.exclusive)
    if wanted > lack.most:
        everything = own(state, "15") if "15" in there else state.changed(drop=["x/c"])
        assert not place(everything, pod, "c", 0, whole(wanted), "t").verdict.admitted
        return
    for missing, admitted in ((lack.missing, True), (lack.missing - 1, False)):
        freed = (
            own(state, ",".join(map(str, held[missing:]))) if held[missing:] else state.changed(drop=["x/c"])
        )
        assert place(freed, pod, "c", 0, whole(wanted), "t").verdict.admitted is admitted, lack


def test_the_containers_that_have_the_cpus_are_named() -> None:
    state = taken("0-2,4", **NONE)
    for number in range(12):
        pod = Pod(f"s{number}", f"u{number}", "ns", f"p{number}")
        plan = place(state, pod, "c", 0, whole(1), f"t{number}")
        state = plan.state if plan.verdict.admitted else state
    plan = place(state, Pod("s", "u", "ns", "p"), "c", 0, whole(3), "t")
    assert plan.explanation is not None
    (lack,) = plan.explanation.shortfalls
    assert (lack.holders[0].ref, str(lack.holders[0].cpus)) == ("ns/x", "0-2,4")
    assert [holder.ref for holder in lack.holders[1:3]] == ["ns/p0/c", "ns/p1/c"]
    assert (len(lack.holders), lack.more_holders) == (10, 2)


def test_named_cpus_of_other_owners_are_reported_with_their_holders() -> None:
    state = taken("2-3")
    rival = Pod("s-r", "r", "ns", "rival", 0, QosClass.LSE, cpuset=CpuSet.parse("3-5"))
    plan = place(state, rival, "c", 0, Request(), "r/c")
    assert plan.explanation is not None
    (lack,) = plan.explanation.shortfalls
    assert (lack.wanted, lack.free, str(lack.named), lack.missing) == (3, 2, "3", 1)
    assert [(holder.ref, str(holder.cpus)) for holder in lack.holders] == [("ns/x", "3")]


def test_only_the_holders_of_the_node_are_named() -> None:
    state = taken("0-3,4-6")
    plan = place(state, Pod("s", "u", "ns", "p"), "c", 0, whole(6), "t")
    assert plan.explanation is not None
    (lack,) = plan.explanation.shortfalls
    assert [(holder.ref, str(holder.cpus)) for holder in lack.holders] == [("ns/x", "4-6")]


def test_under_restricted_a_request_larger_than_any_node_is_counted_on_the_machine() -> None:
    state = taken("0-1,4-7", policy=TopologyPolicy.RESTRICTED)
    assert lacks(state, whole(12)) == (Shortfall("cpu", None, 12, 10, kept=1, most=15),)
    assert lacks(state, whole(16)) == (Shortfall("cpu", None, 16, 10, kept=1, most=15),)


HELD = {
    "k/c": ("k/c (by kubelet's CPU manager)", "12-15"),
    "a": ("ns/aside (set aside)", "8-10"),
    "x": ("ns/x", "2-4"),
}
"""Owner, or key of a pod, to its name and its CPUs."""


@pytest.mark.parametrize("but", ["", *HELD])
@pytest.mark.parametrize("cpus", ["0-15", "4,8-13", "2", "0-1"])
def test_all_that_have_some_cpus_are_named_those_with_the_most_first(cpus: str, but: str) -> None:
    aside = SetAside(None, preferred=True, cpus=CpuSet.parse(HELD["a"][1]))
    state = taken(HELD["x"][1]).with_pod(Pod("s-a", "a", "ns", "aside", reserved_for_pod=aside))
    state = state.with_kubelet_cpus({"k": {"c": CpuSet.parse(HELD["k/c"][1])}})
    some = CpuSet.parse(cpus)
    has = [(name, CpuSet.parse(its) & some) for key, (name, its) in HELD.items() if key != but]
    found = [(holder.ref, holder.cpus) for holder in holders_of(state, some, but)]
    assert found == sorted((each for each in has if each[1]), key=lambda each: (-len(each[1]), each[0]))


def test_the_requesting_owner_is_not_named_as_holder() -> None:
    state = taken("2-4")
    (other,) = holders_of(state, CpuSet.parse("0-3"))
    assert (other.ref, other.cpus) == ("ns/x", CpuSet.parse("2-3"))
    (owner,) = state.owners
    assert holders_of(state, CpuSet.parse("0-3"), owner) == ()


def test_an_owner_is_named_for_the_cpus_that_it_has_now() -> None:
    """It is not named for the CPUs that it had before it ended, which another pod owns now."""
    state = taken("2-3")
    ended = place(taken("", **NONE), Pod("s-e", "e", "ns", "e"), "c", 0, whole(2), "e/c").container
    assert ended is not None
    before = changed_copy(ended.placement, exclusive=CpuSet.parse("2-3"))
    there = [
        changed_copy(ended, placement=before, phase=Phase.EXITED),
        changed_copy(ended, id="again", placement=changed_copy(before, exclusive=CpuSet.parse("4-5"))),
    ]
    for order in (there, there[::-1]):
        found = holders_of(state.changed(put=order), CpuSet.parse("0-15"))
        assert [(holder.ref, str(holder.cpus)) for holder in found] == [("ns/e/c", "4-5"), ("ns/x", "2-3")]
    (holder,) = holders_of(state.changed(put=there[:1]), CpuSet.parse("0-15"))
    assert holder.ref == "ns/x", "the other has ended"
