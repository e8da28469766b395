"""The CPUs and NUMA nodes that input may name."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.model.defects import DefectKind
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import ANY_MACHINE, Cpu, Machine, NumaNode
from proxy.model.workload import Request
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.claims import claim
from proxy.pools.facts import pod_facts
from tests.testkit.changed_copy import changed_copy

MACHINE = Machine(
    cpus=tuple(Cpu(i, i, 0) for i in range(4)),
    nodes=(NumaNode(0, CpuSet(range(4))), NumaNode(2, CpuSet())),
    present=CpuSet(range(6)),
    possible=CpuSet(range(8)),
)


def test_cpus_that_may_be_added_later_may_be_named() -> None:
    assert MACHINE.bounds.cpus == CpuSet(range(8))
    pod = pod_facts("s", "u", "n", "p", 0, {}, {RESOURCE_STATUS: '{"cpuset":"3,7"}'}, "", MACHINE.bounds)
    assert pod.cpuset == CpuSet([3, 7])
    found = claim(pod, Request(), MACHINE.online, static=True)
    assert found.problem == "resource-status names CPUs 3,7, but CPU 7 is not online here"
    assert found.problem.kind is DefectKind.CPU_LIST  # type: ignore[attr-defined]  # it is a fault


@pytest.mark.parametrize(
    ("extra", "nodes"),
    [
        ({}, "0,2"),
        ({"numa": {"possible": "0-3"}}, "0-3"),
        ({"numa": {"possible": "1"}}, "0-2"),
        ({"numa": {"possible": "all of them"}}, "0,2"),
        ({"numa": {"possible": 3}}, "0,2"),
        ({"numa": None}, "0,2"),
    ],
)
def test_nodes_that_may_be_added_later_may_be_named(extra: dict[str, Any], nodes: str) -> None:
    assert changed_copy(MACHINE, extra=extra).bounds.nodes == Mask.parse(nodes)


def test_kernel_limits_apply_if_no_machine_is_known() -> None:
    assert (str(ANY_MACHINE.cpus), str(ANY_MACHINE.nodes)) == ("0-8191", "0-1023")
