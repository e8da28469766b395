"""The adjustment in a server's answer: no echoed fields, and nothing that is not allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.koordinator import hook_pb2 as pb
from proxy.hooks.answers import CLEAR, NOTHING, Adjustment
from proxy.hooks.events import (
    PreCreateContainer,
    PreRunPodSandbox,
    PreStartContainer,
    PreUpdateContainerResources,
)
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Resources
from proxy.hooks.remote.convert import container_request, sandbox_request
from proxy.hooks.remote.handlers import ServerClaims, claims_of
from proxy.hooks.remote.merge import merge_answer
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet, Mask
from tests.testkit.changed_copy import changed_copy

POD = PodFacts(name="db", labels={"app": "db"}, annotations={"note": "x"}, cgroup_parent="/kubepods/pod1")
DECISION = Decision(
    cpus=CpuSet.parse("2-5"), mems=Mask((0,)), allowed=CpuSet.parse("2-5"), allowed_mems=Mask((0, 1))
)
CONTAINER = ContainerFacts(
    name="main",
    annotations={"a": "1"},
    envs={"PATH": "/bin", "TZ": "UTC"},
    resources=Resources(cpu_quota=200_000, cpu_shares=1024, oom_score_adj=900, unified={"memory.high": "9"}),
)
CREATE = PreCreateContainer(POD, CONTAINER, DECISION)
UPDATE = PreUpdateContainerResources(POD, CONTAINER, DECISION, Resources(cpu_shares=2))


def pinned(event: Any, cpus: str = "0-7", mems: str = "") -> Any:
    """The event with a client that requests CPUs and memory nodes by number."""
    requested = changed_copy(CONTAINER.resources, cpuset_cpus=cpus, cpuset_mems=mems)
    return changed_copy(event, container=changed_copy(CONTAINER, resources=requested))


def claims_of_answer(event: Any, so_far: Adjustment = NOTHING, **fields: Any) -> ServerClaims:
    """Answer with an echo that differs in the given fields of the resources or the answer."""
    reported = container_request(event, so_far)
    answer = pb.ContainerResourceHookResponse(
        container_annotations=reported.container_annotations,
        container_resources=reported.container_resources,
        pod_cgroup_parent=reported.pod_cgroup_parent,
        container_envs=reported.container_envs,
    )
    for name, value in fields.items():
        if name in answer.DESCRIPTOR.fields_by_name and isinstance(value, dict):
            getattr(answer, name).clear()
            getattr(answer, name).update(value)
        elif name in answer.DESCRIPTOR.fields_by_name:
            setattr(answer, name, value)
        elif isinstance(value, dict):
            answer.container_resources.unified.update(value)
        else:
            setattr(answer.container_resources, name, value)
    return claims_of(event, so_far, reported, merge_answer(reported, answer))


def adjustment_of(event: Any, so_far: Adjustment = NOTHING, **fields: Any) -> Adjustment:
    claims = claims_of_answer(event, so_far, **fields)
    assert not claims.dropped
    return claims.adjustment


@pytest.mark.parametrize("event", [CREATE, UPDATE, pinned(CREATE), pinned(UPDATE)])
def test_an_echo_and_an_empty_answer_are_no_adjustment(event: Any) -> None:
    assert not adjustment_of(event)
    so_far = Adjustment(cpus=CpuSet((3,)), cpu_shares=5, annotations={"b": "1"})
    assert not adjustment_of(event, so_far)
    reported = container_request(event)
    empty = merge_answer(reported, pb.ContainerResourceHookResponse())
    assert not claims_of(event, NOTHING, reported, empty).adjustment


@pytest.mark.parametrize("event", [CREATE, UPDATE])
def test_changed_fields_are_adjustments(event: Any) -> None:
    numbers = adjustment_of(
        event, cpu_period=1, cpu_quota=-1, cpu_shares=3, memory_limit_in_bytes=4,
        memory_swap_limit_in_bytes=5, oom_score_adj=6,
    )  # fmt: skip
    assert numbers == Adjustment(
        cpu_period=1, cpu_quota=-1, cpu_shares=3, memory_limit=4, memory_swap_limit=5, oom_score_adj=6
    )
    maps = adjustment_of(event, unified={"memory.low": "1"}, container_annotations={"a": "2", "b": "3"})
    assert maps == Adjustment(unified={"memory.low": "1"}, annotations={"a": "2", "b": "3"})


def test_environment_variables_are_compared_one_by_one() -> None:
    """A variable that the answer omits is cleared; the others keep their place."""
    more = adjustment_of(CREATE, container_envs={"PATH": "/bin", "TZ": "CET", "NEW": "1"})
    assert more == Adjustment(envs={"TZ": "CET", "NEW": "1"})
    assert adjustment_of(CREATE, container_envs={"PATH": "/bin"}) == Adjustment(envs={"TZ": CLEAR})
    assert not adjustment_of(CREATE, container_envs={})
    assert not adjustment_of(UPDATE, container_envs={"NEW": "1"})


def test_variables_that_are_not_text_are_kept() -> None:
    not_text = changed_copy(CONTAINER, envs={"ODD": "\udcff", "TZ": "UTC"})
    event = changed_copy(CREATE, container=not_text)
    assert adjustment_of(event, container_envs={"NEW": "1"}) == Adjustment(envs={"NEW": "1", "TZ": CLEAR})


def test_an_oom_score_of_zero_is_no_adjustment() -> None:
    """Koordinator's proxy would set it to zero."""
    assert not adjustment_of(CREATE, oom_score_adj=0)
    assert adjustment_of(CREATE, oom_score_adj=-998) == Adjustment(oom_score_adj=-998)


def test_fewer_cpus_are_an_adjustment_and_the_same_cpus_are_not() -> None:
    assert adjustment_of(CREATE, cpuset_cpus="2") == Adjustment(cpus=CpuSet((2,)))
    assert not adjustment_of(CREATE, cpuset_cpus="2,3,4,5")
    assert adjustment_of(CREATE, cpuset_mems="1") == Adjustment(mems=Mask((1,)))


def test_cpus_that_hooks_may_not_give_are_left_out_and_the_rest_counts() -> None:
    claims = claims_of_answer(CREATE, cpuset_cpus="0-3", cpuset_mems="0,7", cpu_shares=9)
    assert claims.adjustment == Adjustment(cpus=CpuSet((2, 3)), cpu_shares=9)
    assert claims.dropped["cpuset_cpus"].startswith("0-1: ")
    assert claims.dropped["cpuset_mems"].startswith("7: ")
    claims = claims_of_answer(CREATE, cpuset_cpus="8-9", cpu_shares=9)
    assert claims.adjustment == Adjustment(cpu_shares=9)
    claims = claims_of_answer(CREATE, cpuset_cpus="0-7")
    assert not claims.adjustment


def test_cpu_lists_with_empty_items_are_read() -> None:
    """Koordlet joins the pools of all nodes with commas, empty pools included."""
    assert adjustment_of(CREATE, cpuset_cpus=",2,,3,") == Adjustment(cpus=CpuSet((2, 3)))
    assert not adjustment_of(pinned(CREATE), cpuset_cpus=",")
    assert not adjustment_of(pinned(CREATE), cpuset_cpus=" , ")


def test_owned_cpus_may_be_set_if_allowed() -> None:
    wide = changed_copy(CREATE, decision=changed_copy(DECISION, allowed=CpuSet(range(8))))
    assert adjustment_of(wide, cpuset_cpus="0-7") == Adjustment(cpus=CpuSet(range(8)))


def test_a_cpuset_does_not_override_an_earlier_hooks_smaller_one() -> None:
    so_far = Adjustment(cpus=CpuSet((3,)), mems=Mask((1,)))
    assert not adjustment_of(CREATE, so_far, cpuset_cpus="2-5", cpuset_mems="0-1")
    assert not adjustment_of(pinned(CREATE), so_far, cpuset_cpus="", cpuset_mems="")
    assert adjustment_of(CREATE, so_far, cpuset_cpus="2") == Adjustment(cpus=CpuSet((2,)))
    assert adjustment_of(CREATE, Adjustment(cpus=CLEAR), cpuset_cpus="2") == Adjustment(cpus=CpuSet((2,)))
    assert not adjustment_of(CREATE, Adjustment(cpus=CLEAR))


@pytest.mark.parametrize("event", [CREATE, UPDATE])
def test_an_empty_cpuset_clears_the_clients_one(event: Any) -> None:
    """Koordlet clears in this way the CPUs that kubelet's CPU manager writes for BE pods."""
    assert not adjustment_of(event, cpuset_cpus="", cpuset_mems="")
    assert adjustment_of(pinned(event), cpuset_cpus="") == Adjustment(cpus=CLEAR)
    assert adjustment_of(pinned(event, "", "0"), cpuset_mems="") == Adjustment(mems=CLEAR)
    if event is UPDATE:
        requested = changed_copy(UPDATE, asked=Resources(cpuset_cpus="0-7", cpuset_mems="0"))
        assert adjustment_of(requested, cpuset_cpus="", cpuset_mems="") == Adjustment(cpus=CLEAR, mems=CLEAR)


@pytest.mark.parametrize("name", ["cpuset_cpus", "cpuset_mems"])
@pytest.mark.parametrize("text", ["all", "3-1", "-1", "99999999", "x" * 10_000])
def test_an_invalid_list_fails_the_answer(name: str, text: str) -> None:
    with pytest.raises(HookError, match=rf"^cannot use the answer of a hook server: {name} is '") as raised:
        claims_of_answer(CREATE, NOTHING, **{name: text})
    assert len(str(raised.value)) < 200


def test_a_container_call_cannot_move_its_pod() -> None:
    claims = claims_of_answer(CREATE, pod_cgroup_parent="/else", cpu_shares=9)
    assert claims.adjustment == Adjustment(cpu_shares=9)
    assert "/else" in claims.dropped["pod_cgroup_parent"]


def test_changed_fields_of_a_sandbox_are_adjustments() -> None:
    event = PreRunPodSandbox(POD)
    reported = sandbox_request(event)

    def of(**fields: Any) -> Adjustment:
        return claims_of(
            event, NOTHING, reported, merge_answer(reported, pb.PodSandboxHookResponse(**fields))
        ).adjustment

    assert not of()
    assert not of(labels={"app": "db"}, annotations={"note": "x"}, cgroup_parent="/kubepods/pod1")
    adjustment = of(
        labels={"b": "1"}, annotations={"note": "y"}, cgroup_parent="/else", resources={"cpu_period": 5}
    )
    assert adjustment == Adjustment(labels={"b": "1"}, annotations={"note": "y"}, cgroup_parent="/else")


def test_answers_at_other_points_are_no_adjustment() -> None:
    event = PreStartContainer(POD, CONTAINER, DECISION)
    assert not claims_of_answer(event, cpu_shares=9).adjustment


_SETS = st.sets(st.integers(0, 9)).map(lambda ids: str(CpuSet(ids)))
_NUMBER = st.integers(-2, 2000)


@given(
    cpus=_SETS, requested=_SETS, chosen=st.none() | st.sets(st.integers(2, 5), min_size=1), numbers=st.data()
)
def test_no_answer_sets_cpus_that_are_not_allowed(
    cpus: str, requested: str, chosen: set[int] | None, numbers: st.DataObject
) -> None:
    so_far = NOTHING if chosen is None else Adjustment(cpus=CpuSet(chosen))
    fields = {name: numbers.draw(_NUMBER) for name in ("cpu_shares", "cpu_quota", "oom_score_adj")}
    adjustment = claims_of_answer(pinned(CREATE, requested), so_far, cpuset_cpus=cpus, **fields).adjustment
    for name, value in adjustment.set_fields():
        if isinstance(value, CpuSet):
            assert value
            assert value <= DECISION.allowed
            assert value <= CpuSet.parse(cpus)
        elif value is CLEAR:
            assert (name, cpus, chosen) == ("cpus", "", None)
            assert requested
        else:
            assert value == fields[name] != 0
