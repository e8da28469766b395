"""The pods to which the plan is applied, and changes of these pods in steps."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from proxy.engine.container_events import PhaseChanged
from proxy.engine.enforcement import (
    applies_to,
    counts,
    is_applied_to_all,
    is_selected,
    observes_any,
    plan_may_be_in_effect,
    was_applied_to,
)
from proxy.engine.enforcement_state import APPLIED_TO_ALL, ENFORCEMENT_RECORD, Enforcement
from proxy.engine.handle import handle
from proxy.engine.node_effects import EnforcementStep, PutRecord
from proxy.engine.node_events import (
    EnforcementChanged,
    EnforcementPaused,
    EnforcementRead,
    EnforcementStepDone,
    EnforcementStepDue,
    EnforcementStepFailed,
    ModeChanged,
)
from proxy.engine.pod_events import PodLearned
from proxy.engine.state import NodeState
from proxy.model.admission import Namespaces
from proxy.model.idset import CpuSet, Mask
from proxy.model.label_selector import LabelSelector
from proxy.model.mode import NodeMode
from proxy.model.pod_selection import ALL_PODS, PodSelection, number_of
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from tests.engine.test_handle import FOUR, LS, LSE, NODE, OWNED
from tests.testkit.playbook import Playbook

OBSERVE, ENFORCE = NodeMode.OBSERVE, NodeMode.ENFORCE
RELEASING, RELEASED = NodeMode.RELEASING, NodeMode.RELEASED
NONE = PodSelection(percent=0)


def recorded(
    mode: NodeMode, selection: PodSelection, lagging: str = "", moving: str = "", *, paused: bool = False
) -> PutRecord:
    """Return the record of a node; keys are separated by spaces."""
    value = Enforcement(selection, frozenset(lagging.split()), frozenset(moving.split()), paused)
    return PutRecord(ENFORCEMENT_RECORD, value.dump(mode))


@pytest.mark.parametrize("mode", list(NodeMode))
def test_the_mode_decides_for_all_pods(mode: NodeMode) -> None:
    state, _ = handle(NodeState.empty(NODE), ModeChanged(mode))
    assert applies_to(state, LS) is (mode is NodeMode.ENFORCE)
    assert applies_to(state, None) is (mode is NodeMode.ENFORCE)
    assert observes_any(state, [LS]) is (mode is not NodeMode.ENFORCE)


def test_lagging_pods_are_counted_by_the_change_that_is_due() -> None:
    state, _ = handle(structs.replace(OWNED, mode=OBSERVE), ModeChanged(ENFORCE))
    found = counts(state)
    assert (found.applied, found.to_apply, found.to_give_back) == (0, 2, 0)
    state, _ = handle(structs.replace(OWNED, mode=ENFORCE), EnforcementChanged(NONE))
    found = counts(state)
    assert (found.applied, found.to_apply, found.to_give_back) == (2, 0, 2)


def test_a_release_that_is_given_up_in_mode_observe_goes_on_in_steps() -> None:
    scenario = Playbook(structs.replace(OWNED, mode=OBSERVE), handle)
    read = EnforcementRead(ENFORCE, APPLIED_TO_ALL)
    assert scenario >> read << recorded(OBSERVE, ALL_PODS, "ls lse")
    assert scenario >> ModeChanged(RELEASING) << PutRecord(ENFORCEMENT_RECORD, None)
    assert all(plan_may_be_in_effect(scenario.state, pod) for pod in (LS, LSE))
    assert scenario >> ModeChanged(OBSERVE) << recorded(OBSERVE, ALL_PODS, "ls lse")


def test_sharing_pods_are_enforced_before_owners() -> None:
    scenario = Playbook(structs.replace(OWNED, mode=OBSERVE), handle)
    assert scenario >> ModeChanged(ENFORCE) << recorded(ENFORCE, ALL_PODS, "ls lse")
    assert [applies_to(scenario.state, pod) for pod in (LS, LSE)] == [False, False]
    assert applies_to(scenario.state, None)
    scenario >> EnforcementStepDue(1) << recorded(ENFORCE, ALL_PODS, "lse", "ls") << EnforcementStep(("ls",))
    assert [applies_to(scenario.state, pod) for pod in (LS, LSE)] == [True, False]
    # The step is repeated until it is over: a daemon may have been killed in it.
    scenario >> EnforcementStepDue(1) << EnforcementStep(("ls",))
    scenario >> EnforcementStepDone(frozenset({"ls"})) << recorded(ENFORCE, ALL_PODS, "lse")
    scenario >> EnforcementStepDue(1) << recorded(ENFORCE, ALL_PODS, "", "lse") << EnforcementStep(("lse",))
    assert scenario >> EnforcementStepDone(frozenset({"lse"})) << PutRecord(ENFORCEMENT_RECORD, None)
    assert scenario.state.enforcement is APPLIED_TO_ALL
    assert bool(scenario >> EnforcementStepDue(1))


def test_owners_are_released_before_sharing_pods() -> None:
    scenario = Playbook(OWNED, handle)
    assert scenario >> ModeChanged(OBSERVE) << recorded(OBSERVE, ALL_PODS, "ls lse")
    assert [applies_to(scenario.state, pod) for pod in (LS, LSE)] == [True, True]
    scenario >> EnforcementStepDue(1) << recorded(OBSERVE, ALL_PODS, "ls", "lse") << EnforcementStep(("lse",))
    assert [applies_to(scenario.state, pod) for pod in (LS, LSE)] == [True, False]
    assert observes_any(scenario.state, [LS, LSE])
    assert not observes_any(scenario.state, [LS])
    # Back again, in the middle: the step continues, and the pod that it releases lags.
    scenario >> ModeChanged(ENFORCE) << recorded(ENFORCE, ALL_PODS, "lse", "lse")
    assert [applies_to(scenario.state, pod) for pod in (LS, LSE)] == [True, False]
    scenario >> EnforcementStepDue(1) << EnforcementStep(("lse",))
    scenario >> EnforcementStepDone(frozenset({"lse"})) << recorded(ENFORCE, ALL_PODS, "lse")
    assert (
        scenario
        >> EnforcementStepDue(1)
        << recorded(ENFORCE, ALL_PODS, "", "lse")
        << EnforcementStep(("lse",))
    )


def test_a_step_is_finished_however_often_the_target_changes_during_it() -> None:
    scenario = Playbook(OWNED, handle)
    scenario >> ModeChanged(OBSERVE) << recorded(OBSERVE, ALL_PODS, "ls lse")
    scenario >> EnforcementStepDue(1) << recorded(OBSERVE, ALL_PODS, "ls", "lse") << EnforcementStep(("lse",))
    scenario >> ModeChanged(ENFORCE) << recorded(ENFORCE, ALL_PODS, "lse", "lse")
    scenario >> ModeChanged(OBSERVE) << recorded(OBSERVE, ALL_PODS, "ls", "lse")
    assert not applies_to(scenario.state, LSE)
    assert plan_may_be_in_effect(scenario.state, LSE)  # its cpuset is not released yet
    scenario >> EnforcementStepDue(1) << EnforcementStep(("lse",))
    scenario >> EnforcementStepDone(frozenset({"lse"})) << recorded(OBSERVE, ALL_PODS, "ls")
    assert (
        scenario >> EnforcementStepDue(1) << recorded(OBSERVE, ALL_PODS, "", "ls") << EnforcementStep(("ls",))
    )


def test_a_step_that_fails_after_a_change_of_target_leaves_the_pod_observed() -> None:
    scenario = Playbook(structs.replace(OWNED, mode=OBSERVE), handle)
    scenario >> ModeChanged(ENFORCE) << recorded(ENFORCE, ALL_PODS, "ls lse")
    scenario >> EnforcementStepDue(1) << recorded(ENFORCE, ALL_PODS, "lse", "ls") << EnforcementStep(("ls",))
    scenario >> ModeChanged(OBSERVE) << recorded(OBSERVE, ALL_PODS, "ls", "ls")
    assert applies_to(scenario.state, LS)  # the step continues, and a later step releases the pod
    failed = frozenset({"ls"})
    scenario >> EnforcementStepFailed(failed) << recorded(OBSERVE, ALL_PODS, "", "ls")
    assert not applies_to(scenario.state, LS)
    assert bool(scenario >> EnforcementStepFailed(failed))  # that was so already
    scenario >> EnforcementStepDue(1) << EnforcementStep(("ls",))
    assert scenario >> EnforcementStepDone(failed) << recorded(OBSERVE, ALL_PODS)


def test_a_failed_step_changes_nothing_for_pods_outside_of_it() -> None:
    scenario = Playbook(OWNED, handle)
    scenario >> ModeChanged(OBSERVE) << recorded(OBSERVE, ALL_PODS, "ls lse")
    scenario >> EnforcementStepDue(1) << recorded(OBSERVE, ALL_PODS, "ls", "lse") << EnforcementStep(("lse",))
    assert scenario >> EnforcementStepFailed(frozenset({"lse"})), "the plan does not apply to it any more"
    assert scenario >> EnforcementStepFailed(frozenset({"ls", "lse"}))
    assert [applies_to(scenario.state, pod) for pod in (LS, LSE)] == [True, False]


def test_a_pause_lets_the_current_step_finish() -> None:
    scenario = Playbook(structs.replace(OWNED, mode=OBSERVE), handle)
    scenario >> ModeChanged(ENFORCE) << recorded(ENFORCE, ALL_PODS, "ls lse")
    scenario >> EnforcementStepDue(1) << recorded(ENFORCE, ALL_PODS, "lse", "ls") << EnforcementStep(("ls",))
    scenario >> EnforcementPaused(True) << recorded(ENFORCE, ALL_PODS, "lse", "ls", paused=True)
    scenario >> EnforcementStepDue(1) << EnforcementStep(("ls",))
    scenario >> EnforcementStepDone(frozenset({"ls"})) << recorded(ENFORCE, ALL_PODS, "lse", paused=True)
    assert bool(scenario >> EnforcementStepDue(5))
    scenario >> EnforcementPaused(False) << recorded(ENFORCE, ALL_PODS, "lse")
    assert (
        scenario
        >> EnforcementStepDue(5)
        << recorded(ENFORCE, ALL_PODS, "", "lse")
        << EnforcementStep(("lse",))
    )


def test_a_pod_that_cannot_be_enforced_lags_again_after_other_pods() -> None:
    scenario = Playbook(structs.replace(OWNED, mode=OBSERVE), handle)
    scenario >> ModeChanged(ENFORCE) << recorded(ENFORCE, ALL_PODS, "ls lse")
    scenario >> EnforcementStepDue(1) << recorded(ENFORCE, ALL_PODS, "lse", "ls") << EnforcementStep(("ls",))
    failed = frozenset({"ls"})
    scenario >> EnforcementStepFailed(failed) << recorded(ENFORCE, ALL_PODS, "ls lse", "ls")
    assert not applies_to(scenario.state, LS)
    scenario >> EnforcementStepDue(1) << EnforcementStep(("ls",))  # the written cpuset is released
    scenario >> EnforcementStepDone(failed) << recorded(ENFORCE, ALL_PODS, "ls lse")
    assert (
        scenario
        >> EnforcementStepDue(1, failed)
        << recorded(ENFORCE, ALL_PODS, "ls", "lse")
        << EnforcementStep(("lse",))
    )


def test_pods_whose_containers_have_exited_do_not_lag() -> None:
    scenario = Playbook(structs.replace(OWNED, mode=OBSERVE), handle)
    scenario >> ModeChanged(ENFORCE) << recorded(ENFORCE, ALL_PODS, "ls lse")
    scenario.state, _ = handle(scenario.state, PhaseChanged("ls", Phase.EXITED))
    assert (
        scenario
        >> EnforcementStepDue(2)
        << recorded(ENFORCE, ALL_PODS, "", "lse")
        << EnforcementStep(("lse",))
    )


def test_a_new_pod_is_treated_according_to_its_target() -> None:
    state, _ = handle(structs.replace(OWNED, mode=OBSERVE), ModeChanged(ENFORCE))
    new = Pod("s-new", "new", "ns", "new")
    assert applies_to(state, new)
    state, _ = handle(state, EnforcementChanged(PodSelection(Namespaces(("other",)))))
    assert not applies_to(state, new)


def test_the_known_labels_of_a_pod_count() -> None:
    """A container keeps those that its pod had when it was created, and the ledger keeps none."""
    selection = PodSelection(labels=LabelSelector((("app", "a"),)))
    chosen, other = (structs.replace(LS, labels=(("app", value),)) for value in "ab")
    state = structs.replace(OWNED, enforcement=Enforcement(selection))
    for known in (chosen, other, LS):
        there = state.with_pod(known)
        assert {applies_to(there, pod) for pod in (LS, chosen, other)} == {known is chosen}
    arriving = structs.replace(chosen, sandbox_id="not-known")
    assert applies_to(state, arriving)


def test_other_labels_change_all_containers_of_a_pod_together() -> None:
    selection = PodSelection(labels=LabelSelector((("app", "a"),)))
    chosen, other = (structs.replace(LS, labels=(("app", value),)) for value in "ab")
    owned = OWNED.with_pod(chosen).changed(put=[structs.replace(OWNED.containers["ls"], pod=chosen)])
    state = structs.replace(owned, enforcement=Enforcement(selection))
    for event in (PodLearned(other), EnforcementStepDue(2), EnforcementStepDone(frozenset({"ls"}))):
        applied = isinstance(event, PodLearned)
        state, _ = handle(state, event)
        assert {applies_to(state, pod) for pod in (state.pods["s-ls"], state.containers["ls"].pod)} == {
            applied
        }
    assert not state.enforcement.lagging


def test_labels_that_become_known_late_move_no_container_at_once() -> None:
    """A ledger of an earlier version has no labels."""
    selection = PodSelection(labels=LabelSelector((("app", "a"),)))
    state = structs.replace(OWNED, enforcement=Enforcement(selection))
    scenario = Playbook(state, handle)
    labelled = structs.replace(LS, labels=(("app", "a"),))
    (scenario >> PodLearned(labelled) << PutRecord("p/s-ls", labelled) << recorded(ENFORCE, selection, "ls"))
    assert not applies_to(scenario.state, LS)
    assert (
        scenario
        >> EnforcementStepDue(1)
        << recorded(ENFORCE, selection, "", "ls")
        << EnforcementStep(("ls",))
    )
    assert applies_to(scenario.state, LS)
    # Other labels in the middle of the step: the step continues, and the pod is released after it.
    (scenario >> PodLearned(LS) << PutRecord("p/s-ls", LS) << recorded(ENFORCE, selection, "ls", "ls"))
    assert applies_to(scenario.state, LS)
    assert scenario >> EnforcementStepDue(1) << EnforcementStep(("ls",))


def test_a_release_and_its_end_concern_all_pods_at_once() -> None:
    state, _ = handle(OWNED, EnforcementChanged(PodSelection(Namespaces(("other",)))))
    state, _ = handle(state, EnforcementStepDue(1))
    treated = [was_applied_to(state, pod) for pod in (LS, LSE)]
    assert sorted(treated) == [False, True]
    left, effects = handle(state, ModeChanged(NodeMode.RELEASING))
    assert (effects, applies_to(left, LS), applies_to(left, LSE), applies_to(left, None)) == (
        (),
        False,
        False,
        False,
    )
    assert [was_applied_to(left, pod) for pod in (LS, LSE)] == treated
    assert handle(left, EnforcementStepDue(1)) == (left, ())
    back, _ = handle(left, ModeChanged(ENFORCE))
    assert [applies_to(back, pod) for pod in (LS, LSE)] == treated
    released, _ = handle(left, ModeChanged(RELEASED))
    changed, _ = handle(released, EnforcementChanged(ALL_PODS))
    back, _ = handle(changed, ModeChanged(ENFORCE))
    assert back.enforcement is APPLIED_TO_ALL


def test_a_release_restores_pods_that_are_deselected_during_it() -> None:
    """These pods have the CPUs of the plan until the release has reached them, or is given up."""
    left, _ = handle(OWNED, ModeChanged(RELEASING))
    changed, effects = handle(left, EnforcementChanged(NONE))
    assert all(plan_may_be_in_effect(changed, pod) for pod in (LS, LSE))
    assert effects == (recorded(ENFORCE, NONE, "ls lse"),)
    back, _ = handle(changed, ModeChanged(ENFORCE))
    assert all(applies_to(back, pod) for pod in (LS, LSE))
    released, _ = handle(changed, ModeChanged(RELEASED))
    assert not any(plan_may_be_in_effect(released, pod) for pod in (LS, LSE))


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("mode", [OBSERVE, ENFORCE])
def test_no_pod_lags_after_a_release(mode: NodeMode, paused: bool) -> None:
    """The release restores pods that the step had not reached together with all others."""
    before = structs.replace(OWNED, mode=ENFORCE if mode is OBSERVE else OBSERVE)
    scenario = Playbook(before, handle)
    scenario >> ModeChanged(mode) << recorded(mode, ALL_PODS, "ls lse")
    first = "lse" if mode is OBSERVE else "ls"
    other = "ls" if mode is OBSERVE else "lse"
    scenario >> EnforcementStepDue(1) << recorded(mode, ALL_PODS, other, first) << EnforcementStep((first,))
    if paused:
        scenario >> EnforcementPaused(True) << recorded(mode, ALL_PODS, other, first, paused=True)
    treated = [was_applied_to(scenario.state, pod) for pod in (LS, LSE)]
    lagging = other
    if mode is OBSERVE:  # a release counts as mode enforce: the pod that is observed already lags
        lagging = first
        scenario >> ModeChanged(RELEASING) << recorded(ENFORCE, ALL_PODS, first, first, paused=paused)
    else:
        assert scenario >> ModeChanged(RELEASING)  # without a record: it may be given up
    assert (scenario.state.enforcement.lagging, scenario.state.enforcement.moving) == ({lagging}, {first})
    assert [was_applied_to(scenario.state, pod) for pod in (LS, LSE)] == treated
    scenario >> ModeChanged(RELEASED) << recorded(ENFORCE, ALL_PODS, paused=paused)
    assert scenario.state.enforcement == Enforcement(paused=paused)
    for back in (OBSERVE, ENFORCE):
        after, effects = handle(scenario.state, ModeChanged(back))
        assert {applies_to(after, pod) for pod in (None, LS, LSE)} == {back is ENFORCE}
        assert effects == (() if back is ENFORCE else (recorded(OBSERVE, ALL_PODS, paused=paused),))


@pytest.mark.parametrize("known", [ENFORCE, OBSERVE])
def test_a_daemon_that_starts_on_a_released_node_knows_of_no_lag(known: NodeMode) -> None:
    """The last daemon was killed before it recorded that."""
    record = Enforcement(ALL_PODS, frozenset({"ls"}), frozenset({"lse"}))
    state = structs.replace(OWNED, mode=RELEASED)
    after, effects = handle(state, EnforcementRead(known, record))
    assert (after.enforcement, effects) == (APPLIED_TO_ALL, (recorded(ENFORCE, ALL_PODS),))
    after, _ = handle(structs.replace(OWNED, mode=RELEASING), EnforcementRead(ENFORCE, record))
    assert (after.enforcement.lagging, after.enforcement.moving) == ({"ls"}, {"lse"})


@pytest.mark.parametrize("mode", [OBSERVE, ENFORCE])
@pytest.mark.parametrize(
    "value",
    [
        Enforcement(NONE),
        Enforcement(ALL_PODS, frozenset({"u"})),
        Enforcement(ALL_PODS, frozenset({"u", "v"}), frozenset({"v"}), paused=True),
        Enforcement(ALL_PODS, paused=True),
    ],
)
def test_an_enforcement_record_survives_a_round_trip(mode: NodeMode, value: Enforcement) -> None:
    record = value.dump(mode)
    assert record is not None
    assert Enforcement.load(record) == (mode, value)


def test_only_an_application_to_every_pod_needs_no_record() -> None:
    assert APPLIED_TO_ALL.dump(ENFORCE) is None
    assert (APPLIED_TO_ALL.dump(OBSERVE) or {}).get("mode") == "observe"


@pytest.mark.parametrize(
    ("mode", "value", "to_all", "to_some"),
    [
        (ENFORCE, APPLIED_TO_ALL, True, True),
        (ENFORCE, Enforcement(ALL_PODS, paused=True), True, True),
        (ENFORCE, Enforcement(ALL_PODS, frozenset({"u"})), False, True),
        (ENFORCE, Enforcement(NONE), False, True),
        (OBSERVE, APPLIED_TO_ALL, False, False),
        (OBSERVE, Enforcement(NONE), False, False),
        (OBSERVE, Enforcement(ALL_PODS, frozenset({"u"})), False, True),
        (NodeMode.RELEASING, Enforcement(ALL_PODS, frozenset({"u"})), False, False),
    ],
)
def test_whether_the_plan_may_be_applied_to_a_pod_that_is_not_known(
    mode: NodeMode, value: Enforcement, to_all: bool, to_some: bool
) -> None:
    state = structs.replace(OWNED, mode=mode, enforcement=value)
    assert (is_applied_to_all(state), applies_to(state, None)) == (to_all, to_some)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"mode": "enforce"},
        {**Enforcement(NONE).dump(ENFORCE), "selection": []},  # type: ignore[dict-item]
        {**Enforcement(NONE).dump(ENFORCE), "mode": "x"},
        {**Enforcement(NONE).dump(ENFORCE), "lagging": 1},
    ],  # type: ignore[dict-item]
)
def test_an_invalid_enforcement_record_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"record|NodeMode"):
        Enforcement.load(record)


# -- properties ---------------------------------------------------------------------------------------------

SELECTIONS = st.builds(
    PodSelection,
    st.sampled_from([Namespaces(("*",)), Namespaces(("a",)), Namespaces(("b", "c"))]),
    st.sampled_from([LabelSelector(), LabelSelector((("tier", "x"),))]),
    st.sampled_from([0, 10, 50, 90, 100]),
)
CHANGES = (
    st.builds(ModeChanged, st.sampled_from([OBSERVE, ENFORCE]))
    | st.builds(EnforcementChanged, SELECTIONS)
    | st.builds(EnforcementPaused, st.booleans())
)
STEPS = st.builds(EnforcementStepDue, st.integers(1, 4))
ENDS = st.sampled_from(["done", "failed", "killed"])


def pod(at: int) -> Pod:
    labels = (("tier", "x"),) if at % 3 else ()
    owns = at % 4 == 0
    qos, kube = (QosClass.LSE, KubeQos.GUARANTEED) if owns else (QosClass.LS, KubeQos.BURSTABLE)
    return Pod(f"s{at}", f"uid-{at}", "abc"[at % 3], f"p{at}", qos=qos, kube_qos=kube, labels=labels)


def loaded(size: int) -> NodeState:
    """Return an observed node with pods, of which one in four owns a CPU."""
    pods = [pod(at) for at in range(size)]
    containers = []
    for at, one in enumerate(pods):
        if one.qos is QosClass.LSE:
            place = Placement(Pool.OWN, CpuSet((at // 4,)), Mask((0, 1)), excludes_be=True)
            containers.append(Container(f"c{at}", "c", one, FOUR, place, Phase.RUNNING, 0, f"{one.key}/c"))
        else:
            place = Placement(Pool.SHARED, CpuSet(), Mask((0, 1)))
            containers.append(Container(f"c{at}", "c", one, Request(), place, Phase.RUNNING))
    return structs.replace(NodeState.of(NODE, pods, containers), mode=OBSERVE)


def treated(state: NodeState) -> dict[str, bool]:
    return {key: applies_to(state, one) for key, one in state.pods.items()}


def changed(before: NodeState, after: NodeState) -> set[str]:
    old, new = treated(before), treated(after)
    return {key for key in new if old[key] is not new[key]}


def check(state: NodeState) -> None:
    """No container that is enforced is on the CPUs of another owner that is enforced, or nowhere."""
    there = [c for c in state.containers.values() if applies_to(state, c.pod)]
    for one, other in itertools.combinations(there, 2):
        if Pool.OWN in (one.placement.pool, other.placement.pool):
            assert state.desired_cpus(one).isdisjoint(state.desired_cpus(other))
    assert all(state.desired_cpus(c) for c in there)


def restarted(state: NodeState) -> NodeState:
    """Return the state of a daemon that is started with the same configuration after this one was killed."""
    record = state.enforcement.dump(state.mode)
    mode, known = (
        (ENFORCE, APPLIED_TO_ALL) if record is None else Enforcement.load(json.loads(json.dumps(record)))
    )
    fresh = structs.replace(state, enforcement=Enforcement(state.enforcement.selection))
    after, effects = handle(fresh, EnforcementRead(mode, known))
    assert effects == ()
    return after


@settings(deadline=None)
@given(st.lists(CHANGES | st.tuples(STEPS, ENDS), max_size=12), st.integers(1, 16))
def test_pods_are_moved_in_bounded_steps_after_any_change(
    events: list[ModeChanged | EnforcementChanged | EnforcementPaused | tuple[EnforcementStepDue, str]],
    size: int,
) -> None:
    state, begun = loaded(size), set[str]()  # pods of steps that are not done
    for event in (ModeChanged(ENFORCE), *events):
        if not isinstance(event, tuple):
            after, _ = handle(state, event)
            assert changed(state, after) == set()  # running pods do not change at once
            state = restarted(after)
            assert state.enforcement == after.enforcement
            assert begun <= state.enforcement.moving
            continue
        due, end = event
        repeated = bool(state.enforcement.moving)
        after, effects = handle(state, due)
        keys = next((set(each.keys) for each in effects if isinstance(each, EnforcementStep)), set())
        assert len(keys) <= 4
        assert repeated or len(keys) <= due.count
        assert changed(state, after) <= {f"s{key[4:]}" for key in keys}
        assert not (state.enforcement.paused and not repeated and keys)
        check(after)
        state = restarted(after)
        assert state.enforcement == after.enforcement
        begun |= keys
        if end == "failed":
            state, _ = handle(state, EnforcementStepFailed(frozenset(keys)))
            now = treated(state)
            assert not any(now[f"s{key[4:]}"] for key in keys)
        if end != "killed":
            state, _ = handle(state, EnforcementStepDone(frozenset(keys)))
            begun -= keys
    # In the end every pod is treated according to its target.
    state, _ = handle(state, EnforcementPaused(False))
    for _ in range(2 * size + 1):
        state, effects = handle(state, EnforcementStepDue(1))
        check(state)
        state, _ = handle(state, EnforcementStepDone(state.enforcement.moving))
    assert not state.enforcement.lagging
    assert not state.enforcement.moving
    assert treated(state) == {key: is_selected(state, one) for key, one in state.pods.items()}
    found = counts(state)
    assert (found.applied + found.observed, found.to_apply, found.to_give_back, found.moving) == (
        size,
        0,
        0,
        0,
    )
    assert found.observed_containers == found.observed == list(treated(state).values()).count(False)


@settings(deadline=None)
@given(st.integers(1, 16), st.lists(st.integers(0, 100), min_size=2, max_size=5).map(sorted))
def test_a_growing_percentage_only_adds_pods(size: int, percents: list[int]) -> None:
    state, applied = structs.replace(loaded(size), mode=ENFORCE, enforcement=Enforcement(NONE)), set[str]()
    for percent in percents:
        state, _ = handle(state, EnforcementChanged(PodSelection(percent=percent)))
        for _ in range(size + 1):
            state, _ = handle(state, EnforcementStepDue(1))
            now = {key for key, is_applied in treated(state).items() if is_applied}
            assert applied <= now
            applied = now
            state, _ = handle(state, EnforcementStepDone(state.enforcement.moving))
        assert applied == {one.sandbox_id for one in state.pods.values() if number_of(one.key) < percent}
