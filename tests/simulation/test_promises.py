"""Which CPUs the checks of the simulation count as an owner's, when a move has ended with its daemon."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from tests.simulation.node import NodeOptions, SimulatedNode
from tests.simulation.promises import Role, ViolationError
from tests.simulation.runtime import RUNNING, Sandbox, SimulatedContainer

OLD, NEW = CpuSet([3]), CpuSet([5])


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    """A node with an owner, which a daemon that has crashed was moving, and a container that shares."""
    node = SimulatedNode(1, NodeOptions((1, 1, 8, 1), 2))
    there = dict[str, Container]()
    # The promises read the containers of a daemon and nothing else of it.
    node.daemon = SimpleNamespace(  # type: ignore[assignment]
        executor=SimpleNamespace(state=SimpleNamespace(containers=there)), kill=lambda: None
    )
    for name, placement in (
        ("own", Placement(Pool.OWN, OLD, Mask())),
        ("ls", Placement(Pool.SHARED, CpuSet(), Mask())),
    ):
        pod = Pod(f"s-{name}", name, "ns", name)
        there[name] = Container(name, "c", pod, Request(), placement, Phase.RUNNING, owner=name)
        sandbox = Sandbox(pod.sandbox_id, name, name, f"/kubepods/pod{name}", {}, {})
        simulated = SimulatedContainer(name, sandbox, "c", 0, "", "", 0, (0, 0, 0), RUNNING, begun=True)
        node.runtime.containers[name] = simulated
        group = node.kernel.make(simulated.path)
        group.container_id = name
        owns = placement.pool is Pool.OWN
        role = Role(
            placement.pool,
            name if owns else "",
            excludes_be=True,
            exclusive_sets={OLD.bits} if owns else set(),
        )
        node.promises.roles[name] = role
        node.kernel.write(group, str(OLD if owns else CpuSet([0, 1])))
        node.promises.began(simulated)
    node.promises.roles["own"].exclusive_sets.add(NEW.bits)
    node.promises.roles["own"].mover = object()
    yield node
    node.close()


def moving(*containers: str) -> dict[str, Any]:
    return {"m/move-1": {"containers": list(containers), "previous": str(OLD), "cpus": str(NEW)}}


def both_share(node: SimulatedNode) -> None:
    """All old CPUs of the owner are offline: it shares, and CPUs of the move are shared, too."""
    node.kernel.set_online(node.kernel.full_machine.online - OLD)
    for name in ("ls", "own"):
        node.kernel.write(node.kernel.groups[node.runtime.containers[name].path], "0-2,4-7")


def test_cpus_of_a_move_that_was_never_recorded_are_not_the_owners(node: SimulatedNode) -> None:
    node.promises.stored(moving("another"))
    both_share(node)
    assert node.promises.roles["own"].exclusive_sets == {OLD.bits}
    assert node.promises.moves_under_way, "that of another owner"


def test_cpus_of_a_move_that_is_recorded_are_the_owners(node: SimulatedNode) -> None:
    node.promises.stored(moving("own"))
    with pytest.raises(ViolationError, match=r"^ls .* runs on 0-2,4-7, and own owns 5$"):
        both_share(node)


def test_they_are_no_more_once_the_record_is_deleted(node: SimulatedNode) -> None:
    node.promises.stored(moving("own"))
    node.promises.stored({"m/move-1": None})
    both_share(node)
    assert node.promises.roles["own"].exclusive_sets == {OLD.bits}
