"""The history of decisions: how long and how much it keeps, and how records are found."""

from __future__ import annotations

import random
import time

import pytest
from msgspec import structs

from proxy.executor.decision_history import KEEP, DecisionHistory
from proxy.executor.decision_records import RememberedDecision
from proxy.model.explanation import Explanation, MovedContainer
from proxy.model.idset import CpuSet, Mask
from proxy.model.quoting import MESSAGE
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request, Verdict

ADMITTED = Verdict()
REFUSED = Verdict(9, "TopologyAffinityError", "no")
CPUS = CpuSet.parse("0-3")
MOVED = MovedContainer("ns/q/c", CpuSet.parse("0-7"), CpuSet.parse("4-7"))


def decision(ref: str, verdict: Verdict = ADMITTED, uid: str = "", attempt: int = 0) -> Explanation:
    namespace, pod, *container = ref.split("/")
    return Explanation(
        "CreateContainer",
        f"{namespace}/{pod}",
        uid or f"uid-{pod}",
        *container,
        attempt=attempt,
        verdict=verdict,
    )


def pooled(ref: str, key: str, uid: str = "") -> Container:
    namespace, pod, name = ref.split("/")
    sandbox = Pod("s", uid or f"uid-{pod}", namespace, pod, 0, QosClass.NONE, KubeQos.BEST_EFFORT)
    placement = Placement(Pool.BE, CpuSet(), Mask((0, 1)), ("BestEffort pod runs on the BE pool",))
    return Container(key, name, sandbox, Request(), placement, Phase.CREATING, 2)


def whens(records: list[RememberedDecision]) -> list[float]:
    return [record.when for record in records]


def test_records_of_existing_containers_stay_and_of_others_the_newest() -> None:
    history = DecisionHistory(limit=3)
    for i in range(20):
        history.note(i, decision(f"ns/p{i}/c"), f"id{i}")
    assert history.size == 20
    for i in range(10):
        history.removed(f"id{i}")
    assert history.size == 13
    assert [line.pod for line in history.pods() if not line.exists] == ["ns/p7", "ns/p8", "ns/p9"]
    for i in range(5):
        history.note(100 + i, decision(f"ns/q{i}/c", REFUSED))
    assert [line.pod for line in history.pods() if not line.exists] == ["ns/q2", "ns/q3", "ns/q4"]
    assert history.size == 13


def test_another_limit_keeps_the_newest() -> None:
    history = DecisionHistory(limit=5)
    for i in range(5):
        history.note(i, decision(f"ns/q{i}/c", REFUSED))
    history.resize(2)
    assert [line.pod for line in history.pods()] == ["ns/q3", "ns/q4"]
    history.resize(3)
    history.note(5, decision("ns/q5/c", REFUSED))
    assert history.size == 3
    history.resize(0)
    assert history.size == 0


def test_the_last_container_to_go_is_remembered_longest() -> None:
    history = DecisionHistory(limit=1)
    history.note(1, decision("ns/old/c"), "old")
    history.note(2, decision("ns/new/c"), "new")
    history.removed("new")
    history.removed("old")
    assert not history.find("new")
    assert whens(history.find("old")) == [1]


def test_one_container_does_not_displace_the_records_of_all_others() -> None:
    history = DecisionHistory(limit=100)
    history.note(0, decision("ns/other/c", REFUSED))
    for i in range(50):
        history.note(i, decision("ns/loop/c", REFUSED))
        history.note(i, decision("ns/crash/c", attempt=i), f"id{i}")
        history.removed(f"id{i}")
    assert whens(history.find("loop")) == [45, 46, 47, 48, 49]
    assert [r.explanation.attempt for r in history.find("crash")] == [45, 46, 47, 48, 49]
    assert history.find("other")
    for i in range(50):
        history.note(i, decision("ns/long/c"), "long")
    assert whens(history.find("long")) == [45, 46, 47, 48, 49]
    for i in range(50):
        history.note_without_explanation(i, pooled("ns/simple/c", "key"), CPUS)
    assert len(history.find("simple")) == KEEP


def test_another_pod_of_the_same_name_is_another_pod() -> None:
    history = DecisionHistory()
    for i in range(KEEP + 2):
        history.note(i, decision("ns/p/c", REFUSED, uid=f"uid-number-{i}"))
    assert len(history.find("ns/p")) == KEEP + 2
    assert len(history.pods()) == KEEP + 2


def test_a_call_token_is_replaced_by_the_container_id() -> None:
    history = DecisionHistory()
    history.note(1, decision("ns/p/c"), "call-1")
    history.note_without_explanation(2, pooled("ns/q/c", "call-2"), CPUS)
    history.renamed("call-1", "0123456789ab")
    history.renamed("call-2", "ba9876543210")
    history.renamed("call-3", "missing")
    (record,) = history.find("01234567")
    assert (record.container_id, record.exists) == ("0123456789ab", True)
    assert history.find("ba987654")[0].explanation.ref == "ns/q/c"
    assert not history.find("call-1")
    history.removed("0123456789ab")
    assert not history.find("p")[0].exists
    history.note(3, decision("ns/p/c"), "call-4")
    history.note(4, decision("ns/p/c"), "known")
    history.renamed("call-4", "known")
    assert sorted(r.when for r in history.find("p") if r.exists) == [3, 4]


def test_a_refused_update_is_kept_with_its_container() -> None:
    history = DecisionHistory(limit=0)
    history.note(1, decision("ns/p/c"), "id")
    history.note(2, decision("ns/p/c", REFUSED), "id")
    history.note(3, decision("ns/p/c", REFUSED), "call-1")
    history.note(4, decision("ns/p/c"))
    assert whens(history.find("p")) == [1, 2]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("ns/web", [1, 2, 3]),
        ("other/web", [4]),
        ("web", [1, 2, 3, 4]),
        ("ns/web/app", [2]),
        ("web/app", [2, 4]),
        ("web/sidecar", [3]),
        ("uid-web-1", [1, 2, 3]),
        ("uid-web-", [1, 2, 3, 4]),
        ("01234567", [2]),
        ("containerd://0123456789abcdef", [2]),
        ("0123456", []),
        ("uid-web", []),
        (" ns/web/ ", [1, 2, 3]),
        ("app", []),
        ("ns", []),
        ("", []),
        ("/", []),
        ("a/b/c/d", []),
        ("ns/we", []),
    ],
)
def test_names_of_containers(query: str, found: list[float]) -> None:
    history = DecisionHistory()
    history.note(1, decision("ns/web", uid="uid-web-1"), "sandbox-0001")
    history.note(2, decision("ns/web/app", uid="uid-web-1"), "0123456789abcdef")
    history.note_without_explanation(3, pooled("ns/web/sidecar", "fedcba9876543210", uid="uid-web-1"), CPUS)
    history.note(4, decision("other/web/app", REFUSED, uid="uid-web-2"))
    assert whens(history.find(query)) == found


def test_a_name_counts_before_an_id() -> None:
    history = DecisionHistory()
    history.note(1, decision("ns/deadbeef/c"), "0")
    history.note(2, decision("ns/p/c"), "deadbeef00")
    history.note(3, decision("web/app/c"), "1")
    history.note(4, decision("ns/web/app"), "2")
    assert whens(history.find("deadbeef")) == [1]
    assert whens(history.find("deadbeef0")) == [2]
    assert whens(history.find("web/app")) == [3]


def test_a_simple_placement_is_explained_on_request() -> None:
    history = DecisionHistory()
    history.note_without_explanation(7, pooled("ns/p/c", "id"), CPUS)
    (record,) = history.find("p")
    found = record.explanation
    assert (record.when, record.container_id, record.exists) == (7, "id", True)
    assert (found.event, found.ref, found.uid, found.attempt) == ("CreateContainer", "ns/p/c", "uid-p", 2)
    assert (found.pool, found.cpus, found.mems) == ("be", CPUS, Mask((0, 1)))
    assert found.verdict.admitted
    assert found.reasons == ("BestEffort pod runs on the BE pool",)
    assert ("QoS class", "BestEffort") in [(fact.what, fact.value) for fact in found.facts]


def test_the_list_of_pods() -> None:
    history = DecisionHistory()
    history.note(1, decision("ns/a"), "s1")
    history.note(2, decision("ns/b/c", REFUSED))
    history.note_without_explanation(3, pooled("ns/a/app", "a1"), CPUS)
    history.note(4, decision("ns/d/c", Verdict(9)))
    a, b, d = sorted(history.pods(), key=lambda line: line.pod)
    assert [line.pod for line in history.pods()] == ["ns/b", "ns/a", "ns/d"]
    assert (a.when, a.records, a.containers, a.refused, a.exists) == (3, 2, ("app",), "", True)
    assert (b.refused, b.exists, b.uid) == ("TopologyAffinityError", False, "uid-b")
    assert d.refused == "refused"
    history.note(5, decision("ns/d/c"), "id")
    assert [line.refused for line in history.pods()] == ["TopologyAffinityError", "", ""]


def test_memory_is_bounded_whatever_happens() -> None:
    history = DecisionHistory(limit=200)
    chance = random.Random(7)
    alive: list[str] = []
    for i in range(100_000):
        ref = f"ns/p{chance.randrange(4000)}/c{chance.randrange(3)}"
        key = f"id{i}"
        kind = chance.randrange(4)
        if kind == 0:
            history.note(i, decision(ref, REFUSED))
            continue
        if kind == 1:
            history.note(i, decision(ref), key)
        else:
            history.note_without_explanation(i, pooled(ref, key), CPUS)
        alive.append(key)
        if len(alive) > 100:
            history.removed(alive.pop(chance.randrange(100)))
    assert history.size == 100 + 200
    for key in alive:
        history.removed(key)
    assert history.size == 200
    assert len(history._living) == 0
    assert sum(map(len, history._named.values())) == 200
    assert all(history._named.values())


def test_a_simple_note_takes_little_time() -> None:
    # Every create pays for it: well below a microsecond, with a bound that slow machines keep.
    history = DecisionHistory()
    container = [pooled("ns/p/c", f"id{i}") for i in range(5000)]
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for one in container:
            history.note_without_explanation(0, one, CPUS)
        best = min(best, (time.perf_counter() - begin) / len(container))
    assert best < 50e-6


def test_a_refusal_that_was_not_applied_becomes_the_record_of_the_container() -> None:
    history = DecisionHistory(limit=10)
    refused = structs.replace(decision("ns/p/c", REFUSED, attempt=2), applied=False)
    container = pooled("ns/p/c", "id")
    assert not history.exists_despite_refusal(container)
    history.note(1, refused)
    assert [(r.container_id, r.exists) for r in history.would_be_refused()] == [("", False)]
    assert not history.exists_despite_refusal(structs.replace(container, attempt=3)), (
        "a container that was not refused"
    )
    assert history.exists_despite_refusal(container)
    (found,) = history.would_be_refused()
    assert (found.container_id, found.exists, found.explanation) == ("id", True, refused)
    (line,) = history.pods()
    assert (line.refused, line.exists, line.applied) == (REFUSED.reason, True, False)
    history.removed("id")
    assert [r.exists for r in history.would_be_refused()] == [False]
    history.note(2, decision("ns/p/c"), "other")
    assert history.would_be_refused() == [], "the newest decision admits it"


def test_a_refusal_that_was_applied_is_of_no_container() -> None:
    history = DecisionHistory(limit=10)
    history.note(1, decision("ns/p/c", REFUSED, attempt=2))
    assert not history.exists_despite_refusal(pooled("ns/p/c", "id"))
    assert history.would_be_refused() == []


def test_a_plan_that_is_applied_later_moved_nothing_at_the_create() -> None:
    history = DecisionHistory(limit=3)
    planned = structs.replace(
        decision("ns/p/c"), applied=False, cpus=CPUS, mems=Mask((0,)), moved=(MOVED,), more_moved=3
    )
    history.note(1, planned, "id")
    history.mark_applied("id", "the plan is applied since noon", applied=True)
    known = history.find("p")[0].explanation
    assert (known.applied, known.cpus, known.reasons) == (True, CPUS, ("the plan is applied since noon",))
    assert (known.moved, known.more_moved, known.mems) == ((), 0, None)


def test_a_placement_that_is_refused_elsewhere_is_void() -> None:
    history = DecisionHistory(limit=3)
    history.note(1, decision("ns/p/c"), "call-1")
    history.note_without_explanation(2, pooled("ns/p/c", "call-1"), CPUS)
    history.refused("call-1", REFUSED)
    assert [r.explanation.verdict.admitted for r in history.find("p")] == [True, False]
    history.refused("call-2", REFUSED)
    assert history.find("p")[1].explanation.verdict.reason == REFUSED.reason


def test_records_with_devices_are_of_containers_that_got_them() -> None:
    history = DecisionHistory(limit=9)
    with_gpu = structs.replace(decision("ns/p/c"), devices=("gpu=0",))
    history.note(1, with_gpu, "id")
    history.note(2, structs.replace(with_gpu, verdict=REFUSED))
    history.note(3, structs.replace(with_gpu, verdict=REFUSED, applied=False))
    history.note(4, decision("ns/q/c"), "other")
    history.note(5, structs.replace(with_gpu, container=""), "sandbox")
    assert whens(history.with_devices()) == [1, 3]
    assert [record.container_id for record in history.with_devices()] == ["id", ""]


def test_long_messages_are_cut() -> None:
    history = DecisionHistory(limit=3)
    long = structs.replace(
        decision("ns/p/c", Verdict(9, "R", "x" * 5000)), reasons=("y" * 5000,), applied=False
    )
    history.note(1, long, "id")
    known = history.find("p")[0].explanation
    assert len(known.verdict.message) <= MESSAGE
    assert len(known.reasons[0]) <= MESSAGE


def test_a_simple_placement_of_an_observed_pod_is_recorded_as_not_applied() -> None:
    history = DecisionHistory(limit=3)
    history.note_without_explanation(1, pooled("ns/p/c", "id"), CPUS, applied=False)
    assert [line.applied for line in history.pods()] == [False]
    assert not history.find("p")[0].explanation.applied
    history.amend("id", "and then")
    assert (history.find("p")[0].explanation.applied, history.pods()[0].applied) == (False, False)
    history.mark_applied("id", applied=True)
    known = history.find("p")[0].explanation
    assert (known.applied, known.cpus, known.mems) == (True, CPUS, None)
    assert history.pods()[0].applied
    history.note_without_explanation(2, pooled("ns/p/c", "id"), CPUS)
    assert [record.explanation.applied for record in history.find("p")] == [True, True]


def test_a_plan_that_is_applied_from_the_create_on_keeps_what_it_moved() -> None:
    history = DecisionHistory(limit=3)
    history.note(1, structs.replace(decision("ns/p/c"), cpus=CPUS, mems=Mask((0,)), moved=(MOVED,)), "id")
    history.mark_applied("id", applied=True)
    known = history.find("p")[0].explanation
    assert (known.moved, known.mems) == ((MOVED,), Mask((0,)))
