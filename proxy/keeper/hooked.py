"""What hooks want of containers, done: in the state, in the ledger, in the kernel and at the runtime.

What can be done at all is decided in ``proxy.plan.narrowing``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase, Pod, Request, Verdict
from proxy.plan.admit import EVENT
from proxy.plan.narrowing import Narrowing, lost, narrowed, within_its_own
from proxy.plan.record import explain

if TYPE_CHECKING:
    from proxy.keeper.keeper import Keeper


def narrow(keeper: Keeper, container_id: str, wish: Narrowing, seen: CpuSet | None = None) -> str:
    """Narrow a container as hooks want it, from now on.

    Args:
        keeper: Who keeps it.
        container_id: Its id, or the token of its create.
        wish: What hooks want.
        seen: See ``plan.narrowing.narrowed``.

    Returns:
        What cannot be done, in words; empty where all is.
    """
    container = keeper.state.containers.get(container_id)
    if container is None or container.phase is Phase.EXITED:
        return f"cannot narrow container {container_id} by hook {wish.by}: it is not there"
    new, problem = narrowed(keeper.state, container, wish, seen)
    if new is container:
        return problem
    # A container that is being created is recorded when the runtime has named it.
    records = {f"c/{container_id}": new} if new.phase is not Phase.CREATING else {}
    keeper.store.change(keeper.state.changed(put=(new,)), "container narrowed by a hook", records=records)
    fresh = [why for why in new.placement.reasons if why not in container.placement.reasons]
    keeper.history.amend(container_id, "; ".join(fresh) or "hooks do not narrow it any more")
    if new.phase is not Phase.CREATING:
        keeper.later([container_id])
    if keeper.partitions is not None:
        keeper.partitions.stir()
    return problem


def refused_pod(keeper: Keeper, pod: Pod, message: str) -> None:
    """Remember that hooks have refused a pod's sandbox, for who asks why; nothing was decided for it."""
    verdict = Verdict(GrpcStatus.FAILED_PRECONDITION, "RefusedByHook", message)
    keeper.history.note(keeper.wall(), explain(EVENT, pod, "", pod.attempt, Request(), verdict))


def take_back(keeper: Keeper) -> None:
    """Take CPUs of others back that hooks gave away while the configuration let them; it does so no more."""
    there = keeper.state.containers.values()
    inside = [within_its_own(container) for container in there if container.placement.beyond]
    if not inside:
        return
    records = {f"{'i' if c.phase is Phase.CREATING else 'c'}/{c.id}": c for c in inside}
    keeper.store.change(keeper.state.changed(put=inside), "hooks.ownedCPUs is false", records=records)
    for container in inside:
        keeper.voice.info(f"{container.ref} leaves CPUs that a hook gave it: hooks.ownedCPUs is false")
    tell_lost(keeper, [container.id for container in inside])


def tell_lost(keeper: Keeper, ids: Iterable[str]) -> None:
    """Tell who of some containers has nothing left of what hooks have narrowed it to."""
    for container_id in ids:
        container = keeper.state.containers.get(container_id)
        if container is not None and (words := lost(keeper.state, container)):
            keeper.problems.note(f"{words}: it has all that it would have without hooks")
