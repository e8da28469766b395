"""Decide which running containers' CPUs are sent to the runtime, so that its own saved state agrees."""

from __future__ import annotations

from enum import Enum

from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool


class SettleStep(Enum):
    """What is done about a container that is unsettled."""

    NOTHING = "it does not run, or has what the runtime has saved"
    AWAIT = "a call without an answer is in flight for it: it is sent its CPUs when that is over"
    LEARN = "what the runtime has saved is not known"
    SEND = "the runtime is to be sent its CPUs"


def settle_step(state: NodeState, container_id: str) -> SettleStep:
    """Return what is to be done about a container that is unsettled."""
    container = state.containers.get(container_id)
    if container is None or container.phase is not Phase.RUNNING:
        return SettleStep.NOTHING
    if not applies_to(state, container.pod):
        return SettleStep.NOTHING
    if state.node.erases(container.placement):
        return SettleStep.NOTHING  # what its cgroups have is all that it is to have
    is_unsent = container_id in state.facts.quotas.unsent
    strays = [call for call in state.inflight.of(container_id) if call.stray_since is not None]
    if any(call.resend for call in strays) or (strays and not is_unsent):
        return SettleStep.AWAIT
    saved = state.runtime.saved.get(container_id)
    if saved is None:
        return SettleStep.LEARN
    is_right = saved == state.wanted(container) or is_passing(state, container, saved)
    return SettleStep.SEND if is_unsent or not is_right else SettleStep.NOTHING


def is_passing(state: NodeState, container: Container, has: CpuSet) -> bool:
    """Return whether a container's cpuset is narrow only while BE is suppressed.

    Such a cpuset changes every second and is not made lasting, unless what the runtime or systemd has for the
    container holds CPUs that are no longer in the BE pool: an update would bring those back.
    """
    pools = state.pools
    return container.placement.pool is Pool.BE and pools.be_now is not None and bool(has) and has <= pools.be
