"""Requests of hooks, in any order and mixed with other events: the invariants of the plan hold."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import place
from proxy.engine.hook_narrowing import Narrowing, narrowed, unmet_hook_limit, without_extra_cpus
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.placement import moves
from proxy.engine.state import NodeState
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.workload import KubeQos, Phase, Pod, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)
WHOLE = Request(cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
KINDS = {
    "ls": (QosClass.LS, KubeQos.BURSTABLE, "", Request(cpu_shares=512)),
    "be": (QosClass.BE, KubeQos.BEST_EFFORT, "", Request()),
    "named": (QosClass.BE, KubeQos.BEST_EFFORT, "4-11", Request()),
    "lse": (QosClass.LSE, KubeQos.GUARANTEED, "2-5", Request()),
    "lsr": (QosClass.LSR, KubeQos.GUARANTEED, "8-9", Request()),
    "whole": (QosClass.NONE, KubeQos.GUARANTEED, "", WHOLE),
}
CPUS = st.sets(st.integers(0, 17), max_size=8).map(CpuSet)


def empty() -> NodeState:
    return NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), static=True))


def put(state: NodeState, kind: str, uid: str = "") -> NodeState:
    qos, kube, cpus, request = KINDS[kind]
    uid = uid or kind
    pod = Pod(f"s-{uid}", uid, "ns", uid, 0, qos, kube, "", CpuSet.parse(cpus) or None)
    plan = place(state.with_pod(pod), pod, "c", 0, request, uid)
    if plan.container is None:
        return state
    return plan.state.changed(put=(plan.container.in_phase(Phase.RUNNING),))


def without(gone: CpuSet) -> Machine:
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in MACHINE.nodes)
    left = tuple(c for c in MACHINE.cpus if c.id not in gone)
    return changed_copy(MACHINE, cpus=left, nodes=nodes)


def narrowing(cpus: str, **more: object) -> Narrowing:
    return changed_copy(Narrowing(CpuSet.parse(cpus), by="10-x"), **more)  # type: ignore[arg-type]


def hooked(state: NodeState, uid: str, what: Narrowing, seen: str = "") -> NodeState:
    new, problem = narrowed(state, state.containers[uid], what, CpuSet.parse(seen) if seen else None)
    assert not problem
    return state.changed(put=(new,))


def runs_on(state: NodeState, uid: str) -> str:
    return str(state.desired_cpus(state.containers[uid]))


def test_a_pool_is_narrowed_and_followed() -> None:
    state = hooked(put(empty(), "ls"), "ls", narrowing("1-3"))
    assert runs_on(state, "ls") == "1-3"
    assert state.containers["ls"].placement.reasons[-1] == "narrowed to CPUs 1-3 by hook 10-x"
    shrunk = put(state, "lse")  # owns 2-5
    assert runs_on(shrunk, "ls") == "1"
    assert moves(state, shrunk)[0] == ("ls",)
    grown = shrunk.changed(drop=("lse",))
    assert (runs_on(grown, "ls"), moves(shrunk, grown)[1]) == ("1-3", ("ls",))


def test_an_empty_part_is_replaced_by_the_whole_pool_and_reported() -> None:
    state = put(hooked(put(empty(), "ls"), "ls", narrowing("2-5")), "lse")
    assert runs_on(state, "ls") == "0-1,6-15"
    assert "nothing is left of CPUs 2-5" in unmet_hook_limit(state, state.containers["ls"])
    assert not unmet_hook_limit(state.changed(drop=("lse",)), state.containers["ls"])


def test_a_narrowed_owner_keeps_ownership_of_all_its_cpus() -> None:
    state = put(put(empty(), "lse"), "ls")
    narrow = hooked(state, "lse", narrowing("2-3"))
    assert (runs_on(narrow, "lse"), runs_on(narrow, "ls")) == ("2-3", "0-1,6-15")
    assert str(narrow.owners["lse"].cpus) == "2-5"
    assert violations(narrow) == []


def test_a_limit_of_the_scheduler_is_kept() -> None:
    state = hooked(put(empty(), "named"), "named", narrowing("0-5"), seen="4-11")
    assert runs_on(state, "named") == "4-5"
    # Suppression does not move it out of the two limits if it leaves none of their CPUs.
    assert runs_on(state.with_be_limit(CpuSet.parse("5,12")), "named") == "5"
    assert runs_on(state.with_be_limit(CpuSet.parse("12-13")), "named") == "4-5"
    # If the two limits have no CPU in common, only the limit of the scheduler counts.
    assert runs_on(hooked(put(empty(), "named"), "named", narrowing("0-1"), seen="0-15"), "named") == "4-11"


def test_a_new_narrowing_replaces_the_previous_one_and_clear_ends_it() -> None:
    state = hooked(put(empty(), "ls"), "ls", narrowing("1-3"))
    again = hooked(state, "ls", narrowing("6-7", by="20-y"))
    assert runs_on(again, "ls") == "6-7"
    assert again.containers["ls"].placement.reasons[1:] == ("narrowed to CPUs 6-7 by hook 20-y",)
    for ends in (Narrowing(clear=True, by="20-y"), narrowing("0-15"), narrowing("0-15", owned=True)):
        plain = hooked(again, "ls", ends)
        assert plain.containers["ls"].placement == put(empty(), "ls").containers["ls"].placement


@pytest.mark.parametrize("cpus", ["2-3", "99", ""])
def test_cpus_outside_the_pool_are_not_given(cpus: str) -> None:
    state = put(put(empty(), "lse"), "ls")
    one = state.containers["ls"]
    same, problem = narrowed(state, one, narrowing(cpus))
    assert same is one
    assert f"cannot narrow ns/ls/c to CPUs {cpus} by hook 10-x: it has 0-1,6-15" in problem


def test_cpus_lost_during_the_call_of_the_hook_return_later() -> None:
    state = put(put(empty(), "lse"), "ls")
    # The hook was called before the owner was placed.
    late = hooked(state, "ls", narrowing("5-6", owned=True), seen="0-15")
    assert runs_on(late, "ls") == "6"
    assert violations(late) == []


def test_naming_all_cpus_is_not_a_narrowing() -> None:
    state = put(empty(), "lse")
    state = put(state, "ls")
    plain = state.containers["ls"].placement
    same = hooked(state, "ls", narrowing("0-1,6-15"))
    assert same.containers["ls"].placement == plain
    narrow = hooked(same, "ls", narrowing("6-7"))
    assert hooked(narrow, "ls", narrowing("0-15"), seen="0-1,6-15").containers["ls"].placement == plain
    beyond = hooked(narrow, "ls", narrowing("0-15", owned=True))
    assert (runs_on(beyond, "ls"), str(beyond.containers["ls"].placement.hook_extra_cpus)) == ("0-15", "2-5")


def test_owned_cpus_if_the_configuration_lets_hooks_give_them() -> None:
    state = hooked(put(put(empty(), "lse"), "ls"), "ls", narrowing("5-6", owned=True))
    assert runs_on(state, "ls") == "5-6"
    why = state.containers["ls"].placement.reasons[-1]
    assert why == "narrowed to CPUs 5-6 by hook 10-x, including CPUs 5 that its placement does not have"
    assert violations(state) == []
    more = put(state, "whole")  # the placement of another container is not refused because of it
    assert "whole" in more.containers
    assert violations(more) == []


@pytest.mark.parametrize(
    "suffix",
    [
        ", including CPUs 5 that its placement does not have",
        pytest.param(", 5 of them although they are not its to have", id="stored by an earlier release"),
    ],
)
def test_extra_cpus_are_taken_back_with_their_part_of_the_reason(suffix: str) -> None:
    container = hooked(put(put(empty(), "lse"), "ls"), "ls", narrowing("5-6", owned=True)).containers["ls"]
    plain = "narrowed to CPUs 5-6 by hook 10-x"
    reasons = (*container.placement.reasons[:-1], plain + suffix)
    stored = changed_copy(container, placement=changed_copy(container.placement, reasons=reasons))
    left = without_extra_cpus(stored).placement
    assert (left.reasons[-1], str(left.hook_cpus), left.hook_extra_cpus) == (plain, "5-6", CpuSet())


def test_hooks_narrow_memory_nodes() -> None:
    state = hooked(put(empty(), "ls"), "ls", Narrowing(mems=Mask((1,)), mems_by="30-m"))
    one = state.containers["ls"]
    assert (str(state.desired_mems(one)), one.placement.reasons[-1]) == (
        "1",
        "bound to memory of NUMA node 1 by hook 30-m",
    )
    both = hooked(state, "ls", narrowing("1-3")).containers["ls"].placement.reasons
    assert both[-2:] == (one.placement.reasons[-1], "narrowed to CPUs 1-3 by hook 10-x")
    everywhere = hooked(state, "ls", Narrowing(mems=state.node.machine.memory_nodes, by="30-m"))
    assert everywhere.containers["ls"].placement.mems == state.node.machine.memory_nodes
    same, problem = narrowed(state, one, Narrowing(mems=Mask((7,)), by="30-m"))
    assert same is one
    assert "there is memory on NUMA nodes 0-1 only" in problem


def test_a_node_with_promised_memory_is_not_removed() -> None:
    state = put(empty(), "ls")
    one = state.containers["ls"]
    blocks = (Block(Mask((0, 1)), "memory", 1 << 30), Block(Mask((0,)), "hugepages-2Mi", 1 << 21))
    one = changed_copy(one, placement=changed_copy(one.placement, blocks=blocks))
    same, problem = narrowed(state, one, Narrowing(mems=Mask((0,)), mems_by="30-m"))
    assert same is one
    assert problem.endswith("by hook 30-m: it was promised memory of NUMA nodes 0-1")
    assert narrowed(state, one, Narrowing(mems=Mask((0, 1)), mems_by="30-m"))[1] == ""


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(sorted(KINDS)), st.integers(0, 1)),
        st.tuples(st.just("drop"), st.sampled_from(sorted(KINDS)), st.integers(0, 1)),
        st.tuples(st.just("cpus"), st.sampled_from(sorted(KINDS)), st.integers(0, 1), CPUS, CPUS | st.none()),
        st.tuples(st.just("clear"), st.sampled_from(sorted(KINDS)), st.integers(0, 1)),
        st.tuples(st.just("online"), CPUS.filter(lambda cpus: len(cpus) < 5)),
        st.tuples(st.just("suppress"), CPUS | st.none()),
    ),
    max_size=14,
)


@given(steps=STEPS, owned=st.booleans())
@example(
    steps=[("put", "be", 0), ("cpus", "be", 0, CpuSet([1]), None), ("suppress", CpuSet([0]))], owned=False
)
@settings(max_examples=150)
def test_invariants_hold_after_any_hook_answers(steps: list[tuple[object, ...]], owned: bool) -> None:
    state = empty()
    for what, *rest in steps:
        before = state
        if what == "online":
            away = rest[0] & MACHINE.online  # type: ignore[operator]
            after = state.with_machine(without(away))
            state = after if after.pools.shared else state
        elif what == "suppress":
            state = state.with_be_limit(rest[0])
        else:
            uid = f"{rest[0]}{rest[1]}"
            if what == "put" and uid not in state.containers:
                state = put(state, str(rest[0]), uid)
            elif what == "drop":
                state = state.changed(drop=(uid,))
            elif uid in state.containers:
                cpus = rest[2] if what == "cpus" else None
                request = Narrowing(cpus, clear=cpus is None, by="x", owned=owned)  # type: ignore[arg-type]
                seen = rest[3] if what == "cpus" else None
                seen = seen and seen & state.cpus_without_hooks(state.containers[uid])
                new, problem = narrowed(state, state.containers[uid], request, seen or None)  # type: ignore[arg-type]
                assert not problem or new is state.containers[uid]
                state = state.changed(put=(new,))
        assert violations(state) == []
        _moved(before, state)
        for container in state.containers.values():
            given = state.desired_cpus(container)
            # Suppression does not move a container out of the limit of a hook.
            whole = state.with_be_limit(None).cpus_without_hooks(container)
            limit = whole | (container.placement.hook_extra_cpus if owned else CpuSet())
            assert given
            assert given <= limit


def _moved(before: NodeState, after: NodeState) -> None:
    """Return each container whose CPUs differ because a pool changed."""
    if before.pools == after.pools:
        return
    named = {*moves(before, after)[0], *moves(before, after)[1]}
    for key, container in after.containers.items():
        old = before.containers.get(key)
        if old is not None and before.desired_cpus(old) != after.desired_cpus(container):
            assert key in named
