"""New rules on a running node: what can be put into force is, what cannot leaves the old value.

Theory. Rules may change at any moment while containers run. Owners keep their CPUs, also those that are kept
back from now on: to take CPUs from a running owner would break a promise that was made to it, and it gives
them back when it ends. Pools follow at once. So a reservation that is possible on an empty node may leave
the shared pool empty on this one; then it is refused, is tried again as owners go, and the CPUs that were
kept back before still are. The same for class SYSTEM, each by itself if both together cannot be.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet
from proxy.model.options import TopologyOptions, check_cpu_options, check_topology_options
from proxy.model.workload import Phase, Pool
from proxy.plan.node import Node
from proxy.plan.prescribed import Prescribed, Value
from proxy.plan.state import NodeState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Enacted:
    """What came of new rules.

    Attributes:
        state: The state under those that are in force.
        told: Those that are in force, with what is wrong with others.
        notes: Who keeps CPUs that are kept back now, one sentence each.
    """

    state: NodeState
    told: Prescribed
    notes: tuple[str, ...] = ()


def enact(state: NodeState, told: Prescribed, before: Prescribed, options: TopologyOptions) -> Enacted:
    """Put rules into force.

    Args:
        state: The node as it is.
        told: What is prescribed.
        before: What is in force.
        options: Of the topology manager, as our configuration has them.
    """
    problem = _misfit(told.on(state.node), options)
    if problem:
        told = dataclasses.replace(told, policy=_kept(before.policy, problem), scope=before.scope)
    if told.on(state.node) == state.node:
        return Enacted(state, told)
    after = state.under(told.on(state.node))
    if _starved(after):
        told = _possible(state, told, before)
        if told.on(state.node) == state.node:
            return Enacted(state, told)
        after = state.under(told.on(state.node))
    return Enacted(after, told, tuple(_keeping(state, after)))


def _possible(state: NodeState, told: Prescribed, before: Prescribed) -> Prescribed:
    """Give what can be in force of rules that cannot be as a whole."""
    parts = (
        ("reserved", (), "keep CPUs {} from those who share (strict-cpu-reservation)"),
        ("reservation", (), "keep CPUs {} back"),
        ("system", ("system_alone",), "keep CPUs {} for class SYSTEM"),
    )
    names = [name for main, more, _ in parts for name in (main, *more)]
    found = dataclasses.replace(told, **{name: getattr(before, name) for name in names})
    for main, more, what in parts:
        new = dataclasses.replace(found, **{name: getattr(told, name) for name in (main, *more)})
        if not _starved(state.under(new.on(state.node))):
            found = new
            continue
        words = f"cannot {what.format(getattr(told, main).value)}: they would leave the shared pool empty"
        found = dataclasses.replace(found, **{main: _kept(getattr(before, main), words)})
    return found


def _kept(before: Value[T], problem: str) -> Value[T]:
    stays = str(before.value) or "none"
    return dataclasses.replace(before, problem=f"{problem} (what was in force stays: {stays})")


def _starved(state: NodeState) -> bool:
    """Tell whether containers that own nothing would have no CPU, now or when promises are kept."""
    # On a node whose CPUs are all kept back, all are shareable: somebody has to have some.
    return state.node.machine.online <= state.node.withheld or not state.pools.shared - state.aside()


def _misfit(node: Node, options: TopologyOptions) -> str:
    """Tell why a topology policy cannot be on this machine, or with our other settings; empty if it can."""
    machine = node.machine
    count = len(machine.nodes)
    distances = all(len(each.distance) == count for each in machine.nodes)
    try:
        check_cpu_options(node.options, node.policy, len(machine.packages), count)
        check_topology_options(options, node.policy, count, distances=distances)
    except ConfigError as error:
        return str(error)
    return ""


def _keeping(before: NodeState, after: NodeState) -> list[str]:
    """Name owners of CPUs that are kept back now and were not before."""
    new = after.node.withheld - before.node.withheld
    held: dict[str, CpuSet] = {}
    for container in after.containers.values():
        clash = container.placement.own & new
        if clash and container.placement.pool is Pool.OWN and container.phase is not Phase.EXITED:
            held[container.ref] = clash
    return [
        f"CPUs {cpus} are kept back now, and {ref} owns them: it keeps them until it ends"
        for ref, cpus in sorted(held.items())
    ]
