"""The figures of decisions: they measure complete decisions, and are compared with their bars."""

from __future__ import annotations

from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_a_figure_over_its_bar_is_missed() -> None:
    import place_figures as figures

    quick = figures.Figure("quick", (1.0, 2.0, 3.0), 2.5, 3.5)
    assert (quick.p50, quick.p99, quick.missed) == (2.0, 3.0, False)
    assert figures.Figure("slow", quick.samples, 2.0).missed
    assert figures.Figure("late", quick.samples, 2.5, 3.0).missed
    assert not figures.Figure("free", quick.samples).missed
    (row,) = figures.rows([figures.Figure("late", quick.samples, 2.5, 3.0)], 4.0)
    assert row == ["late", "2.00 ms", "3.00 ms", "0.50", "2.5 ms / 3 ms MISSED"]


def test_the_measured_decisions_are_complete() -> None:
    import place_figures as figures

    from proxy.model.idset import Mask
    from proxy.model.options import TopologyPolicy

    what, work, fits = figures.many_nodes(TopologyPolicy.SINGLE_NUMA_NODE, far=False)
    plan = work()
    assert (plan.verdict.admitted, fits) == (True, True)
    assert what == "36 nodes, CPU + memory + 4 GPUs, single-numa-node"
    assert plan.container is not None
    assert plan.container.placement.mems == Mask([0])
    assert len(plan.container.placement.exclusive) == 16
    assert [len(ids) for _, ids in plan.container.placement.devices] == [4]
    assert plan.explanation is not None
    assert [answer.resource for answer in plan.explanation.answers] == ["nvidia.com/gpu", "cpu", "memory"]
    assert plan.explanation.steps
    refused = figures.many_nodes(TopologyPolicy.SINGLE_NUMA_NODE, far=True)[1]()
    assert refused.explanation is not None
    assert refused.explanation.merge is not None
    assert refused.explanation.merge.conflicts
    state = figures.running(12)
    assert len(state.containers) == 12
    assert len(state.owners) == 2
