"""What is read out of a KubeletConfiguration, whatever else is in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.kubelet.manager_settings import ManagerSettings, manager_settings
from proxy.model.idset import CpuSet
from tests.testkit.changed_copy import changed_copy

FULL = {
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true", "distribute-cpus-across-numa": False},
    "topologyManagerPolicy": "single-numa-node",
    "topologyManagerScope": "pod",
    "reservedSystemCPUs": "0-1,8",
    "kubeReserved": {"cpu": "500m", "memory": "1Gi"},
    "systemReserved": {"cpu": 1},
    "evictionHard": {"memory.available": "100Mi"},
}


def test_valid_settings_are_read() -> None:
    assert manager_settings(FULL) == ManagerSettings(
        "static",
        {"full-pcpus-only": "true", "distribute-cpus-across-numa": "false"},
        "single-numa-node",
        "pod",
        CpuSet([0, 1, 8]),
        1500,
    )


def test_missing_settings_are_none() -> None:
    assert manager_settings({}) == ManagerSettings()
    empty = {"cpuManagerPolicy": "", "reservedSystemCPUs": "", "kubeReserved": None, "systemReserved": {}}
    assert manager_settings(empty) == ManagerSettings()


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("cpuManagerPolicy", 7, "cpuManagerPolicy: 7 is not one of none, static"),
        ("cpuManagerPolicy", "Static", "cpuManagerPolicy: 'Static' is not one of none, static"),
        ("topologyManagerPolicy", {}, "topologyManagerPolicy: an object is not one of none, best-effort"),
        ("topologyManagerScope", "node", "topologyManagerScope: 'node' is not one of container, pod"),
        ("cpuManagerPolicyOptions", ["a"], "cpuManagerPolicyOptions: a list is not a list of options"),
        ("cpuManagerPolicyOptions", {"a": {}}, "cpuManagerPolicyOptions: an object is not a value of 'a'"),
        ("reservedSystemCPUs", "0-", "reservedSystemCPUs: '0-' is not a list of ids"),
        ("reservedSystemCPUs", "9000", "reservedSystemCPUs: '9000' names CPUs that no machine has"),
        ("reservedSystemCPUs", True, "reservedSystemCPUs: True is not a list of CPUs"),
        ("kubeReserved", "2", "kubeReserved: '2' is not a list of amounts"),
        ("kubeReserved", {"cpu": "two"}, "kubeReserved: 'two' is not an amount"),
        ("systemReserved", {"cpu": "-1"}, "systemReserved: '-1' CPUs cannot be reserved"),
        ("evictionHard", {"cpu": "1e9"}, "evictionHard: '1e9' CPUs cannot be reserved"),
    ],
)
def test_an_invalid_value_is_reported_and_the_others_are_read(name: str, value: Any, reported: str) -> None:
    result = manager_settings({**FULL, name: value})
    assert len(result.problems) == 1
    assert result.problems[0].startswith(reported)
    without = manager_settings({key: other for key, other in FULL.items() if key != name})
    assert changed_copy(result, problems=()) == without


def test_a_reader_without_types_gives_texts() -> None:
    texts = {"reservedSystemCPUs": 3, "kubeReserved": {"cpu": "1"}, "cpuManagerPolicyOptions": {"x": "true"}}
    result = manager_settings(texts)
    assert (result.reserved, result.reserved_milli, result.options) == (CpuSet([3]), 1000, {"x": "true"})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    values=st.dictionaries(st.sampled_from(sorted(FULL)), ANYTHING),
    others=st.dictionaries(st.text(), ANYTHING),
)
def test_any_content_is_read_without_an_exception(values: dict[str, Any], others: dict[str, Any]) -> None:
    result = manager_settings({**others, **values})
    assert result.policy in (None, "none", "static")
    unused = {name: value for name, value in values.items() if name in FULL}
    assert manager_settings(unused) == result, "unused keys have no effect"
