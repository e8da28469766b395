"""Properties of the three managers while pods are admitted and removed, and kubelet restarts."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.allocation import cpu_static
from proxy.allocation.cpu_policy import CpuPolicy, CpuRejectedError, CpuState
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices import allocate as devices_allocate
from proxy.allocation.devices import hints as devices_hints
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.allocation.memory import allocate as memory_allocate
from proxy.allocation.memory import hints as memory_hints
from proxy.allocation.memory.state import MemoryRejectedError, MemoryState, initial, node_memory
from proxy.allocation.packed import NotEnoughCpus
from proxy.allocation.policies import decide
from proxy.backends.kubelet.checkpoints import held_cpus, read_cpu_checkpoint, read_memory_checkpoint
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import CpuOptions, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.topology.regular_machine import regular_machine
from tests.oracles import memory_manager
from tests.oracles.cpu_manager_state import managed, start
from tests.oracles.device_manager import without_pod
from tests.oracles.memory_manager_file import held_memory
from tests.oracles.memory_manager_state import difference, validated

GPU = "vendor/gpu"
MIB = 1 << 20
MACHINE = regular_machine(2, 2, 2, 2, mem_bytes_per_node=64 * MIB)
TOPO = CpuTopology.of(MACHINE)
NODES = Mask(node.id for node in MACHINE.nodes)
RESERVED = {0: {"memory": 4 * MIB}}
DEVICES = [
    RegisteredDevice("a", Mask([0])),
    RegisteredDevice("b", Mask([1])),
    RegisteredDevice("c", Mask([1, 2])),
    RegisteredDevice("d"),
    RegisteredDevice("e", Mask([3]), healthy=False),
]
REFUSALS = (NotEnoughCpus, CpuRejectedError, MemoryRejectedError, devices_allocate.DeviceRejectedError)

REQUESTS = st.builds(
    lambda cpus, mib, gpus: {"cpu": cpus * 1000, "memory": mib * MIB, **({GPU: gpus} if gpus else {})},
    st.integers(1, 7),
    st.integers(1, 90),
    st.integers(0, 2),
)
PODS = st.tuples(
    st.lists(REQUESTS, max_size=2),
    st.lists(st.booleans(), min_size=2),
    st.lists(REQUESTS, min_size=1, max_size=2),
)


def cpu_text(state: CpuState) -> str:
    """Write ``cpu_manager_state`` as kubelet does, without a checksum."""
    entries = {uid: {name: str(cpus) for name, cpus in pod.items()} for uid, pod in state.assigned.items()}
    return json.dumps({"policyName": "static", "defaultCpuSet": str(state.default), "entries": entries})


def memory_text(state: MemoryState) -> str:
    """Write ``memory_manager_state`` as kubelet does, without a checksum."""
    names = {"total": "total", "system_reserved": "systemReserved", "allocatable": "allocatable"}
    names |= {"reserved": "reserved", "free": "free"}
    nodes = {
        str(i): {
            "numberOfAssignments": node.assignments,
            "memoryMap": {r: {k: getattr(t, n) for n, k in names.items()} for r, t in node.tables.items()},
            "cells": list(node.cells),
        }
        for i, node in state.nodes.items()
    }
    entries = {
        uid: {
            name: [{"numaAffinity": list(b.affinity), "type": b.resource, "size": b.size} for b in blocks]
            for name, blocks in pod.items()
        }
        for uid, pod in state.assignments.items()
    }
    return json.dumps({"policyName": "Static", "machineState": nodes, "entries": entries})


class Node(RuleBasedStateMachine):
    """One node under one policy."""

    @initialize(
        policy=st.sampled_from(TopologyPolicy),
        whole=st.booleans(),
        strict=st.booleans(),
        across=st.booleans(),
    )
    def begin(self, policy: TopologyPolicy, whole: bool, strict: bool, across: bool) -> None:
        options = CpuOptions(
            full_pcpus_only=whole, strict_cpu_reservation=strict, distribute_cpus_across_numa=across
        )
        self.policy = policy
        self.static = CpuPolicy.of(TOPO, options, CpuSet([0]))
        self.cpus = start(self.static)
        self.empty = self.memory = initial(node_memory(MACHINE), RESERVED)
        self.devices = DeviceState().register(GPU, DEVICES)
        self.pods: dict[str, PodRequests] = {}

    @rule(uid=st.sampled_from("xyz"), requests=PODS, whole_pod=st.booleans())
    def come(
        self,
        uid: str,
        requests: tuple[list[dict[str, int]], list[bool], list[dict[str, int]]],
        whole_pod: bool,
    ) -> None:
        if uid in self.pods:
            return
        init, stays, apps = requests
        containers = [
            ContainerResources(f"i{i}", ContainerKind.SIDECAR if stays[i] else ContainerKind.INIT, each, each)
            for i, each in enumerate(init)
        ]
        containers += [
            ContainerResources(f"a{i}", ContainerKind.APP, each, each) for i, each in enumerate(apps)
        ]
        pod = self.pods[uid] = PodRequests(uid, tuple(containers))
        merged = self.decide(pod, None) if whole_pod else None
        for container in pod.containers:
            own = merged if whole_pod else self.decide(pod, container.name)
            if own is None or not self.give(pod, container, own):
                return  # like kubelet: resources of earlier containers are held until the pod is removed

    def decide(self, pod: PodRequests, name: str | None) -> TopologyHint | None:
        """Ask all managers for hints and merge them; None if the policy refuses."""
        if name is None:
            answers = [
                devices_hints.pod_device_hints(self.devices, pod, NODES),
                cpu_static.pod_cpu_hints(self.static, self.cpus, pod),
                memory_hints.pod_memory_hints(self.memory, pod),
            ]
        else:
            answers = [
                devices_hints.container_device_hints(self.devices, pod, name, NODES),
                cpu_static.container_cpu_hints(self.static, self.cpus, pod, name),
                memory_hints.container_memory_hints(self.memory, pod, name),
            ]
        decision = decide(self.policy, answers, NODES)
        return decision.hint if decision.verdict.admitted else None

    def give(self, pod: PodRequests, container: ContainerResources, merged: TopologyHint) -> bool:
        """Allocate for a container by all managers or by none; return whether they did."""
        before = self.cpus
        try:
            devices = devices_allocate.allocate(self.devices, pod, container.name, merged)
            cpus = cpu_static.allocate(self.static, self.cpus, pod, container.name, merged.affinity)
            memory = memory_allocate.allocate(self.memory, pod, container.name, merged)
        except REFUSALS:
            return False
        self.devices, self.cpus, self.memory = devices.state, cpus, memory.state
        result = cpus.owned_by(pod.uid, container.name) or CpuSet()
        assert len(result) == container.requests["cpu"] // 1000, "exactly the requested number"
        assert result <= cpu_static.available(self.static, before) | before.reusable_by(pod.uid), (
            "only free CPUs"
        )
        assert {b.resource: b.size for b in memory.blocks} == {"memory": container.requests["memory"]}
        assert len(devices.devices.get(GPU, ())) == container.limits.get(GPU, 0)
        if (
            self.policy in (TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE)
            and merged.affinity is not None
        ):
            assert (memory_manager.nodes_of(memory) or merged.affinity) >= merged.affinity
        return True

    @rule(uid=st.sampled_from("xyz"))
    def go(self, uid: str) -> None:
        if (pod := self.pods.pop(uid, None)) is None:
            return
        for container in pod.containers:
            self.cpus = cpu_static.remove(self.cpus, uid, container.name)
        self.memory = memory_manager.release_pod(self.memory, uid)
        self.devices = without_pod(self.devices, uid)

    @rule(uid=st.sampled_from("xyz"))
    def leave_the_init_containers(self, uid: str) -> None:
        if pod := self.pods.get(uid):
            self.memory = memory_manager.start(self.memory, pod, pod.of_kinds(ContainerKind.APP)[0].name)

    @rule()
    def restart(self) -> None:
        """Read the state as kubelet would read it from its files."""
        held = held_cpus(read_cpu_checkpoint(cpu_text(self.cpus)))
        if held.default:  # kubelet does not take a state without shared CPUs
            self.cpus = start(self.static, CpuState(held.default, held.held))
        assert self.cpus.assigned == held.held
        read = held_memory(read_memory_checkpoint(memory_text(self.memory)))
        assert read == self.memory
        self.memory = read

    @invariant()
    def every_cpu_is_somewhere_once(self) -> None:
        if not hasattr(self, "cpus"):
            return
        owners = Counter[int](self.cpus.default)
        for pod in self.cpus.assigned.values():
            owners.update(set[int]().union(*pod.values()))
        assert set(owners) == set(managed(self.static))
        assert max(owners.values()) == 1
        for uid, pod in self.cpus.assigned.items():
            staying = [
                cpus
                for name, cpus in pod.items()
                if self.pods[uid].named(name).kind is not ContainerKind.INIT
            ]
            assert sum(map(len, staying)) == len(set[int]().union(*staying)), (
                "only init containers' are shared"
            )

    @invariant()
    def memory_is_what_was_charged(self) -> None:
        if not hasattr(self, "memory"):
            return
        blocks = [b for pod in self.memory.assignments.values() for own in pod.values() for b in own]
        reserved = sum(node.table("memory").reserved for node in self.memory.nodes.values())
        assert reserved == sum(block.size for block in blocks)
        for node in self.memory.nodes.values():
            table = node.table("memory")
            assert table.reserved + table.free == table.allocatable
            assert table.free >= 0
            assert all(b.affinity == node.cells for b in blocks if not b.affinity.isdisjoint(node.cells))
        assert validated(self.memory, node_memory(MACHINE), RESERVED) is self.memory
        if not blocks and not self.memory.assignments:
            assert difference(self.memory, self.empty) == ""

    @invariant()
    def every_device_has_one_holder(self) -> None:
        if not hasattr(self, "devices"):
            return
        holders = Counter[str]()
        for uid, pod in self.devices.held.items():
            mine = set[str]().union(*(own.get(GPU, frozenset()) for own in pod.values()))
            holders.update(mine)
            staying = [
                own.get(GPU, frozenset())
                for name, own in pod.items()
                if self.pods[uid].named(name).kind is not ContainerKind.INIT
            ]
            assert sum(map(len, staying)) == len(set[str]().union(*staying))
        assert max(holders.values(), default=1) == 1
        assert "e" not in holders, "it is not healthy"

    def teardown(self) -> None:
        if not hasattr(self, "pods"):
            return
        for uid in tuple(self.pods):
            self.go(uid)
        assert self.cpus.default == managed(self.static)
        assert difference(self.memory, self.empty) == ""
        assert self.devices.available(GPU) == frozenset("abcd")


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
