"""What stays set aside for a pod of which a container was resized."""

from __future__ import annotations

import pytest

from proxy.engine.call_events import UpdateAccepted
from proxy.engine.container_events import ContainerCreated, CreateRequested, PhaseChanged
from proxy.engine.handle import handle
from proxy.engine.invariants import violations
from proxy.engine.node_effects import PlanDecided, PutRecord
from proxy.engine.node_events import HardwareChanged
from proxy.engine.owners import ReservationCpus
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NumaPolicy
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import PodRequests
from proxy.model.workload import Container, Phase, Pod, QosClass, SetAside
from tests.engine.test_pod_admission import MIB, RESERVED, empty, pod, resources, whole
from tests.testkit.changed_copy import changed_copy


def admitted(state: NodeState, arriving: Pod, cpus: int, mib: int = 0) -> NodeState:
    admission = admit(state, arriving, whole(cpus, mib))
    assert admission.verdict.admitted
    return admission.state


def created(
    state: NodeState, known: Pod, name: str, cpus: int, mib: int = 0, total: int = 0, total_mib: int = 0
) -> tuple[NodeState, list[str]]:
    """Return the state after a container was created again, and the keys of the records."""
    aside = state.pods[known.sandbox_id].reserved_for_pod
    arriving = changed_copy(known, reserved_for_pod=aside, total=whole(total, total_mib) if total else None)
    state, effects = handle(state, CreateRequested(arriving, name, 0, whole(cpus, mib), "t"))
    state, _ = handle(state, ContainerCreated("t", f"{name}-{len(state.containers)}"))
    assert violations(state) == []
    return state, [effect.key for effect in effects if isinstance(effect, PutRecord)]


def ended(state: NodeState, name: str) -> NodeState:
    for container in list(state.containers.values()):
        if container.name == name:
            state, _ = handle(state, PhaseChanged(container.id, Phase.EXITED))
    return state


def aside_of(state: NodeState) -> SetAside:
    aside = state.pods["s-a"].reserved_for_pod
    assert aside is not None
    return aside


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "cri"])
def test_cpus_that_a_smaller_container_does_not_need_are_free_again(*, reported: bool) -> None:
    known = pod("a", *([resources("c", 4)] if reported else []))
    state = admitted(empty(), known, 4)
    state, keys = created(state, known, "c", 4, total=4)
    assert (str(aside_of(state).cpus), keys) == ("0-1,8-9", [])
    if reported:
        known = changed_copy(known, requests=PodRequests("", (resources("c", 2),)))
    state, keys = created(ended(state, "c"), known, "c", 2, total=2)
    assert (str(aside_of(state).cpus), keys) == ("0,8", ["p/s-a"])
    other = admitted(state, pod("b"), 6).pods["s-b"].reserved_for_pod
    assert other is not None
    assert str(other.cpus) == "1-3,9-11"


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "cri"])
def test_a_larger_container_keeps_its_cpus_when_it_comes_back(*, reported: bool) -> None:
    known = pod("a", *([resources("c", 2)] if reported else []))
    state, _ = created(admitted(empty(), known, 2), known, "c", 2, total=2)
    if reported:
        known = changed_copy(known, requests=PodRequests("", (resources("c", 4),)))
    state, _ = created(ended(state, "c"), known, "c", 4, total=4)
    larger = next(c for c in state.containers.values() if c.phase is not Phase.EXITED)
    assert len(larger.placement.exclusive) == 4
    assert aside_of(state).cpus == larger.placement.exclusive


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "cri"])
@pytest.mark.parametrize("aligned", [NumaPolicy.NONE, NumaPolicy.SINGLE_NUMA_NODE])
def test_a_larger_container_is_decided_by_the_policy_if_its_own_part_is_too_small(
    *, reported: bool, aligned: NumaPolicy
) -> None:
    """All CPUs set aside for the pod would be enough for it, but its sibling has some of them."""

    def sized(cpus: int) -> Pod:
        return pod("a", *([resources("c", cpus), resources("d", 2)] if reported else []), aligned=aligned)

    rules = (TopologyPolicy.SINGLE_NUMA_NODE, Scope.POD)
    state = empty(*rules) if aligned is NumaPolicy.NONE else empty(TopologyPolicy.NONE, Scope.CONTAINER)
    state = admitted(state, sized(4), 6)
    for name, cpus in (("c", 4), ("d", 2)):
        state, _ = created(state, sized(4), name, cpus, total=6)
    state = ended(state, "c")
    larger, _ = created(state, sized(6), "c", 6, total=8)
    assert aside_of(larger).cpus == CpuSet.parse("0-3,8-11"), "node 0 has enough for it"
    state = state.with_reservation("other", ReservationCpus("other", CpuSet([3])))
    again = changed_copy(sized(6), reserved_for_pod=aside_of(state), total=whole(8))
    after, effects = handle(state, CreateRequested(again, "c", 1, whole(6), "t"))
    assert isinstance(effects[-1], PlanDecided)
    assert effects[-1].plan.verdict.reason == "TopologyAffinityError", "node 0 has only 5 for it"
    assert after.pods["s-a"] == state.pods["s-a"]


def test_a_container_that_shares_since_its_resize_leaves_nothing_set_aside() -> None:
    known = pod("a", resources("c", 4), resources("d", 2))
    state = admitted(empty(), known, 6)
    for name, cpus in (("c", 4), ("d", 2)):
        state, _ = created(state, known, name, cpus)
    others = next(c for c in state.containers.values() if c.name == "d").placement.exclusive
    known = changed_copy(known, requests=PodRequests("", (resources("c"), resources("d", 2))))
    state, effects = handle(
        ended(state, "c"),
        CreateRequested(changed_copy(known, reserved_for_pod=aside_of(state)), "c", 1, whole(0), "t"),
    )
    assert PutRecord("p/s-a", state.pods["s-a"]) in effects
    assert aside_of(state).cpus == others


def test_containers_that_have_ended_keep_what_was_set_aside_before_others() -> None:
    """Only the CRI is known: it does not matter which CPUs a later container would have got."""
    known = pod("a")
    state = admitted(empty(), known, 6)
    for name, cpus in (("c", 4), ("d", 2)):
        state, _ = created(state, known, name, cpus, total=6)
    cpus_of_d = next(c for c in state.containers.values() if c.name == "d").placement.exclusive
    state, _ = created(ended(ended(state, "d"), "c"), known, "c", 2, total=4)
    assert cpus_of_d < aside_of(state).cpus
    assert len(aside_of(state).cpus) == 4


def lsr() -> Pod:
    return changed_copy(pod("a"), qos=QosClass.LSR)


def restarted(state: NodeState, cpus: int) -> tuple[NodeState, Container, list[str]]:
    """Return the state after all containers of the pod have ended and one was created again."""
    for container in list(state.containers.values()):
        state = ended(state, container.name)
    state, keys = created(state, state.pods["s-a"], "c", cpus, total=cpus)
    again = next(c for c in state.containers.values() if c.phase is not Phase.EXITED)
    assert again.owner == "a"
    assert again.placement.exclusive == state.pods["s-a"].cpuset == aside_of(state).cpus
    return state, again, keys


def test_the_cpus_of_an_lsr_pod_follow_a_resize_once_all_its_containers_have_ended() -> None:
    state = admitted(empty(), lsr(), 4)
    for name in ("init", "c"):
        state, _ = created(state, state.pods["s-a"], name, 4, total=4)
        state = ended(state, "init")
    state, smaller, keys = restarted(state, 2)
    assert (str(smaller.placement.exclusive), keys) == ("0,8", ["p/s-a"])
    assert state.returning_cpus("other") == CpuSet(), "no ended container comes back to the former CPUs"
    other = admitted(state, pod("b"), 4).pods["s-b"].reserved_for_pod
    assert other is not None
    assert str(other.cpus) == "1-2,9-10"
    state, larger, _ = restarted(state, 6)
    assert len(larger.placement.exclusive) == 6
    state, same, keys = restarted(state, 6)
    assert (same.placement.exclusive, keys) == (larger.placement.exclusive, [])


def test_an_lsr_pod_keeps_its_cpus_while_one_of_its_containers_runs() -> None:
    state = admitted(empty(), lsr(), 4)
    for name in ("side", "c"):
        state, _ = created(state, state.pods["s-a"], name, 2, total=4)
    state, keys = created(ended(state, "c"), state.pods["s-a"], "c", 1, total=3)
    assert (str(state.owners["a"].cpus), str(aside_of(state).cpus), keys) == ("0-1,8-9", "0-1,8-9", [])


def test_an_lsr_pod_keeps_its_cpus_if_its_new_request_cannot_be_met() -> None:
    state, _ = created(admitted(empty(), lsr(), 4), lsr(), "first", 4, total=4)
    state, _ = created(state, state.pods["s-a"], "c", 4, total=4)
    state, kept, keys = restarted(state, 16)
    assert (str(kept.placement.exclusive), keys) == ("0-1,8-9", [])
    _, kept, _ = restarted(state, 0)
    assert str(kept.placement.exclusive) == "0-1,8-9"


def test_cpus_that_are_offline_stay_set_aside_only_for_lack_of_others() -> None:
    known = pod("a")
    state, _ = created(admitted(empty(), known, 7), known, "c", 2, total=7)
    others = aside_of(state).cpus - state.containers["c-1"].placement.exclusive
    gone = CpuSet(list(others)[:3])
    machine = state.node.machine
    smaller = changed_copy(machine, cpus=tuple(cpu for cpu in machine.cpus if cpu.id not in gone))
    state, _ = handle(state, HardwareChanged(smaller))
    state, _ = created(ended(state, "c"), known, "c", 2, total=6)
    assert len(aside_of(state).cpus) == 6
    assert len(aside_of(state).cpus & gone) == 2


def test_the_sum_is_ignored_if_it_says_nothing() -> None:
    known = pod("a")
    state, _ = created(admitted(empty(), known, 4), known, "c", 2)
    assert len(aside_of(state).cpus) == 4
    nothing = changed_copy(whole(0), cpu_shares=2)
    unknown = changed_copy(known, reserved_for_pod=aside_of(state), total=nothing)
    after, _ = handle(state, CreateRequested(unknown, "d", 0, whole(2), "t"))
    assert len(aside_of(after).cpus) == 4


def test_the_memory_of_a_pod_follows_its_containers() -> None:
    known = pod("a")
    state = empty(reserved_memory=RESERVED)
    state, _ = created(admitted(state, known, 2, 40), known, "c", 2, 30, total=2, total_mib=40)
    assert [block.size // MIB for block in aside_of(state).blocks] == [40]
    state, effects = handle(state, UpdateAccepted("c-1", 50 * MIB))
    assert [block.size // MIB for block in aside_of(state).blocks] == [60]
    assert state.memory is not None
    assert state.memory.nodes[0].table("memory").reserved == 60 * MIB
    assert PutRecord("p/s-a", state.pods["s-a"]) in effects
    state, effects = handle(state, UpdateAccepted("c-1", 50 * MIB))
    assert effects == ()
    state, _ = created(ended(state, "c"), known, "c", 2, 50, total=2, total_mib=55)
    assert [block.size // MIB for block in aside_of(state).blocks] == [55]
    assert state.memory is not None
    assert state.memory.nodes[0].table("memory").reserved == 55 * MIB


def test_a_container_without_a_part_changes_nothing() -> None:
    known = pod("a", resources("c", 4))
    state, _ = created(admitted(empty(), known, 4), known, "c", 4)
    before = aside_of(state)
    state, keys = created(state, known, "added", 2)
    assert (aside_of(state), keys) == (before, [])


def test_parts_stay_if_kubelet_does_not_report_the_pod_any_more() -> None:
    known = pod("a", resources("c", 4))
    state, _ = created(admitted(empty(), known, 4), known, "c", 4)
    before = aside_of(state)
    state, keys = created(ended(state, "c"), changed_copy(known, requests=None), "c", 2)
    assert (aside_of(state), keys) == (before, [])
