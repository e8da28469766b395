"""Random histories of one node: pods come and go under a policy, CPUs vanish and return, the daemon restarts.

Each step is followed by a check of the invariants: no CPU is owned twice, a set-aside belongs to its pod,
every CPU of a pool is accounted for, the memory accounts match the containers (a new computation gives the
same accounts), and a refusal changes nothing.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.memory.state import MemoryState
from proxy.engine.container_create import place
from proxy.engine.explain_record import explain_pooled
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.executor.ledger_codec import dump, load_container, load_pod
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests, peak_request
from proxy.model.workload import Container, KubeQos, LocatedDevice, Phase, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 2, 2, 2, mem_bytes_per_node=64 * MIB)
RESERVED = {0: {"memory": 4 * MIB}}
NOTHING = LocatedDevice("/dev/fuse", nodes=None)
FAR = LocatedDevice("/dev/gpu3", "vendor/gpu", Mask([3]), "sysfs")

MOST = 6
Wanted = tuple[ContainerKind, int, int, tuple[LocatedDevice, ...]]
CONTAINERS = st.lists(
    st.tuples(
        st.sampled_from([ContainerKind.INIT, ContainerKind.APP, ContainerKind.APP, ContainerKind.SIDECAR]),
        st.sampled_from([0, 500, 1000, 2000, 2000, 4000, 6000, 9000]),
        st.sampled_from([1, 8, 30, 60, 70]),
        st.sampled_from([(), (), (), (NOTHING,), (FAR,)]),
    ),
    min_size=1,
    max_size=4,
)


def within(wanted: list[Wanted]) -> list[tuple[ContainerResources, tuple[LocatedDevice, ...]]]:
    """Sort containers in the order of a pod and name them; at least one is an app container."""
    if all(kind is not ContainerKind.APP for kind, *_ in wanted):
        wanted = [*wanted, (ContainerKind.APP, 1000, 1, ())]
    first = sorted(wanted, key=lambda one: one[0] is ContainerKind.APP)
    return [
        (
            ContainerResources(
                f"c{i}", kind, {"cpu": cpu, "memory": mib * MIB}, {"cpu": cpu, "memory": mib * MIB}
            ),
            near,
        )
        for i, (kind, cpu, mib, near) in enumerate(first)
    ]


def request_of(amounts: dict[str, int], devices: tuple[LocatedDevice, ...] = ()) -> Request:
    cpu = amounts.get("cpu", 0)
    return Request(max(2, cpu * 1024 // 1000), cpu * 100, 100_000, amounts.get("memory", 0), devices=devices)


def accounts(memory: MemoryState | None) -> object:
    """Return comparable memory accounts: for the nodes of a group, only the sum is defined."""
    if memory is None:
        return None
    groups: dict[tuple[int, str], list[int]] = {}
    for node in memory.nodes.values():
        for resource, table in node.tables.items():
            assert min(table.free, table.reserved) >= 0
            assert table.free + table.reserved == table.allocatable
            entry = groups.setdefault((node.cells.bits, resource), [0, 0])
            entry[0] += table.reserved
            entry[1] = node.assignments
    held = {
        uid: {name: blocks for name, blocks in pod.items() if blocks}
        for uid, pod in memory.assignments.items()
    }
    return groups, {uid: pod for uid, pod in held.items() if pod}


class NodeHistory:
    """A node and the calls of kubelet."""

    def begin(
        self,
        policy: TopologyPolicy,
        scope: Scope,
        options: CpuOptions,
        counted: bool,
        follow: bool,
        reserved: str,
    ) -> None:
        self.state = NodeState.empty(
            Node(
                MACHINE,
                CpuTopology.of(MACHINE),
                static=True,
                reserved=CpuSet.parse(reserved),
                follow_mems=follow,
                policy=policy,
                scope=scope,
                options=options,
                reserved_memory=RESERVED if counted else None,
            )
        )
        self.serial = itertools.count()
        self.pods: dict[str, list[tuple[ContainerResources, tuple[LocatedDevice, ...]]]] = {}
        self.requests: dict[str, PodRequests] = {}
        self.forgotten = False

    # -- kubelet ------------------------------------------------------------------------------------------

    def arrives(
        self,
        wanted: list[Wanted],
        known: bool,
        kube: KubeQos,
        qos: QosClass,
        cpus: str,
    ) -> None:
        uid = f"u{next(self.serial)}"
        inside = within(wanted)
        requests = PodRequests(uid, tuple(container for container, _ in inside), kube is KubeQos.GUARANTEED)
        named = (CpuSet.parse(cpus) or None) if qos is not QosClass.NONE else None
        pod = Pod(f"s-{uid}", uid, "ns", uid, 0, qos, kube, "", named, requests=requests if known else None)
        total = request_of(
            peak_request(requests.containers, lambda container: container.requests),
            tuple(d for _, near in inside for d in near),
        )
        before = self.state
        result = admit(before, pod, total)
        if not result.verdict.admitted:
            assert result.state is before
            assert result.pod == pod
            assert result.explanation is not None
            assert result.explanation.verdict == result.verdict
            return
        self.state = result.state.with_pod(result.pod)
        self.pods[uid] = inside
        if known:
            self.requests[uid] = requests

    def newest(self, uid: str) -> dict[str, Container]:
        """Return the newest attempt of each container of a pod."""
        found = sorted(self.state.in_sandbox(f"s-{uid}"), key=lambda c: c.attempt)
        return {c.name: c for c in found}

    def to_create(self, uid: str) -> list[tuple[ContainerResources, tuple[LocatedDevice, ...], int]]:
        """Return the containers of a pod that kubelet may create now."""
        newest, ready = self.newest(uid), []
        for container, near in self.pods[uid]:
            there = newest.get(container.name)
            if container.kind is ContainerKind.INIT:
                if there is None:
                    return [(container, near, 0)]
                if there.phase is not Phase.EXITED:
                    return []
            elif there is None:
                ready.append((container, near, 0))
                if container.kind is ContainerKind.SIDECAR:
                    return ready
            elif there.phase is Phase.EXITED:
                ready.append((container, near, there.attempt + 1))
        return ready

    def creates(self, dice: random.Random, run: bool, fails: bool) -> None:
        able = [(uid, *one) for uid in sorted(self.pods) for one in self.to_create(uid)]
        if not able:
            return
        uid, container, near, attempt = dice.choice(able)
        before, pod = self.state, self.state.pods[f"s-{uid}"]
        if pod.requests is None and uid in self.requests:
            pod = changed_copy(pod, requests=self.requests[uid])
            before = self.state = before.with_pod(pod)
        key = f"x{next(self.serial)}"
        old = self.newest(uid).get(container.name)
        plan = place(before, pod, container.name, attempt, request_of(dict(container.requests), near), key)
        if plan.container is None:
            assert not plan.verdict.admitted
            assert plan.state is before
            assert plan.explanation is not None
            assert (plan.explanation.verdict, plan.explanation.pool) == (plan.verdict, "")
            return
        self.check_plan(plan.container, pod, before)
        why = plan.explanation or explain_pooled(plan.container, plan.state.desired_cpus(plan.container))
        assert why.cpus == plan.state.desired_cpus(plan.container)
        assert (why.mems, why.verdict.admitted) == (plan.container.placement.mems, True)
        self.state = plan.state
        if (
            old is not None
            and pod.requests is not None
            and old.pod.requests is not None
            and before.memory is not None
        ):
            assert plan.container.placement.blocks == old.placement.blocks, "a restart keeps its memory"
        if fails:
            self.state = self.state.changed(drop=[key])
        elif run:
            self.starts(key)

    def check_plan(self, container: Container, pod: Pod, before: NodeState) -> None:
        own = container.placement.exclusive
        assert container.placement.mems
        if container.placement.pool is Pool.OWN:
            assert own
            assert own.isdisjoint(before.cpus_set_aside(pod.key)), "set aside for another pod"
            if pod.cpuset is None:
                assert own.isdisjoint(before.node.cpu.reserved)
            for owner, held in before.owners.items():
                siblings = f"{pod.key}/" in owner or owner == pod.key
                assert siblings or held.cpus.isdisjoint(own)

    def starts(self, key: str) -> None:
        container = self.state.containers[key].in_phase(Phase.RUNNING)
        self.state = self.state.changed(put=[container]).started(container)

    def exits(self, dice: random.Random) -> None:
        live = sorted(k for k, c in self.state.containers.items() if c.phase is not Phase.EXITED)
        if live:
            key = dice.choice(live)
            if self.state.containers[key].phase is Phase.CREATING:
                self.starts(key)
            self.state = self.state.changed(put=[self.state.containers[key].in_phase(Phase.EXITED)])

    def goes(self, dice: random.Random, at_once: bool) -> None:
        uid = dice.choice(sorted(self.pods))
        inside = self.state.in_sandbox(f"s-{uid}")
        if not at_once:  # StopPodSandbox first
            self.state = self.state.changed(put=[c.in_phase(Phase.EXITED) for c in inside])
            self.state = self.state.without_pod(f"s-{uid}")
            self.consistent()
        self.state = self.state.changed(drop=[c.id for c in inside]).without_pod(f"s-{uid}")
        del self.pods[uid]
        assert uid not in (self.state.memory.assignments if self.state.memory else {})

    def is_made_again(self, dice: random.Random) -> None:
        """The sandbox dies; kubelet creates another sandbox for the pod."""
        uid = dice.choice(sorted(self.pods))
        old = self.state.pods[f"s-{uid}"]
        result = admit(
            self.state,
            changed_copy(old, sandbox_id=f"t-{uid}", attempt=1, reserved_for_pod=None),
            Request(),
        )
        if not result.verdict.admitted:
            return
        if old.reserved_for_pod is not None:
            assert result.pod.reserved_for_pod == old.reserved_for_pod
        state = result.state.with_pod(result.pod)
        ended = [c.in_phase(Phase.EXITED) for c in state.in_sandbox(old.sandbox_id)]
        self.state = state.changed(put=ended)
        self.consistent()
        self.state = self.state.without_pod(old.sandbox_id)
        self.consistent()
        self.state = self.state.changed(drop=[c.id for c in ended]).without_pod(result.pod.sandbox_id)
        self.state = self.state.with_pod(changed_copy(result.pod, sandbox_id=old.sandbox_id))

    # -- the machine and the daemon -----------------------------------------------------------------------

    def cpus_change(self, gone: set[int]) -> None:
        online = CpuSet(i for i in range(16) if i not in gone)
        machine = smaller(online)
        after = self.state.with_machine(machine)
        runs = all(not owner.cpus.isdisjoint(online) for owner in after.owners.values())
        if after.pools.shared and runs:
            self.state = after

    def restarts(self, through_ledger: bool) -> None:
        pods, containers = list(self.state.pods.values()), list(self.state.containers.values())
        if through_ledger:
            pods = [p for pod in pods if (p := load_pod(dump(pod)))]
            containers = [c for one in containers if (c := load_container(dump(one)))]
            assert (len(pods), len(containers)) == (len(self.state.pods), len(self.state.containers))
        again = NodeState.of(self.state.node, pods, containers)
        assert (again.owners, again.pools, again.cpus_set_aside()) == (
            self.state.owners,
            self.state.pools,
            self.state.cpus_set_aside(),
        )
        self.state = again

    # -- invariants ---------------------------------------------------------------------------------------

    def consistent(self) -> None:
        state = self.state
        assert violations(state) == []
        assert state.pools.shared
        owned = CpuSet()
        for owner in state.owners.values():
            owned |= owner.cpus
        assert state.pools.shared == state.node.shareable - owned
        for pod in state.pods.values():
            if pod.reserved_for_pod is not None:
                for key, owner in state.owners.items():
                    if key != pod.key and not key.startswith(f"{pod.key}/"):
                        assert owner.cpus.isdisjoint(pod.reserved_for_pod.cpus), (key, pod.key)
        again = NodeState.of(state.node, state.pods.values(), state.containers.values())
        assert accounts(state.memory) == accounts(again.memory)
        if state.memory is not None:
            promised = sum(
                b.size for pod in state.memory.assignments.values() for held in pod.values() for b in held
            )
            reserved = sum(n.table("memory").reserved for n in state.memory.nodes.values())
            assert promised == reserved, "more memory is promised than exists"


def smaller(online: CpuSet) -> Machine:
    """Return the machine with some CPUs offline; groups are named by the lowest CPU that is online."""

    def named(level: str, cpu: int) -> int | None:
        return next((g & online).first() for g in MACHINE.groups(level).values() if cpu in g)

    cpus = tuple(
        changed_copy(c, **{level: named(level, c.id) for level in ("core", "package", "llc", "die")})
        for c in MACHINE.cpus
        if c.id in online
    )
    nodes = tuple(changed_copy(n, cpus=n.cpus & online) for n in MACHINE.nodes)
    return changed_copy(MACHINE, cpus=cpus, nodes=nodes, caches={})


DICE = st.randoms(use_true_random=False)
SOME = lambda self: bool(self.pods)  # noqa: E731
OPTIONS = [CpuOptions(), *(CpuOptions(**{name: True}) for name in CpuOptions.__struct_fields__)]
KUBE = [*[KubeQos.GUARANTEED] * 4, KubeQos.BURSTABLE, KubeQos.BEST_EFFORT]
QOS = [*[QosClass.NONE] * 4, QosClass.LS, QosClass.LSR, QosClass.LSE]
NAMED = ["", "", "", "3,11", "4-5,12-13"]
RESERVES = ["", "0", "0,8"]


class NodeHistoryMachine(NodeHistory, RuleBasedStateMachine):
    """The same random history as a state machine of hypothesis."""

    begins = initialize(
        policy=st.sampled_from(TopologyPolicy),
        scope=st.sampled_from(Scope),
        options=st.sampled_from(OPTIONS),
        counted=st.booleans(),
        follow=st.booleans(),
        reserved=st.sampled_from(RESERVES),
    )(NodeHistory.begin)
    arrival = precondition(lambda self: len(self.pods) < MOST)(
        rule(
            wanted=CONTAINERS,
            known=st.booleans(),
            kube=st.sampled_from(KUBE),
            qos=st.sampled_from(QOS),
            cpus=st.sampled_from(NAMED),
        )(NodeHistory.arrives)
    )
    creation = precondition(SOME)(
        rule(dice=DICE, run=st.booleans(), fails=st.just(False))(NodeHistory.creates)
    )
    another = precondition(SOME)(rule(dice=DICE, run=st.just(True), fails=st.booleans())(NodeHistory.creates))
    end = precondition(SOME)(rule(dice=DICE)(NodeHistory.exits))
    going = precondition(SOME)(rule(dice=DICE, at_once=st.booleans())(NodeHistory.goes))
    made_again = precondition(SOME)(rule(dice=DICE)(NodeHistory.is_made_again))
    change = rule(gone=st.sets(st.integers(0, 15), max_size=3))(NodeHistory.cpus_change)
    restart = rule(through_ledger=st.booleans())(NodeHistory.restarts)
    truth = invariant()(NodeHistory.consistent)


NodeHistoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestNodeHistory = NodeHistoryMachine.TestCase


def wanted(dice: random.Random) -> list[Wanted]:
    kinds, amounts = (
        [ContainerKind.INIT, ContainerKind.APP, ContainerKind.APP, ContainerKind.SIDECAR],
        [0, 500, 1000, 2000, 2000, 4000, 6000, 9000],
    )
    near: list[tuple[LocatedDevice, ...]] = [(), (), (), (NOTHING,), (FAR,)]
    return [
        (dice.choice(kinds), dice.choice(amounts), dice.choice([1, 8, 30, 60, 70]), dice.choice(near))
        for _ in range(dice.randint(1, 4))
    ]


def step(history: NodeHistory, dice: random.Random) -> None:
    """Perform random events of a node, as often as they occur on one."""
    what = dice.random()
    if what < 0.25 and len(history.pods) < MOST:
        known, kube, qos = dice.random() < 0.6, dice.choice(KUBE), dice.choice(QOS)
        history.arrives(wanted(dice), known, kube, qos, dice.choice(NAMED))
    elif what > 0.95:
        history.restarts(through_ledger=dice.random() < 0.5)
    elif what > 0.9:
        history.cpus_change(set(dice.sample(range(16), dice.randint(0, 3))))
    elif not history.pods:
        return
    elif what < 0.65:
        history.creates(dice, run=dice.random() < 0.6, fails=dice.random() < 0.15)
    elif what < 0.8:
        history.exits(dice)
    elif what < 0.87:
        history.goes(dice, at_once=dice.random() < 0.5)
    else:
        history.is_made_again(dice)


@pytest.mark.parametrize("first", range(0, 240, 24))
def test_invariants_hold_for_random_histories(first: int) -> None:
    """Longer histories with more pods than hypothesis tries; ``first`` is the first seed of a series."""
    for seed in range(first, first + 24):
        dice, history = random.Random(seed), NodeHistory()
        history.begin(
            list(TopologyPolicy)[seed % 4],
            list(Scope)[seed // 4 % 2],
            dice.choice(OPTIONS),
            counted=dice.random() < 0.7,
            follow=dice.random() < 0.5,
            reserved=dice.choice(RESERVES),
        )
        for _ in range(50):
            step(history, dice)
            history.consistent()
