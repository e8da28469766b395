"""The table of nodes: which nodes fit, in what order, and which pods are assumed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from proxy.model.idset import CpuSet
from proxy.model.kubelet import NodeMeta
from proxy.model.options import TopologyPolicy
from proxy.pools.node_keys import RAW_ALLOCATABLE, RESERVATION
from proxy.pools.pod_fingerprint import fingerprint
from proxy.scheduler import node_table
from proxy.scheduler.assumed_pods import GRACE_S, LOST_S
from proxy.scheduler.node_facts import SchedulableNode, join_facts
from proxy.scheduler.node_row import JOIN_S
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.pod_demand import read_demand, with_cpus
from proxy.scheduler.resource_topology import read_resource_topology
from proxy.scheduler.scores import Strategy
from tests.scheduler.objects import cpus, demand, node, numatopology, pod, resource_topology


@pytest.fixture
def table() -> NodeTable:
    found = NodeTable()
    found.put(node("n1", free="1-15", pods={}))
    return found


def fits(table: NodeTable, count: int) -> bool:
    return bool(table.filter(demand("asked", count), ["n1"]).fits)


def test_an_assumed_pod_counts_until_the_node_shows_it(table: NodeTable) -> None:
    table.assume("n1", demand("a", 7), 0.0)
    table.assume("n1", demand("b", 8), 0.0)
    assert not fits(table, 1)
    table.put(node("n1", free="1-15", pods={}), 1.0)  # the object is stale
    assert not fits(table, 1)
    table.put(node("n1", free="8-15", pods={"a": "1-7"}), 2.0)
    assert [each.pod for each in table.pending("n1")] == ["b"]
    table.put(node("n1", free="1-7", pods={"b": "8-15"}), 3.0)  # a has ended, and the API server is slow
    assert [each.pod for each in table.pending("n1")] == ["a"]
    table.release("a", 4.0)
    assert fits(table, 7)


def test_a_part_of_a_pod_that_is_shown_is_not_the_pod(table: NodeTable) -> None:
    table.assume("n1", demand("a", 3, 4), 0.0)
    table.put(node("n1", free="4-15", pods={"a": "1-3"}), 1.0)
    assert [each.pod for each in table.pending("n1")] == ["a"]
    table.put(node("n1", free="8-15", pods={"a": "1-7"}), 2.0)
    assert not table.pending("n1")


def test_a_bind_that_is_never_seen_is_lost(table: NodeTable) -> None:
    table.assume("n1", demand("a", 7), 0.0)
    table.tick(LOST_S)
    assert table.pending("n1")
    table.tick(LOST_S + 1)
    assert not table.pending("n1")
    assert fits(table, 7)


def test_a_pod_that_does_not_run_yet_stays_assumed(table: NodeTable) -> None:
    table.observe(demand("a", 7, node="n1"), 0.0, running=False)
    table.tick(1e6)
    assert table.pending("n1")
    table.observe(demand("a", 7, node="n1"), 1e6, running=True)
    table.tick(1e6 + GRACE_S)
    assert table.pending("n1")
    table.tick(1e6 + GRACE_S + 1)
    assert not table.pending("n1")


def counted(fingerprinted: str, free: int) -> SchedulableNode:
    """Return a node of amounts, with 8 CPUs on each of two NUMA nodes, as NFD describes it."""
    raw = resource_topology("n1", {0: {"cpu": (8, free)}, 1: {"cpu": (8, 8)}}, scope="container")
    raw["attributes"].append({"name": "nodeTopologyPodsFingerprint", "value": fingerprinted})
    return join_facts("n1", None, None, read_resource_topology(raw))


def test_a_running_pod_that_the_fingerprint_names_is_not_counted_twice() -> None:
    """The amounts no longer contain its CPUs, and the object lists no pods."""
    table = NodeTable()
    table.put(counted(fingerprint([]), 8), 0.0)
    table.observe(demand("a", 6, node="n1"), 0.0, running=False)
    table.observe(demand("b", "500m", node="n1"), 0.0, running=True)
    both = fingerprint([("default", "a"), ("default", "b")])
    table.put(counted(both, 2), 1.0)
    assert [each.pod for each in table.pending("n1")] == ["a"], (
        "the object may be older than the start of the pod"
    )
    table.observe(demand("a", 6, node="n1"), 2.0, running=True)
    assert not table.pending("n1")
    assert fits(table, 8)
    table.observe(demand("c", 6, node="n1"), 3.0, running=True)
    assert [each.pod for each in table.pending("n1")] == ["c"], "the fingerprint does not contain the pod"
    table.release("b", 4.0)
    table.put(counted(fingerprint([("default", "a"), ("default", "c")]), 2), 4.0)
    assert not table.pending("n1")


def test_the_assumed_pods_are_those_that_are_bound_after_a_restart(table: NodeTable) -> None:
    after = NodeTable()
    for each in (demand("a", 7, node="n1"), demand("b", 8, node="n1")):
        after.observe(each, 0.0, running=False)
    after.put(node("n1", free="8-15", pods={"a": "1-7"}), 0.0)
    assert [each.pod for each in after.pending("n1")] == ["b"]


def test_a_node_that_is_removed_and_added_keeps_its_pods(table: NodeTable) -> None:
    candidate = demand("asked", 4)

    def score() -> int:
        table.put_allocatable("n1", {"cpu": 16_000, "memory": 16 << 30})
        return table.scores(candidate, ["n1"], Strategy.LEAST_ALLOCATED)[0]

    empty = score()
    table.observe(demand("a", 7, node="n1"), 0.0, running=False)
    full = score()
    assert full < empty
    table.remove("n1")
    assert table.place("n1", candidate).message == "no object describes the node"
    table.put(node("n1", free="1-15", pods={}), 1.0)
    assert score() == full
    assert [each.pod for each in table.pending("n1")] == ["a"]
    table.release("a", 2.0)
    assert score() == empty
    table.remove("n1")
    assert not list(table.names())
    table.observe(demand("b", 7, node="n1"), 3.0, running=False)
    table.remove("n1")
    assert list(table.names()) == ["n1"]
    table.release("b", 4.0)
    assert not list(table.names())


def test_an_assumed_pod_counts_with_what_it_requests_after_a_resize(table: NodeTable) -> None:
    table.observe(demand("a", 7, node="n1"), 0.0, running=False)
    for cpu, free in ((2, 13), ("1500m", 15), (7, 8)):
        table.observe(demand("a", cpu, node="n1"), 1.0, running=False)
        assert [each.demand.lasting_cpus for each in table.pending("n1")] == [15 - free]
        assert f"{free} CPUs are free" in table.filter(demand("b", 16), ["n1"]).failed["n1"]
    assert [each.lasting_cpus for each in table.pods("n1")] == [7]


def test_a_resize_keeps_the_cpus_that_the_bind_has_named(table: NodeTable) -> None:
    lsr = {"koordinator.sh/qosClass": "LSR"}
    table.assume("n1", with_cpus(demand("a", 2, labels=lsr), '{"cpuset":"14-15"}'), 0.0)
    table.observe(demand("a", 3, labels=lsr, node="n1"), 1.0, running=False)
    assumed = table.pending("n1")[0].demand
    assert (assumed.lasting_cpus, assumed.pod.cpuset) == (3, cpus("14-15"))


def test_cpus_of_a_pod_that_has_ended_may_be_free_before_the_object_shows_it(table: NodeTable) -> None:
    """A pod that arrives then takes these CPUs, and not the expected ones."""
    table.observe(demand("old", 4, node="n1"), 0.0, running=True)
    table.put(node("n1", free="5-15", pods={"old": "1-4"}), 0.0)
    plain, named = demand("plain", 6), demand("named", 3, labels={"koordinator.sh/qosClass": "LSR"})
    table.assume("n1", plain, 1.0)
    assert table.place("n1", named).cpus == cpus("5-7")
    table.release("old", 2.0)
    assert table.place("n1", named).reason == "PendingPodsConflict"
    table.put(node("n1", free="1-15", pods={}), 3.0)
    assert table.place("n1", named).fits


def test_pods_that_an_object_shows_and_that_are_not_bound_have_ended(table: NodeTable) -> None:
    """The pods may have ended before the table was made; the object shows them until its next write."""
    shown = {"before": "1-4", "running": "14-15"}
    table.put(node("n1", free="5-13", pods=shown), 0.0)
    table.observe(demand("running", 2, node="n1"), 1.0, running=True)
    assert table.shows_ended(["n2", "n1"], 5.0)
    named = demand("named", 3, labels={"koordinator.sh/qosClass": "LSR"})
    table.assume("n1", demand("plain", 6), 5.0)
    assert table.place("n1", named).reason == "PendingPodsConflict", "its CPUs may be free any moment"
    table.tick(5.0 + GRACE_S)
    assert table.shows_ended(["n1"], 5.0 + GRACE_S)
    table.tick(6.0 + GRACE_S)
    assert not table.shows_ended(["n1"], 6.0 + GRACE_S)
    table.put(node("n1", free="6-13", pods=shown), 40.0)
    assert not table.shows_ended(["n1"], 40.0), "an object that keeps it does not become right by waiting"


def test_a_pod_that_is_seen_after_its_node_shows_it_has_not_ended(table: NodeTable) -> None:
    table.put(node("n1", free="5-15", pods={"other": "1-4"}), 0.0)
    assert table.shows_ended(["n1"], 0.0)
    table.observe(demand("other", 4, node="n1"), 1.0, running=False)
    assert not table.shows_ended(["n1"], 1.0)
    table.put(node("n1", free="5-15", pods={"other": "1-4"}), 2.0)
    assert not table.shows_ended(["n1"], 2.0)
    table.release("other", 3.0)
    assert table.shows_ended(["n1"], 3.0)


def test_an_object_is_awaited_of_a_node_that_has_just_joined(table: NodeTable) -> None:
    table.put_allocatable("old", {"cpu": 16_000})
    table.put_allocatable("new", {"cpu": 16_000}, 10.0)
    for name in ("old", "new"):
        table.put_unknown(name, "it has neither a Numatopology nor a NodeResourceTopology")
    assert not table.awaits_object(["n1", "old", "no such node"], 10.0)
    table.put_allocatable("new", {"cpu": 15_000}, 60.0)
    assert table.awaits_object(["n1", "new"], 10.0 + JOIN_S)
    assert not table.awaits_object(["n1", "new"], 11.0 + JOIN_S)
    table.remove("new")
    table.put_allocatable("new", {"cpu": 15_000}, 100.0)
    table.put_unknown("new", "its objects name no CPU")
    assert table.awaits_object(["new"], 100.0)
    table.put(node("new"), 101.0)
    assert not table.awaits_object(["new"], 101.0)


def test_the_cpus_named_by_an_annotation_are_taken(table: NodeTable) -> None:
    lsr = demand("a", 2, labels={"koordinator.sh/qosClass": "LSR"})
    named = with_cpus(lsr, '{"cpuset":"14-15"}')
    assert table.place("n1", named).cpus == cpus("14-15")
    table.assume("n1", named, 0.0)
    assert table.place("n1", demand("b", 6)).cpus <= CpuSet(range(1, 14))


def test_a_resource_status_from_the_pods_author_is_ignored() -> None:
    key = "scheduling.koordinator.sh/resource-status"
    requested = pod("a", 2, annotations={key: '{"cpuset":"0-1"}'})
    assert read_demand(requested).pod.cpuset is None
    assert read_demand({**requested, "spec": {**requested["spec"], "nodeName": "n1"}}).pod.cpuset == cpus(
        "0-1"
    )


@pytest.mark.parametrize("qos", ["", "LSR", "LSE", "LS", "BE", "SYSTEM"])
@pytest.mark.parametrize("static", [True, False])
def test_a_node_is_refused_for_a_lack_of_exclusive_cpus_only_if_it_gives_some(qos: str, static: bool) -> None:
    labels = {"koordinator.sh/qosClass": qos} if qos else {}
    owns = static and qos in ("", "LSR", "LSE")
    table = NodeTable()
    table.put(node("n1", static=static, free="0-3"))
    large = demand("large", 5, labels=labels)
    assert bool(table.filter(large, ["n1"]).fits) is table.place("n1", large).fits is not owns
    table.assume("n1", demand("pending", 2, labels=labels), 0.0)
    other = demand("other", 3)
    assert bool(table.filter(other, ["n1"]).fits) is table.place("n1", other).fits is not owns


def test_named_cpus_are_taken_whatever_the_cpu_manager_is() -> None:
    table = NodeTable()
    table.put(node("n1", static=False, policy="none", free="0-3"))
    lsr = demand("a", 2, labels={"koordinator.sh/qosClass": "LSR"})
    table.assume("n1", with_cpus(lsr, '{"cpuset":"0-1"}'), 0.0)
    named = with_cpus(demand("b", 3, labels=lsr.spec.labels), '{"cpuset":"1-3"}')
    assert table.filter(named, ["n1"]).failed == {"n1": "InsufficientCPUs: 2 CPUs are free, 3 are needed"}
    assert not table.place("n1", named).fits


def test_aligned_pods_do_not_fit_nodes_without_objects(table: NodeTable) -> None:
    table.put_unknown("n2", "its objects name no CPU")
    result = table.filter(demand("a", 2), ["n1", "n2", "n3"])
    assert result.fits == ["n1"]
    assert result.failed["n2"] == "UnknownNode: its objects name no CPU"
    assert not table.place("n3", demand("a", 2)).fits
    shared = demand("b", "500m", "1")
    assert not shared.exclusive_cpus or shared.needs_alignment


def test_best_effort_pods_go_anywhere(table: NodeTable) -> None:
    raw = pod("a", 1)
    raw["spec"]["containers"][0]["resources"] = {}
    anywhere = read_demand(raw)
    assert table.filter(anywhere, ["n1", "n9"]).fits == ["n1", "n9"]
    assert table.place("n9", anywhere).fits
    assert table.evaluations == 0


def test_identical_replicas_and_nodes_are_evaluated_once() -> None:
    table = NodeTable()
    for number in range(200):
        table.put(node(f"n{number}", free="1-15"))
    names = [f"n{number}" for number in range(200)]
    for number in range(5):
        assert len(table.filter(demand(f"p{number}", 4), names).fits) == 200
    assert table.evaluations == 1
    table.assume("n7", demand("p0", 4), 0.0)
    assert len(table.filter(demand("p9", 4), names).fits) == 200
    assert table.evaluations == 2


def test_what_no_node_has_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_table, "SPARE_SHAPES", 10)
    table = NodeTable()
    same = join_facts("same", NodeMeta(), read_numatopology(numatopology("same")), None)
    table.put(same)
    numa = read_numatopology(numatopology("n1"))
    kinds = set()
    for number in range(100):
        annotations = {RESERVATION: f'{{"reservedCPUs": "0", "number": {number}}}'}
        table.put(join_facts("n1", NodeMeta(annotations=annotations), numa, None))
        table.put(same)
        kinds.add(table._class_of["n1"])
        assert table._class_of["n1"] != table._class_of["same"]
    assert len(kinds) == 100
    assert len(table._shapes) <= 15


def test_verdicts_are_forgotten_when_too_many_pods_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_table, "MOST_SIGNATURES", 10)
    table = NodeTable()
    table.put(node("n1", free=""))
    for number in range(100):
        raw = pod("a", 4)
        raw["spec"]["containers"][0]["name"] = f"job-{number}"
        assert table.filter(read_demand(raw)).fits == []
    assert len(table._verdicts) <= 11


def test_nodes_that_differ_in_what_no_placement_depends_on_are_alike() -> None:
    numa = read_numatopology(numatopology("n"))
    metas = [
        NodeMeta(
            labels={"node.koordinator.sh/label": str(number)},
            annotations={RAW_ALLOCATABLE: f'{{"memory": "{number}Ki"}}'},
        )
        for number in range(3)
    ]
    first, *others = [join_facts(f"n{number}", meta, numa, None) for number, meta in enumerate(metas)]
    assert all(other.rules is first.rules for other in others)
    table = NodeTable()
    for found in (first, *others):
        table.put(found)
    assert len(table.filter(demand("p", 4)).fits) == 3
    assert table.evaluations == 1


def test_fewest_numa_nodes_score_highest() -> None:
    table = NodeTable()
    table.put(node("one", free="1-15", policy="best-effort"))
    table.put(node("two", free="1-3,8-10", policy="best-effort"))
    candidate = demand("a", 4)
    assert table.scores(candidate, ["one", "two"], Strategy.FEWEST_NUMA_NODES) == [50, 0]


def test_allocation_scores_count_bound_pods(table: NodeTable) -> None:
    for name in ("n1", "n2"):
        table.put_allocatable(name, {"cpu": 16_000, "memory": 16 << 30})
    table.assume("n1", demand("a", 8), 0.0)
    least = table.scores(demand("b", 4), ["n1", "n2"], Strategy.LEAST_ALLOCATED)
    most = table.scores(demand("b", 4), ["n1", "n2"], Strategy.MOST_ALLOCATED)
    assert least[1] > least[0]
    assert most[0] > most[1]
    table.release("a", 1.0)
    assert table.scores(demand("b", 4), ["n1"], Strategy.LEAST_ALLOCATED) == [least[1]]


def test_allocation_scores_follow_a_resize_in_place(table: NodeTable) -> None:
    table.put_allocatable("n1", {"cpu": 16_000, "memory": 16 << 30})
    scores = []
    for cpu in ("500m", "8500m", "500m"):
        table.observe(demand("a", cpu, node="n1"), 0.0, running=True)
        scores += table.scores(demand("b", "500m"), ["n1"], Strategy.LEAST_ALLOCATED)
    assert scores[0] - scores[1] >= 20
    assert scores[2] == scores[0]


def test_allocation_scores_count_the_overhead_of_the_runtime_class(table: NodeTable) -> None:
    for name in ("n1", "n2"):
        table.put_allocatable(name, {"cpu": 16_000, "memory": 16 << 30})
    sandboxed = demand("a", "500m", overhead={"cpu": "4", "example.com/gpu": "1"})
    assert sandboxed.needs["cpu"] == 4_500
    assert (sandboxed.exclusive_cpus, sandboxed.devices) == (0, {}), "no container gets the overhead"
    table.observe(replace(sandboxed, node="n1"), 0.0, running=True)
    table.observe(demand("b", "500m", node="n2"), 0.0, running=True)
    scores = table.scores(demand("c", "500m"), ["n1", "n2"], Strategy.LEAST_ALLOCATED)
    assert scores[1] - scores[0] >= 12


@pytest.mark.parametrize(
    ("strategy", "label", "best"),
    [
        (Strategy.NUMA_LEAST_ALLOCATED, "", "empty"),
        (Strategy.NUMA_MOST_ALLOCATED, "", "full"),
        (Strategy.NUMA_LEAST_ALLOCATED, "MostAllocated", "full"),
        (Strategy.NUMA_MOST_ALLOCATED, "LeastAllocated", "empty"),
        (Strategy.NUMA_MOST_ALLOCATED, "DistributeEvenly", "empty"),
    ],
)
def test_the_numa_nodes_that_a_pod_would_use_are_scored(strategy: Strategy, label: str, best: str) -> None:
    """Both nodes have the same number of free CPUs, but not the NUMA node that the pod would use."""
    table = NodeTable()
    meta = NodeMeta(labels={"node.koordinator.sh/numa-allocate-strategy": label} if label else {})
    for name, free in (("empty", "1-7"), ("full", "4-7,8-10")):
        table.put(join_facts(name, meta, read_numatopology(numatopology(name, free=free, pods={})), None))
        table.put_allocatable(name, {"cpu": 16_000})
    demanded = demand("a", 4)
    scores = dict(zip(("empty", "full"), table.scores(demanded, ["empty", "full"], strategy), strict=True))
    assert max(scores, key=scores.__getitem__) == best
    assert len(set(scores.values())) == 2
    shared = demand("b", "500m")
    assert len(set(table.scores(shared, ["empty", "full"], strategy))) == 1, "the nodes are equal in total"


def test_volcanos_annotation_is_part_of_the_demand() -> None:
    plain, wishing = demand("a", 2), demand("a", 2, annotations={"volcano.sh/numa-topology-policy": "none"})
    strict = demand("a", 2, annotations={"volcano.sh/numa-topology-policy": "restricted"})
    assert wishing.volcano_policy is None
    assert strict.volcano_policy is TopologyPolicy.RESTRICTED
    assert plain.signature != strict.signature


def test_a_label_is_not_taken_for_an_annotation_of_the_same_name(table: NodeTable) -> None:
    """Only one of the two is read, so the verdict for one pod is not that for the other."""
    key, value = "volcano.sh/numa-topology-policy", "restricted"
    assert table.filter(demand("annotated", 2, annotations={key: value}), ["n1"]).failed
    assert table.filter(demand("labelled", 2, labels={key: value}), ["n1"]).fits
    key, value = "koordinator.sh/qosClass", "LSR"
    assert demand("a", 2, labels={key: value}).signature != demand("b", 2, annotations={key: value}).signature


def test_labels_and_annotations_that_no_placement_reads_are_not_kept() -> None:
    read = {"volcano.sh/numa-topology-policy": "restricted"}
    qos = {"koordinator.sh/qosClass": "LSR"}
    kept = demand("a", 2, annotations={**read, "notes": "x" * 100_000}, labels={**qos, "app": "web"})
    assert (kept.spec.annotations, kept.spec.labels, dict(kept.pod.labels)) == (read, qos, qos)
    assert kept.signature == demand("b", 2, annotations=read, labels=qos).signature
