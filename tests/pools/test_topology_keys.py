from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.pools.node_keys import SYSTEM_QOS
from proxy.pools.published_pools import NodePool
from proxy.pools.topology_keys import BE_POOLS, MANAGER_POLICY, SHARED_POOLS, ManagerPolicy, write_pools
from tests.oracles.koordinator_rule import (
    MANAGER_POLICY_KEYS,
    NodeRule,
    manager_policy,
    parse_rule,
    read_pools,
    updated,
)

POOLS = (NodePool(0, 0, CpuSet.parse("0-3")), NodePool(1, 3, CpuSet()))
POOL = st.builds(
    NodePool, st.integers(0, 7), st.integers(0, 99), st.builds(CpuSet.from_bits, st.integers(0, 255))
)


def test_a_rule_is_read_from_its_annotations() -> None:
    annotations = {
        SHARED_POOLS: write_pools(POOLS),
        BE_POOLS: write_pools(POOLS[:1]),
        MANAGER_POLICY: '{"policy": "static", "options": {"b": "1", "a": "2"}, "reservedCPUs": "0"}',
        SYSTEM_QOS: '{"cpuset": "4,5"}',
    }
    rule = NodeRule("static", POOLS, POOLS[:1], "4,5")
    assert parse_rule(annotations) == (rule, "")
    assert rule.system_cpus == CpuSet.parse("4-5")
    assert updated(rule, annotations) == (rule, False, "")
    assert updated(None, annotations) == (rule, True, "")
    assert manager_policy(annotations) == ManagerPolicy("static", (("a", "2"), ("b", "1")), "0")


def test_a_rule_without_known_facts() -> None:
    assert parse_rule({}) == (NodeRule(), "")
    assert ManagerPolicy().data() == {}


def test_no_pools_are_written_as_go_writes_them() -> None:
    """A slice without elements that was never made (``json.Marshal`` of nil)."""
    assert write_pools(()) == "null"


def test_the_documents_spelling_of_kubelets_policy() -> None:
    assert manager_policy({MANAGER_POLICY_KEYS[1]: '{"policy": "none"}'}).policy == "none"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (SHARED_POOLS, "{}", "is not a list"),
        (BE_POOLS, '[{"cpuset": "3-"}]', "'3-' is not a list of ids"),
        (MANAGER_POLICY, "[]", "is not a JSON object"),
        (SYSTEM_QOS, '{"cpuset": "x"}', "'x' is not a list of ids"),
    ],
)
def test_a_faulty_annotation_keeps_the_previous_rule(key: str, text: str, message: str) -> None:
    before = NodeRule("none", POOLS)
    rule, new, problem = updated(before, {SHARED_POOLS: "[]", key: text})
    assert (rule, new) == (before, False)
    assert problem.startswith(f"annotation {key}: ")
    assert message in problem


@given(st.lists(POOL, max_size=4))
def test_pools_survive_a_round_trip(pools: list[NodePool]) -> None:
    assert read_pools({BE_POOLS: write_pools(pools)}, BE_POOLS) == tuple(pools)
