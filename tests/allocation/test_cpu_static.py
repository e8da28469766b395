"""The static CPU policy: reserved CPUs, checks, allocation and release."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.allocation.cpu_policy import CpuPolicy, CpuState, CpuStateError, SmtAlignmentError
from proxy.allocation.cpu_request import (
    container_cpus,
    pod_cpus,
    requested_whole_cpus,
    running_request_milli,
)
from proxy.allocation.cpu_static import allocate, available, container_cpu_hints, pod_cpu_hints, remove
from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.packed import NotEnoughCpus
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import CpuOptions
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from tests.oracles.cpu_manager_state import managed, start
from tests.oracles.pod_level_cpu import EmptyPodSharedPoolError, allocate_pod
from tests.testkit.changed_copy import changed_copy as replace

TOPO = CpuTopology.of_rows(  # two sockets of two nodes of two cores: core c has CPUs c and c + 8
    CpuRow(c + 8 * t, c, c // 4, c // 2, c // 2) for t in range(2) for c in range(8)
)


def resources(name: str, cpus: float, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    amounts = {"cpu": int(cpus * 1000), "memory": 1} if cpus else {"memory": 1}
    return ContainerResources(name, kind, amounts, amounts)


def pod(
    *containers: ContainerResources, uid: str = "pod", guaranteed: bool = True, own: float | None = None
) -> PodRequests:
    return PodRequests(
        uid, containers, guaranteed, None if own is None else {"cpu": int(own * 1000)}, own is not None
    )


def policy(reserved: str = "", **options: bool) -> CpuPolicy:
    return CpuPolicy.of(TOPO, CpuOptions(**options), CpuSet.parse(reserved))


def uneven(*cores: str) -> CpuTopology:
    """Return one NUMA node with these cores."""
    return CpuTopology.of_rows(
        CpuRow(cpu, core, 0, 0, 0) for core, cpus in enumerate(cores) for cpu in CpuSet.parse(cpus)
    )


def owned(state: CpuState, uid: str = "pod") -> dict[str, str]:
    return {name: str(cpus) for name, cpus in state.assigned.get(uid, {}).items()}


@pytest.mark.parametrize("affinity", [None, Mask([0])])
@pytest.mark.parametrize("distribute", [False, True])
@pytest.mark.parametrize(
    ("cores", "reserved", "count", "found"),
    [
        (["0,4", "1,5", "2,6", "3"], "", 2, "0,4"),  # CPU 7 is offline
        (["0,4", "1,5", "2,6", "3"], "", 6, "0-2,4-6"),
        (["0,4", "1,5", "2,6", "3"], "0", 4, "1,3-5"),  # CPU 4 is all that a container may have of its core
        (["0-1", "2-3", "4", "5", "6"], "", 4, "0-3"),  # cores with two threads and with one
        (["0-1", "2-3", "4", "5", "6"], "4-5", 2, "0-1"),
        (["0-1", "2-3", "4", "5"], "2-5", 2, "0-1"),
    ],
)
def test_full_pcpus_only_splits_no_core_if_cores_differ_in_size(
    cores: list[str], reserved: str, count: int, found: str, distribute: bool, affinity: Mask | None
) -> None:
    options = CpuOptions(full_pcpus_only=True, distribute_cpus_across_numa=distribute)
    rules = CpuPolicy.of(uneven(*cores), options, CpuSet.parse(reserved))
    steps: list[str] = []
    state = start(rules)
    after = allocate(rules, state, pod(resources("main", count)), "main", affinity, steps)
    assert owned(after) == {"main": found}, steps


def test_full_pcpus_only_rejects_a_request_that_only_cores_of_several_sizes_could_hold() -> None:
    rules = CpuPolicy.of(uneven("0-1", "2", "3", "4"), CpuOptions(full_pcpus_only=True), CpuSet())
    with pytest.raises(SmtAlignmentError, match="cores of 2 CPUs have 2, requested CPUs = 4"):
        allocate(rules, start(rules), pod(resources("main", 4)), "main")


def test_only_whole_cpus_of_guaranteed_pods_are_exclusive() -> None:
    whole, part = resources("a", 2), resources("b", 1.5)
    assert [container_cpus(pod(a), a) for a in (whole, part)] == [2, 0]
    assert container_cpus(pod(whole, guaranteed=False), whole) == 0
    assert container_cpus(pod(whole, own=4), whole) == 2
    loose = ContainerResources("l", requests={"cpu": 2000, "memory": 1}, limits={"cpu": 2000})
    assert container_cpus(pod(loose), loose) == 2
    assert container_cpus(pod(loose, own=4), loose) == 0, "in a pod that owns CPUs it must be exact itself"
    unmanaged = PodRequests("pod", (whole,), pod_level_requests={"cpu": 4000})
    assert (container_cpus(unmanaged, whole), pod_cpus(unmanaged)) == (0, 0)
    assert (
        pod_cpus(
            pod(resources("i", 5, ContainerKind.INIT), resources("s", 1, ContainerKind.SIDECAR), whole, part)
        )
        == 5
    )
    assert (
        pod_cpus(pod(resources("s", 1, ContainerKind.SIDECAR), resources("i", 5, ContainerKind.INIT), whole))
        == 6
    )
    assert [pod_cpus(pod(whole, own=own)) for own in (4, 2.5)] == [4, 0]
    assert pod_cpus(pod(whole, own=4, guaranteed=False)) == 0


def test_whole_cpus_of_a_pod_are_its_own_or_the_most_that_its_containers_need_at_a_time() -> None:
    containers = (
        resources("i", 3.5, ContainerKind.INIT),
        resources("s", 0.75, ContainerKind.SIDECAR),
        resources("c", 1.5),
        resources("d", 0.5),
    )
    assert requested_whole_cpus(pod(*containers)) == 3
    assert requested_whole_cpus(pod(*containers[1:])) == 2
    assert requested_whole_cpus(pod(*containers[1:], guaranteed=False)) == 2
    assert [requested_whole_cpus(pod(*containers, own=own)) for own in (0, 0.5, 5, 5.5)] == [0, 0, 5, 5]
    assert requested_whole_cpus(replace(pod(*containers), pod_level_requests={"memory": 1})) == 3
    assert requested_whole_cpus(pod(resources("c", 0))) == 0


def test_a_pod_requests_what_it_states_or_what_its_running_containers_do() -> None:
    containers = (
        resources("i", 4, ContainerKind.INIT),
        resources("s", 0.5, ContainerKind.SIDECAR),
        resources("c", 2),
    )
    assert running_request_milli(pod(*containers)) == 2500
    assert running_request_milli(pod(*containers, own=3)) == 3000
    memory_only = replace(pod(*containers), pod_level_requests={"memory": 1})
    assert running_request_milli(memory_only) == 2500


def test_reserves_by_list_or_amount() -> None:
    assert str(policy("3").reserved_cores) == "3,11"
    by_amount = CpuPolicy.of(TOPO, amount=2)
    assert str(by_amount.reserved) == "0,8", "as an allocation would"
    with pytest.raises(CpuStateError, match=r"\(size of 0-1 did not equal 1\)"):
        CpuPolicy.of(TOPO, reserved=CpuSet.parse("0-1"), amount=1)
    with pytest.raises(CpuStateError, match=r"\(size of  did not equal 17\)"):
        CpuPolicy.of(TOPO, amount=17)
    with pytest.raises(CpuStateError, match="unknown CPU ID: 16"):
        CpuPolicy.of(TOPO, reserved=CpuSet.parse("0,16"))


def test_an_empty_state_is_initialized() -> None:
    assert str(start(policy("0")).default) == "0-15"
    strict = policy("0", strict_cpu_reservation=True)
    assert str(start(strict).default) == "1-15"
    assert str(available(policy("0"), start(policy("0")))) == "1-15"


@pytest.mark.parametrize(
    ("default", "assigned", "strict", "message"),
    [
        ("", "1", False, "default cpuset cannot be empty"),
        ("1-15", "", False, 'not all reserved cpus: "0" are present in defaultCpuSet: "1-15"'),
        ("0-15", "", True, 'some of strictly reserved cpus: "0" are present in defaultCpuSet: "0-15"'),
        ("0-15", "1-2", False, 'pod: p, container: c cpuset: "1-2" overlaps with default cpuset "0-15"'),
        ("0-13", "14", False, 'available CPUs "0-15" doesn\'t match with CPUs in state "0-14"'),
        ("1-14", "15-16", True, 'available CPUs "1-15" doesn\'t match with CPUs in state "1-16"'),
    ],
)
def test_a_stored_state_that_does_not_fit(default: str, assigned: str, strict: bool, message: str) -> None:
    stored = CpuState(CpuSet.parse(default), {"p": {"c": CpuSet.parse(assigned)}} if assigned else {})
    with pytest.raises(CpuStateError) as caught:
        start(policy("0", strict_cpu_reservation=strict), stored)
    assert message in str(caught.value)


def test_a_stored_state_that_fits_is_kept() -> None:
    stored = CpuState(CpuSet.parse("0-9"), {"p": {"c": CpuSet.parse("10")}}, {"p": CpuSet.parse("10-15")})
    assert start(policy("0"), stored) is stored


def test_cpus_inside_the_hint_are_taken_first() -> None:
    known = policy()
    state = allocate(known, start(known), pod(resources("a", 2)), "a", Mask([2]))
    assert owned(state) == {"a": "4,12"}
    assert str(state.default) == "0-3,5-11,13-15"
    more = allocate(known, state, pod(resources("b", 4), uid="q"), "b", Mask([2]))
    assert owned(more, "q") == {"b": "5-6,13-14"}, "the remaining CPUs of node 2, then those of its socket"
    anywhere = allocate(known, state, pod(resources("b", 8), uid="q"), "b")
    assert owned(anywhere, "q") == {"b": "0-3,8-11"}
    assert allocate(known, state, pod(resources("b", 0.5)), "b") is state, "it shares"
    with pytest.raises(NotEnoughCpus, match="requested=15, available=14"):
        allocate(known, state, pod(resources("b", 15), uid="q"), "b")


def test_align_by_socket_takes_from_the_whole_socket() -> None:
    known = policy(align_by_socket=True)
    busy = CpuState(CpuSet.parse("2-4,10-12"), {"x": {"c": CpuSet.parse("0-1,5-9,13-15")}})
    assert owned(allocate(known, busy, pod(resources("a", 2)), "a", Mask([0]))) == {"a": "2,10"}
    plain = allocate(policy(), busy, pod(resources("a", 2)), "a", Mask([0]))
    assert owned(plain) == {"a": "4,12"}, "node 0 has none, so the best fit anywhere"


def test_the_options_choose_the_allocator() -> None:
    def taken(free: str, n: int, **options: bool) -> str:
        busy = CpuState(CpuSet.parse(free))
        return owned(allocate(policy(**options), busy, pod(resources("a", n)), "a"))["a"]

    assert taken("0-15", 6) == "0-2,8-10"
    assert taken("0-15", 6, distribute_cpus_across_numa=True) == "0-3,8,10"
    assert taken("0-15", 6, distribute_cpus_across_numa=True, full_pcpus_only=True) == "0-2,8-10"
    assert taken("0-15", 3) == "0-1,8"
    assert taken("0-15", 3, distribute_cpus_across_cores=True) == "0-2"
    assert taken("1,4-7,9,12-15", 3) == "1,4,9"
    assert taken("1,4-7,9,12-15", 3, prefer_align_cpus_by_uncorecache=True) == "4-5,12"


def test_full_cores_only() -> None:
    known = policy("0", full_pcpus_only=True)
    state = start(known)
    with pytest.raises(SmtAlignmentError, match="requested 3 cpus not multiple cpus per core = 2") as caught:
        allocate(known, state, pod(resources("a", 3)), "a")
    assert caught.value.reason == "SMTAlignmentError"
    text = "available physical CPUs = 14, requested CPUs = 16, CPUs per core = 2"
    with pytest.raises(SmtAlignmentError, match=text):
        allocate(known, state, pod(resources("a", 16)), "a")
    assert len(allocate(known, state, pod(resources("a", 14)), "a").assigned["pod"]["a"]) == 14


def test_cpus_of_init_containers_pass_to_later_containers() -> None:
    known = policy()
    requests = pod(
        resources("i", 4, ContainerKind.INIT),
        resources("s", 2, ContainerKind.SIDECAR),
        resources("a", 2),
        resources("b", 2),
    )
    state = allocate(known, start(known), requests, "i", Mask([1]))
    assert (owned(state), str(state.reusable_by("pod"))) == ({"i": "2-3,10-11"}, "2-3,10-11")
    assert container_cpu_hints(known, state, requests, "a") != container_cpu_hints(
        known, start(known), requests, "a"
    )
    state = allocate(known, state, requests, "s", Mask([1]))
    assert str(state.reusable_by("pod")) == "3,11", "a sidecar keeps its own"
    state = allocate(known, state, requests, "a", Mask([1]))
    assert owned(state) == {"i": "2-3,10-11", "s": "2,10", "a": "3,11"}
    state = allocate(known, state, requests, "b", Mask([1]))
    assert (owned(state)["b"], str(state.default)) == ("0,8", "1,4-7,9,12-15")
    assert str(remove(state, "pod", "i").default) == str(state.default), (
        "other containers use its former CPUs"
    )
    assert allocate(known, state, requests, "i").assigned == state.assigned, "it keeps the CPUs that it owns"
    elsewhere = allocate(known, state, pod(resources("z", 1), uid="z"), "z")
    assert not elsewhere.reusable_by("pod"), "only for the pod that was served last"


def test_hints_of_a_pod_include_cpus_of_its_containers() -> None:
    requests = pod(resources("a", 2), resources("b", 2))

    def masks(state: CpuState, **options: bool) -> list[tuple[Mask | None, bool]]:
        hints = pod_cpu_hints(policy("0", **options), state, requests)
        assert hints is not None
        return [(h.affinity, h.preferred) for h in hints["cpu"] or ()]

    known = policy("0")
    state = start(known)
    assert masks(state)[:4] == [(Mask([n]), n > 0) for n in range(1, 4)] + [(Mask([0, 1]), False)]
    assert masks(state, align_by_socket=True)[3] == (Mask([0, 1]), True)
    state = allocate(known, state, requests, "a", Mask([2]))
    assert masks(state)[0] == (Mask([2]), True), "two more on the node where it has two"
    state = allocate(known, state, requests, "b", Mask([3]))
    assert masks(state)[0] == (Mask([2, 3]), False), "both nodes, because it owns CPUs on both"
    wrong = CpuState(CpuSet.parse("0-14"), {"pod": {"a": CpuSet.parse("15")}})
    assert masks(wrong) == []


def test_a_removed_container_gives_its_cpus_back() -> None:
    known = policy()
    state = allocate(known, start(known), pod(resources("a", 2)), "a")
    assert remove(state, "pod", "other") is state
    assert remove(state, "other", "a") is state
    gone = remove(state, "pod", "a")
    assert (gone.default, gone.assigned) == (TOPO.cpus, {})


def test_a_pod_that_owns_cpus() -> None:
    known = policy("0")
    requests = pod(
        resources("i", 2, ContainerKind.INIT),
        resources("s", 1, ContainerKind.SIDECAR),
        resources("j", 0, ContainerKind.INIT),
        resources("t", 0, ContainerKind.SIDECAR),
        resources("a", 1),
        resources("b", 0),
        own=4,
    )
    state = allocate_pod(known, start(known), requests, Mask([1]))
    assert {u: str(b) for u, b in state.pod_level_cpus.items()} == {"pod": "2-3,10-11"}
    assert owned(state) == {"i": "2,10", "s": "2", "j": "3,10-11", "t": "3,11", "a": "10", "b": "3,11"}
    assert start(known, state) is state
    assert allocate_pod(known, state, requests) is state
    hints = pod_cpu_hints(known, state, requests)
    assert hints is not None
    assert next(h.affinity for h in hints["cpu"] or ()) == Mask([1])
    for name in ("i", "s", "j", "t", "a"):
        state = remove(state, "pod", name)
        assert state.default == TOPO.cpus - CpuSet.parse("2-3,10-11"), "until the last container is removed"
    assert remove(state, "pod", "b") == CpuState(TOPO.cpus)


def test_a_pod_that_leaves_its_sharing_containers_no_cpus_is_refused() -> None:
    known = policy()
    with pytest.raises(EmptyPodSharedPoolError) as caught:
        allocate_pod(known, start(known), pod(resources("a", 2), resources("b", 0), own=2))
    assert caught.value.reason == "EmptyPodSharedPoolError"
    with pytest.raises(NotEnoughCpus):
        allocate_pod(known, start(known), pod(resources("a", 2), resources("b", 1), own=2))
    nothing = start(known)
    assert allocate_pod(known, nothing, pod(resources("a", 2))) is nothing


class CpuPolicyHistory(RuleBasedStateMachine):
    """Pods come and go; no container owns CPUs that do not exist or that another pod owns."""

    @initialize(
        strict=st.booleans(),
        across=st.booleans(),
        full=st.booleans(),
        reserved=st.sampled_from(["0", "0-1,8"]),
    )
    def begin(self, strict: bool, across: bool, full: bool, reserved: str) -> None:
        self.known = policy(
            reserved,
            strict_cpu_reservation=strict,
            distribute_cpus_across_numa=across,
            full_pcpus_only=full,
        )
        self.state = start(self.known)

    @rule(
        uid=st.sampled_from("xyz"),
        name=st.sampled_from("ia"),
        cpus=st.integers(1, 9),
        node=st.none() | st.integers(0, 3),
    )
    def come(self, uid: str, name: str, cpus: int, node: int | None) -> None:
        requests = pod(
            resources(name, cpus, ContainerKind.INIT if name == "i" else ContainerKind.APP), uid=uid
        )
        before = self.state
        try:
            self.state = allocate(self.known, before, requests, name, None if node is None else Mask([node]))
        except (NotEnoughCpus, SmtAlignmentError):
            return
        if before.owned_by(uid, name) is None:
            new = self.state.owned_by(uid, name)
            assert new is not None
            assert len(new) == cpus
            assert new <= available(self.known, before) | before.reusable_by(uid)

    @rule(uid=st.sampled_from("xyz"), name=st.sampled_from("ia"))
    def go(self, uid: str, name: str) -> None:
        self.state = remove(self.state, uid, name)

    @invariant()
    def all_cpus_are_somewhere_once(self) -> None:
        if not hasattr(self, "state"):
            return
        seen = self.state.default
        for containers in self.state.assigned.values():
            of_pod = CpuSet()
            for cpus in containers.values():
                of_pod |= cpus
            assert seen.isdisjoint(of_pod)
            seen |= of_pod
        assert seen == managed(self.known)
        if self.state.default:  # kubelet does not take its own state back when all CPUs are owned
            assert start(self.known, self.state) is self.state


TestCpuPolicyHistory = CpuPolicyHistory.TestCase
TestCpuPolicyHistory.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
