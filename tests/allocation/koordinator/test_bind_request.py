"""The requested policy of a pod, and the CPUs allocated to other pods."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.koordinator.bind_request import (
    Allocated,
    BindRequest,
    PolicyConflictError,
    UnsupportedPolicyError,
    effective_policy,
    supported_request,
)
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NodeBindPolicy

FULL, SPREAD = BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS
NONE, DEFAULT, BURST = BindPolicy.NONE, BindPolicy.DEFAULT, BindPolicy.CONSTRAINED_BURST
ANY, FULL_ONLY, SPREAD_ONLY = NodeBindPolicy


@pytest.mark.parametrize(
    ("required", "preferred", "node", "default", "expected"),
    [
        (NONE, NONE, ANY, SPREAD, (SPREAD, False)),
        (NONE, NONE, ANY, NONE, (FULL, False)),
        (NONE, DEFAULT, ANY, SPREAD, (SPREAD, False)),
        (NONE, BURST, ANY, SPREAD, (SPREAD, False)),
        (NONE, SPREAD, ANY, FULL, (SPREAD, False)),
        (SPREAD, FULL, ANY, FULL, (SPREAD, True)),
        (DEFAULT, FULL, ANY, SPREAD, (FULL, False)),
        (NONE, SPREAD, FULL_ONLY, SPREAD, (FULL, True)),
        (NONE, FULL, SPREAD_ONLY, FULL, (SPREAD, True)),
        (FULL, SPREAD, FULL_ONLY, SPREAD, (FULL, True)),
    ],
)
def test_which_policy_holds(
    required: BindPolicy,
    preferred: BindPolicy,
    node: NodeBindPolicy,
    default: BindPolicy,
    expected: tuple[BindPolicy, bool],
) -> None:
    assert effective_policy(required, preferred, node, default) == expected


def test_pod_and_node_may_not_require_different_policies() -> None:
    with pytest.raises(
        PolicyConflictError, match="the pod requires SpreadByPCPUs and the node requires Full"
    ):
        effective_policy(SPREAD, NONE, FULL_ONLY, FULL)


def machine(threads: int) -> CpuTopology:
    return CpuTopology.of_rows(CpuRow(cpu, cpu // threads, 0, 0, 0) for cpu in range(4))


def test_arm_offers_whole_cores_and_whole_nodes_only() -> None:
    bind_request = BindRequest(SPREAD, required=True, exclusive=ExclusivePolicy.PCPU_LEVEL)
    assert supported_request(bind_request, "x86_64", machine(2)) == (bind_request, ())
    fit, notes = supported_request(bind_request, "aarch64", machine(1))
    assert fit == BindRequest(FULL, required=True)
    assert [note.split(" ")[0] for note in notes] == ["FullPCPUs", "PCPULevel"]
    with pytest.raises(UnsupportedPolicyError, match="SpreadByPCPUs is required, which arm64 does not offer"):
        supported_request(bind_request, "arm64", machine(2))
    node_level = BindRequest(FULL, exclusive=ExclusivePolicy.NUMA_NODE_LEVEL)
    assert supported_request(node_level, "aarch64", machine(2)) == (node_level, ())
    assert supported_request(BindRequest(SPREAD), "aarch64", machine(2))[0] == BindRequest(FULL), (
        "it was only preferred"
    )


def test_counts_of_pods_and_the_policy_of_the_last_one() -> None:
    taken = Allocated().add(CpuSet([0, 1]), ExclusivePolicy.PCPU_LEVEL).add(CpuSet([1, 2]))
    assert dict(taken.counts) == {0: 1, 1: 2, 2: 1}
    assert taken.under(ExclusivePolicy.PCPU_LEVEL) == CpuSet([0])
