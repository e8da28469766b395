"""Random histories of unusual machines: one CPU, cores of unequal size, ARM, NUMA ids with gaps, nodes
without memory or without CPUs, no NUMA at all, 512 CPUs on 36 nodes.

Pods carry all annotations at once, contradictory ones too; sandboxes are created again, or fail; kubelet's
CPU manager assigns and releases CPUs; the Node object and the machine change. After each step all invariants
hold, some CPU is left for containers that share, a refusal changes nothing and has a reason, and no decision
takes long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.adoption import adopt
from proxy.engine.container_create import place
from proxy.engine.container_events import ContainerFound
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_policy import read_node_policy
from proxy.engine.node_policy_applied import apply_node_policy
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NodeBindPolicy, NumaStrategy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.machine import Cpu, Machine, NumaNode
from proxy.model.options import CpuOptions, Scope, TopologyOptions, TopologyPolicy
from proxy.model.workload import KubeQos, LocatedDevice, Phase, Pod, Request
from proxy.pools import node_keys
from proxy.pools.facts import pod_facts
from tests.testkit.changed_copy import changed_copy

GIB = 1 << 30
PREFIX = "scheduling.koordinator.sh/"
LABELS = ("LSE", "LSR", "LSR", "LS", "BE", "SYSTEM", "", "", "GOLD")
POLICIES = ("FullPCPUs", "SpreadByPCPUs", "ConstrainedBurst", "Default", "None", "", "Zigzag")
STEPS, LIMIT_S = 40, 2.0

Cores = Iterable[tuple[tuple[int, ...], int, int | None]]
"""CPUs, package and NUMA node of each core."""


def built(cores: Cores, memory: dict[int, int | None], arch: str = "x86_64") -> Machine:
    cpus = sorted(
        (Cpu(i, min(ids), package, numa=node) for ids, package, node in cores for i in ids),
        key=lambda c: c.id,
    )
    nodes = tuple(
        NumaNode(node, CpuSet(c.id for c in cpus if c.numa == node), size) for node, size in memory.items()
    )
    online = CpuSet(c.id for c in cpus)
    return Machine(tuple(cpus), nodes, online, online, extra={"arch": arch})


def big() -> Machine:
    cores = [((c, c + 256), c // 128 * 128, c * 36 // 256) for c in range(256)]
    return built(cores, dict.fromkeys(range(36), 16 * GIB))


MACHINES: dict[str, Callable[[], Machine]] = {
    "one CPU": lambda: built([((0,), 0, 0)], {0: GIB}),
    "one core": lambda: built([((0, 1), 0, 0)], {0: GIB}),
    "unequal cores": lambda: built(
        [*(((2 * c, 2 * c + 1), 0, 0) for c in range(4)), *(((c,), 0, 0) for c in range(8, 12))], {0: GIB}
    ),
    "ARM": lambda: built([((c,), 0, c // 8) for c in range(16)], {0: GIB, 1: GIB}, "aarch64"),
    "ARM with threads": lambda: built(
        [((2 * c, 2 * c + 1), 0, c // 4) for c in range(8)], {0: GIB, 1: GIB}, "aarch64"
    ),
    "memory-only nodes": lambda: built(
        [((c,), c // 8 * 8, c // 8) for c in range(16)], dict.fromkeys((0, 1, 2, 10, 18, 62), GIB), "aarch64"
    ),
    "gaps": lambda: built(
        [((2 * c, 2 * c + 1), c // 4 * 8, (0, 3, 8, 62)[c // 4]) for c in range(16)],
        dict.fromkeys((0, 3, 8, 62), GIB),
    ),
    "a node without memory": lambda: built([((c, c + 8), 0, c // 4) for c in range(8)], {0: GIB, 1: 0}),
    "unequal nodes": lambda: built([((c, c + 6), 0, int(c > 1)) for c in range(6)], {0: GIB, 1: 64 * GIB}),
    "no NUMA": lambda: built([((c, c + 4), 0, None) for c in range(4)], {0: None}),
    "512 CPUs on 36 nodes": big,
}


class OddMachineHistory:
    def __init__(self, machine: Machine, dice: random.Random) -> None:
        self.dice, self.machine = dice, machine
        online = sorted(machine.online)
        several = len(online) > 3
        self.base = Node(
            machine,
            CpuTopology.of(machine),
            static=dice.random() < 0.8,
            reserved=CpuSet(online[:1]) if several and dice.random() < 0.4 else CpuSet(),
            policy=dice.choice(list(TopologyPolicy)),
            scope=dice.choice(list(Scope)),
            options=CpuOptions(
                full_pcpus_only=dice.random() < 0.3, strict_cpu_reservation=dice.random() < 0.4
            ),
            reserved_memory={machine.nodes[0].id: {"memory": GIB // 8}} if self.counted() else None,
            node_reservation=CpuSet(online[-1:]) if several and dice.random() < 0.2 else CpuSet(),
            bind=dice.choice(list(NodeBindPolicy)),
            strategy=dice.choice(list(NumaStrategy)),
        )
        self.state = NodeState.empty(self.base)
        self.policy = read_node_policy(self.base, machine, None, None)
        self.serial = 0

    def counted(self) -> bool:
        return all(node.mem_bytes for node in self.machine.nodes) and self.maybe(0.4)

    # -- labels, annotations and requests of users --------------------------------------------------------

    def random_cpus(self) -> str:
        most = len(self.machine.present) + 1
        count = self.dice.choice((1, 1, 2, 2, 4, most))
        return ",".join(str(self.dice.randrange(most)) for _ in range(count))

    def maybe(self, often: float) -> bool:
        return self.dice.random() < often

    def node(self) -> int:
        return self.dice.choice([*(node.id for node in self.machine.nodes), 5, 63])

    def annotations(self) -> dict[str, str]:
        pick, maybe = self.dice.choice, self.maybe
        found: dict[str, str] = {}
        if maybe(0.4):
            parts = [f'"cpuset":"{self.random_cpus()}"'] if maybe(0.6) else []
            if maybe(0.4):
                amount = f'{{"{pick(("cpu", "kubernetes.io/batch-cpu"))}":"{pick(("1", "0", "-1"))}"}}'
                parts.append(f'"numaNodeResources":[{{"node":{self.node()},"resources":{amount}}}]')
            if maybe(0.2):
                parts.append(f'"cpuSharedPools":[{{"socket":0,"node":{self.node()}}}]')
            found[f"{PREFIX}resource-status"] = f"{{{','.join(parts)}}}"
        if maybe(0.5):
            found[f"{PREFIX}resource-spec"] = (
                f'{{"requiredCPUBindPolicy":"{pick(POLICIES)}","preferredCPUBindPolicy":"{pick(POLICIES)}",'
                f'"preferredCPUExclusivePolicy":"{pick(("", "PCPULevel", "NUMANodeLevel"))}"}}'
            )
        if maybe(0.5):
            policy = pick(("BestEffort", "Restricted", "SingleNUMANode", "None"))
            found[f"{PREFIX}numa-topology-spec"] = (
                f'{{"numaTopologyPolicy":"{policy}",'
                f'"singleNUMANodeExclusive":"{pick(("", "Required", "Preferred"))}"}}'
            )
        if maybe(0.4):
            found["volcano.sh/numa-topology-policy"] = pick(("none", "restricted", "single-numa-node", "x"))
        if maybe(0.4):
            found["volcano.sh/topology-decision"] = f'{{"numa":{{"{self.node()}":{{"cpu":"2"}}}}}}'
        return found

    def request(self, guaranteed: bool, pinned: str = "") -> Request:
        milli = self.dice.choice((0, 500, 1000, 2000, 2000, 4000, 1000 * len(self.machine.present)))
        nodes = [Mask((node.id,)) for node in self.machine.nodes]
        near = [LocatedDevice(f"/dev/{n}", "gpu", self.dice.choice(nodes), "", 1) for n in range(2)]
        memory = self.dice.choice((0, GIB // 4, 2 * GIB)) if guaranteed else 0
        devices = tuple(near) if self.maybe(0.2) else ()
        shares = max(2, milli * 1024 // 1000)
        return Request(shares, milli * 100, 100_000, memory, pinned, devices=devices)

    # -- events -------------------------------------------------------------------------------------------

    def pod(self) -> None:
        parent, attempt = self.dice.choice(("", "", "", "burstable", "besteffort")), 0
        self.serial += 1
        uid, sandbox = f"u{self.serial}", f"s{self.serial}"
        if len(self.state.pods) and self.maybe(0.2):
            again = self.dice.choice(sorted(self.state.pods.values(), key=lambda p: p.sandbox_id))
            uid, attempt, parent = (
                again.uid,
                again.attempt + 1,
                again.cgroup_parent.removeprefix("/kubepods/"),
            )
        labels = {"koordinator.sh/qosClass": self.dice.choice(LABELS)}
        came = pod_facts(sandbox, uid, "ns", uid, attempt, labels, self.annotations(), f"/kubepods/{parent}")
        result = admit(self.state, came, self.request(came.kube_qos is KubeQos.GUARANTEED))
        if not result.verdict.admitted:
            assert result.state is self.state
            assert result.verdict.message
            return
        after = result.state.with_pod(result.pod)
        if self.maybe(0.1):
            before, after = self.state, after.without_pod(result.pod.sandbox_id)
            assert (after.owners, after.pools) == (before.owners, before.pools), "the sandbox was never made"
            assert after.cpus_set_aside() == before.cpus_set_aside()
        self.state = after

    def container(self, pod: Pod) -> None:
        self.serial += 1
        name = self.dice.choice("ab")
        inside = self.state.in_sandbox(pod.sandbox_id)
        if any(c.name == name and c.phase is not Phase.EXITED for c in inside):
            return
        pinned = self.random_cpus() if self.maybe(0.3) else ""
        request, key = self.request(pod.kube_qos is KubeQos.GUARANTEED, pinned), f"c{self.serial}"
        if self.maybe(0.2):
            phase = self.dice.choice((Phase.RUNNING, Phase.CREATED))
            plan = adopt(self.state, ContainerFound(key, pod, name, self.serial, request, phase))
            assert plan.container is not None, "the container exists"
        else:
            plan = place(self.state, pod, name, self.serial, request, key)
        if plan.container is None:
            assert plan.state is self.state
            assert plan.verdict.message
        self.state = plan.state

    def existing_object(self) -> None:
        """An event of a random existing pod or container."""
        state, what = self.state, self.dice.random()
        pods = sorted(state.pods.values(), key=lambda p: p.sandbox_id)
        there = sorted(state.containers.values(), key=lambda c: c.id)
        if pods and (what < 0.6 or not there):
            self.container(self.dice.choice(pods))
        elif pods and what < 0.68:
            gone = self.dice.choice(pods).sandbox_id
            self.state = state.changed(drop=[c.id for c in state.in_sandbox(gone)]).without_pod(gone)
        elif there:
            one = self.dice.choice(there)
            phase = Phase.EXITED if what < 0.85 or one.phase is Phase.EXITED else Phase.RUNNING
            self.state = state.changed(put=[one.in_phase(phase)]).started(one.in_phase(phase))

    def kubelet(self) -> None:
        uids = ["k1", "k2", *(pod.uid for pod in self.state.pods.values())]
        held = {
            uid: {self.dice.choice("abc"): CpuSet.parse(self.random_cpus())}
            for uid in sorted(uids)
            if self.maybe(0.5)
        }
        self.state = self.state.with_kubelet_cpus(held)

    def suppression(self) -> None:
        self.state = self.state.with_be_limit(self.dice.choice((None, CpuSet.parse(self.random_cpus()))))

    def rules(self) -> None:
        pick = self.dice.choice
        labels = {
            node_keys.BIND_POLICY[0]: pick(("None", "FullPCPUsOnly", "SpreadByPCPUs", "Zigzag", "")),
            node_keys.NUMA_POLICY[0]: pick(("None", "SingleNUMANode", "Restricted", "")),
        }
        reserved = pick((f'{{"reservedCPUs":"{self.random_cpus()}"}}', '{"resources":{"cpu":"3"}}', "{"))
        system = f'{{"cpuset":"{self.random_cpus()}","cpusetExclusive":{pick(("true", "false"))}}}'
        annotations = {node_keys.RESERVATION: reserved, node_keys.SYSTEM_QOS: system}
        some = {key: text for key, text in annotations.items() if self.maybe(0.5)}
        kubelets = CpuManager(pick(("static", "none")), reserved=CpuSet.parse(self.random_cpus()))
        meta = NodeMeta("n", labels=labels, annotations=some)
        new = read_node_policy(self.base, self.state.node.machine, meta, kubelets)
        done = apply_node_policy(self.state, new, self.policy, TopologyOptions())
        self.state, self.policy = done.state, done.policy

    def hotplug(self) -> None:
        """Take other CPUs offline than before."""
        left = tuple(cpu for cpu in self.machine.cpus if self.maybe(0.8)) or self.machine.cpus
        online = CpuSet(cpu.id for cpu in left)
        cores: dict[int, int] = {}
        for cpu in left:
            cores.setdefault(cpu.core, cpu.id)
        cpus = tuple(changed_copy(cpu, core=cores[cpu.core]) for cpu in left)
        nodes = tuple(changed_copy(node, cpus=node.cpus & online) for node in self.machine.nodes)
        changed = changed_copy(self.machine, cpus=cpus, nodes=nodes)
        after = self.state.with_machine(self.dice.choice((changed, self.machine)))
        self.state = after if after.pools.shared else self.state  # as the executor does

    def run(self) -> None:
        others = (self.kubelet, self.suppression, self.rules, self.hotplug)
        for _ in range(STEPS):
            what = self.dice.random()
            step = (
                self.pod if what < 0.3 else self.existing_object if what < 0.8 else self.dice.choice(others)
            )
            began = time.thread_time()
            step()
            assert time.thread_time() - began < LIMIT_S
            assert self.state.pools.shared
            assert violations(self.state) == []


@pytest.mark.parametrize("kind", MACHINES)
def test_invariants_hold_for_random_histories(kind: str) -> None:
    machine = MACHINES[kind]()
    for seed in range(10 if len(machine.cpus) > 64 else 40):
        OddMachineHistory(machine, random.Random(seed)).run()
