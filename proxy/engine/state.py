"""The state of a node: its pods and containers, the owners of CPUs, and the pools.

A state is a value. Every change makes a new state, so that a worker thread can use a consistent one while the
event loop continues to decide. Owners and pools follow from the containers. They are recomputed only if an
owner comes or goes, and carried along otherwise: most containers own nothing, and placing them must cost next
to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, structs

from proxy.allocation.devices.state import DeviceState
from proxy.allocation.memory.accounts import inits_before
from proxy.allocation.memory.state import MemoryState
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import Provider
from proxy.engine.admission import assigned_cpus, sum_requests
from proxy.engine.enforcement_state import APPLIED_TO_ALL, Enforcement
from proxy.engine.inflight import InflightCalls
from proxy.engine.node import Node
from proxy.engine.node_state_facts import NodeStateFacts
from proxy.engine.owners import ReservationCpus, cpu_owners
from proxy.engine.runtime_knowledge import RuntimeKnowledge
from proxy.model.grants import Grants
from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import Held
from proxy.model.machine import Machine
from proxy.model.mode import NodeMode
from proxy.model.persistent_map import PersistentMap
from proxy.model.requests import ContainerKind
from proxy.model.workload import Container, ContainerPart, Phase, Placement, Pod, Pool
from proxy.pools.pools import CpuPools, Owner, pool_cpus, pools_of, without_hook_limits

_NOTHING_HELD: Held = {}
_NO_RESERVATION_CPUS: Mapping[str, ReservationCpus] = {}
_NOTHING_KNOWN = RuntimeKnowledge()
_NO_CALLS = InflightCalls()
_NO_FACTS = NodeStateFacts()
_NO_DEVICES = DeviceState()
_NO_CPUS = CpuSet()


class NodeState(Struct, frozen=True):
    """Pods, containers, and what follows from them.

    Attributes:
        pods: Sandboxes by id.
        containers: Containers by id (by token while a create is in flight).
        owners: The owners of CPUs, by ``Container.owner``.
        pools: The CPUs of containers that own none.
        providers: The providers of the topology manager, with what containers hold.
        kubelet_cpus: The CPUs that kubelet's CPU manager holds for containers, by its state file.
        be_limit: CPUs to which BE (best effort) containers are limited by BE suppression; None if BE is not
            suppressed.
        reservation_cpus: CPUs of reservations that are part of no placement, by reservation.
        runtime: The known state of the runtime besides its containers.
        mode: The mode of the node.
        inflight: Calls at the runtime that may write a container's cpuset.
        facts: The facts about other subjects: writes of other programs to cpusets, CFS quotas, memory
            nodes, partitions, BE suppression, kubelet's CPU manager; see ``NodeStateFacts``.
        enforcement: To which pods the plan is applied, if the mode is ``enforce``.
        devices: The devices that device plugins report, and which containers hold them.
        blocked_cpus: CPUs that must not be chosen or named for a container, because containers of the pools
            run on them and cannot be moved. They stay in the pools. Set only while one create is decided
            again.
    """

    node: Node
    pods: PersistentMap[Pod]
    containers: PersistentMap[Container]
    owners: Mapping[str, Owner]
    pools: CpuPools
    providers: tuple[Provider, ...] = ()
    kubelet_cpus: Held = _NOTHING_HELD
    be_limit: CpuSet | None = None
    reservation_cpus: Mapping[str, ReservationCpus] = _NO_RESERVATION_CPUS
    runtime: RuntimeKnowledge = _NOTHING_KNOWN
    mode: NodeMode = NodeMode.ENFORCE
    inflight: InflightCalls = _NO_CALLS
    facts: NodeStateFacts = _NO_FACTS
    enforcement: Enforcement = APPLIED_TO_ALL
    devices: DeviceState = _NO_DEVICES
    blocked_cpus: CpuSet = _NO_CPUS

    @classmethod
    def empty(cls, node: Node) -> NodeState:
        """Return the state of a node without pods and containers."""
        devices = DeviceState(node.devices) if node.devices else _NO_DEVICES
        pools = _pools(node, {})
        return cls(node, PersistentMap(), PersistentMap(), {}, pools, node.providers, devices=devices)

    @classmethod
    def of(
        cls,
        node: Node,
        pods: Iterable[Pod],
        containers: Iterable[Container],
        kubelet: Held | None = None,
        be_limit: CpuSet | None = None,
        reservation_cpus: Mapping[str, ReservationCpus] | None = None,
    ) -> NodeState:
        """Build a state from the pods and containers that are known to exist."""
        existing = PersistentMap({c.id: c for c in containers})
        known = PersistentMap({p.sandbox_id: p for p in pods})
        held, kept = kubelet or {}, reservation_cpus or {}
        owners = cpu_owners(node, existing.values(), held, known.values(), kept.values())
        pools = _pools(node, owners, be_limit)
        providers = node.providers
        if node.accounts:
            pods, containers = list(known.values()), list(existing.values())
            providers = tuple(each.account(known, existing, pods, containers) for each in providers)
        return cls(node, known, existing, owners, pools, providers, held, be_limit, kept)

    @property
    def memory(self) -> MemoryState | None:
        """The memory of the NUMA nodes, with what containers hold of it; None if it is not counted."""
        for each in self.providers:
            if type(each) is MemoryProvider:  # isinstance is slow for a class that inherits from a protocol
                return each.state
        return None

    def with_node(self, node: Node) -> NodeState:
        """Return the state under other rules, or on a machine on which CPUs came or went."""
        pods, containers = self.pods.values(), self.containers.values()
        after = NodeState.of(node, pods, containers, self.kubelet_cpus, self.be_limit, self.reservation_cpus)
        return structs.replace(
            after,
            runtime=self.runtime,
            mode=self.mode,
            inflight=self.inflight,
            facts=self.facts,
            enforcement=self.enforcement,
            devices=self.devices,
            blocked_cpus=self.blocked_cpus,
        )

    def with_machine(self, machine: Machine) -> NodeState:
        """Return the state after CPUs came or went."""
        return self.with_node(self.node.with_machine(machine))

    def with_kubelet_cpus(self, held: Held) -> NodeState:
        """Return the state with the CPUs that kubelet's CPU manager holds.

        CPUs that it holds for a container that exists here are ignored, because the decision made here
        counts. The others count as owned, because their containers may be created at any moment.
        """
        if held == self.kubelet_cpus:
            return self
        return structs.replace(self, kubelet_cpus=held)._recomputed()

    def with_reservation(self, reservation: str, reserved: ReservationCpus | None) -> NodeState:
        """Return the state with other CPUs of a reservation; None for no CPUs."""
        after = {key: cpus for key, cpus in self.reservation_cpus.items() if key != reservation}
        if reserved is not None and reserved.cpus:
            after[reservation] = reserved
        if after == self.reservation_cpus:
            return self
        return structs.replace(self, reservation_cpus=after)._recomputed()

    def with_be_limit(self, limit: CpuSet | None) -> NodeState:
        """Return the state with BE limited to some CPUs; None if BE is not suppressed."""
        if limit == self.be_limit:
            return self
        pools = _pools(self.node, self.owners, limit)
        return structs.replace(self, pools=pools, be_limit=limit)

    def with_facts(self, **facts: object) -> NodeState:
        """Return the state with other facts, by their names in ``NodeStateFacts``."""
        return structs.replace(self, facts=structs.replace(self.facts, **facts))

    def with_runtime(self, runtime: RuntimeKnowledge) -> NodeState:
        """Return the state with other knowledge of the runtime."""
        return self if runtime is self.runtime else structs.replace(self, runtime=runtime)

    def desired_cpus(self, container: Container) -> CpuSet:
        """Return the CPUs that a container must run on."""
        placement = container.placement
        if placement.pool is not Pool.OWN:
            return pool_cpus(self.node.machine, self.pools, placement)
        # An offline CPU may come back, and still belongs to its owner then. An owner whose CPUs are all
        # offline uses shared CPUs until then: otherwise the kernel would let it run anywhere, even on the
        # CPUs of other owners.
        online = self.node.machine.online
        present = placement.exclusive & online
        if placement.replacement and (lacking := len(placement.exclusive) - len(present)):
            present |= CpuSet(list(placement.replacement & online)[:lacking])
        usable = present or self.pools.shared
        if placement.hook_cpus is None:
            return usable
        return usable & placement.hook_cpus | placement.hook_extra_cpus & online or usable

    def cpus_without_hooks(self, container: Container) -> CpuSet:
        """Return the CPUs that a container would run on without the limits of hooks."""
        if container.placement.hook_cpus is None:
            return self.desired_cpus(container)
        return self.desired_cpus(
            structs.replace(container, placement=without_hook_limits(container.placement))
        )

    def uses_shared_cpus(self, container: Container) -> bool:
        """Return whether a container runs on shared CPUs, and must leave those that become exclusive.

        This includes an owner while all of its CPUs are offline.
        """
        placement = container.placement
        if placement.pool is not Pool.OWN:
            return True
        return (placement.exclusive | placement.replacement).isdisjoint(self.node.machine.online)

    def desired_mems(self, container: Container) -> Mask:
        """Return the memory nodes of a container: those of the decision that exist, or else all."""
        memory_nodes, mems = self.node.machine.memory_nodes, container.placement.mems
        if mems.bits and not mems.bits & ~memory_nodes.bits:
            return mems
        return mems & memory_nodes or memory_nodes

    def changed(
        self,
        put: Iterable[Container] = (),
        drop: Iterable[str] = (),
        runtime: RuntimeKnowledge | None = None,
    ) -> NodeState:
        """Return the state after containers came, changed or went.

        Args:
            put: Containers that are new or changed (their id decides).
            drop: Ids of containers that are gone; unknown ones are ignored.
            runtime: The knowledge of the runtime after the same event; None if it has not changed.
        """
        runtime = runtime or self.runtime
        containers = self.containers
        owners_change = False
        touched: list[Container] = []
        for gone in drop:
            old = containers.get(gone)
            if old is not None:
                containers = containers.drop(gone)
                touched.append(old)
                owners_change |= old.placement.pool is Pool.OWN
        for new in put:
            before = containers.get(new.id)
            containers = containers.put(new.id, new)
            touched.append(new)
            owners_change |= new.placement.pool is Pool.OWN
            if before is not None:
                touched.append(before)
                owners_change |= before.placement.pool is Pool.OWN
        providers = self._accounted(self.pods, containers, (), touched)
        if not owners_change and not any(c.pod.uid in self.kubelet_cpus for c in touched):
            return self._with(containers, providers, runtime)
        return structs.replace(
            self, containers=containers, providers=providers, runtime=runtime
        )._recomputed()

    def _with(
        self,
        containers: PersistentMap[Container],
        providers: tuple[Provider, ...],
        runtime: RuntimeKnowledge,
    ) -> NodeState:
        """Return the state with other containers, if they change neither owners nor pools."""
        return NodeState(
            self.node,
            self.pods,
            containers,
            self.owners,
            self.pools,
            providers,
            self.kubelet_cpus,
            self.be_limit,
            self.reservation_cpus,
            runtime,
            self.mode,
            self.inflight,
            self.facts,
            self.enforcement,
            self.devices,
            self.blocked_cpus,
        )

    def _accounted(
        self,
        pods: PersistentMap[Pod],
        containers: PersistentMap[Container],
        changed: Sequence[Pod],
        touched: Sequence[Container],
    ) -> tuple[Provider, ...]:
        """Return the providers after pods and containers came, changed or went."""
        if not self.node.accounts:
            return self.providers
        return tuple(each.account(pods, containers, changed, touched) for each in self.providers)

    def with_container(
        self, old_id: str, container: Container, runtime: RuntimeKnowledge | None = None
    ) -> NodeState:
        """Return the state after a container got its id, or, with an empty ``old_id``, after one was added.

        A container without an old id owns nothing. Neither change affects the owners, unless the new id was
        that of an owner.
        """
        before = self.containers.get(container.id)
        if before is not None and (before.placement.pool is Pool.OWN or before.placement.blocks):
            return self.changed((container,), (old_id,), runtime)
        if not old_id and container.pod.uid in self.kubelet_cpus:
            return self.changed((container,), (), runtime)
        containers = self.containers.drop(old_id) if old_id else self.containers
        return self._with(containers.put(container.id, container), self.providers, runtime or self.runtime)

    def with_pod(self, pod: Pod) -> NodeState:
        """Return the state after a sandbox came, or changed."""
        before = self.pods.get(pod.sandbox_id)
        pods = self.pods.put(pod.sandbox_id, pod)
        # Whether a container that has ended still holds memory depends on its sandbox.
        inside = self.in_sandbox(pod.sandbox_id) if before is None and self.node.accounts else ()
        providers = self._accounted(pods, self.containers, [p for p in (before, pod) if p], inside)
        runtime = self.runtime if before is not None else self.runtime.with_sandbox(pod, self.pods.values())
        after = structs.replace(self, pods=pods, providers=providers, runtime=runtime)
        return after._recomputed_for(pod, before)

    def without_pod(self, sandbox_id: str) -> NodeState:
        """Return the state after a sandbox was removed; its containers are removed separately."""
        gone = self.pods.get(sandbox_id)
        if gone is None:
            return self
        pods = self.pods.drop(sandbox_id)
        ended = self.in_sandbox(sandbox_id) if self.node.accounts else ()
        providers = self._accounted(pods, self.containers, (gone,), ended)
        runtime = self.runtime.without_sandbox(gone, pods.values())
        after = structs.replace(self, pods=pods, providers=providers, runtime=runtime)
        return after._recomputed_for(gone)

    def _recomputed_for(self, *pods: Pod | None) -> NodeState:
        """Return the state with recomputed owners and pools, if the pods affect what kubelet holds."""
        held = self.kubelet_cpus
        if not held or not any(pod and (pod.uid in held or pod.reserved_for_pod) for pod in pods):
            return self
        after = self._recomputed()
        return self if after.owners == self.owners else after

    def _recomputed(self) -> NodeState:
        """Return the state with recomputed owners and pools."""
        containers, pods = self.containers.values(), self.pods.values()
        owners = cpu_owners(self.node, containers, self.kubelet_cpus, pods, self.reservation_cpus.values())
        return structs.replace(self, owners=owners, pools=_pools(self.node, owners, self.be_limit))

    def started(self, container: Container) -> NodeState:
        """Return the state after a container has started: earlier init containers release their resources.

        Only init containers that have ended release anything; the providers decide what each of them keeps.
        """
        if not self.node.accounts:
            return self
        pod = self.pods.get(container.pod.sandbox_id)
        requests = container.pod.requests or (pod.requests if pod else None)
        if requests is None:
            return self  # init containers are unknown; this is the case for most pods
        return self._released(container.pod.sandbox_id, pod, inits_before(requests, container.name))

    def _released(self, sandbox_id: str, pod: Pod | None, ended: Collection[str]) -> NodeState:
        """Return the state after init containers released their resources, held and set aside."""
        changed: list[Container] = []
        for each in self.in_sandbox(sandbox_id):
            if each.name in ended and each.phase is Phase.EXITED:
                placement = with_grants(each.placement, self._after_release(grants_of(each.placement)))
                if placement != each.placement:
                    changed.append(structs.replace(each, placement=placement))
        after = self.changed(put=changed) if changed else self
        aside = pod.reserved_for_pod if pod else None
        if pod is None or aside is None:
            return after
        parts = tuple(self._part_after_release(part) if part.name in ended else part for part in aside.parts)
        if parts == aside.parts:
            return after
        return after.with_pod(structs.replace(pod, reserved_for_pod=structs.replace(aside, parts=parts)))

    def _part_after_release(self, part: ContainerPart) -> ContainerPart:
        grants = self._after_release(Grants(part.cpus, part.blocks, shares=part.shares))
        return ContainerPart(part.name, grants.cpus, grants.blocks, grants.shares)

    def _after_release(self, grants: Grants) -> Grants:
        for provider in self.providers:
            grants = provider.release(grants)
        return grants

    def exclusive_cpus(self, pod_key: str) -> tuple[dict[str, CpuSet], CpuSet]:
        """Return exclusive CPUs: those of a pod's containers by name, and those of all other pods.

        CPUs that are set aside for other pods count as theirs; blocked CPUs count among those of other pods.
        """
        own_cpus: dict[str, CpuSet] = {}
        others, prefix = self.cpus_set_aside(pod_key).bits | self.blocked_cpus.bits, f"{pod_key}/"
        for owner, held in self.owners.items():
            if owner.startswith(prefix):
                own_cpus[owner.removeprefix(prefix)] = held.cpus
            else:
                others |= held.cpus.bits
        return own_cpus, CpuSet.from_bits(others)

    def cpus_set_aside(self, pod_key: str = "") -> CpuSet:
        """Return the CPUs that were set aside for pods other than this one."""
        bits = 0
        for pod in self.pods.values():
            if pod.reserved_for_pod is not None and pod.key != pod_key:
                bits |= pod.reserved_for_pod.cpus.bits
        return CpuSet.from_bits(bits)

    def promised_cpus(self, owner: str) -> CpuSet:
        """Return the CPUs promised to owners other than this one, even if these do not run on them now.

        A pod whose sandbox exists may return to the CPUs of its annotation, and a container that has ended to
        those that it had (kubelet keeps them until the pod is gone). Until then pools use these CPUs; if a
        new owner got them, the earlier owner would have none.
        """
        bits = self.returning_cpus(owner).bits
        for pod in self.pods.values():
            if pod.cpuset and pod.key != owner and (cpus := assigned_cpus(self.node, pod)):
                bits |= cpus.bits
        return CpuSet.from_bits(bits)

    def returning_cpus(self, owner: str) -> CpuSet:
        """Return the CPUs that ended containers of other owners will get when they are created again."""
        return CpuSet.union_of(c.placement.exclusive for c in self.ended_owners() if c.owner != owner)

    def ended_owners(self) -> list[Container]:
        """Return the containers that owned CPUs, have ended, and may come back to them.

        A container that was created again is left out: after a resize it may own other CPUs than before, or
        none.
        """
        ended = [c for c in self.containers.values() if c.phase is Phase.EXITED and self._may_return(c)]
        if not ended:
            return ended
        live = {(c.pod.sandbox_id, c.name) for c in self.containers.values() if c.phase is not Phase.EXITED}
        return [c for c in ended if (c.pod.sandbox_id, c.name) not in live]

    def retained_cpus(self, owner: str) -> CpuSet:
        """Return the CPUs that an owner holds, or to which its ended containers may come back."""
        held = self.owners.get(owner)
        if held is not None:
            return held.cpus
        return CpuSet.union_of(c.placement.exclusive for c in self.ended_owners() if c.owner == owner)

    def _may_return(self, container: Container) -> bool:
        """Return whether a container that has ended may come back to CPUs that it owned.

        It may if its sandbox exists, and the claim of its annotation is still permitted (rules may have
        changed).
        """
        if not container.owner:
            return False
        pod = self.pods.get(container.pod.sandbox_id)
        if pod is None or self._is_over(container):
            return False
        if container.owner != pod.key:
            return True
        if pod.cpuset_chosen_locally:
            return container.placement.exclusive <= (pod.cpuset or CpuSet())  # others after a resize
        requests = {c.name: c.request for c in self.in_sandbox(pod.sandbox_id)}
        return assigned_cpus(self.node, pod, sum_requests(list(requests.values()))) is not None

    def _is_over(self, container: Container) -> bool:
        """Return whether an ended container stays ended: an init container, once app containers exist."""
        requests = container.pod.requests
        kinds = {each.name: each.kind for each in requests.containers} if requests else {}
        return kinds.get(container.name) is ContainerKind.INIT and any(
            kinds.get(other.name) is ContainerKind.APP for other in self.in_sandbox(container.pod.sandbox_id)
        )

    def last_cpus(self, owner: str) -> CpuSet:
        """Return the CPUs that an owner holds, or held when it ended; empty if it never held any."""
        held = self.owners.get(owner)
        if held is not None:
            return held.cpus
        ended = [c for c in self.containers.values() if c.owner == owner]
        return max(ended, key=lambda c: c.attempt).placement.exclusive if ended else CpuSet()

    def without_devices(self, pod_key: str) -> NodeState:
        """Return the state without a pod's devices; unchanged if the pod still has a sandbox."""
        if pod_key not in self.devices.held or any(pod.key == pod_key for pod in self.pods.values()):
            return self
        return structs.replace(self, devices=self.devices.release_pod(pod_key))

    def current_pod(self, pod: Pod) -> Pod:
        """Return the pod as the state has it; the given value if its sandbox is not in the state."""
        return self.pods.get(pod.sandbox_id) or pod

    def existing(self, ids: Iterable[str]) -> list[Container]:
        """Return the containers with some ids, in that order, without those that the state does not have."""
        containers = self.containers
        return [c for i in ids if (c := containers.get(i)) is not None]

    def in_sandbox(self, sandbox_id: str) -> list[Container]:
        """Return the containers of a sandbox."""
        return [c for c in self.containers.values() if c.pod.sandbox_id == sandbox_id]


def grants_of(placement: Placement) -> Grants:
    """Return the grants of a container, from its placement."""
    return Grants(placement.exclusive, placement.blocks, placement.devices, placement.shares)


def with_grants(placement: Placement, grants: Grants) -> Placement:
    """Return a placement with other memory, devices and shares; its CPUs stay."""
    return structs.replace(placement, blocks=grants.blocks, devices=grants.devices, shares=grants.shares)


def _pools(node: Node, owners: Mapping[str, Owner], be_limit: CpuSet | None = None) -> CpuPools:
    return pools_of(node.shareable, owners.values(), node.system & node.machine.online, be_limit)
