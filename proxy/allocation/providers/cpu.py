"""The CPU provider: exclusive CPUs, as kubelet's CPU manager under policy ``static`` grants them.

What belongs to others is never offered: CPUs of other owners, CPUs reserved for other pods, and, where the
pod's containers are known, what its own containers keep. CPUs to which others may come back (an owner that
has ended) are left out as long as enough are left without them.

An ordinary init container that has ended leaves its CPUs to the containers after it (kubernetes v1.36,
pkg/kubelet/cm/cpumanager/policy_static.go ``updateCPUsToReuse``). Where the pod's containers are not known,
an exited init container looks the same as a container that crashed, so the CPUs of an exited sibling are
free.

Where no policy merges hints, CPUs are chosen on one NUMA node if one can hold them, if possible on that of
the devices (``pick_unpoliced``). kubelet's allocator takes them in the order of the topology.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from msgspec import structs

from proxy.allocation import cpu_static
from proxy.allocation.cpu_policy import CpuPolicy, CpuState, pick_unpoliced
from proxy.allocation.cpu_request import CPU, container_cpus, pod_cpus
from proxy.allocation.koordinator.selection import Binding, NodeBinding, binding_of, choose
from proxy.allocation.providers.devices import nodes_of_devices
from proxy.allocation.providers.provider import Allocation, NodeView, Provider, ProviderRequest
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.machine import Machine
from proxy.model.options import Scope
from proxy.model.requests import ContainerKind
from proxy.model.workload import Phase


@dataclass(frozen=True, slots=True)
class CpuProvider(Provider):
    """Grants exclusive CPUs.

    Attributes:
        machine: The hardware.
        policy: Topology, options and reserved CPUs.
        node_binding: What the node says about the binding of CPUs.
        state: The owners of CPUs, for one decision.
        binding: How the CPUs of the pod are bound; None where the options of the CPU manager decide.
    """

    machine: Machine
    policy: CpuPolicy
    node_binding: NodeBinding
    state: CpuState = field(default_factory=CpuState)
    binding: Binding | None = None

    @property
    def name(self) -> str:
        """The name in records."""
        return CPU

    def prepare(self, view: NodeView, request: ProviderRequest) -> CpuProvider:
        """Return the provider with the CPUs that may be chosen, and with the bind policy that applies."""
        if not request.exclusive:
            return dataclasses.replace(self, state=CpuState(), binding=None)
        state = self._offered(view, request)
        binding = binding_of(self.node_binding, request.pod, view.containers.values())
        return dataclasses.replace(self, state=state, binding=binding)

    def wants(self, request: ProviderRequest) -> bool:
        """Return whether exclusive CPUs are wanted."""
        return self.wanted(request) > 0

    def hints(self, request: ProviderRequest) -> Hints:
        """Return hints for exclusive CPUs; None where none are wanted."""
        if not request.exclusive:
            return None
        if request.scope is Scope.POD:
            return cpu_static.pod_hints(self.policy, self.state, request.requests)
        return cpu_static.container_hints(self.policy, self.state, request.requests, request.name)

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Choose exclusive CPUs; CPUs that the container has already stay."""
        requests, name = request.requests, request.name
        wanted = container_cpus(requests, requests.named(name)) if request.exclusive else 0
        if not wanted:
            return Allocation(self, grants)
        steps: list[str] = []
        held = self.state.of(requests.uid, name)
        if held is not None and len(held) == wanted:
            # kubelet checks again here whether whole cores are free; this container has them already.
            state, cpus = cpu_static.with_assigned(self.state, requests, name, held), held
            steps.append(f"keeps CPUs {held}")
        elif self.binding is None and not request.unmerged:
            state = cpu_static.allocate(self.policy, self.state, requests, name, hint.affinity, steps=steps)
            cpus = state.of(requests.uid, name) or CpuSet()
        else:
            cpus = self._chosen(request, wanted, hint.affinity, steps)
            state = cpu_static.with_assigned(self.state, requests, name, cpus)
        after = dataclasses.replace(self, state=state)
        return Allocation(after, structs.replace(grants, cpus=cpus), steps)

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return how many free CPUs a NUMA node is short of."""
        wanted = self.wanted(request)
        if not wanted:
            return ()
        here = CpuSet.from_bits(self.policy.topo.nodes.get(node, 0))
        if len(here - self.policy.reserved) < wanted:
            return None
        free = len(self.free(request) & here)
        return (Shortfall(CPU, Mask((node,)), wanted, free),) if free < wanted else ()

    def free(self, request: ProviderRequest) -> CpuSet:
        """Return the CPUs that may become the pod's: the free ones, and those that it may use again."""
        return cpu_static.available(self.policy, self.state) | self.state.reusable_by(request.requests.uid)

    def wanted(self, request: ProviderRequest) -> int:
        """Return how many exclusive CPUs are wanted."""
        if not request.exclusive:
            return 0
        if request.whole or request.scope is Scope.POD:
            return pod_cpus(request.requests)
        return container_cpus(request.requests, request.requests.named(request.name))

    def _chosen(
        self, request: ProviderRequest, wanted: int, affinity: Mask | None, steps: list[str]
    ) -> CpuSet:
        """Choose CPUs where a bind policy applies, or where no policy has merged hints."""
        topology, free = self.policy.topo, self.free(request)
        if self.binding is not None:
            return choose(topology, free, wanted, self.binding, affinity, steps, even=request.even)
        cpu_static.check_whole_cores(self.policy, self.state, wanted)
        near = nodes_of_devices(request.near)
        return pick_unpoliced(self.machine, topology, free, wanted, self.policy.options, near, steps)

    def _offered(self, view: NodeView, request: ProviderRequest) -> CpuState:
        """Return what the CPU manager may choose from, and what the pod's containers have."""
        pod, requests, name, wanted = request.pod, request.requests, request.name, request.cpus
        key, avoid, every = pod.key, request.avoid, self.policy.topo.cpus
        own_cpus, taken_by_others = view.exclusive_cpus(key)
        others = taken_by_others.bits
        if [container.name for container in requests.containers] == [""]:
            own_cpus = _as_one(view, request, own_cpus)
        reusable = CpuSet()
        if pod.requests is not None:
            reusable = _ended(view, request, own_cpus) & every
        reusable = CpuSet.from_bits(reusable.bits & ~others & ~avoid.bits)
        part = pod.reserved_for_pod.part(name) if pod.reserved_for_pod is not None else None
        had = own_cpus.pop(name, None) or (part.cpus if part else view.had(f"{key}/{name}"))
        taken = others
        for cpus in own_cpus.values():
            reusable -= cpus
            taken |= cpus.bits
        free = every.bits & ~taken & ~avoid.bits
        if len(had) == wanted and not had.bits & ~free:
            default = CpuSet.from_bits(free & ~had.bits & ~reusable.bits)
            return CpuState(default, {key: {**own_cpus, name: had}}, reusing=key, reusable=reusable - had)
        default = CpuSet.from_bits(free & ~reusable.bits)
        spare = default - view.promised(f"{key}/{name}")
        if pod.reserved_for_pod is not None and len(default & pod.reserved_for_pod.cpus) >= wanted:
            default &= pod.reserved_for_pod.cpus
        elif len(spare - self.policy.reserved) + len(reusable) >= wanted:
            default = spare
        return CpuState(default, {key: own_cpus}, reusing=key, reusable=reusable)


def _as_one(view: NodeView, request: ProviderRequest, own_cpus: dict[str, CpuSet]) -> dict[str, CpuSet]:
    """Return a pod's CPUs where it is decided as one: what only kubelet holds for it belongs to all of it."""
    uid = request.pod.uid
    here = {c.name for c in view.containers.values() if c.pod.uid == uid and c.phase is not Phase.EXITED}
    coming = (view.kubelet.get(uid, {}).keys() & own_cpus.keys()) - here
    if not coming:
        return own_cpus
    whole = CpuSet.from_bits(union(own_cpus[name].bits for name in coming))
    return {name: cpus for name, cpus in own_cpus.items() if name not in coming} | {"": whole}


def _ended(view: NodeView, request: ProviderRequest, own_cpus: dict[str, CpuSet]) -> CpuSet:
    """Return the CPUs of init containers that have ended; those of other ended containers stay theirs."""
    kinds = {each.name: each.kind for each in request.requests.containers}
    free = CpuSet()
    for container in sorted(view.in_sandbox(request.pod.sandbox_id), key=lambda c: -c.attempt):
        if container.phase is not Phase.EXITED or not container.placement.exclusive:
            continue
        if kinds.get(container.name) is ContainerKind.INIT:
            free |= container.placement.exclusive
        else:
            own_cpus.setdefault(container.name, container.placement.exclusive)
    return free
