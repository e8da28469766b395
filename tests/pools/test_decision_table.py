from __future__ import annotations

import itertools

import pytest

from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import KubeQos, Pod, Pool, QosClass, Request
from proxy.pools.claims import claim
from proxy.pools.decision_table import DecisionRow, row_of

QOS = tuple(QosClass)
KUBE = tuple(KubeQos)


@pytest.mark.parametrize(
    ("qos", "kube", "reported", "row"),
    [
        (QosClass.NONE, KubeQos.BURSTABLE, {"named": True, "bound": True}, DecisionRow.NAMED),
        (QosClass.BE, KubeQos.BEST_EFFORT, {"bound": True}, DecisionRow.BE_ON_NODES),
        (QosClass.SYSTEM, KubeQos.BURSTABLE, {"bound": True}, DecisionRow.SHARED_ON_NODES),
        (QosClass.LSE, KubeQos.GUARANTEED, {"bound": True}, DecisionRow.SHARED_ON_NODES),
        (QosClass.SYSTEM, KubeQos.BEST_EFFORT, {}, DecisionRow.SYSTEM),
        (QosClass.LS, KubeQos.BEST_EFFORT, {}, DecisionRow.LS),
        (QosClass.NONE, KubeQos.BEST_EFFORT, {}, DecisionRow.BEST_EFFORT),
        (QosClass.BE, KubeQos.BEST_EFFORT, {}, DecisionRow.BEST_EFFORT),
        (QosClass.LSR, KubeQos.GUARANTEED, {}, DecisionRow.SHARED),
        (QosClass.BE, KubeQos.BURSTABLE, {}, DecisionRow.SHARED),
    ],
)
def test_the_first_row_that_fits_decides(
    qos: QosClass, kube: KubeQos, reported: dict[str, bool], row: DecisionRow
) -> None:
    assert row_of(qos, kube, **reported) is row


def test_the_rows_have_koordinators_numbers() -> None:
    assert [int(row) for row in DecisionRow] == [1, 3, 4, 5, 6, 7, 9]


@pytest.mark.parametrize(("qos", "kube"), list(itertools.product(QOS, KUBE)))
def test_what_the_rows_come_to_on_a_node_of_ours(qos: QosClass, kube: KubeQos) -> None:
    """Every class in every cgroup, with nothing named: the pool is that of the row, and BE's label wins."""
    pod = Pod("s", "u", "ns", "n", qos=qos, kube_qos=kube)
    pools = {
        DecisionRow.SYSTEM: Pool.SYSTEM,
        DecisionRow.LS: Pool.SHARED,
        DecisionRow.BEST_EFFORT: Pool.BE,
        DecisionRow.SHARED: Pool.SHARED,
    }
    expected = Pool.BE if qos is QosClass.BE else pools[row_of(qos, kube)]
    made = claim(pod, Request(), CpuSet.parse("0-7"), static=False)
    assert (made.pool, made.nodes, made.within, made.cpus) == (expected, None, None, None)


def test_volcanos_nodes_narrow_the_shared_pool_and_no_other() -> None:
    there = CpuSet.parse("0-7")
    wish = Mask((1,))
    shares = Pod("s", "u", "ns", "n", kube_qos=KubeQos.BURSTABLE, wish_nodes=wish)
    assert claim(shares, Request(), there, static=False).nodes == wish
    best_effort = Pod("s", "u", "ns", "n", kube_qos=KubeQos.BEST_EFFORT, wish_nodes=wish)
    assert claim(best_effort, Request(), there, static=False).nodes is None
    bound = Pod("s", "u", "ns", "n", kube_qos=KubeQos.BURSTABLE, wish_nodes=wish, nodes=Mask((0,)))
    assert claim(bound, Request(), there, static=False).nodes == Mask((0,))
