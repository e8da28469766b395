"""Limits of hooks on the CPUs and memory nodes of a container, as part of its placement.

A hook does not change the decision: the placement stays, and hooks limit the part of it that the container
uses. ``Placement.hook_cpus`` are the CPUs that hooks named. The CPUs that a container runs on follow from the
state (``NodeState.desired_cpus``): those of its own CPUs, or of its pool, that hooks named. So the container
leaves a named CPU that is given to an owner, and uses it again when it returns to the pool. If none of the
named CPUs is left, the container has all CPUs that it would have without hooks. An owner that hooks have
limited still owns its other CPUs: no other container gets them.

If the configuration lets hooks give CPUs that have owners, the CPUs that the container could not have
otherwise are kept separately (``Placement.hook_extra_cpus``). The container may run there although others own
them.

A new limit replaces the earlier one, and a hook that names all CPUs ends the limit. The resulting cpuset is
never empty, and has no offline CPUs and no CPUs of other owners (except the extra CPUs);
``proxy.engine.invariants`` checks each state. A NUMA node from which memory was promised is never taken away.
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import listed, numa_nodes_text
from proxy.model.workload import Container, Placement
from proxy.pools.pools import without_hook_limits

_NARROWED, _MEMORY = "narrowed to CPUs ", "bound to memory of "
_BY = " by hook "
_EARLIER_OUTSIDE = ", {} of them although they are not its to have"
"""The text of ``_outside`` in earlier releases: the ledger keeps reasons as they were written."""


class Narrowing(Struct, frozen=True):
    """The limits that hooks set.

    Attributes:
        cpus: CPUs; None to leave the CPUs as they are.
        mems: Memory nodes; None to leave the memory nodes as they are.
        clear: Whether the earlier limits of hooks are dropped.
        by: The hooks, for messages.
        mems_by: The hook that named the memory nodes.
        owned: Whether hooks may name CPUs that belong to others.
    """

    cpus: CpuSet | None = None
    mems: Mask | None = None
    clear: bool = False
    by: str = ""
    mems_by: str = ""
    owned: bool = False


def narrowed(
    state: NodeState, container: Container, limits: Narrowing, offered: CpuSet | None = None
) -> tuple[Container, str]:
    """Limit a container.

    Args:
        state: The node as it is.
        container: The container, as the state has it.
        limits: The limits that hooks set.
        offered: The CPUs that the container could have when the hooks were called; its current ones if None.
            CPUs that it has lost since then do not count as extra CPUs.

    Returns:
        The limited container (the same value if nothing changes), and a sentence about what cannot be done;
        empty if everything can.
    """
    placement, problems = container.placement, []
    if limits.clear or limits.cpus is not None:
        base = state.cpus_without_hooks(container) if offered is None else offered
        placement, problem = _cpus(state, without_hook_limits(placement), limits, base)
        if problem:
            placement = container.placement
            cpus = listed(limits.cpus or CpuSet())
            problems.append(f"cannot narrow {container.ref} to CPUs {cpus}{_BY}{limits.by}: {problem}")
    if limits.mems is not None:
        memory_nodes = state.node.machine.memory_nodes
        promised = Mask.union_of(block.affinity for block in placement.blocks)
        named, by = numa_nodes_text(limits.mems), limits.mems_by or limits.by
        message = f"cannot bind {container.ref} to memory of {named}{_BY}{by}"
        if not limits.mems or not limits.mems <= memory_nodes:
            problems.append(f"{message}: there is memory on {numa_nodes_text(memory_nodes)} only")
        elif not promised <= limits.mems:
            problems.append(f"{message}: it was promised memory of {numa_nodes_text(promised)}")
        else:
            reasons = _without(placement.reasons, _MEMORY)
            reason = f"{_MEMORY}{named}{_BY}{by}"
            placement = structs.replace(placement, mems=limits.mems, reasons=(*reasons, reason))
    if placement == container.placement:
        return container, "; ".join(problems)
    return structs.replace(container, placement=placement), "; ".join(problems)


def _cpus(state: NodeState, placement: Placement, limits: Narrowing, base: CpuSet) -> tuple[Placement, str]:
    placement = structs.replace(placement, reasons=_without(placement.reasons, _NARROWED))
    cpus = limits.cpus
    if cpus is None or (base <= cpus and (not limits.owned or cpus & state.node.machine.online <= base)):
        return placement, ""  # the hook has named all: many servers answer with what they received
    outside = cpus & state.node.machine.online - base if limits.owned else CpuSet()
    if not cpus & base | outside:
        return placement, f"it has {listed(base)}" if not limits.owned else "none of them is online"
    reason = f"{_NARROWED}{listed(cpus)}{_BY}{limits.by}"
    if outside:
        reason += _outside(outside)
    reasons = (*placement.reasons, reason)
    return structs.replace(placement, hook_cpus=cpus, hook_extra_cpus=outside, reasons=reasons), ""


def _without(reasons: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(reason for reason in reasons if not reason.startswith(kind) or _BY not in reason)


def is_bound_by_hook(placement: Placement) -> bool:
    """Return whether a hook has named the memory nodes of a container."""
    return _without(placement.reasons, _MEMORY) != placement.reasons


def without_extra_cpus(container: Container) -> Container:
    """Return a container without the extra CPUs that a hook gave it."""
    placement = container.placement
    extra = placement.hook_extra_cpus
    text, earlier_text = _outside(extra), _EARLIER_OUTSIDE.format(listed(extra))
    reasons = tuple(reason.removesuffix(text).removesuffix(earlier_text) for reason in placement.reasons)
    placement = structs.replace(placement, hook_extra_cpus=CpuSet(), reasons=reasons)
    return structs.replace(container, placement=placement)


def _outside(cpus: CpuSet) -> str:
    return f", including CPUs {listed(cpus)} that its placement does not have"


def unmet_hook_limit(state: NodeState, container: Container) -> str:
    """Return the message that no CPU is left that hooks named for a container; empty if there is one."""
    named_cpus = container.placement.hook_cpus
    if named_cpus is None or state.desired_cpus(container) <= named_cpus:
        return ""
    return f"nothing is left of CPUs {listed(named_cpus)}, to which a hook has narrowed {container.ref}"
