"""The CPUs that a decision may choose from: free, kept, reusable, promised, or set aside."""

from __future__ import annotations

from typing import TypeVar

import pytest

from proxy.allocation.cpu_policy import CpuState
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.providers.cpu import CpuProvider
from proxy.allocation.providers.provider import Provider, ProviderRequest
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import AdmissionContext, build_context, pod_requests
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy
from proxy.model.options import CpuOptions, Scope
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import (
    Container,
    ContainerPart,
    Phase,
    Placement,
    Pod,
    Pool,
    QosClass,
    Request,
    SetAside,
)
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # CPUs 0-15
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
COUNTING = changed_copy(NODE, reserved_memory={0: {"memory": 1}})
P = TypeVar("P", bound=Provider)
RUNNING, EXITED = Phase.RUNNING, Phase.EXITED
ANY = TopologyHint(None, preferred=False)


def resources(name: str, cpus: int, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    return ContainerResources(name, kind, {"cpu": cpus * 1000}, {"cpu": cpus * 1000})


REQUESTS = PodRequests(
    "p",
    (
        resources("i", 4, ContainerKind.INIT),
        resources("s", 1, ContainerKind.SIDECAR),
        resources("a", 2),
        resources("b", 2),
    ),
)
POD = Pod("s-p", "p", "ns", "p", requests=REQUESTS)
BARE = changed_copy(POD, requests=None)
OTHER = Pod("s-o", "o", "ns", "o")


def owning(name: str, cpus: str, phase: Phase = RUNNING, pod: Pod = POD, attempt: int = 0) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask([0]))
    key = f"{pod.uid}/{name}"
    return Container(f"{key}/{attempt}", name, pod, Request(), placement, phase, attempt, key)


def aside(cpus: str, *parts: tuple[str, str]) -> SetAside:
    return SetAside(
        None,
        True,
        CpuSet.parse(cpus),
        (),
        tuple(ContainerPart(name, CpuSet.parse(own)) for name, own in parts),
    )


def provider(context: AdmissionContext, kind: type[P]) -> P:
    (found,) = (each for each in context.providers if isinstance(each, kind))
    return found


def cpu(state: NodeState, name: str, wanted: int, pod: Pod = POD) -> CpuState:
    requests = pod_requests(pod, name, Request(), wanted)
    request = ProviderRequest(pod, requests, name, Request(), exclusive=True, cpus=wanted)
    return provider(build_context(state, request), CpuProvider).state


def test_owned_and_set_aside_cpus_of_other_pods_are_not_offered() -> None:
    far = changed_copy(OTHER, reserved_for_pod=aside("4-5"))
    lsr = changed_copy(owning("c", "0-1", pod=Pod("s-l", "l", "ns", "l")), owner="l")
    state = NodeState.of(NODE, [POD, far], [lsr, owning("b", "2-3")])
    result = cpu(state, "a", 2)
    assert result.default == CpuSet.parse("6-15")
    assert result.assigned == {"p": {"b": CpuSet.parse("2-3")}}
    assert (result.reusing, result.reusable) == ("p", CpuSet())


@pytest.mark.parametrize(
    ("phases", "default", "reusable"),
    [
        ({"i": EXITED}, "4-15", "0-3"),
        ({"i": RUNNING}, "4-15", ""),
        ({"i": EXITED, "s": RUNNING}, "4-15", "1-3"),
        ({"i": EXITED, "s": EXITED}, "4-15", "1-3"),
        ({"b": EXITED}, "0-5,8-15", ""),
    ],
)
def test_init_containers_that_have_ended_leave_their_cpus(
    phases: dict[str, Phase], default: str, reusable: str
) -> None:
    cpus = {"i": "0-3", "s": "0", "b": "6-7"}
    state = NodeState.of(NODE, [POD], [owning(name, cpus[name], phase) for name, phase in phases.items()])
    result = cpu(state, "a", 2)
    assert (str(result.default), str(result.reusable)) == (default, reusable)


def test_where_containers_are_not_known_an_end_frees_cpus() -> None:
    state = NodeState.of(NODE, [BARE], [owning("i", "0-3", EXITED, BARE)])
    result = cpu(state, "a", 2, BARE)
    assert (str(result.default), result.reusable) == ("4-15", CpuSet()), (
        "promised CPUs are avoided while there are other free CPUs"
    )
    assert str(cpu(state, "a", 13, BARE).default) == "0-15"


def test_a_container_of_a_pod_decided_as_a_whole_represents_all_cpus_of_the_pod() -> None:
    requests = PodRequests("p", (resources("a", 2), resources("b", 3)))
    alone = ProviderRequest(POD, requests, "a", Request())
    cpus = provider(build_context(NodeState.of(NODE, [POD], []), alone), CpuProvider)
    together = changed_copy(alone, scope=Scope.POD)
    assert (cpus.requested_cpus(alone), cpus.requested_cpus(together)) == (2, 5)
    assert cpus.requested_cpus(changed_copy(together, exclusive=False)) == 0


def test_a_restart_keeps_the_cpus_of_the_newest_attempt() -> None:
    ended = [owning("a", "4-5", EXITED, attempt=1), owning("a", "2-3", EXITED, attempt=0)]
    for order in (ended, ended[::-1]):
        for pod in (POD, BARE):
            state = NodeState.of(NODE, [pod], [changed_copy(c, pod=pod) for c in order])
            result = cpu(state, "a", 2, pod)
            assert result.assigned == {"p": {"a": CpuSet.parse("4-5")}}
            assert str(result.default) == "0-3,6-15"
    assert cpu(state, "a", 3, BARE).assigned == {"p": {}}, "it requests another number of CPUs"
    taken = state.changed(put=[owning("c", "5", pod=OTHER)])
    assert cpu(taken, "a", 2, BARE).assigned == {"p": {}}


def test_cpus_promised_to_other_containers_are_offered_last() -> None:
    lsr = changed_copy(OTHER, qos=QosClass.LSR, cpuset=CpuSet.parse("0-7"))
    node = changed_copy(NODE, reserved=CpuSet.parse("8"))
    state = NodeState.of(node, [lsr, POD], [])
    assert str(cpu(state, "a", 7).default) == "8-15"
    assert str(cpu(state, "a", 8).default) == "0-15", "the reserved CPU cannot be used"
    ended = state.changed(put=[owning("i", "14-15", EXITED)])
    assert str(cpu(ended, "a", 7).default) == "8-13", "reusable CPUs count"
    assert str(cpu(ended, "a", 8).default) == "0-13"


def test_parts_and_set_aside_cpus_come_first() -> None:
    known = changed_copy(POD, reserved_for_pod=aside("0-7", ("a", "0-1"), ("b", "2-3")))
    state = NodeState.of(NODE, [known], [])
    assert cpu(state, "a", 2, known).assigned == {"p": {"a": CpuSet.parse("0-1")}}
    assert cpu(state, "a", 3, known).default == CpuSet.parse("0-7")
    assert cpu(state, "x", 8, known).default == CpuSet.parse("0-7")
    assert cpu(state, "x", 9, known).default == MACHINE.online
    whole = changed_copy(BARE, reserved_for_pod=aside("0-3"))
    state = NodeState.of(NODE, [whole], [owning("b", "0-1", pod=whole)])
    assert cpu(state, "a", 2, whole).default == CpuSet.parse("2-3")
    assert cpu(state, "a", 3, whole).default == CpuSet.parse("2-15")


def test_only_whole_cores_are_offered_under_full_pcpus_only() -> None:
    node = changed_copy(NODE, options=CpuOptions(full_pcpus_only=True), reserved=CpuSet.parse("7"))
    state = NodeState.of(node, [POD], [owning("c", "0-1,8", pod=OTHER), owning("i", "2", EXITED)])
    result = cpu(state, "a", 2)
    assert str(result.default) == "3-7,10-15", (
        "not 9; and 15, as kubelet offers the siblings of reserved CPUs"
    )
    assert str(result.reusable) == "2", "with its sibling 10 it is a whole core"
    state = state.changed(put=[owning("d", "10", pod=OTHER)])
    result = cpu(state, "a", 2)
    assert (str(result.default), result.reusable) == ("3-7,11-15", CpuSet())


def test_promised_and_set_aside_cpus_are_chosen_by_whole_cores_if_these_are_required() -> None:
    lsr = changed_copy(OTHER, qos=QosClass.LSR, cpuset=CpuSet.parse("4-5"))
    known = changed_copy(POD, reserved_for_pod=aside("0-1"))
    for options, required in (
        (CpuOptions(full_pcpus_only=True), BindPolicy.NONE),
        (CpuOptions(), BindPolicy.FULL_PCPUS),
    ):
        node = changed_copy(NODE, options=options)
        bound = changed_copy(POD, bind_required=required)
        state = NodeState.of(node, [lsr, bound], [owning("c", "0-3", pod=OTHER)])
        assert str(cpu(state, "a", 4, bound).default) == "6-7,14-15"
        assert str(cpu(state, "a", 6, bound).default) == "4-7,12-15", "the promised CPUs are needed"
        bound = changed_copy(known, bind_required=required)
        result = cpu(NodeState.of(node, [bound], []), "x", 2, bound)
        assert str(result.default) == "0-15", "what was set aside is no whole core"


def test_one_thread_of_each_core_counts_if_that_is_required() -> None:
    spread = changed_copy(POD, bind_required=BindPolicy.SPREAD_BY_PCPUS)
    state = NodeState.of(NODE, [spread], [owning("c", "0-1,8-9", pod=OTHER)])

    def prepared(requests: PodRequests, name: str, scope: Scope) -> tuple[CpuProvider, ProviderRequest]:
        request = ProviderRequest(spread, requests, name, Request(), scope, cpus=4)
        return provider(build_context(state, request), CpuProvider), request

    def first_hint(requests: PodRequests, name: str, scope: Scope) -> Mask | None:
        cpus, request = prepared(requests, name, scope)
        hints = (cpus.hints(request) or {})["cpu"]
        assert hints is not None
        return hints[0].affinity

    one = PodRequests("p", (resources("a", 4),))
    two = PodRequests("p", (resources("a", 2), resources("b", 2)))
    assert first_hint(one, "a", Scope.CONTAINER) == first_hint(one, "", Scope.POD) == Mask([1])
    assert first_hint(two, "", Scope.POD) == Mask([0]), "both containers may be on the same cores"
    uneven = PodRequests("p", (resources("a", 3), resources("b", 1)))
    assert first_hint(uneven, "a", Scope.CONTAINER) == Mask([1]), "a itself needs three cores"
    assert first_hint(uneven, "b", Scope.CONTAINER) == Mask([0])
    assert first_hint(uneven, "", Scope.POD) == Mask([1]), "node 0 has four CPUs, and a needs three cores"
    cpus, request = prepared(one, "a", Scope.CONTAINER)
    assert cpus.explain_shortfall(request, 0) == (Shortfall("cpu", Mask([0]), 4, 2),)
    assert cpus.explain_shortfall(request, 1) == ()
    cpus, request = prepared(uneven, "", Scope.POD)
    assert cpus.explain_shortfall(request, 0) == (Shortfall("cpu", Mask([0]), 3, 2),)
    wide = PodRequests("p", (resources("a", 5),))
    cpus, request = prepared(wide, "a", Scope.CONTAINER)
    assert cpus.explain_shortfall(request, 1) is None, "a NUMA node has four cores"


def test_the_decision_for_a_pod_offers_cpus_of_its_containers() -> None:
    state = NodeState.of(NODE, [POD], [owning("a", "0-1"), owning("c", "4-5", pod=OTHER)])
    result = cpu(state, "", 7)
    assert (str(result.default), result.assigned) == ("2-3,6-15", {"p": {"a": CpuSet.parse("0-1")}})


def test_kubelets_reservation_for_a_pod_does_not_block_that_pod() -> None:
    """kubelet assigns CPUs before the sandbox is created; a pod decided as a whole gets these or others."""
    other = owning("c", "4-15", pod=OTHER)
    state = NodeState.of(NODE, [BARE], [other], {"p": {"a": CpuSet((1, 2)), "b": CpuSet((3,))}})
    assert str(state.pools.shared) == "0"
    result = cpu(state, "", 3, BARE)
    assert (str(result.default), result.assigned) == ("0", {"p": {"": CpuSet((1, 2, 3))}})
    assert (str(cpu(state, "", 2, BARE).default), cpu(state, "", 2, BARE).assigned) == ("0-3", {"p": {}})
    assert cpu(state, "a", 2, BARE).assigned == {"p": {"a": CpuSet((1, 2)), "b": CpuSet((3,))}}
    runs = state.changed(put=[owning("a", "1-2", pod=changed_copy(BARE, sandbox_id="earlier"))])
    result = cpu(runs, "", 1, BARE)
    assert (str(result.default), result.assigned) == ("0", {"p": {"a": CpuSet((1, 2)), "": CpuSet((3,))}})


def test_an_init_container_without_a_seen_end_is_not_counted_twice() -> None:
    state = NodeState.of(NODE, [POD], [owning("i", "0-3")])
    request = Request(2048, 200_000, 100_000)
    plan = place(state, POD, "a", 0, request, "t")
    assert plan.container is not None
    assert plan.container.placement.exclusive.isdisjoint(CpuSet.parse("0-3"))


def test_a_shortfall_is_explained_if_the_numa_node_could_hold_the_container() -> None:
    state = NodeState.of(changed_copy(NODE, machine=MACHINE), [OTHER], [owning("x", "0-1,8-9", pod=OTHER)])

    def found(cpus: int, node: int) -> object:
        requests = PodRequests("p", (resources("a", cpus),))
        request = ProviderRequest(POD, requests, "a", Request(), exclusive=True, cpus=cpus)
        return provider(build_context(state, request), CpuProvider).explain_shortfall(request, node)

    assert found(6, 0) == (Shortfall("cpu", Mask([0]), 6, 4),)
    assert found(4, 0) == found(8, 1) == ()
    assert found(9, 0) is found(9, 1) is None, "it could never hold that many"


def test_a_container_holds_its_cpus_after_others_of_its_pod_are_served() -> None:
    requests = pod_requests(POD, "a", Request(), 2)
    request = ProviderRequest(POD, requests, "a", Request(), exclusive=True, cpus=2)
    serving = provider(build_context(NodeState.of(NODE, [POD], []), request), CpuProvider)
    had = Grants(cpus=CpuSet([2, 3]))
    assert serving.holds(request, "i", had) == had


def test_cpus_are_wanted_and_missing_only_if_they_are_exclusive() -> None:
    requests = PodRequests("p", (resources("a", 2), resources("b", 0)))
    state = NodeState.of(NODE, [POD], [owning("c", "0-15", pod=OTHER)])
    request = ProviderRequest(POD, requests, "a", Request(), exclusive=True, cpus=2)
    cpus = provider(build_context(state, request), CpuProvider)
    shared = [changed_copy(request, exclusive=False), changed_copy(request, name="b", cpus=0)]
    assert [cpus.wants(each) for each in (request, *shared)] == [True, False, False]
    assert [cpus.explain_shortfall(each, 0) for each in shared] == [(), ()]
    assert cpus.hints(shared[0]) is None
    had = Grants(devices=(("gpu", ("x",)),))
    assert [cpus.allocate(each, ANY, had).grants for each in shared] == [had, had]


def test_cpus_are_chosen_under_the_hint_and_recorded() -> None:
    requests = PodRequests("p", (resources("a", 2), resources("b", 2)))
    request = ProviderRequest(POD, requests, "a", Request(), exclusive=True, cpus=2)
    cpus = provider(build_context(NodeState.of(NODE, [POD], []), request), CpuProvider)
    had = Grants(devices=(("gpu", ("x",)),))
    done = cpus.allocate(request, TopologyHint(Mask([1]), preferred=True), had)
    assert done.grants == changed_copy(had, cpus=CpuSet([4, 12]))
    assert done.steps
    assert isinstance(done.provider, CpuProvider)
    assert done.provider.state.assigned == {"p": {"a": CpuSet([4, 12])}}
    assert done.provider.free(request).isdisjoint(done.grants.cpus)
    again = done.provider.allocate(request, TopologyHint(Mask([0]), preferred=True), had)
    assert (again.grants, list(again.steps)) == (done.grants, ["keeps CPUs 4,12"])
    other = done.provider.allocate(changed_copy(request, name="b"), ANY, Grants())
    assert other.grants.cpus.isdisjoint(done.grants.cpus)


def test_cpus_that_kubelet_holds_for_ended_containers_belong_to_the_pod() -> None:
    held = {"p": {"a": CpuSet((1, 2)), "b": CpuSet((3,))}}
    for phase, own in ((RUNNING, {"a": CpuSet((1, 2)), "": CpuSet((3,))}), (EXITED, {"": CpuSet((1, 2, 3))})):
        state = NodeState.of(NODE, [BARE], [owning("a", "1-2", phase, BARE)], held)
        assert cpu(state, "", sum(map(len, own.values())) - 2 * (phase is RUNNING), BARE).assigned == {
            "p": own
        }
    of_other = NodeState.of(NODE, [BARE], [owning("a", "8-9", pod=OTHER)], held)
    assert cpu(of_other, "", 3, BARE).assigned == {"p": {"": CpuSet((1, 2, 3))}}, "another pod's container"


@pytest.mark.parametrize(("phase", "default", "reusable"), [(RUNNING, "0-15", ""), (EXITED, "4-15", "0-3")])
def test_only_an_ended_init_container_leaves_cpus_to_its_next_attempt(
    phase: Phase, default: str, reusable: str
) -> None:
    result = cpu(NodeState.of(NODE, [POD], [owning("i", "0-3", phase)]), "i", 2)
    assert (str(result.default), str(result.reusable), result.assigned) == (default, reusable, {"p": {}})
