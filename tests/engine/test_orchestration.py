"""Random histories of a node with pods of all classes, by the labels and annotations that users write.

The CPUs of each container are computed here a second time, from the documented rules (Koordinator v1.8.0
pkg/koordlet) and from nothing but the existing containers. After each step: owned sets are disjoint; LS,
SYSTEM and all other sharing containers are on CPUs without an owner; BE is on no CPU of LSE; no container is
without CPUs; exactly the containers whose set changes move; released CPUs return to the pools; a pod of class
LSE or LSR is on its CPUs or was refused.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.adoption import adopt
from proxy.engine.container_create import place
from proxy.engine.container_events import ContainerFound
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.placement import moves
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.executor.ledger_codec import dump, load_container, load_pod
from proxy.model.idset import CpuSet, union
from proxy.model.koordinator import NodeBindPolicy, NumaStrategy
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.model.workload import Container, KubeQos, Phase, Pod, Pool, QosClass, Request
from proxy.pools.facts import pod_facts
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 2, 2, 2)  # node n: cores 2n and 2n+1, CPUs 2n, 2n+1, 2n+8, 2n+9
EVERY = CpuSet(range(16))
MOST = 7
STRICT = (QosClass.LSE, QosClass.LSR)
PREFIX = "scheduling.koordinator.sh/"

LABELS = ["LSE", "LSE", "LSR", "LSR", "LS", "LS", "BE", "BE", "SYSTEM", "", "", "lse", "GOLD"]
PARENTS = ["/kubepods", "/kubepods", "/kubepods/burstable", "/kubepods/besteffort"]
STATUSES = [
    *[""] * 8,
    '{"cpuset":"5,13"}',
    '{"cpuset":"4-5,12-13"}',
    '{"cpuset":"2-3"}',
    '{"CPUSet":"3,11"}',
    '{"cpuset":"1-14"}',
    '{"cpuset":"0-15"}',
    '{"cpuset":"14-20"}',
    '{"cpuset":"60000"}',
    '{"cpuset":"5-"}',
    '{"cpuset":"3-1"}',
    '{"cpuset":7}',
    '{"cpuset":""}',
    "no JSON",
    "[]",
    "null",
    '{"numaNodeResources":[{"node":1,"resources":{"cpu":"2"}}]}',
    '{"numaNodeResources":[{"node":0,"resources":{"cpu":"1"}},{"node":3,"resources":{}}]}',
    '{"numaNodeResources":[{"node":2,"resources":{"kubernetes.io/batch-cpu":"2000"}}]}',
    '{"numaNodeResources":[{"node":9,"resources":{"cpu":"1"}}]}',
    '{"numaNodeResources":[{"node":-1,"resources":{"cpu":"1"}}]}',
    '{"numaNodeResources":[{"node":1,"resources":{"memory":"1Gi"}}]}',
    '{"cpuSharedPools":[{"socket":0,"node":1}]}',
    '{"cpuset":"6,14","numaNodeResources":[{"node":3,"resources":{"cpu":"2"}}]}',
]
SPECS = [
    *[""] * 6,
    '{"requiredCPUBindPolicy":"FullPCPUs"}',
    '{"preferredCPUBindPolicy":"SpreadByPCPUs","preferredCPUExclusivePolicy":"PCPULevel"}',
    '{"preferredCPUBindPolicy":"FullPCPUs","preferredCPUExclusivePolicy":"NUMANodeLevel"}',
    '{"requiredCPUBindPolicy":"ConstrainedBurst"}',
    '{"preferredCPUBindPolicy":"ConstrainedBurst"}',
    '{"requiredCPUBindPolicy":"FullPCPU"}',
    '{"preferredCPUExclusivePolicy":7}',
    "{",
]
NUMA_SPECS = [
    *[""] * 6,
    '{"numaTopologyPolicy":"SingleNUMANode"}',
    '{"numaTopologyPolicy":"Restricted","singleNUMANodeExclusive":"Preferred"}',
    '{"numaTopologyPolicy":"best"}',
]
VOLCANO = [
    *[("", "")] * 6,
    ("single-numa-node", ""),
    ("restricted", '{"numa":{"1":{"cpu":"2"}}}'),
    ("sideways", '{"numa":{"x":{}}}'),
]
AMOUNTS = [(0, 0), (500, 800), (1000, 1000), *[(2000, 2000)] * 3, (3000, 3000), (2000, 4000), (1500, 1500)]
PINNED = ["", "", "7,15", "0-15"]
HELD: list[Mapping[str, Mapping[str, CpuSet]]] = [
    {},
    {"k1": {"c0": CpuSet((7, 15))}},
    {"k1": {"c0": CpuSet((7, 15))}, "k2": {"c0": CpuSet((7,)), "c1": CpuSet((1, 9))}},
    {"k2": {"c1": CpuSet((1, 9, 77))}, "u1": {"c0": CpuSet((6,))}, "u3": {"c0": CpuSet((4, 12))}},
    {"k3": {"c0": EVERY}},
]
LIMITS = [None, None, CpuSet((0, 8)), CpuSet((3, 5, 13)), CpuSet((12,)), CpuSet((99,))]


def request_of(amount: tuple[int, int], pinned: str = "") -> Request:
    wants, may = amount
    return Request(max(2, wants * 1024 // 1000), may * 100 or -1, 100_000, cpuset_cpus=pinned)


def annotations_of(status: str, spec: str, numa: str, volcano: tuple[str, str]) -> dict[str, str]:
    found = {
        f"{PREFIX}resource-status": status,
        f"{PREFIX}resource-spec": spec,
        f"{PREFIX}numa-topology-spec": numa,
        "volcano.sh/numa-topology-policy": volcano[0],
        "volcano.sh/topology-decision": volcano[1],
    }
    return {key: text for key, text in found.items() if text}


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


def pool_by_the_table(pod: Pod, *, bound: bool) -> Pool:
    """Return the pool of a pod without exclusive CPUs: rows 3 to 9."""
    if pod.qos is QosClass.BE:
        return Pool.BE
    if bound and not pod.problem:
        return Pool.SHARED
    if pod.qos is QosClass.SYSTEM:
        return Pool.SYSTEM
    return Pool.BE if pod.kube_qos is KubeQos.BEST_EFFORT and pod.qos is not QosClass.LS else Pool.SHARED


class Account:
    """The CPUs of containers, computed from the existing containers and the rules alone."""

    def __init__(self, state: NodeState) -> None:
        node = state.node
        self.state = state
        self.online = node.machine.online
        self.live = [c for c in state.containers.values() if c.phase is not Phase.EXITED]
        owning = [c for c in self.live if c.placement.pool is Pool.OWN]
        only_kubelets = set(state.owners) - {c.owner for c in owning}
        self.kubelets = {key: state.owners[key].cpus for key in only_kubelets}
        theirs = union(cpus.bits for cpus in self.kubelets.values())
        self.owned = CpuSet.from_bits(union(c.placement.exclusive.bits for c in owning) | theirs)
        lsr = [c for c in owning if not c.placement.excludes_be]
        hard = [c for c in owning if c not in lsr]
        self.hard = CpuSet.from_bits(union(c.placement.exclusive.bits for c in hard) | theirs)
        kept = node.node_reservation | node.system if node.system_cpus_exclusive else node.node_reservation
        if node.options.strict_cpu_reservation:
            kept |= node.reserved
        self.usable = self.online - kept or self.online
        self.shared = self.usable - self.owned

    def expected(self, container: Container) -> CpuSet:
        """Return the CPUs of a live container."""
        place = container.placement
        if place.pool is Pool.OWN:
            return place.exclusive & self.online or self.shared
        whole = pool = self.shared
        if place.pool is Pool.SYSTEM:
            whole = pool = (self.state.node.system & self.online) - self.owned or self.shared
        elif place.pool is Pool.BE:
            whole = pool = self.usable - self.hard
            if self.state.be_limit is not None:
                pool = pool & self.state.be_limit or pool
        limit = place.pool_cpus_limit
        if place.pool_numa_limit is not None:
            bits = union(n.cpus.bits for n in self.state.node.machine.nodes if n.id in place.pool_numa_limit)
            limit = CpuSet.from_bits(bits)
        return pool if limit is None else pool & limit or whole & limit or pool


class PodClassHistory:
    """A node and its events."""

    def begin(
        self, static: bool, reservation: str, system: str, alone: bool, more: Mapping[str, Any]
    ) -> None:
        node = Node(
            MACHINE,
            CpuTopology.of(MACHINE),
            static=static,
            node_reservation=CpuSet.parse(reservation),
            system=CpuSet.parse(system),
            system_cpus_exclusive=alone,
            **more,
        )
        self.state = NodeState.empty(node)
        self.serial = itertools.count()
        self.amounts: dict[str, tuple[int, int]] = {}
        """The request of each container of a pod, by the pod's uid."""

    def move(self, after: NodeState) -> None:
        """Enter a state; exactly the containers whose CPUs differ must move."""
        before, self.state = self.state, after
        shrink, grow = moves(before, after)
        old, new = Account(before), Account(after)
        ways: dict[str, int] = {}
        for container in new.live:
            known = before.containers.get(container.id)
            if known is not None and known.placement == container.placement:
                had, has = old.expected(known), new.expected(container)
                if had != has:
                    ways[container.id] = 1 if had <= has else -1
        assert set(shrink) == {i for i, way in ways.items() if way < 0}
        assert set(grow) == {i for i, way in ways.items() if way > 0}

    # -- kubelet ------------------------------------------------------------------------------------------

    def arrives(
        self,
        label: str,
        parent: str,
        annotations: Mapping[str, str],
        amount: tuple[int, int],
        with_request: bool,
    ) -> None:
        uid = f"u{next(self.serial)}"
        labels = {"koordinator.sh/qosClass": label} if label else {}
        pod = pod_facts(f"s-{uid}", uid, "ns", uid, 0, labels, annotations, f"{parent}/pod{uid}")
        before = self.state
        result = admit(before, pod, request_of(amount) if with_request else Request())
        if not result.verdict.admitted:
            assert result.state is before
            assert result.explanation is not None
            return
        self.amounts[uid] = amount
        self.move(result.state.with_pod(result.pod))

    def pods(self) -> list[str]:
        return sorted(self.amounts)

    def creates(self, dice: random.Random, run: bool, pinned: str) -> None:
        uid = dice.choice(self.pods())
        pod, name = self.state.pods[f"s-{uid}"], dice.choice(["c0", "c1"])
        there = [c for c in self.state.in_sandbox(pod.sandbox_id) if c.name == name]
        if any(c.phase is not Phase.EXITED for c in there):
            return
        key, before = f"x{next(self.serial)}", self.state
        request = request_of(self.amounts[uid], pinned)
        plan = place(before, pod, name, len(there), request, key)
        self.judge(before, pod, plan.container, plan.verdict.reason)
        if plan.container is None:
            assert plan.state is before
            return
        if plan.container.placement.pool is Pool.OWN:
            assert set(plan.shrink) == set(moves(before, plan.state)[0])
        self.move(plan.state)
        if dice.random() < 0.15:  # the runtime could not make it
            self.move(self.state.changed(drop=[key]))
        elif run:
            self.enters(key, Phase.RUNNING)

    def judge(self, before: NodeState, pod: Pod, container: Container | None, reason: str) -> None:
        """Compare an answer with the CPUs to which the class of the pod entitles it."""
        node, others = before.node, before.cpus_set_aside(pod.key)
        for key, held in before.owners.items():
            if key != pod.key:
                others |= held.cpus
        named = pod.cpuset if pod.cpuset and pod.qos is not QosClass.BE and not pod.problem else None
        # A pod that has its CPUs already continues with those that are left.
        goes_on = (
            named is not None and bool(named & node.machine.online) and named <= before.last_cpus(pod.key)
        )
        fits = (
            named is not None
            and (named <= node.machine.online or goes_on)
            and named.isdisjoint(others)
            and not node.shareable <= named | others
        )
        if pod.qos in STRICT and (pod.problem or (named is not None and not fits)):
            assert container is None, "a strict pod that cannot have its CPUs must not run"
            assert reason in ("InvalidCPUSet", "CPUsInUse", "SharedPoolExhausted")
        if fits:
            assert container is not None, "refused without need"
        if named is not None and pod.qos not in STRICT:
            assert container is not None, "a pod that is not strict runs on a pool"
        if container is None:
            return
        placement = container.placement
        if fits:
            assert (placement.pool, placement.exclusive) == (Pool.OWN, named)
        elif placement.pool is Pool.OWN:
            assert named is None, "a container that cannot own CPUs shares"
            assert pod.qos in (QosClass.NONE, *STRICT)
            assert pod.kube_qos is KubeQos.GUARANTEED
        else:
            bound = bool(pod.nodes) and named is None
            assert placement.pool is pool_by_the_table(pod, bound=bound)
            if pod.cpuset and pod.qos is QosClass.BE and not pod.problem:
                assert placement.pool_cpus_limit == pod.cpuset
            elif bound and not pod.problem:
                assert placement.pool_numa_limit == pod.nodes
        if placement.pool is Pool.OWN:
            kept = before.owners.get(container.owner)  # kubelet held them for this very container
            assert placement.exclusive.isdisjoint(others - kept.cpus if kept else others)
            assert placement.excludes_be == (
                pod.qos is QosClass.LSE or (not named and pod.qos is QosClass.NONE)
            )

    def enters(self, key: str, phase: Phase) -> None:
        self.move(self.state.changed(put=[self.state.containers[key].in_phase(phase)]))

    def is_found(self, dice: random.Random, phase: Phase, pinned: str) -> None:
        """A container that was created while the daemon did not run."""
        uid = dice.choice(self.pods())
        pod = self.state.pods[f"s-{uid}"]
        key = f"x{next(self.serial)}"
        if self.state.owners and dice.random() < 0.5:
            pinned = str(dice.choice(sorted(self.state.owners.items()))[1].cpus)
        plan = adopt(
            self.state, ContainerFound(key, pod, key, 0, request_of(self.amounts[uid], pinned), phase)
        )
        assert plan.container is not None
        self.move(plan.state)

    def exits(self, dice: random.Random) -> None:
        live = sorted(k for k, c in self.state.containers.items() if c.phase is not Phase.EXITED)
        if live:
            self.enters(dice.choice(live), Phase.EXITED)

    def is_updated(self, dice: random.Random) -> None:
        """An update of kubelet's reconciliation carries a CPU list of kubelet, and changes nothing."""
        live = sorted(k for k, c in self.state.containers.items() if c.phase is not Phase.EXITED)
        if live:
            old = self.state.containers[dice.choice(live)]
            new = changed_copy(old, request=changed_copy(old.request, cpuset_cpus="0-15"))
            wanted = self.state.desired_cpus(old)
            self.move(self.state.changed(put=[new]))
            assert self.state.desired_cpus(new) == wanted

    def goes(self, uid: str) -> None:
        inside = self.state.in_sandbox(f"s-{uid}")
        self.move(self.state.changed(put=[c.in_phase(Phase.EXITED) for c in inside]))
        self.move(self.state.changed(drop=[c.id for c in inside]))
        self.move(self.state.without_pod(f"s-{uid}"))
        del self.amounts[uid]

    # -- the machine, the daemon, and other components ----------------------------------------------------

    def cpus_change(self, gone: set[int]) -> None:
        after = self.state.with_machine(smaller(EVERY - CpuSet(gone)))
        if after.pools.shared:  # the daemon ignores a machine that leaves the shared pool empty
            self.move(after)

    def is_reserved_anew(self, reservation: str) -> None:
        node = changed_copy(self.state.node, node_reservation=CpuSet.parse(reservation), pool_placements={})
        after = self.state.with_node(node)
        if after.pools.shared:
            self.move(after)

    def restarts(self) -> None:
        pods = [p for pod in self.state.pods.values() if (p := load_pod(dump(pod)))]
        containers = [c for one in self.state.containers.values() if (c := load_container(dump(one)))]
        again = NodeState.of(self.state.node, pods, containers, self.state.kubelet_cpus, self.state.be_limit)
        assert (again.owners, again.pools) == (self.state.owners, self.state.pools)
        for container in again.containers.values():
            old = self.state.containers[container.id]
            assert (container.placement, container.owner) == (old.placement, old.owner)
        assert moves(self.state, again) == ((), ())
        self.move(again)

    def kubelet_holds(self, held: Mapping[str, Mapping[str, CpuSet]]) -> None:
        self.move(self.state.with_kubelet_cpus(held))

    def is_suppressed(self, limit: CpuSet | None) -> None:
        self.move(self.state.with_be_limit(limit))

    def everything_leaves(self) -> None:
        for uid in self.pods():
            self.goes(uid)
        self.move(self.state.with_kubelet_cpus({}))
        self.move(self.state.with_be_limit(None))
        self.move(self.state.with_machine(MACHINE))
        assert self.state.pools == NodeState.empty(self.state.node).pools
        assert not [*self.state.owners, *self.state.pods, *self.state.containers]

    # -- invariants ---------------------------------------------------------------------------------------

    def holds(self) -> None:
        state = self.state
        account = Account(state)
        assert violations(state) == []
        for container in account.live:
            wanted, placement = state.desired_cpus(container), container.placement
            assert wanted == account.expected(container), container
            assert wanted
            assert wanted <= account.online
            if placement.pool is Pool.OWN:
                continue
            if container.pod.qos is QosClass.BE or placement.pool is Pool.BE:
                assert wanted.isdisjoint(account.hard)
            else:
                assert wanted.isdisjoint(account.owned)
            assert not placement.exclusive
        owners: dict[str, CpuSet] = dict(account.kubelets)
        for container in account.live:
            if container.placement.pool is Pool.OWN:
                owners[container.owner] = (
                    owners.get(container.owner, CpuSet()) | container.placement.exclusive
                )
        assert {key: owner.cpus for key, owner in state.owners.items()} == owners
        for one, other in itertools.combinations(owners.values(), 2):
            assert one.isdisjoint(other)
        assert account.shared
        assert state.pools.shared == account.shared
        self.kubelets_part(account)

    def kubelets_part(self, account: Account) -> None:
        """Only CPUs that kubelet holds for a container that does not exist yet are kept free."""
        state, held = self.state, self.state.kubelet_cpus
        there = {(c.pod.uid, c.name) for c in account.live}
        ours = {
            pod.uid
            for pod in state.pods.values()
            if pod.qos in (QosClass.LS, QosClass.BE, QosClass.SYSTEM) or pod.cpuset
        }
        for key, cpus in account.kubelets.items():
            uid, _, name = key.partition("/")
            assert cpus <= held[uid][name]
            assert (uid, name) not in there
            assert uid not in ours
        taken = account.owned | state.cpus_set_aside()
        for uid, names in held.items():
            for name, cpus in names.items():
                if (uid, name) not in there and uid not in ours:
                    left = cpus & account.online - taken
                    assert not left or state.node.shareable <= taken | left, "kept free for no container"


DICE = st.randoms(use_true_random=False)
SOME = lambda self: bool(self.amounts)  # noqa: E731
RESERVATIONS = ["", "", "0", "0,8", "1-2"]
SYSTEMS = ["", "", "14-15", "15"]
MORE: list[Mapping[str, Any]] = [
    {},
    {},
    {"reserved": CpuSet((0,))},
    {"reserved": CpuSet((0,)), "options": CpuOptions(strict_cpu_reservation=True)},
    {"policy": TopologyPolicy.SINGLE_NUMA_NODE},
    {"policy": TopologyPolicy.RESTRICTED, "scope": Scope.POD},
    {"bind": NodeBindPolicy.FULL_PCPUS_ONLY},
    {"bind": NodeBindPolicy.SPREAD_BY_PCPUS, "strategy": NumaStrategy.DISTRIBUTE_EVENLY},
    {"strategy": NumaStrategy.LEAST_ALLOCATED, "follow_mems": False},
]
TEXTS = st.builds(
    annotations_of,
    st.sampled_from(STATUSES),
    st.sampled_from(SPECS),
    st.sampled_from(NUMA_SPECS),
    st.sampled_from(VOLCANO),
)
GARBAGE = st.text(alphabet='{}[]":,-0159cpusetnodeU ', max_size=30)
PHASES = [Phase.CREATED, *[Phase.RUNNING] * 3, Phase.EXITED]


class PodClassHistoryMachine(PodClassHistory, RuleBasedStateMachine):
    """The same random history as a state machine of hypothesis."""

    begins = initialize(
        static=st.booleans(),
        reservation=st.sampled_from(RESERVATIONS),
        system=st.sampled_from(SYSTEMS),
        alone=st.booleans(),
        more=st.sampled_from(MORE),
    )(PodClassHistory.begin)
    arrival = precondition(lambda self: len(self.amounts) < MOST)(
        rule(
            label=st.sampled_from(LABELS),
            parent=st.sampled_from(PARENTS),
            annotations=TEXTS,
            amount=st.sampled_from(AMOUNTS),
            with_request=st.booleans(),
        )(PodClassHistory.arrives)
    )
    odd_arrival = precondition(lambda self: len(self.amounts) < MOST)(
        rule(
            label=st.sampled_from(LABELS),
            parent=st.sampled_from(PARENTS),
            annotations=st.builds(annotations_of, GARBAGE, GARBAGE, GARBAGE, st.tuples(GARBAGE, GARBAGE)),
            amount=st.sampled_from(AMOUNTS),
            with_request=st.booleans(),
        )(PodClassHistory.arrives)
    )
    creation = precondition(SOME)(
        rule(dice=DICE, run=st.booleans(), pinned=st.sampled_from(PINNED))(PodClassHistory.creates)
    )
    another = precondition(SOME)(
        rule(dice=DICE, run=st.just(True), pinned=st.just(""))(PodClassHistory.creates)
    )
    finding = precondition(SOME)(
        rule(dice=DICE, phase=st.sampled_from(PHASES), pinned=st.sampled_from(PINNED))(
            PodClassHistory.is_found
        )
    )
    end = precondition(SOME)(rule(dice=DICE)(PodClassHistory.exits))
    update = precondition(SOME)(rule(dice=DICE)(PodClassHistory.is_updated))
    going = precondition(SOME)(rule(dice=DICE)(lambda self, dice: self.goes(dice.choice(self.pods()))))
    change = rule(gone=st.sets(st.integers(0, 15), max_size=4))(PodClassHistory.cpus_change)
    reservation = rule(reservation=st.sampled_from(RESERVATIONS))(PodClassHistory.is_reserved_anew)
    restart = rule()(PodClassHistory.restarts)
    checkpoint = rule(held=st.sampled_from(HELD))(PodClassHistory.kubelet_holds)
    suppression = rule(limit=st.sampled_from(LIMITS))(PodClassHistory.is_suppressed)
    leaving = rule()(PodClassHistory.everything_leaves)
    truth = invariant()(PodClassHistory.holds)


PodClassHistoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPodClassHistory = PodClassHistoryMachine.TestCase


def step(history: PodClassHistory, dice: random.Random) -> None:
    """Perform random events of a node, as often as they occur on one."""
    what = dice.random()
    if what < 0.28 and len(history.amounts) < MOST:
        texts = (STATUSES, SPECS, NUMA_SPECS)
        annotations = annotations_of(*(dice.choice(one) for one in texts), dice.choice(VOLCANO))  # type: ignore[arg-type]
        amount, with_request = dice.choice(AMOUNTS), dice.random() < 0.6
        history.arrives(dice.choice(LABELS), dice.choice(PARENTS), annotations, amount, with_request)
    elif what > 0.97:
        history.restarts()
    elif what > 0.94:
        history.cpus_change(set(dice.sample(range(16), dice.randint(0, 4))))
    elif what > 0.91:
        history.kubelet_holds(dice.choice(HELD))
    elif what > 0.88:
        history.is_suppressed(dice.choice(LIMITS))
    elif what > 0.86:
        history.is_reserved_anew(dice.choice(RESERVATIONS))
    elif not history.amounts:
        return
    elif what < 0.58:
        history.creates(dice, run=dice.random() < 0.7, pinned=dice.choice(PINNED))
    elif what < 0.67:
        history.is_found(dice, dice.choice(PHASES), dice.choice(PINNED))
    elif what < 0.7:
        history.is_updated(dice)
    elif what < 0.8:
        history.exits(dice)
    else:
        history.goes(dice.choice(history.pods()))


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_invariants_hold_for_random_histories(first: int) -> None:
    """Longer histories with more pods than hypothesis tries; ``first`` is the first seed of a series."""
    for seed in range(first, first + 20):
        dice, history = random.Random(seed), PodClassHistory()
        history.begin(
            seed % 2 == 0,
            dice.choice(RESERVATIONS),
            dice.choice(SYSTEMS),
            dice.random() < 0.5,
            MORE[seed // 2 % len(MORE)],
        )
        for _ in range(60):
            step(history, dice)
            history.holds()
        history.everything_leaves()
        history.holds()
