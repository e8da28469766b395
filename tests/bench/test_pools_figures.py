"""The figures of pools: all classes are on the machine, and the moves of each change are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_the_measured_machine_has_containers_of_all_classes() -> None:
    import pools_figures as figures

    from proxy.engine.invariants import violations
    from proxy.model.workload import Pool, QosClass

    state = figures.full_node()
    there = state.containers.values()
    assert (len(state.node.machine.online), len(there)) == (512, 1000)
    assert len(state.owners) == 51
    assert violations(state) == []
    classes = Counter(c.pod.qos for c in there)
    assert set(classes) == set(QosClass)
    assert min(classes.values()) >= 17
    pools = Counter(c.placement.pool for c in there)
    assert set(pools) == set(Pool)
    assert sum(c.placement.pool_numa_limit is not None for c in there) > 200


def test_a_change_is_missed_over_its_bar_or_with_unequal_counts() -> None:
    import pools_figures as figures

    good = figures.MeasuredChange("good", (1.0, 1.5), 3, 3, 3)
    assert not good.missed
    assert figures.MeasuredChange("slow", (1.0, 2.5), 3, 3, 3).missed
    assert not figures.MeasuredChange("slow", (1.0, 2.5), 3, 3, 3, None).missed
    assert figures.MeasuredChange("more named", (1.0,), 4, 3, 3).missed
    assert figures.MeasuredChange("fewer written", (1.0,), 3, 3, 2).missed
    (row,) = figures.rows([good], 1.0)
    assert row[1:] == ["1.25 ms", "1.50 ms", "1.25", "2 ms", "3", "3", "3"]


def test_the_containers_that_a_change_moves_are_counted() -> None:
    import pools_figures as figures

    from proxy.engine.state import NodeState
    from proxy.model.workload import QosClass

    state = figures.full_node()
    pod = figures.bench_pod(5000, QosClass.LSR, figures.GUARANTEED, figures.owner_cpus(60))
    _, container = figures.with_container(state, pod, figures.WHOLE)
    came = figures.change("LSR", state, lambda: state.changed(put=(container,)))
    # LS and those without a class, the bound ones of one node among them; neither BE nor SYSTEM.
    node = state.node.machine.nodes_of(container.placement.exclusive)
    moving = [
        c
        for c in state.containers.values()
        if c.placement.pool.value == "shared" and c.placement.pool_numa_limit in (None, node)
    ]
    assert came.named == came.changed == came.written == len(moving) > 300
    calm = figures.change("nothing", state, lambda: state)
    assert (calm.named, calm.changed, calm.written, calm.missed) == (0, 0, 0, False)

    def otherwise() -> NodeState:
        """New pools with the same CPUs for all containers: none of them may be named."""
        return NodeState.of(state.node, state.pods.values(), state.containers.values())

    assert figures.change("again", state, otherwise).named == 0
