"""The cpuset that each container would have without topoproxy.

Theory (kubernetes v1.36 pkg/kubelet/cm/cpumanager/cpu_manager.go, reconcileState; runc v1.1). Three sides say
where a container runs without topoproxy between kubelet and the runtime:

* kubelet's CPU manager under policy ``static``: the CPUs of the container's entry in its state file, for
  all others its default set. It sends them with the create, and again in each of its reconcile periods.
* the request that created the container, and the last update that named a set. Only such a kubelet names CPUs
  on most nodes; kubelet's memory manager names memory nodes.
* the group above it. A container without a named set runs on all that its pod's group has: on
  cgroup v1 runc copies it when it makes the group, on v2 an empty list means the same.

A container that was adopted after its create (``engine.adoption``) has as its request what the runtime had
saved then: that is what it gets back. So where the ledger was lost while containers were on sets of ours,
these sets are what is known of them.

In the kernel sets only grow: a container first has its current CPUs and its target together, so that no
container ever has fewer CPUs than before (``proxy.release.kernel``). Where the target is narrower, which only
kubelet's static policy or a named set can cause, the runtime's own update narrows it.
"""

from __future__ import annotations

from msgspec import Struct

from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import CpuManager
from proxy.model.machine import Machine
from proxy.model.workload import Container, Request


class ReleaseTarget(Struct, frozen=True):
    """The target of a container.

    Attributes:
        cpus: The CPUs; None for those of the group above it.
        mems: The memory nodes; None for those of the group above it.
    """

    cpus: CpuSet | None
    mems: Mask | None


def target_of(container: Container, machine: Machine, manager: CpuManager) -> ReleaseTarget:
    """Return the target of a container.

    Args:
        container: The container.
        machine: The hardware.
        manager: What kubelet's CPU manager does.
    """
    mems = named_mems(container.request, machine)
    if manager.policy == "static":
        held = manager.held.get(container.pod.uid, {}).get(container.name)
        if held and held <= machine.present:
            return ReleaseTarget(held, mems)
        if manager.default and manager.default <= machine.present:
            return ReleaseTarget(manager.default, mems)
    named = named_cpus(container.request, machine)
    if named is not None:
        return ReleaseTarget(named, mems)
    return ReleaseTarget(None, mems)


def named_cpus(request: Request, machine: Machine) -> CpuSet | None:
    """Return the CPUs that a request names; None where it names none that are here."""
    try:
        named = CpuSet.parse(request.cpuset_cpus)
    except ValueError:
        return None
    return named if named and named <= machine.present else None


def named_mems(request: Request, machine: Machine) -> Mask | None:
    """Return the memory nodes that a request names; None where it names none that are here."""
    try:
        named = Mask.parse(request.cpuset_mems)
    except ValueError:
        return None
    return named if named and named <= Mask(machine.node_by_id) else None
