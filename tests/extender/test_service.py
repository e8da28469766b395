"""The answers to kube-scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.agent import watcher as watcher_module
from proxy.extender import service as service_module
from proxy.model.backoff import Backoff
from proxy.pools.topology_keys import OWNER_NAMESPACES, POLICIES
from proxy.scheduler.assumed_pods import GRACE_S
from tests.extender.running_extender import (
    NODES,
    NUMATOPOLOGIES,
    PODS,
    ClusterApi,
    RunningExtender,
    scheduler_pod,
)
from tests.scheduler.objects import numatopology, pod
from tests.testkit.simulated_clock import run_simulated
from tests.testkit.waiting import until


def with_extender(test: Callable[[RunningExtender], Awaitable[None]], *nodes: str) -> None:
    api = ClusterApi()
    for name in nodes or ("n1", "n2"):
        api.add_node(name)

    async def run() -> None:
        extender = RunningExtender(api)
        async with extender.following():
            await test(extender)

    run_simulated(run())


def test_filter_and_prioritize_and_bind() -> None:
    async def test(extender: RunningExtender) -> None:
        raw = scheduler_pod("a", 7)
        assert await extender.filter(raw, "n1", "n2", "n3") == ["n1", "n2"]
        answer = await extender.call("filter", Pod=raw, NodeNames=["n1", "n3"])
        assert answer["FailedAndUnresolvableNodes"] == {"n3": "UnknownNode"}
        scores = await extender.call("prioritize", Pod=raw, NodeNames=["n1", "n2"])
        assert scores == [], "both nodes score equally"
        assert await extender.bind(raw, "n1") == ""
        assert extender.api.bindings[0]["target"]["name"] == "n1"
        assert extender.api.bindings[0]["metadata"]["uid"] == "a"
        answer = await extender.call("filter", Pod=scheduler_pod("b", 9), NodeNames=["n1", "n2"])
        assert answer["NodeNames"] == []
        assert answer["FailedNodes"] == {"n1": "InsufficientCPUs", "n2": "TopologyAffinityError"}

    with_extender(test)


def test_no_pod_is_ended_for_one_whose_namespace_may_own_no_cpus() -> None:
    async def test(extender: RunningExtender) -> None:
        policies = json.dumps({OWNER_NAMESPACES: '["team-*"]'})
        spec = numatopology("ruled", free="1-15", pods={})["spec"]
        extender.api.put(NODES, "ruled")
        metadata = {"annotations": {POLICIES: policies}}
        extender.api.put(NUMATOPOLOGIES, "ruled", metadata=metadata, spec=spec)
        await until(lambda: extender.table.node("ruled") is not None)
        strict = scheduler_pod("a", 2, labels={"koordinator.sh/qosClass": "LSR"})
        answer = await extender.call("filter", Pod=strict, NodeNames=["n1", "ruled"])
        assert answer["NodeNames"] == ["n1"]
        assert answer["FailedAndUnresolvableNodes"] == {"ruled": "AdmissionNamespace"}

    with_extender(test)


def test_a_pod_that_only_pending_pods_exclude_is_tried_again() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_node("half", free="0-5,8-9")
        await until(lambda: extender.table.node("half") is not None)
        large, small = scheduler_pod("large", 6), scheduler_pod("small", 2)
        assert await extender.filter(small, "half") == await extender.filter(large, "half") == ["half"]
        assert await extender.bind(large, "half") == ""
        answer = await extender.call("filter", Pod=small, NodeNames=["half"])
        assert "cannot decide on default/small" in answer["Error"]
        assert await extender.filter(small, "half", "n1") == ["n1"]

    with_extender(test)


def test_a_pod_that_only_an_ended_pod_excludes_is_tried_again() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_pod(pod("first", 7, node="full"))
        extender.api.add_node("full", free="1-7", pods={"first": "8-14"})
        await until(lambda: extender.table.node("full") is not None and bool(extender.table.pods("full")))
        large = scheduler_pod("large", 8)
        assert await extender.filter(large, "full") == []
        extender.api.remove(PODS, "default/first")
        await until(lambda: not extender.table.pods("full"))
        answer = await extender.call("filter", Pod=large, NodeNames=["full"])
        assert "cannot decide on default/large: a node still shows CPUs" in answer["Error"]
        assert extender.table.shows_ended(["full"], asyncio.get_running_loop().time())
        extender.table.tick(asyncio.get_running_loop().time() + GRACE_S + 1)
        assert await extender.filter(large, "full") == [], "the object is not only stale"
        extender.api.add_node("full", free="1-15")
        await until(lambda: len(extender.table.node("full").free) == 15)
        assert await extender.filter(large, "full") == ["full"]

    with_extender(test)


def test_a_pod_that_only_an_end_before_the_start_of_the_extender_excludes_is_tried_again() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_node("full", free="1-7", pods={"first": "8-14"})
        await until(lambda: extender.table.node("full") is not None)
        answer = await extender.call("filter", Pod=scheduler_pod("large", 8), NodeNames=["full"])
        assert "cannot decide on default/large: a node still shows CPUs" in answer["Error"]

    with_extender(test)


def test_a_pod_that_fits_nowhere_is_tried_again_while_a_new_node_has_no_object() -> None:
    async def test(extender: RunningExtender) -> None:
        large = scheduler_pod("large", 16)
        assert await extender.filter(large, "n1", "n2") == []
        extender.api.put(NODES, "new", status={"allocatable": {"cpu": "31", "memory": "64Gi"}})
        await until(lambda: "new" in extender.table.names())
        answer = await extender.call("filter", Pod=large, NodeNames=["n1", "new"])
        assert (
            "cannot decide on default/large: no object describes a node that has just joined"
            in answer["Error"]
        )
        assert await extender.filter(scheduler_pod("small", 2), "n1", "new") == ["n1"]
        assert await extender.filter(large, "n1", "n2") == [], "kube-scheduler does not offer the new node"

    with_extender(test)


def test_nodes_without_an_object_that_were_there_before_are_not_awaited() -> None:
    async def test(extender: RunningExtender) -> None:
        assert "old" in extender.table.names()
        answer = await extender.call("filter", Pod=scheduler_pod("large", 16), NodeNames=["n1", "old"])
        assert (answer["NodeNames"], answer["Error"]) == ([], "")

    api = ClusterApi()
    api.add_node("n1")
    api.put(NODES, "old", status={"allocatable": {"cpu": "31", "memory": "64Gi"}})

    async def run() -> None:
        extender = RunningExtender(api)
        async with extender.following():
            await test(extender)

    run_simulated(run())


def test_two_simultaneous_binds_never_get_the_same_cpus() -> None:
    async def test(extender: RunningExtender) -> None:
        pods = [scheduler_pod(f"p{number}", 7) for number in range(6)]
        for raw in pods:
            assert await extender.filter(raw, "n1") == ["n1"]
        errors = await asyncio.gather(*(extender.bind(raw, "n1") for raw in pods))
        assert sum(not error for error in errors) == 2
        assert len(extender.api.bindings) == 2
        assert any("cannot bind default/p" in error for error in errors)

    with_extender(test, "n1")


def test_cpus_of_lsr_pods_are_written_with_the_binding() -> None:
    async def test(extender: RunningExtender) -> None:
        raw = scheduler_pod("a", 2, labels={"koordinator.sh/qosClass": "LSR"})
        await extender.filter(raw, "n1")
        assert await extender.bind(raw, "n1") == ""
        annotation = extender.api.bindings[0]["metadata"]["annotations"]
        status = json.loads(annotation["scheduling.koordinator.sh/resource-status"])
        assert status["numaNodeResources"] == [{"node": 0, "resources": {"cpu": "2"}}]
        assert status["cpuset"] == "2-3"

    with_extender(test)


def test_a_bind_that_the_server_refuses_assumes_nothing() -> None:
    async def test(extender: RunningExtender) -> None:
        raw = scheduler_pod("a", 7)
        await extender.filter(raw, "n1")
        extender.api.bind_status = 403
        assert "as the test wants it" in await extender.bind(raw, "n1")
        assert not extender.table.pending("n1")
        extender.api.bind_status = 503
        assert await extender.bind(raw, "n1")
        assert len(extender.table.pending("n1")) == 1, "the result of the bind is unknown"

    with_extender(test)


def test_a_bind_without_an_answer_is_dropped_once_it_can_have_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "SETTLED_S", 0.1)
    monkeypatch.setattr(service_module, "SETTLE_RETRY_S", 0.01)

    async def test(extender: RunningExtender) -> None:
        async def bind(name: str, cpus: int, node: str) -> None:
            await extender.filter(scheduler_pod(name, cpus), "n1", "n2")
            assert "as the test wants it" in await extender.bind(scheduler_pod(name, cpus), node)

        extender.api.bind_status = 503
        extender.api.add_pod(pod("waiting", 4))
        for name, cpus in (("gone", 3), ("waiting", 4), ("bound", 2)):
            await bind(name, cpus, "n1")
        extender.api.add_pod(pod("bound", 2, node="n1"))
        extender.api.down = True
        await asyncio.sleep(0.2)
        assert len(extender.table.pending("n1")) == 3, "the API server does not answer"
        extender.api.down = False
        await until(lambda: len(extender.table.pending("n1")) == 1)
        assert extender.table.pending("n1")[0].pod == "bound"
        await bind("again", 1, "n1")
        await asyncio.sleep(0.06)
        await bind("again", 1, "n2")
        await asyncio.sleep(0.06)
        assert [each.pod for each in extender.table.pending("n2")] == ["again"], (
            "a later bind has its own timeout"
        )
        await until(lambda: not extender.table.pending("n2"))
        assert set(extender.api.bind_limits) == {f"{service_module.BIND_S}s"}

    with_extender(test)


def test_a_pod_that_is_bound_stays_counted_where_it_is_bound() -> None:
    """kube-scheduler binds it to another node, as it has got no answer to the first bind."""

    async def test(extender: RunningExtender) -> None:
        raw = scheduler_pod("a", 7)
        assert await extender.filter(raw, "n1", "n2") == ["n1", "n2"]
        extender.api.bind_status = 409
        extender.api.add_pod(pod("a", 7, node="n1"))
        await until(lambda: extender.table.assumed_pod("a") is not None)
        assert "it is bound to n1" in await extender.bind(raw, "n2")
        assert [each.pod for each in extender.table.pending("n1")] == ["a"]
        assert not extender.api.bind_limits

    with_extender(test)


def test_a_bind_that_conflicts_with_an_earlier_one_leaves_the_pod_where_that_has_bound_it() -> None:
    async def test(extender: RunningExtender) -> None:
        raw, other = scheduler_pod("a", 7), scheduler_pod("other", 2)
        assert await extender.filter(raw, "n1", "n2") == ["n1", "n2"]
        extender.api.bind_status = 409
        extender.api.collections[PODS]["default/a"] = pod("a", 7, node="n1")  # the watch does not show it yet
        assert "as the test wants it" in await extender.bind(raw, "n2")
        await until(lambda: bool(extender.table.pending("n1")))
        assert not extender.table.pending("n2")
        extender.api.add_pod(pod("other", 2))
        assert "as the test wants it" in await extender.bind(other, "n2")
        await until(lambda: not extender.table.pending("n2"))

    with_extender(test)


def test_a_bind_is_not_sent_after_a_pause_in_which_the_lease_has_ended() -> None:
    async def test(extender: RunningExtender) -> None:
        assume = extender.table.assume

        def bind_after_pause(*given: Any) -> None:
            assume(*given)
            extender.lease._until = 0.0  # the clock advances as if the process had been stopped here

        extender.table.assume = bind_after_pause  # type: ignore[method-assign]
        await extender.filter(scheduler_pod("a", 2), "n1")
        named = {"PodName": "a", "PodNamespace": "default", "PodUID": "a", "Node": "n1"}
        status, message = await extender.call("bind", **named)
        assert (status, "lease" in message) == (503, True)
        assert not extender.api.bindings
        assert not extender.table.pending("n1")

    with_extender(test)


def test_a_pod_that_was_filtered_by_another_replica_is_read() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_pod(pod("a", 2))
        assert await extender.bind(scheduler_pod("a", 2), "n1") == ""
        assert "was replaced" in await extender.bind(scheduler_pod("a", 2, uid="other"), "n1")

    with_extender(test)


def test_a_node_that_vanishes_or_fills_between_filter_and_bind() -> None:
    async def test(extender: RunningExtender) -> None:
        raw = scheduler_pod("a", 7)
        assert await extender.filter(raw, "n1", "n2") == ["n1", "n2"]
        extender.api.remove(NODES, "n1")
        extender.api.add_node("n2", free="1-3", pods={"x": "4-15"})
        await until(lambda: extender.table.node("n1") is None)
        await until(lambda: (found := extender.table.node("n2")) is not None and len(found.free) == 3)
        assert "no object describes the node" in await extender.bind(raw, "n1")
        assert await extender.bind(raw, "n2")
        assert not extender.api.bindings

    with_extender(test)


def test_malformed_objects_make_a_node_unknown() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.put(NUMATOPOLOGIES, "n1", spec={"cpuDetail": []}, kind="Numatopology")
        await until(lambda: extender.table.node("n1") is None)
        assert await extender.filter(scheduler_pod("a", 2), "n1", "n2") == ["n2"]
        answer = await extender.call("bind", PodName="a", PodNamespace="default", PodUID="a", Node="n1")
        assert "Numatopology cannot be read: cpuDetail names no CPU" in answer["Error"]

    with_extender(test)


def test_pods_bound_by_other_schedulers_count_too() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_pod(pod("x", 8, node="n1"))
        await until(lambda: bool(extender.table.pending("n1")))
        assert await extender.filter(scheduler_pod("a", 8), "n1", "n2") == ["n2"]
        extender.api.put(
            "/api/v1/pods", "default/x", **{**pod("x", 8, node="n1"), "status": {"phase": "Failed"}}
        )
        await until(lambda: not extender.table.pending("n1"))
        assert await extender.filter(scheduler_pod("a", 8), "n1", "n2") == ["n1", "n2"]

    with_extender(test)


def test_victims_make_room_on_one_numa_node() -> None:
    async def test(extender: RunningExtender) -> None:
        held = {"low": "1-4", "other": "8-11", "high": "5-7"}
        extender.api.add_node("n1", free="12-15", pods=held)
        for name, cpus, priority in (("low", 4, 1), ("other", 4, 2), ("high", 3, 9)):
            extender.api.add_pod(pod(name, cpus, node="n1", priority=priority))
        await until(lambda: len(extender.table.pods("n1")) == 3 and not extender.table.pending("n1"))
        raw = scheduler_pod("a", 8, priority=5)
        answer = await extender.call(
            "preempt", Pod=raw, NodeNameToMetaVictims={"n1": {"Pods": [{"UID": "low"}]}}
        )
        uids = [each["UID"] for each in answer["NodeNameToMetaVictims"]["n1"]["Pods"]]
        assert uids == ["low", "other"]
        raw = scheduler_pod("b", 4, priority=5)
        answer = await extender.call(
            "preempt", Pod=raw, NodeNameToMetaVictims={"n1": {"Pods": [{"UID": "low"}]}}
        )
        assert len(answer["NodeNameToMetaVictims"]["n1"]["Pods"]) == 1
        raw = scheduler_pod("c", 8, priority=2)
        answer = await extender.call("preempt", Pod=raw, NodeNameToMetaVictims={"n1": {"Pods": []}})
        assert answer["NodeNameToMetaVictims"] == {}

    with_extender(test)


def test_other_requests_are_answered_during_a_search_for_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has a time limit; nodes that were not examined by then are left out of the answer."""

    async def test(extender: RunningExtender) -> None:
        names = [f"v{number}" for number in range(20)]
        for name in names:
            extender.api.add_node(name)
        await until(lambda: all(extender.table.node(name) for name in names))
        proposed: Any = {name: {"Pods": []} for name in names}
        search = asyncio.ensure_future(
            extender.call("preempt", Pod=scheduler_pod("a", 2), NodeNameToMetaVictims=proposed)
        )
        turns = 0
        while not search.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= len(names)
        assert search.result()["NodeNameToMetaVictims"].keys() == set(names)
        monkeypatch.setattr(service_module, "PREEMPT_S", -1.0)
        answer = await extender.call("preempt", Pod=scheduler_pod("a", 2), NodeNameToMetaVictims=proposed)
        assert list(answer["NodeNameToMetaVictims"]) == names[:1]

    with_extender(test)


def test_advice_names_a_pod_whose_move_makes_room() -> None:
    async def test(extender: RunningExtender) -> None:
        extender.api.add_node("n1", free="3-7,10-15", pods={"x": "1-2", "y": "8-9"})
        extender.api.add_node("n2", free="1-3", pods={"z": "4-15"})
        extender.api.add_pod(pod("z", 12, node="n2"))
        for name in ("x", "y"):
            extender.api.add_pod(pod(name, 2, node="n1"))
        await until(lambda: bool(extender.table.pods("n2")))
        await until(lambda: len(extender.table.pods("n1")) == 2 and not extender.table.pending("n1"))
        await until(lambda: (found := extender.table.node("n2")) is not None and len(found.free) == 3)
        assert await extender.filter(scheduler_pod("a", 8), "n1", "n2") == []
        status, advice = await extender.get("/advice?pod=default/a")
        assert status == 200
        assert advice["waiting"] == ["default/a"]
        assert advice["moves"] == [{"pod": "default/a", "node": "n1", "move": "default/y", "to": "n2"}]
        assert advice["complete"]

    with_extender(test)


def test_an_undecidable_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(extender: RunningExtender) -> None:
        assert (await extender.get("/readyz"))[0] == 200
        monkeypatch.setattr(service_module, "STALE_S", 0.0)
        extender.api.crash()
        await until(lambda: bool(extender.view.age))
        status, message = await extender.call("filter", Pod=scheduler_pod("a", 2), NodeNames=["n1"])
        assert (status, "seconds old" in message) == (503, True)
        extender.lease._until = 0.0
        status, message = await extender.call("filter", Pod=scheduler_pod("a", 2), NodeNames=["n1"])
        assert (status, "lease" in message) == (503, True)
        extender.service.draining = True
        assert (await extender.get("/readyz"))[0] == 503
        assert (await extender.get("/livez"))[0] == 200

    with_extender(test)


@pytest.mark.parametrize(
    ("verb", "body", "message"),
    [
        ("filter", b"{", "cannot read the request"),
        ("filter", b"[]", "it is not an object"),
        ("filter", b"{}", "Pod is missing"),
        ("filter", b'{"Pod": {"metadata": {"name": "a"}, "spec": {}}}', "at least one container"),
        ("bind", b'{"PodName": "a"}', "is missing"),
    ],
)
def test_malformed_requests_are_answered_with_an_error(verb: str, body: bytes, message: str) -> None:
    async def test(extender: RunningExtender) -> None:
        answer = await extender.service.handle("POST", f"/{verb}", body, True)
        assert isinstance(answer.value, dict)
        assert message in answer.value["Error"]

    with_extender(test)


@pytest.mark.parametrize("victims", [5, [], {"n1": []}, {"n1": {"Pods": 5}}, {"n1": {"Pods": ["a"]}}])
def test_malformed_victims_are_refused_and_null_victims_are_none(victims: Any) -> None:
    async def test(extender: RunningExtender) -> None:
        answer = await extender.call("preempt", Pod=scheduler_pod("a", 2), NodeNameToMetaVictims=victims)
        cause = "NodeNameToMetaVictims is missing or malformed (nodeCacheCapable must be set)"
        assert answer == (400, f"cannot preempt: {cause}\n")
        none = {"n1": None}
        empty = await extender.call("preempt", Pod=scheduler_pod("a", 2), NodeNameToMetaVictims=none)
        assert empty == {"NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}

    with_extender(test)


@pytest.mark.parametrize("path", [PODS, NODES, NUMATOPOLOGIES])
def test_what_may_no_longer_be_read_is_used_until_it_is_too_old(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "PAUSES", Backoff(0.001, 0.005))

    async def test(extender: RunningExtender) -> None:
        extender.api.add_pod(pod("a", 8, node="n1"))
        await until(lambda: extender.table.pods("n1"))
        watchers = {
            PODS: extender.view.pods,
            NODES: extender.view.nodes,
            NUMATOPOLOGIES: extender.view.numatopologies,
        }
        extender.api.answers[path] = [403] * 50
        extender.api.end_watches()
        await until(lambda: not watchers[path].present)
        both = {"Pod": scheduler_pod("b", 8), "NodeNames": ["n1", "n2"]}
        assert (await extender.call("filter", **both))["NodeNames"] == ["n2"], "the bound pod still counts"
        monkeypatch.setattr(service_module, "STALE_S", 0.05)
        await asyncio.sleep(0.1)
        status, text = await extender.get("/readyz")
        assert (status, "seconds old" in text) == (503, True)

    with_extender(test)


def test_metrics_count_requests_and_known_nodes() -> None:
    async def test(extender: RunningExtender) -> None:
        await extender.filter(scheduler_pod("a", 2), "n1")
        status, text = await extender.get("/metrics")
        assert status == 200
        assert 'topoproxy_extender_requests_total{verb="filter",result="ok"} 1' in text
        assert 'topoproxy_extender_request_seconds_count{verb="filter"} 1' in text
        assert 'topoproxy_extender_nodes{state="known"} 2' in text
        assert "topoproxy_extender_leader 1" in text

    with_extender(test)


def test_a_page_that_does_not_exist_and_a_replica_that_shuts_down_are_named_so() -> None:
    async def test(extender: RunningExtender) -> None:
        known = "/healthz, /livez, /readyz, /metrics, /advice"
        assert await extender.get("/none") == (404, f"not found; available: {known}\n")
        none = (404, "not found; available: /filter, /prioritize, /bind, /preempt\n")
        assert await extender.call("none") == none
        extender.service.draining = True
        assert await extender.get("/readyz") == (503, "cannot decide: this replica is shutting down\n")

    with_extender(test)


def test_clients_without_a_certificate_get_probes_and_metrics_only() -> None:
    async def test(extender: RunningExtender) -> None:
        for path, status in (("/readyz", 200), ("/livez", 200), ("/metrics", 200), ("/advice", 403)):
            assert (await extender.service.handle("GET", path, b"", False)).status == status
        for verb in ("filter", "prioritize", "bind", "preempt"):
            assert (await extender.service.handle("POST", f"/{verb}", b"{}", False)).status == 403

    with_extender(test)
