"""Events in random orders: the invariants of a node hold after each of them."""

from __future__ import annotations

import json
import random
import typing

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine import call_events, container_events, node_events, pod_events
from proxy.engine.handle import handle
from proxy.engine.inflight import InflightCall
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_effects import Change, NodeEffect, NodeEffects, PutRecord
from proxy.engine.node_events import NodeEvent
from proxy.engine.owners import ReservationCpus
from proxy.engine.reservation_effects import AbortReason, RequestReconcile
from proxy.engine.state import NodeState
from proxy.engine.suppression import ReportBeChange, SuppressionEnded
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyOptions
from proxy.model.pod_selection import PodSelection
from proxy.model.workload import KubeQos, Phase, Pod, QosClass, Request
from proxy.pools.node_keys import RESERVATION
from proxy.topology.regular_machine import regular_machine
from tests.testkit.be_load import used_beside_be
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)
SMALLER = changed_copy(MACHINE, cpus=tuple(cpu for cpu in MACHINE.cpus if cpu.id != 7))
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
PHASES = (Phase.CREATED, Phase.RUNNING, Phase.EXITED)
CLASSES = (
    (QosClass.LS, KubeQos.BURSTABLE),
    (QosClass.LSR, KubeQos.GUARANTEED),
    (QosClass.LSE, KubeQos.GUARANTEED),
)
LENGTH = 120
"""The number of events of one run."""


class RandomEvents:
    """A node and its possible next events, also late and duplicate ones and events of removed objects."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.state = NodeState.empty(NODE)
        self.calls: list[InflightCall] = [InflightCall(0, "none", CpuSet((1,)))]
        self.ids, self.clock, self.count = ["none"], 0.0, 0
        self.pods: list[Pod] = []

    def event(self) -> NodeEvent:
        """Choose the next event."""
        self.clock += self.dice.random()
        self.count += 1
        choices = (self.pod_event, self.create_event, self.phase_event, self.call_event, self.node_event)
        return self.dice.choice(choices)()

    def known(self) -> str:
        """Return an id, mostly that of an existing container."""
        there = list(self.state.containers)
        return self.dice.choice(there if there and self.dice.random() < 0.8 else self.ids)

    def pod_event(self) -> NodeEvent:
        dice, number = self.dice, self.count
        if not self.pods or dice.random() < 0.4:
            qos, kube = dice.choice(CLASSES)
            self.pods.append(Pod(f"s-{number}", f"u-{number}", "ns", f"p-{number}", qos=qos, kube_qos=kube))
            return pod_events.SandboxRunning(self.pods[-1])
        pod = dice.choice(self.pods)
        return dice.choice(
            (
                pod_events.SandboxStopped(pod.sandbox_id),
                pod_events.SandboxRemoved(pod.sandbox_id),
                pod_events.SandboxRequested(changed_copy(pod, sandbox_id=f"token-{number}"), Request()),
                pod_events.PodChangedByHook(changed_copy(pod, sandbox_id=f"token-{number}")),
                pod_events.SandboxFailed(f"token-{number - 1}"),
                pod_events.PodLearned(pod),
                pod_events.SandboxRunning(
                    changed_copy(pod, sandbox_id=f"s-{number}", attempt=pod.attempt + 1),
                    is_relayed_elsewhere=dice.random() < 0.5,
                ),
            )
        )

    def create_event(self) -> NodeEvent:
        dice, new = self.dice, f"c-{self.count}"
        pod = dice.choice(self.pods) if self.pods else Pod("s", "u", "ns", "p")
        name, attempt = dice.choice("ab"), dice.randrange(3)
        request = dice.choice((Request(cpu_shares=2), Request(2048, 200_000, 100_000)))
        self.ids.append(new)
        stuck = CpuSet((dice.randrange(16),))
        return dice.choice(
            (
                container_events.CreateRequested(pod, name, attempt, request, new),
                container_events.CreateRequested(pod, name, attempt, request, new),
                container_events.ContainerCreated(self.known(), new, stuck),
                container_events.ContainerCreated(self.known(), new),
                container_events.CreateFailed(self.creating()),
                container_events.CreateLost(self.creating(), self.clock),
                container_events.CpusNotFreed(self.creating(), AbortReason("stuck", stuck), new),
                container_events.ContainerFound(new, pod, name, attempt, request, dice.choice(PHASES), None),
            )
        )

    def creating(self) -> str:
        there = [c.id for c in self.state.containers.values() if c.phase is Phase.CREATING]
        return self.dice.choice(there or ["none"])

    def made(self) -> str:
        there = [c.id for c in self.state.containers.values() if c.phase is not Phase.CREATING]
        return self.dice.choice(there or ["none"])

    def phase_event(self) -> NodeEvent:
        some, other = self.known(), self.known()
        return self.dice.choice(
            (
                container_events.PhaseChanged(some, self.dice.choice(PHASES)),
                container_events.ContainersRemoved((some, other)),
                container_events.ContainerTouched(some),
                container_events.ContainerIsBack(some),
                container_events.CpusAssigned((some, other)),
                call_events.SavedCpusLearned(some, self.dice.choice((None, CpuSet((2, 3))))),
                call_events.RuntimeSyncDue((some, other)),
                call_events.RuntimeSyncStarted(some),
            )
        )

    def call_event(self) -> NodeEvent:
        dice, call = self.dice, self.dice.choice(self.calls[-6:])
        if dice.random() < 0.4:
            orphan = dice.choice((None, None, self.clock))
            container_id, is_start = self.made(), dice.random() < 0.5
            there = self.state.containers.get(container_id)
            right = self.state.pools.shared if there is None else self.state.desired_cpus(there)
            carries = dice.choice((CpuSet((dice.randrange(16),)), right))
            call = InflightCall(self.count, container_id, carries, is_start, orphaned_since=orphan)
            self.calls.append(call)
            return call_events.CallSent(call)
        phase = dice.choice((None, *PHASES))
        return dice.choice(
            (
                call_events.CallCompleted(call),
                call_events.CallOrphaned(call, self.clock),
                call_events.StartRefused(call, self.clock),
                call_events.StartEnded(call, phase),
                call_events.UpdateEnded(call, dice.choice((None, call.carries))),
                call_events.UpdateEnded(call, call.carries),
                call_events.ResendWanted(call.container_id),
                call_events.CallConfined(call, dice.random() < 0.5),
                call_events.OrphanListed(call, phase, self.clock - 1, self.clock, dice.random() < 0.5),
                call_events.OrphanEnded(call, phase or Phase.CREATED),
            )
        )

    def enforcement_event(self) -> NodeEvent:
        dice, moving = self.dice, self.state.enforcement.moving
        return dice.choice(
            (
                node_events.EnforcementChanged(PodSelection(percent=dice.randrange(101))),
                node_events.EnforcementPaused(dice.random() < 0.2),
                node_events.EnforcementStepDue(dice.randrange(1, 4)),
                node_events.EnforcementStepDone(moving),
                node_events.EnforcementStepFailed(moving),
            )
        )

    def node_object(self) -> NodeMeta:
        """A Node object, which may keep CPUs back."""
        kept = json.dumps({"reservedCPUs": str(self.dice.randrange(16))})
        return NodeMeta(annotations={RESERVATION: kept} if self.dice.random() < 0.3 else {})

    def node_event(self) -> NodeEvent:
        dice, free = self.dice, list(self.state.pools.shared)
        cpus = CpuSet(free[: dice.randrange(1, 3)]) if len(free) > 4 else CpuSet()
        return dice.choice(
            (
                node_events.HardwareChanged(dice.choice((MACHINE, SMALLER))),
                node_events.ModeChanged(dice.choice(list(NodeMode))),
                self.enforcement_event(),
                SuppressionEnded(self.clock, "it ends"),
                *used_beside_be(self.state, dice.randrange(16)),
                node_events.ReservationCpusChanged("r", ReservationCpus("o", cpus, True) if cpus else None),
                node_events.ReservationCpusChanged("r", None),
                node_events.RuntimeListed(["s"], ["c"], self.state.runtime.changes.number),
                node_events.NodePolicyRead(NODE, TopologyOptions(), self.node_object(), None),
                node_events.TakeoverChanged(
                    static=True, reserved=CpuSet((0,)) if dice.random() < 0.3 else CpuSet()
                ),
                node_events.KubeletCpusRead(CpuManager(), {"k": {"c": cpus}} if dice.random() < 0.3 else {}),
                node_events.MemoryNodesCompared(frozenset((self.known(),)), {}),
                node_events.LossesDue(),
            )
        )


def in_order(effects: NodeEffects) -> bool:
    """Return whether each object is recorded before its observers are notified."""
    change = next((at for at, effect in enumerate(effects) if isinstance(effect, Change)), None)
    if change is None or sum(isinstance(effect, Change) for effect in effects) > 1:
        return True
    return any(isinstance(effect, PutRecord) for effect in effects[:change]) or not any(
        isinstance(effect, PutRecord) for effect in effects
    )


@pytest.mark.parametrize("seed", range(60))
def test_invariants_hold_after_each_random_event(seed: int) -> None:
    events = RandomEvents(seed)
    for _ in range(LENGTH):
        event, before = events.event(), events.state
        after, effects = handle(before, event)
        assert violations(after) == [], f"after {event}"
        assert in_order(effects), effects
        again, same = handle(before, event)
        assert [type(effect) for effect in same] == [type(effect) for effect in effects]
        assert (again.containers.items(), again.pools, again.runtime.awaiting_sync) == (
            after.containers.items(),
            after.pools,
            after.runtime.awaiting_sync,
        )
        changes = [effect for effect in effects if isinstance(effect, Change)]
        assert bool(changes) or (after.pools == before.pools), "a change of the pools without a notification"
        assert after.runtime.changes.number >= before.runtime.changes.number
        events.state = after


def test_random_events_produce_every_kind_of_effect() -> None:
    seen = set[type[object]]()
    for seed in range(200):
        events = RandomEvents(seed)
        for _ in range(LENGTH):
            events.state, effects = handle(events.state, events.event())
            seen |= {type(effect) for effect in effects}
    ours = {kind for kind in typing.get_args(NodeEffect) if kind.__module__.endswith("_effects")}
    assert ours | {RequestReconcile, ReportBeChange} == seen
