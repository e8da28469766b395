"""The checks of a calm node: no new events occur, and the promised state must be reached in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.model.idset import CpuSet
from proxy.model.workload import Phase
from tests.simulation.kernel import text_of
from tests.simulation.runtime import EXITED, RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.node import SimulatedNode

KERNEL_LIMIT_S = 90.0
"""Until the kernel agrees: a write conflict is repaired after a minute at most, and a reconcile follows."""
ALL_LIMIT_S = 400.0
"""Until the runtime agrees: after failed requests, the CPUs of a container are sent again 256 s later."""


def kernel_differences(node: SimulatedNode) -> Iterator[str]:
    """Yield the differences between the kernel and the plan."""
    assert node.daemon is not None
    state = node.daemon.executor.state
    for simulated in node.runtime.containers.values():
        group = node.kernel.groups.get(simulated.path)
        container = state.containers.get(simulated.id)
        if simulated.state != RUNNING:
            continue
        if group is None or container is None:
            yield f"{simulated.id} runs, and the daemon does not know it"
            continue
        has, want = node.kernel.effective(group), state.desired_cpus(container)
        if has != want.bits:
            yield f"{simulated.id} is on {text_of(has)} and should be on {want}"
        if group.displaced:
            yield f"the processes of {simulated.id} were moved away and are not back"
    live = {simulated.id for simulated in node.runtime.containers.values() if simulated.state != EXITED}
    known = {c.id for c in state.containers.values() if c.phase is not Phase.EXITED}
    if live != known:
        yield f"the daemon knows {sorted(known - live)} and does not know {sorted(live - known)}"


def other_differences(node: SimulatedNode) -> Iterator[str]:
    """Yield what the runtime, the ledger or the state have that they should not have."""
    assert node.daemon is not None
    executor = node.daemon.executor
    state = executor.state
    for simulated in node.runtime.containers.values():
        container = state.containers.get(simulated.id)
        if simulated.state == RUNNING and container is not None and node.options.settle_per_second:
            want = state.desired_cpus(container)
            if CpuSet.parse(simulated.cpus) != want:
                yield f"the runtime has saved {simulated.cpus} for {simulated.id}, which should be on {want}"
    under_way = [key for key in node.promises.durable if key.startswith(("i/", "m/"))]
    if under_way:
        yield f"the ledger has records of what was under way: {', '.join(under_way)}"
    creating = [c.ref for c in state.containers.values() if c.phase is Phase.CREATING]
    if creating:
        yield f"creates have left placements behind: {', '.join(creating)}"
    if state.reservation_cpus:
        yield f"CPUs are held for {', '.join(state.reservation_cpus)}"
    recorded = {key[2:] for key in node.promises.durable if key.startswith("c/")}
    known = {c.id for c in state.containers.values()}
    if recorded != known:
        yield f"the ledger has {sorted(recorded - known)} too many, and lacks {sorted(known - recorded)}"
    rules = {name: getattr(state.node, name) for name in node.rules}
    if rules != node.rules:
        yield f"the rules in effect are {rules}, and the configuration says {node.rules}"
    if any(
        kubelet_call.body is None and not kubelet_call.over for kubelet_call in node.kubelet.kubelet_calls
    ):
        yield "calls are still held"
