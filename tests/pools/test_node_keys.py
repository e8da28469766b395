from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.model.koordinator import NodeBindPolicy, NumaPolicy
from proxy.pools.node_keys import (
    AMPLIFICATION,
    BIND_POLICY,
    NUMA_POLICY,
    RAW_ALLOCATABLE,
    RESERVATION,
    SYSTEM_QOS,
    NodeReservation,
    SystemQos,
    amplification_ratios,
    raw_allocatable,
    read_label,
    reservation,
    system_qos,
    with_ratios,
)
from tests.oracles.koordinator_annotations import with_ratio, with_raw_allocatable


def test_the_documents_spelling_counts_if_the_codes_is_missing() -> None:
    both = {NUMA_POLICY[0]: "BestEffort", NUMA_POLICY[1]: "Restricted"}
    assert read_label(NumaPolicy, NUMA_POLICY, both) == (NumaPolicy.BEST_EFFORT, NUMA_POLICY[0], "")
    del both[NUMA_POLICY[0]]
    assert read_label(NumaPolicy, NUMA_POLICY, both) == (NumaPolicy.RESTRICTED, NUMA_POLICY[1], "")


def test_labels_with_unknown_values_are_reported() -> None:
    wrong = f"label {BIND_POLICY[0]}: 'Full' is not one of FullPCPUsOnly, SpreadByPCPUs"
    found = read_label(NodeBindPolicy, BIND_POLICY, {BIND_POLICY[0]: "Full"})
    assert found == (NodeBindPolicy.NONE, "", wrong)
    assert read_label(NodeBindPolicy, BIND_POLICY, {BIND_POLICY[0]: "None"})[0] is NodeBindPolicy.NONE
    assert read_label(NodeBindPolicy, BIND_POLICY, {}) == (NodeBindPolicy.NONE, "", "")


def test_a_reservation_by_amount_and_by_name() -> None:
    amount = reservation({RESERVATION: '{"resources": {"cpu": "1200m"}, "applyPolicy": "Default"}'})[0]
    assert (amount.count, amount.cpus, amount.policy) == (2, CpuSet(), "Default")
    named = reservation({RESERVATION: '{"resources": {"cpu": 9}, "reservedCPUs": "3,1"}'})[0]
    assert (named.count, named.cpus) == (0, CpuSet([1, 3]))
    assert named.data() == {"resources": {"cpu": 9}, "reservedCPUs": "3,1"}
    assert amount.with_cpus(CpuSet([0])).data()["reservedCPUs"] == "0"
    assert NodeReservation().data() == {}


@pytest.mark.parametrize(
    ("cpu", "count"),
    [(0, 0), ("1m", 1), ("999m", 1), (1, 1), ("1001m", 2), ("2000m", 2), (2000, 2000), (0.5, 1), (-3, 0)],
)
def test_a_reserved_amount_is_rounded_up_to_whole_cpus(cpu: str | float, count: int) -> None:
    assert NodeReservation({"cpu": cpu, "memory": "1Gi"}).count == count


def test_a_faulty_reservation_is_reported_with_its_annotation() -> None:
    found, problem = reservation({RESERVATION: '{"reservedCPUs": "1-"}'})
    assert (found.text, found.cpus) == ("1-", CpuSet())
    assert problem == f"annotation {RESERVATION}: '1-' is not a list of ids such as '0-3,8'"
    assert reservation({RESERVATION: "1"}) == (
        NodeReservation(),
        f"annotation {RESERVATION}: it is not a JSON object",
    )


def test_cpus_of_class_system_leave_the_pools_unless_they_are_shared() -> None:
    alone = system_qos({SYSTEM_QOS: '{"cpuset": "0-1"}'})[0]
    shared = system_qos({SYSTEM_QOS: '{"cpuset": "0-1", "cpusetExclusive": false}'})[0]
    assert (alone.exclusive, alone.exclusive_cpus, shared.exclusive_cpus) == (True, CpuSet([0, 1]), CpuSet())
    assert shared.data() == {"cpuset": "0-1", "cpusetExclusive": False}
    found, problem = system_qos({SYSTEM_QOS: '{"cpuset": "x"}'})
    assert (found.exclusive_cpus, problem) == (
        CpuSet(),
        f"annotation {SYSTEM_QOS}: 'x' is not a list of ids such as '0-3,8'",
    )
    assert system_qos({SYSTEM_QOS: '{"cpusetExclusive": 1}'})[0] == SystemQos()


def test_ratios_are_written_with_two_decimals() -> None:
    assert with_ratios({"a": "b"}, {"memory": 1, "cpu": 1.005}) == {
        "a": "b",
        AMPLIFICATION: '{"cpu":1.00,"memory":1.00}',
    }
    assert amplification_ratios({AMPLIFICATION: '{"cpu":1.50}'}) == ({"cpu": 1.5}, "")
    assert amplification_ratios({AMPLIFICATION: '{"cpu":2,"CPU":3}'}) == ({"cpu": 2.0, "CPU": 3.0}, "")
    assert amplification_ratios({}) == (None, "")


def test_one_ratio_is_written_and_other_ratios_are_kept() -> None:
    before = with_ratios({}, {"memory": 2})
    after, changed, problem = with_ratio(before, "cpu", 1.5)
    assert (after[AMPLIFICATION], changed, problem) == ('{"cpu":1.50,"memory":2.00}', True, "")
    assert with_ratio(after, "cpu", 1.5) == (after, False, "")
    assert with_ratio(after, "gpu", 0.0) == (after, False, ""), "a ratio of zero removes an absent ratio"
    assert amplification_ratios({AMPLIFICATION: '{"cpu": null}'}) == ({"cpu": 0.0}, "")
    faulty = {AMPLIFICATION: '{"cpu": "x"}'}
    assert with_ratio(faulty, "cpu", 1.5) == (
        faulty,
        False,
        f"annotation {AMPLIFICATION}: cpu is not a number",
    )


@pytest.mark.parametrize("text", ["9" * 400, "1e999"])
def test_a_ratio_beyond_numbers(text: str) -> None:
    assert amplification_ratios({AMPLIFICATION: f'{{"cpu": {text}}}'})[1].endswith("cpu is too large")


def test_the_original_allocatable_resources_are_read() -> None:
    reported = with_raw_allocatable({}, {"memory": "1Gi", "cpu": "8"})
    assert reported == {RAW_ALLOCATABLE: '{"cpu":"8","memory":"1Gi"}'}
    assert raw_allocatable(reported) == ({"cpu": "8", "memory": "1Gi"}, "")
    assert raw_allocatable({}) == (None, ""), "no resource was amplified"
    assert raw_allocatable({RAW_ALLOCATABLE: "[]"}) == (
        None,
        f"annotation {RAW_ALLOCATABLE}: it is not a JSON object",
    )


@given(st.sampled_from([RESERVATION, SYSTEM_QOS, AMPLIFICATION, RAW_ALLOCATABLE]), st.text())
def test_no_text_raises(key: str, text: str) -> None:
    for reader in (reservation, system_qos, amplification_ratios, raw_allocatable):
        reader({key: text})
    read_label(NumaPolicy, NUMA_POLICY, {NUMA_POLICY[1]: text})
