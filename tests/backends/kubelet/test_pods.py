"""Finding a pod in kubelet's list: when a list is requested, and which pod is returned."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.kubelet.pods import PodList, read_items
from proxy.backends.kubelet.settings import KubeletError
from proxy.model.errors import InputError
from proxy.model.grpc_status import GrpcStatus
from proxy.pools.pod_spec import pod_spec

Raw = dict[str, Any]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def pod(uid: str, name: str = "web", cpu: str = "1", annotations: Raw | None = None) -> Raw:
    metadata = {"uid": uid, "namespace": "shop", "name": name, "annotations": annotations}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": cpu}}}]},
    }


class World:
    """A clock, and a kubelet that needs ``took`` seconds to return its list."""

    def __init__(self, *items: Raw) -> None:
        self.content: Any = {"kind": "PodList", "items": list(items)}
        self.failure: KubeletError | None = None
        self.now = 100.0
        self.took = 0.1
        self.fetch_count = 0
        self.pods = PodList(self.fetch, lambda: self.now)

    def fetch(self) -> bytes:
        self.fetch_count += 1
        self.now += self.took
        if self.failure is not None:
            raise self.failure
        return self.content if isinstance(self.content, bytes) else json.dumps(self.content).encode()

    def cpu(self, uid: str, name: str = "web") -> int | None:
        found = self.pods.find(uid, "shop", name)
        return None if found is None else found.requests.containers[0].requests["cpu"]


def test_one_list_serves_all_its_pods_for_a_while() -> None:
    world = World(pod("u-1"), pod("u-2", cpu="2"))
    assert (world.cpu("u-1"), world.cpu("u-2"), world.cpu("u-1")) == (1000, 2000, 1000)
    assert world.fetch_count == 1
    world.now += 5
    assert world.cpu("u-1") == 1000
    assert world.fetch_count == 2


def test_a_pod_that_is_missing_in_the_list_renews_it_once_a_second() -> None:
    world = World(pod("u-1"))
    world.cpu("u-1")
    world.content["items"].append(pod("u-2"))
    assert world.cpu("u-2") == 1000
    assert world.fetch_count == 2
    assert world.cpu("u-3") is None
    assert world.cpu("u-3") is None
    assert world.fetch_count == 3
    assert world.cpu("u-4") is None  # the query for another pod does not wait
    assert world.fetch_count == 4
    world.now += 1
    world.content["items"].append(pod("u-3"))
    assert world.cpu("u-3") == 1000


def test_unknown_pods_are_forgotten() -> None:
    world = World()
    for i in range(50):
        assert world.cpu(f"u-{i}") is None
        world.now += 1
    assert len(world.pods._requested_at) == 1


def test_waiting_callers_share_one_list() -> None:
    going, go = threading.Event(), threading.Event()
    fetches = []

    def fetch() -> bytes:
        fetches.append(1)
        going.set()
        assert go.wait(60)
        return json.dumps({"items": [pod("u-1"), pod("u-2")]}).encode()

    pods = PodList(fetch, lambda: 100.0)
    with ThreadPoolExecutor(6) as many:
        first = many.submit(pods.find, "u-1", "shop", "web")
        assert going.wait(60)
        others = [many.submit(pods.find, uid, "shop", "web") for uid in ("u-1", "u-2", "u-1", "u-2")]
        go.set()
        assert all(found.result(60) is not None for found in (first, *others))
    assert len(fetches) == 1


def test_a_list_older_than_the_query_does_not_make_a_pod_unknown() -> None:
    world = World()
    late: list[int | None] = []

    def fetch() -> bytes:
        content = world.fetch()
        if world.fetch_count == 1:  # meanwhile kubelet starts a pod, and its requests are queried
            world.content["items"].append(pod("u-2"))
            caller.start()
            came.wait(60)
        return content

    clock_read, came = 0, threading.Event()

    def clock() -> float:
        nonlocal clock_read
        if threading.current_thread() is caller:
            clock_read += 1
            came.set()
        return world.now

    caller = threading.Thread(target=lambda: late.append(world.cpu("u-2")))
    world.pods = PodList(fetch, clock)
    assert world.cpu("u-1") is None
    caller.join(60)
    assert late == [1000]
    assert world.fetch_count == 2


def test_static_pods_are_found_by_the_hash_of_their_file() -> None:
    mirror = {"kubernetes.io/config.hash": "h-1", "kubernetes.io/config.mirror": "h-1"}
    world = World(pod("m-1", "etcd", "2", mirror), pod("liar", "web", "64", mirror))
    assert world.cpu("h-1", "etcd") == 2000
    assert world.cpu("m-1", "etcd") == 2000
    # Any user may write the annotation: it gives no pod the requests of another one.
    assert world.cpu("h-1", "db") is None
    own = World(pod("m-1", "etcd", "2", mirror), pod("h-1", "etcd", "3", mirror))
    assert own.cpu("h-1", "etcd") == 3000


def test_failures_are_reported_and_retried_after_ten_times_their_cost() -> None:
    world = World(pod("u-1"), pod("u-2"))
    world.failure = KubeletError("it is gone")
    for uid in ("u-1", "u-2", "u-1"):
        with pytest.raises(KubeletError, match="it is gone"):
            world.cpu(uid)
    assert world.fetch_count == 1
    world.failure = None
    world.now += 10 * world.took
    assert world.cpu("u-2") == 1000
    assert world.cpu("u-1") == 1000


def test_a_kubelet_that_refuses_at_once_is_queried_for_the_next_pod() -> None:
    world = World(pod("u-1"), pod("u-2"))
    world.took, world.failure = 0.0, KubeletError("refused")
    with pytest.raises(KubeletError):
        world.cpu("u-1")
    world.now += 0.001
    world.failure = None
    assert world.cpu("u-2") == 1000


def test_the_retry_delay_is_at_most_thirty_seconds() -> None:
    world = World(pod("u-1"))
    world.took, world.failure = 60.0, KubeletError("slow")
    with pytest.raises(KubeletError):
        world.cpu("u-1")
    world.failure = None
    world.now += 30
    assert world.cpu("u-1") == 1000


def test_a_single_timeout_does_not_hide_the_next_pods() -> None:
    world = World(pod("u-1"), pod("u-2"))
    world.took, world.failure = 2.0, KubeletError("no complete answer", GrpcStatus.DEADLINE_EXCEEDED)
    for uid in ("u-1", "u-2"):
        with pytest.raises(KubeletError, match="no complete answer"):
            world.cpu(uid)
    assert world.fetch_count == 2, "one timeout is tolerated"
    world.failure = None
    world.now += 19
    with pytest.raises(KubeletError):
        world.cpu("u-1")
    assert world.fetch_count == 2, "two timeouts in a row are not"
    world.now += 1
    assert world.cpu("u-1") == 1000
    world.failure = KubeletError("no complete answer", GrpcStatus.DEADLINE_EXCEEDED)
    world.now += 5
    with pytest.raises(KubeletError):
        world.cpu("u-1")
    world.failure = None
    world.now += 1
    assert world.cpu("u-1") == 1000, "the timeouts are not in a row"


def test_callers_that_wait_share_a_timeout() -> None:
    world = World()
    world.took, world.failure = 2.0, KubeletError("late", GrpcStatus.DEADLINE_EXCEEDED)
    came = threading.Event()
    failures: list[str] = []

    def find(uid: str) -> None:
        with pytest.raises(KubeletError) as caught:
            world.pods.find(uid, "shop", "web")
        failures.append(str(caught.value))

    def fetch() -> bytes:
        if world.fetch_count == 0:
            second.start()
            came.wait(60)
        return world.fetch()

    def clock() -> float:
        now = world.now
        if threading.current_thread() is second:
            came.set()
        return now

    second = threading.Thread(target=find, args=("u-2",))
    world.pods = PodList(fetch, clock)
    find("u-1")
    second.join(60)
    assert failures == ["late", "late"]
    assert world.fetch_count == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "'{' is missing at character 0"),
        (b"\xff\xfe", "can't decode byte"),
        (b'{"items": [' + b"[" * 200_000, "cannot read"),
        (b"[]", "'{' is missing"),
        (b'{"kind": "Status"}', "it is not a PodList"),
        (b'{"items": {"a": 1}}', "it is not a PodList"),
        (b'{"items": [{}', "',' is missing"),
    ],
)
def test_invalid_lists_of_pods(content: bytes, message: str) -> None:
    world = World()
    world.content = content
    with pytest.raises(KubeletError, match=message) as caught:
        world.cpu("u-1")
    assert str(caught.value).startswith("cannot read kubelet's list of pods: ")


def test_an_empty_list_as_go_writes_it() -> None:
    world = World()
    world.content = b'{"kind": "PodList", "items": null}'
    assert world.cpu("u-1") is None


def test_an_invalid_pod_does_not_affect_other_pods() -> None:
    bad: list[Any] = [
        7,
        {},
        {"metadata": 7},
        {"metadata": {"uid": 7}},
        {"metadata": {"uid": "u-3", "annotations": 3}},
    ]
    world = World(*bad, pod("u-2", cpu="much"), pod("u-1"))
    assert world.cpu("u-1") == 1000
    with pytest.raises(InputError, match=r"^cannot read the pod shop/web: .*'much' is not an amount"):
        world.cpu("u-2")
    with pytest.raises(InputError):
        world.cpu("u-3")
    assert world.fetch_count == 1


def test_a_reduced_list_reads_as_the_whole_list() -> None:
    """The list's items are cut down; what is left reads as the whole does."""
    item = pod("u-1", annotations={"a": "b"})
    item["metadata"] |= {"labels": {"c": "d"}, "managedFields": [{}]}
    item["spec"] |= {
        "initContainers": [
            {"name": "i", "image": "x", "resources": {"limits": {"memory": "1Gi"}}},
            {"name": "s", "restartPolicy": "Always", "env": [{}]},
        ],
        "volumes": [{}],
        "overhead": {"cpu": "1"},
        "resources": {"limits": {"cpu": "9"}},
    }
    assert World(item).pods.find("u-1", "shop", "web") == pod_spec(item, listed=True)


def test_the_qos_class_of_kubelet_is_used() -> None:
    item = pod("u-1")
    item["status"] = {"qosClass": "Guaranteed", "phase": "Running"}
    found = World(item).pods.find("u-1", "shop", "web")
    assert found is not None
    assert found.requests.guaranteed


@given(
    items=st.lists(VALUES, max_size=5),
    others=st.dictionaries(
        st.text(max_size=5).filter(lambda k: k not in ("items", "kind")), VALUES, max_size=3
    ),
    first=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_items_of_any_list(items: list[Any], others: dict[str, Any], first: bool, indent: int | None) -> None:
    listed = {"kind": "PodList", "items": items}
    whole = {**listed, **others} if first else {**others, **listed}
    text = f"\n {json.dumps(whole, indent=indent, ensure_ascii=first)} \r\n"
    assert list(read_items(text.encode())) == items


@pytest.mark.parametrize("text", ["{}", '{"items": null}', '{"items":[]}', ' { "kind" : "PodList" } '])
def test_a_list_without_items_yields_no_pods(text: str) -> None:
    assert list(read_items(text.encode())) == []


LIST = b'{"kind": "PodList", "items": [{"a": [1, "x"]}, 2], "end": {}}'


@pytest.mark.parametrize("end", range(len(LIST)))
def test_a_list_that_ends_early_is_refused(end: int) -> None:
    with pytest.raises(ValueError):
        list(read_items(LIST[:end]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "'{' is missing at character 0"),
        ("{1: 2}", "a key is missing"),
        ('{"items" []}', "':' is missing at character 9"),
        ('{"items": [1 2]}', "',' is missing at character 13"),
        ('{"items": [1,]}', "Expecting value"),
        ('{"items": [],}', "Expecting value"),
        ('{"items": []} {}', "there is more text after its end, at character 14"),
        ('{"items": 0}', "it is not a PodList"),
        ('{"kind": "NodeList"}', "it is not a PodList"),
    ],
)
def test_an_invalid_list_is_refused_with_the_cause(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        list(read_items(text.encode()))
    assert message in str(caught.value)
