"""Records of the ledger, those of reservations among them: written, read back, and refused if invalid."""

from __future__ import annotations

import copy
import enum
import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from proxy.executor.ledger_codec import dump, load_container, load_pod
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.grants import Block, Share
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, ExclusivePolicy
from proxy.model.machine import Bounds
from proxy.model.pod_selection import selectable_labels
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import (
    Container,
    ContainerPart,
    KubeQos,
    LocatedDevice,
    Phase,
    Placement,
    Pod,
    Pool,
    QosClass,
    Request,
    SetAside,
)
from tests.testkit.changed_copy import changed_copy

CPUS = st.sets(st.integers(0, 300), max_size=9).map(CpuSet)
MASKS = st.sets(st.integers(0, 70), max_size=4).map(Mask)
NUMBERS = st.integers(0, 1 << 50)
TEXTS = st.text(max_size=9)
BLOCKS = st.lists(st.builds(Block, MASKS, TEXTS, NUMBERS), max_size=3).map(tuple)
ASIDES = st.builds(
    SetAside,
    st.none() | MASKS,
    st.booleans(),
    CPUS,
    BLOCKS,
    st.lists(st.builds(ContainerPart, TEXTS, CPUS, BLOCKS), max_size=3).map(tuple),
)
DEFECTS = st.builds(
    lambda messages, kinds, decisive: tuple(
        InputDefect(each, kind, decisive=i == decisive)
        for i, (each, kind) in enumerate(zip(messages, kinds, strict=True))
    ),
    st.lists(TEXTS.filter(bool), min_size=3, max_size=3, unique=True),
    st.lists(st.sampled_from(DefectKind), min_size=3, max_size=3),
    st.none() | st.integers(0, 2),
)
PODS = st.builds(
    Pod,
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
    NUMBERS,
    st.sampled_from(QosClass),
    st.sampled_from(KubeQos),
    TEXTS,
    st.none() | CPUS,
    DEFECTS,
    st.none() | MASKS,
    st.sampled_from(BindPolicy),
    st.sampled_from(BindPolicy),
    st.sampled_from(ExclusivePolicy),
    cpuset_chosen_locally=st.booleans(),
    reserved_for_pod=st.none() | ASIDES,
    cgroup_changed_by_hook=st.booleans(),
)
PAGES = st.dictionaries(TEXTS, NUMBERS, max_size=2).map(lambda sizes: tuple(sizes.items()))
CONTAINERS = st.builds(
    Container,
    TEXTS,
    TEXTS,
    PODS,
    st.builds(Request, NUMBERS, st.integers(-1, 9), NUMBERS, NUMBERS, TEXTS, TEXTS, PAGES),
    st.builds(
        Placement,
        st.sampled_from(Pool),
        CPUS,
        MASKS,
        st.lists(TEXTS).map(tuple),
        st.booleans(),
        BLOCKS,
        pool_cpus_limit=st.none() | CPUS,
        pool_numa_limit=st.none() | MASKS,
        hook_cpus=st.none() | CPUS,
        hook_extra_cpus=CPUS,
        hook_quota=st.integers(-1, 9),
    ),
    st.sampled_from(Phase),
    NUMBERS,
    TEXTS,
    TEXTS,
)


@given(PODS)
def test_pods_are_read_back_as_written(pod: Pod) -> None:
    read = load_pod(json.loads(json.dumps(dump(pod))))
    assert read == pod
    assert read is not None
    assert [(d.kind, d.decisive) for d in read.defects] == [(d.kind, d.decisive) for d in pod.defects]


@given(CONTAINERS)
def test_containers_are_read_back_as_written(container: Container) -> None:
    assert load_container(json.loads(json.dumps(dump(container)))) == container


BLOCK = Block(Mask([0, 1]), "memory", 5)
POD = Pod(
    "s",
    "u",
    "ns",
    "p",
    reserved_for_pod=SetAside(Mask([0]), True, CpuSet([1]), (BLOCK,), (ContainerPart("c", CpuSet([1])),)),
)
CONTAINER = Container(
    "x",
    "c",
    POD,
    Request(huge_pages=(("hugepages-2Mi", 2),)),
    Placement(Pool.OWN, CpuSet([1]), Mask([0]), ("why",), True, (BLOCK,)),
    Phase.RUNNING,
)


ANY_CONTAINER = Container(
    "c", "n", Pod("s", "u", "ns", "p"), Request(), Placement(Pool.SHARED, CpuSet(), Mask()), Phase.RUNNING
)


@given(PODS, st.dictionaries(st.sampled_from(["a", "b", "x/y"]), st.sampled_from(["", "1"])))
def test_labels_are_kept_with_the_pod_alone(pod: Pod, labels: dict[str, str]) -> None:
    """The records of containers repeat the pod, and would repeat its labels."""
    labelled = structs.replace(pod, labels=selectable_labels(labels))
    read, plain = load_pod(json.loads(json.dumps(dump(labelled)))), load_pod(dump(pod))
    assert read is not None
    assert plain is not None
    assert read == structs.replace(plain, labels=selectable_labels(labels))
    container = structs.replace(ANY_CONTAINER, pod=labelled)
    assert dump(container) == dump(structs.replace(ANY_CONTAINER, pod=pod))


def test_grants_of_other_providers_are_stored_only_if_present() -> None:
    assert "'shares'" not in str(dump(CONTAINER))
    granted = Share("l3", "l3-ways", 2, Mask([1])), Share("l3", "class", 7)
    aside = SetAside(
        None, False, CpuSet(), parts=(ContainerPart("c", CpuSet(), shares=granted),), shares=granted[:1]
    )
    pod = changed_copy(POD, reserved_for_pod=aside)
    placement = changed_copy(CONTAINER.placement, shares=granted)
    container = changed_copy(CONTAINER, pod=pod, placement=placement)
    assert load_container(json.loads(json.dumps(dump(container)))) == container
    wrong = dump(container)
    wrong["placement"]["shares"] = [["l3", "l3-ways", "2", None]]  # type: ignore[index]
    assert load_container(wrong) is None, "an amount that is not a number"


def test_requests_are_stored_with_containers_and_queried_again_for_the_next_one() -> None:
    amounts = {"cpu": 2000, "memory": 1 << 30}
    resources = (
        ContainerResources("i", ContainerKind.INIT, {"cpu": 500}),
        ContainerResources("c", requests=amounts, limits={**amounts, "example.com/nic": 1}),
    )
    for requests in (
        PodRequests("u", resources),
        PodRequests(
            "u",
            resources,
            guaranteed=False,
            pod_level_requests={"cpu": 3000},
            are_pod_level_requests_managed=True,
        ),
        PodRequests("u", resources, pod_level_requests={"cpu": 3000}, pod_level_limits={"cpu": 4000}),
    ):
        pod = Pod("s", "u", "ns", "p", requests=requests, source="kubelet")
        assert load_pod(dump(pod)) == Pod("s", "u", "ns", "p")
        near = Container(
            "x", "c", pod, Request(devices=(LocatedDevice("/dev/a"),)), CONTAINER.placement, Phase.RUNNING
        )
        read = load_container(json.loads(json.dumps(dump(near))))
        assert read is not None
        assert (read.request, read.pod) == (Request(), pod)
    wrong: Any = dump(near)
    wrong["pod"]["requests"]["containers"][0][2] = {"cpu": "500m"}
    assert load_container(wrong) is None, "an amount that is not a number"


SAMPLES = {bool: True, int: 3, str: "text", CpuSet: CpuSet((2, 3)), Mask: Mask((1,))}


def test_every_simple_field_of_a_pod_is_recorded() -> None:
    plain = Pod("s", "u", "ns", "n")
    types = get_type_hints(Pod)
    recorded = set()
    for each in structs.fields(Pod):
        kinds = get_args(types[each.name]) or (types[each.name],)
        kind = next((kind for kind in kinds if isinstance(kind, type)), None)
        if kind is None or each.name in ("source", "requests"):
            continue
        options = list(kind) if issubclass(kind, enum.Enum) else [SAMPLES.get(kind)]
        value = next((option for option in options if option != getattr(plain, each.name)), None)
        if value is None:
            continue  # records and lists have tests of their own
        pod = structs.replace(plain, **{each.name: value})
        assert pod != plain
        assert load_pod(json.loads(json.dumps(dump(pod)))) == pod
        recorded.add(each.name)
    assert {"volcano_nodes", "bind_required", "cgroup_changed_by_hook", "attempt"} <= recorded


def test_sets_that_are_not_on_the_machine_are_left_out() -> None:
    pod = Pod("s", "u", "ns", "n", volcano_nodes=Mask((0, 5)))
    read = load_pod(dump(pod), Bounds(CpuSet(range(8)), Mask((0, 1))))
    assert read is not None
    assert read.volcano_nodes is None
    assert [str(defect) for defect in read.defects] == [
        "a scheduler named 5 (NUMA node), not on this machine"
    ]
    assert not read.problem


def test_records_of_the_previous_version_lack_set_asides_and_memory() -> None:
    old = json.loads(json.dumps(dump(CONTAINER)))
    del old["pod"]["aside"], old["request"]["huge_pages"], old["placement"]["blocks"]
    read = load_container(old)
    assert read is not None
    assert (read.pod.reserved_for_pod, read.request, read.placement.blocks) == (None, Request(), ())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("placement blocks", None),
        ("placement blocks", "text"),
        ("placement blocks", [["0", "memory"]]),
        ("placement blocks", [["0", "memory", True]]),
        ("placement blocks", [["0", "memory", -1]]),
        ("placement blocks", [["0", 7, 1]]),
        ("placement blocks", [[0, "memory", 1]]),
        ("placement blocks", [["2-1", "memory", 1]]),
        ("request huge_pages", ["2Mi"]),
        ("request huge_pages", {"hugepages-2Mi": "2"}),
        ("pod aside", None),
        ("pod aside", {}),
        ("pod aside affinity", 3),
        ("pod aside cpus", None),
        ("pod aside blocks", [[]]),
        ("pod aside parts", None),
        ("pod aside parts", [{"name": "c"}]),
        ("pod aside parts", [{"name": "c", "cpus": "x", "blocks": []}]),
    ],
)
def test_unreadable_data_is_not_a_record(path: str, value: Any) -> None:
    data: Any = json.loads(json.dumps(dump(CONTAINER)))
    assert load_container(copy.deepcopy(data)) == CONTAINER
    *way, last = path.split()
    inner = data
    for name in way:
        inner = inner[name]
    inner[last] = value
    assert load_container(data) is None
    if way[0] == "pod":
        assert load_pod(data["pod"]) is None
