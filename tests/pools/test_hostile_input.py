"""Labels, annotations and names that are written to do harm."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.executor.ledger_codec import dump
from proxy.model.defects import DefectKind
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import ANY_MACHINE, Bounds
from proxy.model.workload import Pod, QosClass, Request
from proxy.pools.annotations import (
    BATCH_CPU,
    NUMA_TOPOLOGY_SPEC,
    RESOURCE_SPEC,
    RESOURCE_STATUS,
    VOLCANO_DECISION,
    VOLCANO_POLICY,
    resource_status,
)
from proxy.pools.claims import claim
from proxy.pools.facts import POD_KEYS, QOS_LABEL, pod_facts
from proxy.pools.go_json import DEEPEST, LARGEST_ANNOTATION, LARGEST_STATUS, MOST_ITEMS, load

SMALL = Bounds(CpuSet(range(8)), Mask(range(2)))
SPARSE = ",".join(map(str, range(0, 65536, 2)))


def facts(text: str, key: str = RESOURCE_STATUS, bounds: Bounds | None = SMALL, label: str = "") -> Pod:
    more = () if bounds is None else (bounds,)
    return pod_facts("s", "u", "ns", "p", 0, {QOS_LABEL: label}, {key: text}, "/kubepods/podu", *more)


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# -- any input ----------------------------------------------------------------------------------------------

ODD = st.sampled_from(
    ["\ud800", "\udfff\ud800", "\u202e", "\x00", "\x1b[2J", "\n", "'", '"', "\\", "\u4e2d", "a" * 5000]
)
TEXT = st.lists(st.text(max_size=5) | ODD, max_size=4).map("".join)
RUNS = st.builds(lambda low, more: f"{low}-{low + more}", st.integers(0, 70000), st.integers(-2, 70000))
LISTS = st.lists(st.integers(0, 70000).map(str) | RUNS | TEXT, max_size=50).map(",".join)
LISTS |= st.builds(
    lambda step, end: ",".join(map(str, range(0, end, step))), st.integers(1, 3), st.integers(0, 20000)
)
AMOUNTS = (
    st.integers()
    | st.floats()
    | TEXT
    | st.sampled_from(["1", "1.5m", "1e999999", "9" * 4200, "-3Gi", True, []])
)
RESOURCES = st.dictionaries(st.sampled_from(["cpu", BATCH_CPU, "memory"]) | TEXT, AMOUNTS, max_size=4)
NODE = st.integers(-2, 3) | st.integers() | st.sampled_from([1023, 1024, 65535, 1 << 31, 0.5, "0"])
SHARES = st.lists(st.fixed_dictionaries({"node": NODE}, optional={"resources": RESOURCES}), max_size=4)
NESTED = st.recursive(
    st.none() | st.booleans() | NODE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=9,
)
JSON = NESTED | st.fixed_dictionaries(
    {},
    optional={
        "cpuset": LISTS | NESTED,
        "numaNodeResources": SHARES | NESTED,
        "cpuSharedPools": SHARES | NESTED,
        "requiredCPUBindPolicy": TEXT | NESTED,
        "preferredCPUExclusivePolicy": TEXT,
        "numaTopologyPolicy": TEXT,
        "singleNUMANodeExclusive": TEXT,
        "numa": st.dictionaries(st.integers(0, 70000).map(str) | TEXT, RESOURCES, max_size=4) | NESTED,
    },
)


def escaped_keys(value: object) -> str:
    """Write JSON with the letters of its texts escaped; unchanged if it has an escape already."""

    def escape(text: re.Match[str]) -> str:
        return re.sub("[a-zA-Z]", lambda letter: f"\\u{ord(letter[0]):04x}", text[0])

    plain = json.dumps(value)
    return plain if "\\" in plain else re.sub('"[^"]*"', escape, plain)


VALUES = (
    JSON.map(json.dumps)
    | JSON.map(escaped_keys)
    | TEXT
    | LISTS
    | st.builds(
        lambda mark, times: mark * times,
        st.sampled_from(["[", '{"a":', '"\\', "9", "\ud800"]),
        st.integers(0, 70000),
    )
)


def texts(value: object) -> list[str]:
    """Return all texts within a value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in texts(each)]
    return [text for each in value for text in texts(each)] if isinstance(value, list) else []


@given(
    names=st.tuples(TEXT, TEXT, TEXT),
    label=TEXT | st.sampled_from(list(QosClass)),
    annotations=st.dictionaries(st.sampled_from(POD_KEYS[1:]) | TEXT, VALUES, max_size=5),
    parent=TEXT | st.just("/kubepods/burstable/podu"),
    bounds=st.sampled_from([SMALL, ANY_MACHINE]),
)
def test_whatever_a_pod_says_little_is_kept_of_it(
    names: tuple[str, str, str], label: str, annotations: dict[str, str], parent: str, bounds: Bounds
) -> None:
    began = time.thread_time()
    pod = pod_facts("s", *names, 0, {QOS_LABEL: label}, annotations, parent, bounds)
    claimed = claim(pod, Request(), SMALL.cpus, static=True)
    assert time.thread_time() - began < 0.5
    assert pod.cpuset is None or pod.cpuset <= bounds.cpus
    assert pod.nodes is None or pod.nodes <= bounds.nodes
    assert pod.volcano_nodes is None or pod.volcano_nodes <= bounds.nodes
    for message in (pod.problem, *pod.defects, claimed.reason, claimed.problem):
        assert len(message) <= 300
        assert message.isprintable()
    assert len(pod.ref) <= 320
    assert pod.ref.isprintable()
    record = dump(pod)
    json.dumps(record, ensure_ascii=False).encode()
    assert len(json.dumps({**record, "cpuset": None, "cgroup_parent": ""})) < 16_000
    assert all(
        len(text) <= 800
        for name, value in record.items()
        for text in texts(value)
        if name not in ("cpuset", "cgroup_parent")
    )


@given(JSON)
def test_faults_do_not_depend_on_how_keys_are_escaped(value: Any) -> None:
    one, other = facts(json.dumps(value)), facts(escaped_keys(value))
    assert (one.cpuset, one.nodes, bool(one.problem)) == (other.cpuset, other.nodes, bool(other.problem))


# -- inputs that caused harm before -------------------------------------------------------------------------


@pytest.mark.parametrize("qos", ["", "LSR", "LSE", "BE", "LS"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"cpuset": SPARSE}),
        json.dumps({"cpuset": ",".join(["0-65535"] * 31000)}),
        json.dumps({"numaNodeResources": [{"node": 1}] * 15000}),
        json.dumps({"cpuset": ",".join(map(str, range(0, 8192, 2)))}),
    ],
    ids=["sparse", "overlapping", "many nodes", "short enough to be read"],
)
def test_a_long_annotation_makes_neither_a_long_message_nor_a_long_record(text: str, qos: str) -> None:
    pod = pod_facts("s", "u", "ns", "p", 0, {QOS_LABEL: qos}, {RESOURCE_STATUS: text}, "/kubepods/podu")
    began = time.thread_time()
    found = claim(pod, Request(), SMALL.cpus, static=True)
    assert time.thread_time() - began < 0.1
    assert len(found.reason) <= 300
    assert len(found.problem) <= 400
    assert len(json.dumps(dump(pod))) < 21_000


def test_a_set_that_is_not_on_the_machine_is_not_kept() -> None:
    pod = facts('{"cpuset":"0,2,4,31"}', label="LSR")
    assert pod.cpuset is None
    assert pod.problem == f"annotation {RESOURCE_STATUS}: cpuset: CPU 31 is not on this machine (0-7)"
    assert [fault.kind for fault in pod.defects] == [DefectKind.CPU_LIST]
    found = claim(pod, Request(), SMALL.cpus, static=True)
    assert found.fatal
    assert found.problem == pod.problem


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (RESOURCE_STATUS, '{"numaNodeResources":[{"node":2}]}', "NUMA node 2 is not on this machine (0-1)"),
        (RESOURCE_STATUS, '{"cpuSharedPools":[{"node":9}]}', "NUMA node 9 is not on this machine (0-1)"),
        (VOLCANO_DECISION, '{"numa":{"5":{"cpu":"1"}}}', "numa: NUMA node 5 is not on this machine (0-1)"),
    ],
)
def test_a_numa_node_that_is_not_on_the_machine_is_not_kept(key: str, text: str, message: str) -> None:
    pod = facts(text, key)
    assert (pod.nodes, pod.volcano_nodes) == (None, None)
    (fault,) = pod.defects
    assert fault == f"annotation {key}: {message}"
    assert fault.kind is DefectKind.CPU_LIST


def test_half_a_surrogate_pair_in_a_key_is_escaped() -> None:
    pod = facts('{"numaNodeResources":[{"node":0,"resources":{"\\ud800":"abc"}}]}', bounds=None)
    assert pod.problem.startswith(f"annotation {RESOURCE_STATUS}: resources: \\ud800: 'abc' is not an amount")
    json.dumps(dump(pod), ensure_ascii=False).encode()


@pytest.mark.parametrize("key", POD_KEYS[1:])
@pytest.mark.parametrize("odd", ["\ud800", "\u202e", "\x1b[31m", "\n"])
def test_what_is_quoted_of_an_annotation_is_escaped(key: str, odd: str) -> None:
    for text in (
        odd,
        json.dumps(
            {"cpuset": odd, "requiredCPUBindPolicy": odd, "numaTopologyPolicy": odd, "numa": {odd: 1}}
        ),
    ):
        for fault in facts(text, key, bounds=None).defects:
            assert fault.isprintable()
            fault.encode()


def test_a_label_is_quoted_escaped_and_cut() -> None:
    (fault,) = facts("", label="\u202e\ud800" + "x" * 10**6, bounds=None).defects
    assert fault.isprintable()
    assert "\\u202e\\ud800xxx" in fault
    assert len(fault) < 200


# -- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "largest"), [(RESOURCE_STATUS, LARGEST_STATUS), (NUMA_TOPOLOGY_SPEC, LARGEST_ANNOTATION)]
)
def test_an_annotation_is_read_up_to_a_size(key: str, largest: int) -> None:
    def of(size: int) -> str:
        return '{"other":"' + "x" * (size - 12) + '"}'

    assert len(of(largest)) == largest
    assert facts(of(largest), key).defects == ()
    (fault,) = facts(of(largest + 1), key).defects
    assert fault == f"annotation {key}: it has {largest + 1} characters; at most {largest} are read"


def test_entries_are_read_up_to_a_limit() -> None:
    for value in (
        {"numaNodeResources": [{"node": 1}] * (MOST_ITEMS + 1)},
        {"cpuSharedPools": [{"node": 1}] * (MOST_ITEMS + 1)},
        {"numaNodeResources": [{"node": 1, "resources": {str(i): 1 for i in range(MOST_ITEMS + 1)}}]},
    ):
        assert f"has {MOST_ITEMS + 1} entries; at most {MOST_ITEMS} are read" in facts(compact(value)).problem
    many = {"numa": {str(i): {} for i in range(MOST_ITEMS + 1)}}
    (fault,) = facts(compact(many), VOLCANO_DECISION, ANY_MACHINE).defects
    assert "at most 1024 are read" in fault


@pytest.mark.parametrize("outer", ["[", '{"a":'])
def test_nested_levels_are_read_up_to_a_limit(outer: str) -> None:
    closing = "]" if outer == "[" else "}"
    deepest = outer * DEEPEST + "1" + closing * DEEPEST
    assert load(deepest) is not None
    assert load(f"[{deepest[len(outer) : -1]}, []]") is not None, "also with more brackets in total"
    with pytest.raises(
        ValueError, match=r"^not JSON that is read here: it is nested more than 32 levels deep$"
    ):
        load(outer * (DEEPEST + 1) + "1" + closing * (DEEPEST + 1))
    flat = compact([outer * 40, *([[]] * 100)])
    assert load(flat) == json.loads(flat), "brackets in texts and sibling lists do not count as levels"


def test_the_largest_machine_fits() -> None:
    machine = Bounds(CpuSet(range(8192)), Mask(range(1024)))
    every_second = CpuSet(range(0, 8192, 2))
    shares = [{"node": i, "resources": {"cpu": "8"}} for i in range(1024)]
    text = compact({"cpuset": str(every_second), "numaNodeResources": shares})
    status, fault = resource_status({RESOURCE_STATUS: text}, machine)
    assert not fault
    assert status.cpus == every_second
    assert status.nodes == tuple(range(1024))
    decision = compact({"numa": {str(i): {"cpu": "127500m"} for i in range(1024)}})
    assert facts(decision, VOLCANO_DECISION, machine).volcano_nodes == machine.nodes


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (RESOURCE_STATUS, compact({"cpuset": ",".join(["0-8191"] * 9000)})),
        (
            RESOURCE_STATUS,
            compact(
                {
                    "numaNodeResources": [
                        {"node": 0, "resources": {f"{j:x}": f"{i}{j}e9" for j in range(1000)}}
                        for i in range(4)
                    ]
                }
            ),
        ),
        (RESOURCE_STATUS, "[" * 65000),
        (RESOURCE_STATUS, "[" * 40 + '"\\' * 30000),
        (VOLCANO_DECISION, compact({"numa": {str(i): {"cpu": f"{i}m"} for i in range(1024)}})),
        (VOLCANO_POLICY, "\u202e" * 10**6),
        (RESOURCE_SPEC, compact({"requiredCPUBindPolicy": "\ud800" * 5000})),
    ],
    ids=["overlapping", "amounts", "nested", "quotes", "nodes", "policy", "bind"],
)
def test_the_worst_that_is_read_takes_little_time(key: str, text: str) -> None:
    took = []
    for _ in range(3):
        began = time.thread_time()
        facts(text, key, ANY_MACHINE)
        took.append(time.thread_time() - began)
    assert min(took) < 0.1, "about 10 ms on a machine of 2020; one second before the limits were introduced"


def test_names_that_kubernetes_does_not_allow_are_cut_and_stay_distinct() -> None:
    def named(name: str) -> Pod:
        return pod_facts("s", name, name, name, 0, {}, {}, f"/kubepods/pod{name}")

    one, other = named("\ud800" + "x" * 10**6), named("\ud800" + "x" * 10**6 + "y")
    assert one.uid != other.uid
    assert one.name != other.name
    assert len(one.uid) <= 253
    assert one.cgroup_parent == "", "no path is that long"
    json.dumps(msgspec.to_builtins(one, enc_hook=str), ensure_ascii=False).encode()
    assert named("\u4e2d").name == "\u4e2d"
