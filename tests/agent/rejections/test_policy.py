"""Which rejected pods end, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from proxy.agent.objects.node_page import Rejection
from proxy.agent.rejections.policy import (
    CONTROLLER_LONGEST_S,
    CONTROLLER_S,
    EVERYWHERE_REASONS,
    FORGET_S,
    EndedPods,
    EndingDecision,
    PodAtServer,
    decide,
    frequent_rejections,
    pod_at_server,
)
from proxy.config.cluster import RejectedPodsConfig, RejectedPolicy

EVICT = RejectedPodsConfig(policy=RejectedPolicy.EVICT, after=3, per_minute=4)
FAIL = replace(EVICT, policy=RejectedPolicy.FAIL)
OWNED = PodAtServer(("ReplicaSet", "rs-1"), cpus=4)
NOTHING = EndedPods()


def rejection(number: int = 1, **changed: Any) -> Rejection:
    known = Rejection(f"ns/web-{number}", f"u{number}", "main", "TopologyAffinityError", "no room", 3)
    return structs.replace(known, **changed)


def decided(
    *rejections: Rejection,
    pod: PodAtServer | None = OWNED,
    settings: RejectedPodsConfig = EVICT,
    done: EndedPods = NOTHING,
    now: float = 1000.0,
) -> EndingDecision:
    pods = {} if pod is None else {each.uid: pod for each in rejections}
    return decide(frequent_rejections(rejections, settings), pods, settings, done, now)


def test_nothing_is_done_before_enough_tries() -> None:
    assert decided(rejection(count=2)).ends == ()
    (end,) = decided(rejection(count=3)).ends
    assert (end.rejection.uid, end.policy, end.cpus, end.dry_run) == ("u1", RejectedPolicy.EVICT, 4, False)


def test_by_default_pods_are_retried_without_end() -> None:
    assert frequent_rejections([rejection(count=999)], RejectedPodsConfig()) == []


def test_a_pod_with_several_rejected_containers_ends_once() -> None:
    one, other = rejection(count=4), rejection(container="side", count=9)
    assert [each.container for each in frequent_rejections([one, other, one], EVICT)] == ["side"]
    assert frequent_rejections([rejection(uid="", count=9)], EVICT) == [], (
        "a pod without a uid cannot be named"
    )


@pytest.mark.parametrize(
    ("pod", "settings", "why"),
    [
        (PodAtServer(), EVICT, "no controller would create it again"),
        (PodAtServer(("DaemonSet", "d")), EVICT, "DaemonSet"),
        (PodAtServer(("DaemonSet", "d")), FAIL, "DaemonSet"),
        (PodAtServer(("Node", "n"), is_static=True), EVICT, "from a file"),
        (structs.replace(OWNED, priority_class="system-node-critical"), EVICT, "priority class"),
        (structs.replace(OWNED, has_run=True), FAIL, "has run"),
    ],
)
def test_pods_that_are_not_ended(pod: PodAtServer, settings: RejectedPodsConfig, why: str) -> None:
    found = decided(rejection(), pod=pod, settings=settings)
    assert found.ends == ()
    (left,) = found.skipped
    assert why in left.why
    assert found.later is None
    assert found.done == NOTHING, "a pod that is not ended counts for no limit"


def test_the_operator_may_include_pods_without_a_controller() -> None:
    settings = replace(EVICT, without_controller=True)
    assert len(decided(rejection(), pod=PodAtServer(), settings=settings).ends) == 1


def test_a_running_pod_may_be_evicted() -> None:
    assert len(decided(rejection(), pod=structs.replace(OWNED, has_run=True)).ends) == 1


@pytest.mark.parametrize("reason", sorted(EVERYWHERE_REASONS))
def test_a_pod_that_every_node_rejects_is_not_evicted_and_may_fail(reason: str) -> None:
    found = decided(rejection(reason=reason))
    assert (found.ends, "every node" in found.skipped[0].why) == ((), True)
    assert len(decided(rejection(reason=reason), settings=FAIL).ends) == 1


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (
            "SMTAlignmentError",
            "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2",
        ),
        ("CPUBindPolicyError", "node(s) requested cpus not multiple cpus per core: 3 of 2"),
    ],
)
def test_a_number_of_cpus_that_fills_no_core_is_rejected_by_every_node(reason: str, message: str) -> None:
    found = decided(rejection(reason=reason, message=message))
    assert (found.ends, "every node" in found.skipped[0].why) == ((), True)
    lacking = "SMT Alignment Error: not enough free physical CPUs: 1 available, 4 requested"
    assert len(decided(rejection(reason=reason, message=lacking)).ends) == 1


@pytest.mark.parametrize("pod", [None, structs.replace(OWNED, ends=True)])
def test_a_removed_or_ending_pod_needs_no_action(pod: PodAtServer | None) -> None:
    assert decided(rejection(), pod=pod) == EndingDecision((), (), None, NOTHING)


def test_the_planned_action_for_an_observed_pod_is_reported_once() -> None:
    first = decided(rejection(applied=False))
    (end,) = first.ends
    assert end.dry_run
    assert first.done.times == (), "nothing was done"
    assert decided(rejection(applied=False), done=first.done).ends == ()


def test_the_pods_ended_per_minute_are_limited() -> None:
    pods = {f"u{i}": PodAtServer(("ReplicaSet", f"rs-{i}")) for i in range(9)}
    rejections = [rejection(i) for i in range(9)]
    first = decide(rejections, pods, EVICT, NOTHING, 1000.0)
    assert [end.rejection.uid for end in first.ends] == ["u0", "u1", "u2", "u3"]
    assert first.later == 60.0
    rest = rejections[4:]
    assert decide(rest, pods, EVICT, first.done, 1059.0).ends == ()
    assert decide(rest, pods, EVICT, first.done, 1059.0).later == 1.0
    assert len(decide(rest, pods, EVICT, first.done, 1060.0).ends) == 4


def test_the_pauses_between_pods_of_one_controller_grow() -> None:
    done, now, waits = NOTHING, 0.0, []
    for number in range(9):
        found = decided(rejection(number), done=done, now=now)
        while not found.ends:
            assert found.later is not None
            waits.append(found.later)
            now += found.later
            found = decided(rejection(number), done=found.done, now=now)
        done = found.done
    assert waits[:5] == [CONTROLLER_S * 2**i for i in range(5)]
    assert max(waits) == CONTROLLER_LONGEST_S
    another = PodAtServer(("ReplicaSet", "rs-2"))
    assert len(decided(rejection(), pod=another, done=done, now=now).ends) == 1, (
        "pods of other controllers do not wait"
    )
    later = decided(rejection(), done=done, now=now + FORGET_S)
    assert len(later.ends) == 1
    assert later.done.controllers["rs-1"][0] == 1, "the pauses start again with the first one"


def test_a_pod_without_a_controller_is_tried_again_at_growing_pauses() -> None:
    """The eviction of a pod may be refused each time; other pods must not wait for it."""
    settings, done, now = replace(EVICT, without_controller=True), NOTHING, 0.0
    for number in range(4):
        found = decided(rejection(), pod=PodAtServer(), settings=settings, done=done, now=now)
        assert len(found.ends) == 1
        done = found.done
        waiting = decided(rejection(), pod=PodAtServer(), settings=settings, done=done, now=now)
        assert (waiting.ends, waiting.later) == ((), CONTROLLER_S * 2**number)
        assert len(decided(rejection(2), settings=settings, done=done, now=now).ends) == 1
        now += CONTROLLER_S * 2**number


def test_the_facts_read_from_a_pod_object() -> None:
    item: dict[str, Any] = {
        "metadata": {
            "name": "web",
            "ownerReferences": [
                {"kind": "Other", "uid": "o"},
                {"kind": "ReplicaSet", "uid": "rs", "controller": True},
            ],
        },
        "spec": {
            "priorityClassName": "high",
            "containers": [{"name": "main", "resources": {"limits": {"cpu": "2500m", "memory": "1Gi"}}}],
        },
        "status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "x"}}}]},
    }
    assert pod_at_server(item) == PodAtServer(("ReplicaSet", "rs"), priority_class="high", cpus=2)
    for status in ({"state": {"running": {}}}, {"restartCount": 1}, {"lastState": {"terminated": {}}}):
        for part in ("containerStatuses", "initContainerStatuses"):
            assert pod_at_server({**item, "status": {part: [status]}}).has_run
    for phase in ("Failed", "Succeeded"):
        assert pod_at_server({**item, "status": {"phase": phase}}).ends
    ending = {**item, "metadata": {**item["metadata"], "deletionTimestamp": "now"}}
    assert pod_at_server(ending).ends
    for metadata in (
        {"annotations": {"kubernetes.io/config.mirror": "x"}},
        {"ownerReferences": [{"kind": "Node", "uid": "n", "controller": True}]},
    ):
        assert pod_at_server({**item, "metadata": metadata}).is_static
    assert pod_at_server({}) == PodAtServer()
    assert pod_at_server({"spec": {"containers": "odd"}}).cpus == 0
