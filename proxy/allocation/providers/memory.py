"""The memory provider: memory and huge pages by NUMA node, as kubelet's memory manager grants them.

No memory is granted if it is bound already: if the request names memory nodes, or if the pod got memory as a
whole, which its containers use together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec import structs

from proxy.allocation.memory.accounts import age_key, charged, entries_of, released
from proxy.allocation.memory.allocate import allocate
from proxy.allocation.memory.hints import container_memory_hints, pod_memory_hints
from proxy.allocation.memory.request import container_amounts, gets_memory, pod_amounts
from proxy.allocation.memory.state import MemoryRejectedError, MemoryState
from proxy.allocation.providers.provider import Allocation, NodeView, Provider, ProviderRequest, Serves
from proxy.model.explanation import Shortfall
from proxy.model.grants import Block, Grants
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.machine import Machine
from proxy.model.options import Scope
from proxy.model.workload import Container, KubeQos, Pod, Request

MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class MemoryProvider(Provider):
    """Grants memory by NUMA node.

    Attributes:
        machine: The hardware.
        state: The memory of the NUMA nodes, and which containers hold it.
        follow_cpus: Whether memory is looked for on the NUMA nodes of the container's CPUs first if no policy
            has merged hints.
        bound: Whether the memory of the request is bound already, so that none is granted.
    """

    machine: Machine
    state: MemoryState
    follow_cpus: bool = True
    bound: bool = False

    @property
    def name(self) -> str:
        """The name in records."""
        return MEMORY

    @property
    def serves(self) -> Serves:
        """Memory is granted to containers of Guaranteed pods."""
        return Serves.GUARANTEED

    @property
    def accounts(self) -> bool:
        """Memory is charged to the NUMA nodes over the life of containers."""
        return True

    def account(
        self,
        pods: Mapping[str, Pod],
        containers: Mapping[str, Container],
        changed_pods: Collection[Pod],
        changed: Collection[Container],
    ) -> MemoryProvider:
        """Return the provider with what containers hold now."""
        state = charged(self.state, pods, containers, entries_of(changed_pods, changed))
        return self if state is self.state else dataclasses.replace(self, state=state)

    def prepare(self, view: NodeView, request: ProviderRequest) -> MemoryProvider:
        """Return the provider for one decision; it grants nothing if memory is bound already.

        A container that is created again keeps its memory, unless it was resized since. Then the memory that
        its earlier attempt holds is free for it.
        """
        pod = request.pod
        bound = bool(request.cri_resources.cpuset_mems) or (
            pod.reserved_for_pod is not None and bool(pod.reserved_for_pod.blocks)
        )
        state = self.state
        if not bound and self._is_resized(view, request):
            state = released(state, request.requests.uid, request.name)
        return dataclasses.replace(self, state=state, bound=bound)

    def wants(self, request: ProviderRequest) -> bool:
        """Return whether the request contains memory or huge pages, even if no NUMA node could hold them."""
        return gets_memory(request.requests) and bool(self._amounts(request))

    def hints(self, request: ProviderRequest) -> Hints:
        """Return hints for memory and huge pages."""
        if self.bound:
            return None
        if request.scope is Scope.POD:
            return pod_memory_hints(self.state, request.requests)
        return container_memory_hints(self.state, request.requests, request.name)

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Grant memory under the hint; without one on the NUMA nodes of the CPUs if it fits there."""
        if self.bound:
            return Allocation(self, grants)
        targets = [hint]
        if hint.affinity is None and not hint.preferred and grants.cpus and self.follow_cpus:
            homes = self.machine.nodes_of(grants.cpus) & self.machine.memory_nodes
            targets = [TopologyHint(homes, preferred=False), hint] if homes else targets
        steps: list[str] = []
        for target in targets[:-1]:
            try:
                granted = allocate(self.state, request.requests, request.name, target)
                break
            except MemoryRejectedError as refusal:
                steps.append(f"not on the nodes {target.affinity} of its CPUs: {refusal}")
        else:
            granted = allocate(self.state, request.requests, request.name, targets[-1])
        if granted.blocks:
            steps += granted.reasons
        after = dataclasses.replace(self, state=granted.state)
        return Allocation(after, structs.replace(grants, blocks=granted.blocks), steps)

    def holds(self, request: ProviderRequest, name: str, grants: Grants) -> Grants:
        """Return the grants with the memory that the container still holds."""
        return structs.replace(grants, blocks=self.state.blocks(request.requests.uid, name) or ())

    def release(self, grants: Grants) -> Grants:
        """Return the grants without memory.

        Source: kubernetes v1.36, pkg/kubelet/cm/memorymanager/memory_manager.go ``AddContainer``, which
        releases the memory of the init containers before the one that starts.
        """
        return structs.replace(grants, blocks=()) if grants.blocks else grants

    def adopt(self, pod: Pod, request: Request, mems: Mask, grants: Grants, *, running: bool) -> Grants:
        """Return the grants with the memory of the NUMA nodes to which the container is bound.

        The container has no memory of its own if it may use all nodes, or if its pod is not Guaranteed.
        """
        if grants.blocks and not running:
            return grants
        bound = mems != self.machine.memory_nodes or len(mems) == 1
        if pod.kube_qos is not KubeQos.GUARANTEED or not bound:
            return structs.replace(grants, blocks=()) if grants.blocks else grants
        amounts = ((MEMORY, request.memory_limit), *request.huge_pages)
        blocks = tuple(Block(mems, resource, size) for resource, size in amounts if size > 0)
        return structs.replace(grants, blocks=blocks)

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return how many bytes a NUMA node is short of, by resource."""
        if self.bound or not request.requests.guaranteed:
            return ()
        numa_memory = self.state.nodes.get(node)
        amounts = self._amounts(request)
        if numa_memory is None or (amounts and len(numa_memory.cells) > 1):
            return None
        shortfalls: list[Shortfall] = []
        for resource, size in amounts.items():
            table = numa_memory.table(resource)
            if table.allocatable < size:
                return None
            if table.free < size:
                shortfalls.append(Shortfall(resource, Mask((node,)), size, table.free))
        return tuple(shortfalls)

    def _is_resized(self, view: NodeView, request: ProviderRequest) -> bool:
        """Return whether an earlier attempt of a container was granted other amounts than it requests now."""
        if request.scope is Scope.POD or not self.state.blocks(request.requests.uid, request.name):
            return False
        attempts = [c for c in view.in_sandbox(request.pod.sandbox_id) if c.name == request.name]
        blocks = max(attempts, key=age_key).placement.blocks if attempts else ()
        granted: dict[str, int] = {}
        for block in blocks:
            granted[block.resource] = granted.get(block.resource, 0) + block.size
        return bool(granted) and granted != {r: size for r, size in self._amounts(request).items() if size}

    def _amounts(self, request: ProviderRequest) -> dict[str, int]:
        if request.whole or request.scope is Scope.POD:
            return pod_amounts(request.requests)
        return container_amounts(request.requests, request.requests.named(request.name))
