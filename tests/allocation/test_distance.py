from __future__ import annotations

import pytest

from proxy.allocation.distance import Distances
from proxy.model.idset import Mask
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

TABLE = Distances({0: {0: 10, 4: 32}, 4: {0: 21, 4: 10}})


def test_the_total_counts_both_directions_and_each_node_itself() -> None:
    assert TABLE.total(Mask([0, 4])) == 73, "both directions, and each node with itself"
    assert TABLE.total(Mask([4])) == 10
    assert TABLE.total(Mask()) == 0
    with pytest.raises(KeyError):
        TABLE.total(Mask([0, 1]))


def test_distances_of_a_machine_whose_ids_have_gaps() -> None:
    machine = regular_machine(2, 1, 2, 1)
    low, high = machine.nodes
    nodes = (
        changed_copy(low, distance=(10, 32)),
        changed_copy(high, id=4, distance=(21, 10)),
    )
    assert Distances.of(changed_copy(machine, nodes=nodes)) == TABLE
    untold = (nodes[0], changed_copy(nodes[1], distance=()))
    assert Distances.of(changed_copy(machine, nodes=untold)) is None
