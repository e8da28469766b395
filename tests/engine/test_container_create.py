from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import Plan, place
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.placement import moves
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules
from proxy.model.defects import InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import KeepQuota
from proxy.model.options import CpuOptions
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Phase, Pod, Pool, QosClass, Request, SetAside
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # two sockets, one node each; 16 CPUs
NODE0, NODE1 = MACHINE.nodes[0].cpus, MACHINE.nodes[1].cpus


def empty(*, static: bool = True, reserved: str = "", follow: bool = True) -> NodeState:
    return NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), static, CpuSet.parse(reserved), follow))


def pod(uid: str, qos: QosClass = QosClass.NONE, kube: KubeQos = KubeQos.GUARANTEED, cpus: str = "") -> Pod:
    return Pod(f"s-{uid}", uid, "ns", uid, 0, qos, kube, "", CpuSet.parse(cpus) or None)


def whole(count: int) -> Request:
    return Request(cpu_shares=1024 * count, cpu_quota=100_000 * count, cpu_period=100_000)


SMALL = Request(cpu_shares=512)


def put(state: NodeState, the_pod: Pod, request: Request = SMALL, name: str = "c", key: str = "") -> Plan:
    return place(state, the_pod, name, 0, request, key or f"{the_pod.uid}/{name}")


def node_with(*requests: tuple[Pod, Request], static: bool = True, reserved: str = "") -> NodeState:
    state = empty(static=static, reserved=reserved)
    for the_pod, request in requests:
        plan = put(state, the_pod, request)
        assert plan.verdict.admitted, plan.verdict
        state = plan.state
    return state


def test_owners_shrink_the_pools_of_their_class() -> None:
    lse = pod("lse", QosClass.LSE, cpus="0-1")
    lsr = pod("lsr", QosClass.LSR, cpus="2-3")
    state = node_with((lse, SMALL), (lsr, SMALL), (pod("g"), whole(2)))
    picked = state.containers["g/c"].placement.exclusive
    assert len(picked) == 2
    assert state.pools.shared == MACHINE.online - CpuSet.parse("0-3") - picked
    assert state.pools.be == MACHINE.online - CpuSet.parse("0-1") - picked


def test_an_owner_moves_exactly_the_containers_on_its_cpus() -> None:
    ls = pod("ls", QosClass.LS)
    be = pod("be", kube=KubeQos.BEST_EFFORT)
    state = node_with((ls, SMALL), (be, SMALL))
    assert put(state, pod("x", QosClass.LSR, cpus="4")).shrink == ("ls/c",)
    assert put(state, pod("x", QosClass.LSE, cpus="4")).shrink == ("be/c", "ls/c")
    assert put(state, pod("y", QosClass.LS)).shrink == ()


def test_whole_cpus_are_packed_on_one_node_in_whole_cores() -> None:
    state = empty()
    for uid in ("a", "b"):
        state = put(state, pod(uid), whole(4)).state
        cpus = state.containers[f"{uid}/c"].placement.exclusive
        assert len(MACHINE.nodes_of(cpus)) == 1
        assert all(core <= cpus or core.isdisjoint(cpus) for core in MACHINE.cores.values())
    a, b = (state.containers[f"{uid}/c"].placement.exclusive for uid in ("a", "b"))
    assert MACHINE.nodes_of(a) == MACHINE.nodes_of(b), "best fit fills the node that is in use already"


def test_a_request_that_fits_a_node_is_not_split_for_free_cores() -> None:
    # Node 0 has three free CPUs (the packed allocator would prefer its fuller core), node 1 is empty.
    state = node_with((pod("x", QosClass.LSE, cpus=str(CpuSet(list(NODE0)[:5]))), SMALL))
    cpus = put(state, pod("g"), whole(4)).container.placement.exclusive
    assert cpus <= NODE1


def test_a_request_larger_than_a_node_spans_nodes() -> None:
    plan = put(empty(), pod("g"), whole(10))
    assert plan.container.placement.mems == Mask((0, 1))
    assert len(plan.container.placement.exclusive) == 10


def test_reserved_cpus_are_never_exclusive_and_stay_shared() -> None:
    state = node_with((pod("g"), whole(6)), reserved="0,8")
    assert CpuSet.parse("0,8") <= state.pools.shared
    refused = put(state, pod("h"), whole(9))
    assert refused.verdict.code == 9
    assert refused.verdict.reason == "UnexpectedAdmissionError"
    assert "requested=9, available=8" in refused.verdict.message
    assert refused.state is state


def test_memory_nodes_follow_the_cpus_if_configured() -> None:
    lse = pod("lse", QosClass.LSE, cpus=str(NODE1))
    assert put(empty(), lse).container.placement.mems == Mask((1,))
    assert put(empty(follow=False), lse).container.placement.mems == Mask((0, 1))
    bare = changed_copy(MACHINE, nodes=(MACHINE.nodes[0], changed_copy(MACHINE.nodes[1], mem_bytes=0)))
    state = NodeState.empty(Node(bare, CpuTopology.of(bare)))
    for text, mems in (("0-1", (0, 1)), (" ", (0,)), ("0-x", (0,)), ("0-2", (0,))):
        request = Request(cpu_shares=512, cpuset_mems=text)
        assert put(state, pod("ls", QosClass.LS), request).container.placement.mems == Mask(mems)
    named = Request(cpu_shares=512, cpuset_mems="1")
    assert put(empty(), pod("ls", QosClass.LS), named).container.placement.mems == Mask((1,))
    garbage = Request(cpu_shares=512, cpuset_mems="9")
    assert put(empty(), pod("ls", QosClass.LS), garbage).container.placement.mems == Mask((0, 1))


def test_an_owner_gets_as_many_memory_nodes_as_it_needs() -> None:
    node_bytes = MACHINE.nodes[0].mem_bytes or 0
    lse = pod("lse", QosClass.LSE, cpus=str(NODE1))
    small, big = Request(memory_limit=node_bytes // 2), Request(memory_limit=node_bytes + 1)
    assert put(empty(), lse, small).container.placement.mems == Mask((1,))
    plan = put(empty(), lse, big)
    assert plan.container.placement.mems == Mask((0, 1))
    assert "cannot hold its limit" in plan.container.placement.reasons[1]
    # Two that fit alone do not fit together; the same container does not count twice.
    state = put(empty(), pod("a", QosClass.LSR, cpus="4"), small).state
    assert put(state, pod("b", QosClass.LSR, cpus="5"), small).container.placement.mems == Mask((1,))
    more = Request(memory_limit=node_bytes * 2 // 3)
    assert put(state, pod("b", QosClass.LSR, cpus="5"), more).container.placement.mems == Mask((0, 1))
    again = put(state, pod("a", QosClass.LSR, cpus="4"), more, key="again")
    assert again.container.placement.mems == Mask((1,))


def test_memory_nodes_that_the_request_names_are_kept() -> None:
    named = Request(memory_limit=1, cpuset_mems="0")
    lse = pod("lse", QosClass.LSE, cpus=str(NODE1))
    assert put(empty(), lse, named).container.placement.mems == Mask((0,))
    whole_and_named = changed_copy(whole(2), cpuset_mems="1")
    assert put(empty(), pod("g"), whole_and_named).container.placement.mems == Mask((1,))


def test_the_shared_pool_is_never_emptied() -> None:
    plan = put(empty(), pod("lse", QosClass.LSE, cpus="0-15"))
    assert (plan.verdict.code, plan.verdict.reason) == (9, "SharedPoolExhausted")
    assert plan.container is None
    assert put(empty(), pod("lse", QosClass.LSE, cpus="0-14")).verdict.admitted
    ls = put(empty(), pod("ls", QosClass.LS, cpus="0-15"))
    assert (ls.container.placement.pool, ls.problem) == (Pool.SHARED, "the shared pool would be left empty")
    rest = node_with((pod("lse", QosClass.LSE, cpus="0-7"), SMALL))
    assert put(rest, pod("lsr", QosClass.LSR, cpus="8-15")).verdict.reason == "SharedPoolExhausted"
    picked = put(empty(), pod("g"), whole(16))
    assert (picked.verdict.code, picked.verdict.reason) == (9, "SharedPoolExhausted")
    assert picked.verdict.message == "cannot give CPUs 0-15 to ns/g/c: the shared pool would be left empty"
    assert picked.state.containers == {}


def test_the_report_of_kubelet_takes_precedence_over_the_cri_request() -> None:
    amounts = {"cpu": 2000, "memory": 1}
    requests = PodRequests("g", (ContainerResources("c", ContainerKind.APP, amounts, amounts),))
    plan = put(empty(), changed_copy(pod("g"), requests=requests), Request(1536, 150_000, 100_000))
    assert plan.container is not None
    assert (plan.container.placement.pool, len(plan.container.placement.exclusive)) == (Pool.OWN, 2)


def test_a_container_that_kubelet_does_not_report_is_decided_by_its_cri_request() -> None:
    requests = PodRequests("g", (ContainerResources("other", ContainerKind.APP, {"cpu": 500}, {"cpu": 500}),))
    plan = put(empty(), changed_copy(pod("g"), requests=requests), whole(2))
    assert plan.container is not None
    assert (plan.container.placement.pool, len(plan.container.placement.exclusive)) == (Pool.OWN, 2)


def test_a_container_that_starts_again_keeps_named_cpus_of_which_one_went_offline() -> None:
    named = pod("lse", QosClass.LSE, cpus="0-3")
    state = put(empty(), named, SMALL).state
    left = MACHINE.online - CpuSet([3])
    cpus = tuple(cpu for cpu in MACHINE.cpus if cpu.id in left)
    nodes = tuple(changed_copy(node, cpus=node.cpus & left) for node in MACHINE.nodes)
    smaller = state.with_machine(changed_copy(MACHINE, cpus=cpus, nodes=nodes))
    again = place(smaller, named, "c", 1, SMALL, "again")
    assert again.container is not None, again.verdict
    assert again.container.placement.exclusive == CpuSet.parse("0-3")
    other = place(smaller, pod("x", QosClass.LSE, cpus="3-4"), "c", 0, SMALL, "x")
    assert other.verdict.message.endswith("names CPUs 3-4, but CPU 3 is not online here")


@pytest.mark.parametrize(
    ("owners", "named"),
    [
        (4, "ns/a, ns/b, ns/c, ns/d"),
        (5, "ns/a, ns/b, ns/c, ns/d, 1 more"),
        (6, "ns/a, ns/b, ns/c, ns/d, 2 more"),
    ],
)
def test_a_refusal_names_four_owners_and_counts_the_rest(owners: int, named: str) -> None:
    state = node_with(*((pod("abcdef"[cpu], QosClass.LSR, cpus=f"{cpu}"), SMALL) for cpu in range(owners)))
    clash = put(state, pod("x", QosClass.LSE, cpus="0-6"))
    assert f"CPUs 0-{owners - 1} are owned by {named} already" in clash.verdict.message


@pytest.mark.parametrize(("owners", "whose"), [(1, "another pod"), (2, "other pods")])
def test_a_refusal_does_not_name_owners_if_names_are_disabled(owners: int, whose: str) -> None:
    state = node_with(*((pod("ab"[cpu], QosClass.LSR, cpus=f"{cpu}"), SMALL) for cpu in range(owners)))
    quiet = state.with_node(changed_copy(state.node, admission=AdmissionRules(name_others=False)))
    clash = put(quiet, pod("x", QosClass.LSE, cpus="0-6"))
    assert f"owned by {whose} already" in clash.verdict.message


def test_cpus_are_not_given_twice() -> None:
    state = node_with((pod("one", QosClass.LSR, cpus="2-4"), SMALL))
    clash = put(state, pod("two", QosClass.LSE, cpus="4-5"))
    assert clash.verdict.code == 9
    assert "CPU 4 is owned by ns/one already" in clash.verdict.message
    ls = put(state, pod("ls", QosClass.LS, cpus="4"))
    assert ls.container.placement.pool is Pool.SHARED
    assert "owned by ns/one" in ls.problem
    for uid in ("a", "b", "c"):
        state = put(state, pod(uid), whole(4)).state
    assert violations(state) == []
    assert not put(state, pod("d"), whole(2)).verdict.admitted


def test_only_owners_of_the_requested_cpus_are_named() -> None:
    state = node_with((pod("g"), whole(2)), (pod("h"), whole(2)), (pod("ls", QosClass.LS), SMALL))
    cpus = state.containers["g/c"].placement.exclusive
    assert put(state, pod("x", QosClass.LSE, cpus=str(cpus))).verdict.message.endswith(
        f"CPUs {cpus} are owned by ns/g/c already"
    )
    ended = changed_copy(state.containers["g/c"], phase=Phase.EXITED)
    state = put(state.changed(put=[ended]), pod("new", QosClass.LSR, cpus=str(cpus))).state
    assert put(state, pod("x", QosClass.LSE, cpus=str(cpus))).verdict.message.endswith(
        f"CPUs {cpus} are owned by ns/new already"
    )


def test_all_containers_of_an_annotated_pod_own_the_same_cpus() -> None:
    lse = pod("lse", QosClass.LSE, cpus="0-3")
    state = put(empty(), lse, name="a").state
    plan = put(state, lse, name="b")
    assert plan.verdict.admitted
    assert plan.container.placement.exclusive == CpuSet.parse("0-3")
    gone = plan.state.changed(drop=["lse/a"])
    assert gone.pools == plan.state.pools, "the other container still holds them"
    assert gone.changed(drop=["lse/b"]).pools == empty().pools


def test_a_new_attempt_keeps_the_cpus_of_the_old_one() -> None:
    state = node_with((pod("a"), whole(2)), (pod("g"), whole(3)))
    first = state.containers["g/c"].placement.exclusive
    running = changed_copy(state.containers["g/c"], phase=Phase.RUNNING)
    plan = put(state.changed(put=[running]), pod("g"), whole(3), key="second")
    assert plan.container.placement.exclusive == first
    assert plan.shrink == ()


def ended(state: NodeState, key: str) -> NodeState:
    return state.changed(put=[changed_copy(state.containers[key], phase=Phase.EXITED)])


def test_a_new_attempt_keeps_the_cpus_only_if_the_request_is_the_same() -> None:
    state = node_with((pod("a"), whole(2)), (pod("g"), whole(2)))
    previous = state.containers["g/c"].placement.exclusive
    state = ended(state, "g/c").changed(drop=["a/c"])
    again = put(state, pod("g"), whole(2), key="2").container.placement
    assert again.exclusive == previous, "although better CPUs are free now"
    assert again.reasons == (
        "Guaranteed container with 2 whole CPUs, policy static; keeps the CPUs of its earlier attempt",
        "its CFS quota is off",
    )
    assert len(put(state, pod("g"), whole(3), key="2").container.placement.exclusive) == 3
    taken = put(state, pod("lse", QosClass.LSE, cpus=str(previous))).state
    assert put(taken, pod("g"), whole(2), key="2").container.placement.exclusive.isdisjoint(previous)
    smaller = changed_copy(MACHINE, cpus=tuple(c for c in MACHINE.cpus if c.id not in previous))
    node = Node(smaller, CpuTopology.of(smaller), static=True)
    state = NodeState.of(node, (), state.containers.values())
    assert put(state, pod("g"), whole(2), key="2").container.placement.exclusive <= smaller.online


def test_cpus_promised_to_other_containers_are_picked_last() -> None:
    state = empty().with_pod(pod("lse", QosClass.LSE, cpus="0-3,6-11,14-15"))
    assert put(state, pod("g"), whole(3)).container.placement.exclusive == CpuSet.parse("4-5,12")
    assert put(state, pod("g"), whole(4)).container.placement.exclusive == CpuSet.parse("4-5,12-13")
    assert put(state, pod("g"), whole(6)).container.placement.exclusive == CpuSet.parse("0-2,8-10")


@pytest.mark.parametrize(("count", "where"), [(2, "0,8 on NUMA node 0"), (10, "0-4,8-12 on NUMA nodes 0-1")])
def test_the_reason_names_the_place_of_the_cpus(count: int, where: str) -> None:
    reason = put(empty(), pod("g"), whole(count)).container.placement.reasons[0]
    assert reason.endswith(f"; picked {where}")


def test_exited_containers_own_no_cpus() -> None:
    state = node_with((pod("g"), whole(4)))
    exited = changed_copy(state.containers["g/c"], phase=Phase.EXITED)
    after = state.changed(put=[exited])
    assert after.pools == empty().pools
    assert after.owners == {}


BAD = InputDefect("annotation is not JSON", decisive=True)


def test_invalid_argument_for_strict_pods_only() -> None:
    bad = changed_copy(pod("lse", QosClass.LSE), defects=(BAD,))
    assert put(empty(), bad).verdict.code == 3
    assert "annotation is not JSON" in put(empty(), bad).verdict.message
    ls = changed_copy(pod("ls", QosClass.LS), defects=(BAD,))
    plan = put(empty(), ls)
    assert plan.verdict.admitted
    assert plan.problem == "annotation is not JSON"


CPUS = st.sets(st.integers(0, 17), min_size=1, max_size=6).map(lambda s: str(CpuSet(s)))
PODS = st.builds(
    pod,
    st.sampled_from([f"p{i}" for i in range(8)]),
    st.sampled_from(list(QosClass)),
    st.sampled_from(list(KubeQos)),
    st.one_of(st.just(""), CPUS),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(PODS, st.sampled_from([SMALL, *map(whole, range(1, 6))]), st.sampled_from("ab")),
        st.integers(0, 40),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.booleans(), st.sampled_from(["", "0,8"]))
def test_any_history_keeps_the_invariants(steps: list[object], static: bool, reserved: str) -> None:
    state = empty(static=static, reserved=reserved)
    for number, step in enumerate(steps):
        before = state
        if isinstance(step, int):
            keys = list(state.containers)
            if not keys:
                continue
            state = state.changed(drop=[keys[step % len(keys)]])
            lost = [k for k in moves(before, state)[0] if not state.containers[k].placement.is_narrowed]
            assert lost == [], "no container loses CPUs, except one that returns to those it is bound to"
        else:
            the_pod, request, name = step
            plan = place(state, the_pod, name, 0, request, f"k{number}")
            if not plan.verdict.admitted:
                assert plan.state is state
                # The message of kubelet if the CPUs do not suffice.
                assert plan.verdict.message.startswith(("cannot ", "UnexpectedAdmissionError: "))
                continue
            state = plan.state
            placed = plan.container
            lost = {
                k
                for k, c in before.containers.items()
                if not before.desired_cpus(c) <= state.desired_cpus(state.containers[k])
            }
            assert set(plan.shrink) == lost
            if placed.placement.pool is Pool.OWN and placed.owner not in before.owners:
                assert all(
                    not before.desired_cpus(before.containers[k]).isdisjoint(placed.placement.exclusive)
                    for k in lost
                )
            if placed.placement.pool is Pool.OWN and not the_pod.cpuset:
                assert placed.placement.exclusive.isdisjoint(CpuSet.parse(reserved))
            assert placed.placement.mems
        assert violations(state) == []
        assert state.pools.shared <= state.pools.be
        assert state.pools.shared
        rebuilt = NodeState.of(state.node, state.pods.values(), state.containers.values())
        assert (rebuilt.owners, rebuilt.pools) == (state.owners, state.pools), (
            "the derived state matches the state computed from scratch"
        )


@pytest.mark.parametrize("phase", [Phase.CREATED, Phase.RUNNING])
def test_moves_distinguish_shrink_from_growth(phase: Phase) -> None:
    state = node_with((pod("ls", QosClass.LS), SMALL), (pod("be", kube=KubeQos.BEST_EFFORT), SMALL))
    state = state.changed(put=[changed_copy(c, phase=phase) for c in state.containers.values()])
    owned = put(state, pod("lse", QosClass.LSE, cpus="0-3")).state
    assert moves(state, owned) == (("be/c", "ls/c"), ())
    assert moves(owned, owned.changed(drop=["lse/c"])) == ((), ("be/c", "ls/c"))
    exited = changed_copy(owned.containers["ls/c"], phase=Phase.EXITED)
    assert moves(owned, owned.changed(put=[exited], drop=["lse/c"])) == ((), ("be/c",))


def strict(reserved: str) -> NodeState:
    options = CpuOptions(strict_cpu_reservation=True)
    return NodeState.empty(
        Node(MACHINE, CpuTopology.of(MACHINE), True, CpuSet.parse(reserved), options=options)
    )


def test_cpus_that_are_strictly_reserved_do_not_count_as_shared() -> None:
    state = strict("0,8")
    assert state.pools.shared == state.pools.be == CpuSet.parse("1-7,9-15")
    ls = put(state, pod("ls", QosClass.LS, cpus="1-7,9-15"))
    assert ls.container is not None, "a container that may share is not refused"
    assert (ls.container.placement.pool, ls.problem) == (Pool.SHARED, "the shared pool would be left empty")
    assert put(state, pod("l", QosClass.LSR, cpus="1-7,9-15")).verdict.reason == "SharedPoolExhausted"
    assert put(state, pod("l", QosClass.LSR, cpus="2-7,9-15")).verdict.admitted
    assert put(state, pod("g"), whole(13)).verdict.admitted
    assert put(state, pod("g"), whole(14)).verdict.reason == "SharedPoolExhausted"


@pytest.mark.parametrize("named", ["", "4-5"])
def test_cpus_named_by_kubelet_and_set_asides_do_not_overlap(named: str) -> None:
    aside = SetAside(None, True, CpuSet.parse("4-7"))
    keeps = changed_copy(pod("keeps"), reserved_for_pod=aside)
    state = empty(static=False).with_pod(keeps)
    request = changed_copy(whole(2), cpuset_cpus=named or "0-1")
    plan = put(state, pod("g"), request)
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.OWN
    own = plan.container.placement.exclusive
    assert own.isdisjoint(aside.cpus), "other CPUs are chosen because the CPUs of kubelet are promised"
    assert (len(own), own == CpuSet.parse("0-1")) == (2, not named)
    assert plan.problem == ("CPUs 4-5 are owned by ns/keeps (set aside) already" if named else "")
    its_own = put(state, keeps, changed_copy(whole(2), cpuset_cpus="4-5"))
    assert its_own.container is not None
    assert its_own.container.placement.exclusive == CpuSet.parse("4-5")
    all_but = put(state, pod("l", QosClass.LSR, cpus="0-3,8-15"))
    assert all_but.verdict.reason == "SharedPoolExhausted"


def test_the_shared_pool_keeps_a_cpu_that_is_not_set_aside() -> None:
    keeps = changed_copy(pod("keeps"), reserved_for_pod=SetAside(None, True, CpuSet.parse("0-3")))
    state = empty().with_pod(keeps)
    refused = put(state, pod("g"), whole(12))
    assert (refused.verdict.reason, refused.state) == ("SharedPoolExhausted", state)
    assert refused.explanation is not None
    assert refused.explanation.verdict == refused.verdict
    assert (refused.explanation.cpus, refused.explanation.pool) == (CpuSet(), ""), "it got none"
    assert put(state, pod("g"), whole(11)).verdict.admitted
    assert put(state, keeps, whole(4)).verdict.admitted
    assert put(state, keeps, whole(15)).verdict.admitted, "it may use its own set-aside"


@pytest.mark.parametrize("keep", list(KeepQuota))
def test_a_removed_quota_is_reported(keep: KeepQuota) -> None:
    state = NodeState.empty(changed_copy(empty().node, keep_quota=keep))
    placement = put(state, pod("g"), whole(2)).container.placement
    off = keep is not KeepQuota.ALWAYS
    assert placement.cfs_quota_off is off
    assert ("its CFS quota is off" in placement.reasons) is off
    endless = put(state, pod("lse", QosClass.LSE, cpus="2"), Request(cpu_shares=1024)).container.placement
    assert endless.cfs_quota_off is off
    assert "its CFS quota is off" not in endless.reasons, "there was none"
    assert not put(state, pod("ls", QosClass.LS), whole(2)).container.placement.cfs_quota_off
