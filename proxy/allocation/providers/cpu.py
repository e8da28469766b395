"""The CPU provider: exclusive CPUs, as kubelet's CPU manager under policy ``static`` grants them.

CPUs of others are never offered: those of other owners, those set aside for other pods, and, if the pod's
containers are known, those that its own other containers keep. CPUs to which an ended owner may come back are
left out if there are enough without them.

An ordinary init container that has ended leaves its CPUs to the containers after it (kubernetes v1.36,
pkg/kubelet/cm/cpumanager/policy_static.go ``updateCPUsToReuse``). If the pod's containers are not known, an
exited init container looks the same as a container that crashed, so the CPUs of an exited sibling are free.

If whole cores are required, by ``full-pcpus-only`` or by a bind policy, only whole cores are offered, so that
hints lead to a NUMA node that has them. If one thread of each core is required, hints also count cores
(``proxy.allocation.cpu_hints``).

If no policy merges hints, CPUs are chosen on one NUMA node if one can hold them, preferably on that of the
devices (``pick_unpoliced``). kubelet's allocator takes CPUs in the order of the topology.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from proxy.allocation import cpu_static
from proxy.allocation.cpu_policy import CpuPolicy, CpuState, pick_unpoliced
from proxy.allocation.cpu_request import CPU, container_cpus, pod_cpus
from proxy.allocation.koordinator.bind import eligible
from proxy.allocation.koordinator.later_containers import NO_LATER_CONTAINERS, LaterContainers, Stage
from proxy.allocation.koordinator.selection import Binding, NodeBinding, binding_of, choose
from proxy.allocation.providers.devices import nodes_of_devices
from proxy.allocation.providers.provider import Allocation, NodeView, Provider, ProviderRequest
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy
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
        node_binding: The settings of the node for the binding of CPUs.
        state: The owners of CPUs, for one decision.
        binding: How the CPUs of the pod are bound; None if the options of the CPU manager decide.
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
        binding = binding_of(self.node_binding, request.pod, view.containers.values())
        state = self._offered(view, request, binding)
        return dataclasses.replace(self, state=state, binding=binding)

    def wants(self, request: ProviderRequest) -> bool:
        """Return whether the request contains exclusive CPUs."""
        return self.requested_cpus(request) > 0

    def hints(self, request: ProviderRequest) -> Hints:
        """Return hints for exclusive CPUs; None if none are requested."""
        if not request.exclusive:
            return None
        cores = self._cores(request)
        if request.scope is Scope.POD:
            return cpu_static.pod_cpu_hints(self.policy, self.state, request.requests, cores)
        return cpu_static.container_cpu_hints(self.policy, self.state, request.requests, request.name, cores)

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Choose exclusive CPUs; the container keeps CPUs that it already has."""
        requests, name = request.requests, request.name
        count = container_cpus(requests, requests.named(name)) if request.exclusive else 0
        if not count:
            return Allocation(self, grants)
        steps: list[str] = []
        held = self.state.owned_by(requests.uid, name)
        if held is not None and len(held) == count:
            # kubelet checks again here whether whole cores are free; this container has them already.
            state, cpus = cpu_static.with_assigned(self.state, requests, name, held), held
            steps.append(f"keeps CPUs {held}")
        elif self.binding is None and not request.unmerged:
            state = cpu_static.allocate(self.policy, self.state, requests, name, hint.affinity, steps=steps)
            cpus = state.owned_by(requests.uid, name) or CpuSet()
        else:
            cpus = self._choose(request, count, hint.affinity, steps)
            state = cpu_static.with_assigned(self.state, requests, name, cpus)
        after = dataclasses.replace(self, state=state)
        return Allocation(after, structs.replace(grants, cpus=cpus), steps)

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return how many free CPUs a NUMA node is short of."""
        count = self.requested_cpus(request)
        if not count:
            return ()
        node_cpus = CpuSet.from_bits(self.policy.topo.nodes.get(node, 0))
        most, free = node_cpus - self.policy.reserved, node_cpus & self.free(request)
        demands = [(count, most, free)]
        if cores := self._cores(request):
            one_each = self.policy.topo.one_of_each_core
            demands.append((cores, one_each(most), one_each(free)))
        if any(len(possible) < needed for needed, possible, _ in demands):
            return None
        missing, needed = max((needed - len(cpus), needed) for needed, _, cpus in demands)
        return (Shortfall(CPU, Mask((node,)), needed, needed - missing),) if missing > 0 else ()

    def free(self, request: ProviderRequest) -> CpuSet:
        """Return the CPUs that may become the pod's: the free ones, and those that it may use again."""
        return cpu_static.available(self.policy, self.state) | self.state.reusable_by(request.requests.uid)

    def requested_cpus(self, request: ProviderRequest) -> int:
        """Return how many exclusive CPUs are requested."""
        if not request.exclusive:
            return 0
        if request.whole or request.scope is Scope.POD:
            return pod_cpus(request.requests)
        return container_cpus(request.requests, request.requests.named(request.name))

    def _choose(
        self, request: ProviderRequest, count: int, affinity: Mask | None, steps: list[str]
    ) -> CpuSet:
        """Choose CPUs if a bind policy applies, or if no policy has merged hints."""
        topology, free = self.policy.topo, self.free(request)
        if self.binding is not None:
            even, later = request.even, self._later_containers(request)
            return choose(topology, free, count, self.binding, affinity, steps, even=even, later=later)
        cpu_static.check_whole_cores(self.policy, self.state, count)
        pick = partial(pick_unpoliced, self.machine, topology)
        options, near = self.policy.options, nodes_of_devices(request.assigned_devices)
        chosen = pick(free, count, options, near, steps)
        equal = cpu_static.in_equal_cores(self.policy, free, chosen, steps)
        return chosen if equal is None else pick(equal, count, options, near, steps)

    def _later_containers(self, request: ProviderRequest) -> LaterContainers:
        """Return the containers of the pod that get CPUs after this one, as far as this matters.

        An ordinary init container leaves its CPUs to those after it, so they have no fewer CPUs.
        """
        requests = request.requests
        own = requests.named(request.name)
        if not _requires(self.binding, BindPolicy.SPREAD_BY_PCPUS) or own.kind is ContainerKind.INIT:
            return NO_LATER_CONTAINERS
        stages: list[Stage] = []
        staying: Stage = ()
        for place, container in enumerate(requests.containers):
            count = container_cpus(requests, container)
            has_begun = container.kind is not ContainerKind.APP and place < requests.containers.index(own)
            owned = self.state.owned_by(requests.uid, container.name)
            if container is own or not count or has_begun or owned is not None:
                continue
            if container.kind is ContainerKind.INIT:
                stages.append((*staying, count))
            else:
                staying = (*staying, count)
        stages += [staying] if staying else []
        return LaterContainers(tuple(stages), request.under_pod_hint, request.may_leave_hint)

    def _cores(self, request: ProviderRequest) -> int:
        """Return the number of cores of which one container must have one thread each; 0 without such a rule.

        Several containers of a pod may be on the same cores.
        """
        if not _requires(self.binding, BindPolicy.SPREAD_BY_PCPUS):
            return 0
        requests = request.requests
        if request.whole or request.scope is Scope.POD:
            return max(container_cpus(requests, container) for container in requests.containers)
        return container_cpus(requests, requests.named(request.name))

    def _eligible(self, default: CpuSet, reusable: CpuSet, binding: Binding | None) -> tuple[CpuSet, CpuSet]:
        """Return the CPUs of each set that a container may get if the node or the pod restricts them."""
        required = binding is not None and binding.request.required
        if not required and not self.policy.options.full_pcpus_only:
            return default, reusable
        cpus = default | reusable
        if self.policy.options.full_pcpus_only:
            cpus = cpu_static.in_whole_cores(self.policy, cpus)
        if binding is not None and required:
            cpus = eligible(self.policy.topo, cpus - (self.policy.reserved - reusable), binding.request)
        return default & cpus, reusable & cpus

    def _offered(self, view: NodeView, request: ProviderRequest, binding: Binding | None) -> CpuState:
        """Return the CPU manager's state for one decision: the CPUs to choose from, and those of the pod."""
        pod, requests, name, count = request.pod, request.requests, request.name, request.cpus
        key, avoid, all_cpus = pod.key, request.avoid, self.policy.topo.cpus
        own_cpus, taken_by_others = view.exclusive_cpus(key)
        others = taken_by_others.bits
        if [container.name for container in requests.containers] == [""]:
            own_cpus = _as_one(view, request, own_cpus)
        reusable = CpuSet()
        if pod.requests is not None:
            reusable = _ended(view, request, own_cpus) & all_cpus
        reusable = CpuSet.from_bits(reusable.bits & ~others & ~avoid.bits)
        part = pod.reserved_for_pod.part(name) if pod.reserved_for_pod is not None else None
        previous = own_cpus.pop(name, None) or (part.cpus if part else view.last_cpus(f"{key}/{name}"))
        taken = others
        for cpus in own_cpus.values():
            reusable -= cpus
            taken |= cpus.bits
        free = all_cpus.bits & ~taken & ~avoid.bits
        if len(previous) == count and not previous.bits & ~free:
            default = CpuSet.from_bits(free & ~previous.bits & ~reusable.bits)
            assigned = {**own_cpus, name: previous}
            reusable -= previous
        else:
            default = self._first_choice(
                view, request, CpuSet.from_bits(free & ~reusable.bits), reusable, binding
            )
            assigned = own_cpus
        # A container takes one thread of each core; the next container of the pod may take the other.
        spread = _requires(binding, BindPolicy.SPREAD_BY_PCPUS)
        default, reusable = self._eligible(default, reusable, None if spread else binding)
        return CpuState(default, {key: assigned}, reusing=key, reusable=reusable)

    def _first_choice(
        self,
        view: NodeView,
        request: ProviderRequest,
        free: CpuSet,
        reusable: CpuSet,
        binding: Binding | None,
    ) -> CpuSet:
        """Return the free CPUs to offer: those set aside for the pod, or unpromised ones, or all."""
        pod, count = request.pod, request.cpus
        if pod.reserved_for_pod is not None:
            set_aside = free & pod.reserved_for_pod.cpus
            if len(self._eligible(set_aside, reusable, binding)[0]) >= count:
                return set_aside
        unpromised = free - view.promised_cpus(pod.owner_key(request.name))
        default, reusable = self._eligible(unpromised, reusable, binding)
        return unpromised if len(default - self.policy.reserved) + len(reusable) >= count else free


def _requires(binding: Binding | None, policy: BindPolicy) -> bool:
    """Return whether a bind policy is required."""
    return binding is not None and binding.request.required and binding.request.policy is policy


def _as_one(view: NodeView, request: ProviderRequest, own_cpus: dict[str, CpuSet]) -> dict[str, CpuSet]:
    """Return the CPUs of a pod that is decided as one: entries that only kubelet holds become one."""
    uid = request.pod.uid
    existing = {c.name for c in view.containers.values() if c.pod.uid == uid and c.phase is not Phase.EXITED}
    coming = (view.kubelet_cpus.get(uid, {}).keys() & own_cpus.keys()) - existing
    if not coming:
        return own_cpus
    whole = CpuSet.union_of(own_cpus[name] for name in coming)
    return {name: cpus for name, cpus in own_cpus.items() if name not in coming} | {"": whole}


def _ended(view: NodeView, request: ProviderRequest, own_cpus: dict[str, CpuSet]) -> CpuSet:
    """Return the CPUs of ended init containers; those of other ended containers are added to ``own_cpus``."""
    kinds = {resources.name: resources.kind for resources in request.requests.containers}
    free = CpuSet()
    for container in sorted(view.in_sandbox(request.pod.sandbox_id), key=lambda c: -c.attempt):
        if container.phase is not Phase.EXITED or not container.placement.exclusive:
            continue
        if kinds.get(container.name) is ContainerKind.INIT:
            free |= container.placement.exclusive
        else:
            own_cpus.setdefault(container.name, container.placement.exclusive)
    return free
