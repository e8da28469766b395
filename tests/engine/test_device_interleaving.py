"""Every order of a small day with devices: pods, fewer devices, and all that can come between.

A search over plain values, as ``test_every_interleaving`` has it for CPUs. The engine takes every step;
around it are what the executor waits for (a plug-in's preference, its answer to Allocate, the ledger), the
runtime, and what the ledger has. On each way some faults may happen: a plug-in fails, the runtime fails, a
client goes away while its plug-in is asked, a device becomes unhealthy, or all vanish. From every node the
daemon crashes, which is a crash after every effect: the runtime does later, or never, what it was sent.

What must hold in every node: no device is in two pods at the runtime, and what a container there has is held
by its pod. In the end no device is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.engine import call_answers, create, sandboxes
from proxy.engine import handle as engine
from proxy.engine.call_answers import AllocateFirst, AskPreference, Forward, Refuse
from proxy.engine.container_events import (
    AllocateFailed,
    ContainerCreated,
    CreateFailed,
    CreateRequested,
    CreateResumed,
    CreateWithoutDevices,
    DevicesAllocated,
)
from proxy.engine.device_book import PODS, load_record
from proxy.engine.handle import handle
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_effects import NodeEffects, PlanDecided, PutRecord
from proxy.engine.node_events import DevicesChanged, LedgerRead, NodeEvent, RuntimeListed
from proxy.engine.pod_events import PodLearned, SandboxRemoved, SandboxStopped
from proxy.engine.state import NodeState
from proxy.model.devices import AllocateAnswer
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Pod, Request
from proxy.topology.build import described

MACHINE = described(1, 1, 2, 1)
NODE = Node(MACHINE, CpuTopology.of(MACHINE))
R = "example.com/nic"
ILL = RegisteredDevice("x", healthy=False)
LIMIT = 400_000
"""More nodes than there are."""
Ids = frozenset[str]


def devices(names: str) -> dict[str, RegisteredDevice]:
    return {name: RegisteredDevice(name) for name in names}


def pod(uid: str) -> Pod:
    asks = PodRequests(uid, (ContainerResources("c", limits={R: 1}),))
    return Pod(f"s-{uid}", uid, "ns", uid, kube_qos=KubeQos.BURSTABLE, asks=asks)


@dataclass(frozen=True)
class Call:
    """A create on its way.

    Attributes:
        stage: ``asked``: its plug-in is asked what it prefers; ``allocating``; ``recording``; ``runtime``;
            ``made``: the runtime has it, and the daemon has not heard of it.
        ids: The devices that its plug-in is requested, and then those in its request.
        gone: Its client has gone, or the daemon that sent it has crashed.
    """

    stage: str
    ids: Ids = frozenset()
    gone: bool = False


@dataclass(frozen=True)
class Day:
    """The node, its daemon, the runtime, the ledger.

    Attributes:
        queue: Records that the ledger has yet to write.
        ledger: What it has.
        live: What the runtime has, with its devices.
        there: Pods whose sandboxes run.
        tried: A pod for each create that was sent.
        names: The devices.
        tries: Creates of one pod.
        reported: Which list the plug-in has reported last: 0 all, 1 one is unhealthy, 2 none.
        faults, crashes: How many there may still be.
    """

    state: NodeState
    queue: tuple[tuple[str, object], ...] = ()
    ledger: Mapping[str, object] = field(default_factory=dict)
    calls: Mapping[str, Call] = field(default_factory=dict)
    live: Mapping[str, Ids] = field(default_factory=dict)
    there: Ids = frozenset("abc")
    tried: tuple[str, ...] = ()
    names: str = "x"
    tries: int = 2
    reported: int = 0
    faults: int = 1
    crashes: int = 1

    def key(self) -> object:
        devices = self.state.devices
        return (
            repr(sorted((u, sorted(c.items())) for u, c in devices.held.items())),
            repr(sorted(devices.answers)),
            tuple(sorted(self.state.containers.keys())),
            tuple(sorted(self.state.pods.keys())),
            repr(sorted(dict(self.queue).items())),
            repr(sorted(self.ledger.items(), key=str)),
            tuple(sorted(self.calls.items(), key=repr)),
            tuple(sorted(self.live.items(), key=repr)),
            self.there,
            tuple(sorted(self.tried)),
            (
                self.reported,
                R in devices.registered and len(devices.registered[R]),
                self.faults,
                self.crashes,
            ),
        )

    def after(self, event: NodeEvent) -> tuple[Day, NodeEffects]:
        state, effects = handle(self.state, event)
        records = tuple((e.key, e.record) for e in effects if type(e) is PutRecord and e.key[0] in "dp")
        return replace(self, state=state, queue=(*self.queue, *records)), effects

    def does(self, *events: NodeEvent) -> Day:
        day = self
        for event in events:
            day, _ = day.after(event)
        return day

    def with_call(self, uid: str, call: Call | None) -> Day:
        calls = {key: other for key, other in self.calls.items() if key != uid}
        return replace(self, calls=calls if call is None else {**calls, uid: call})


# -- what may happen next -----------------------------------------------------------------------------------


def decided(day: Day, uid: str, preferred: tuple[str, ...] | None) -> Day:
    """A create is decided, or its plug-in has to be asked first."""
    event = CreateRequested(pod(uid), "c", 0, Request(), f"t-{uid}", {("c", R): preferred})
    day, effects = day.after(event)
    last = effects[-1]
    answer = last.answer if type(last) is PlanDecided else last
    if isinstance(answer, AskPreference):
        return day.with_call(uid, Call("asked"))
    if isinstance(answer, AllocateFirst):
        return day.with_call(uid, Call("allocating", day.state.devices.of_container(uid, "c", R)))
    assert isinstance(answer, Refuse), answer
    return day.with_call(uid, None)


def written(day: Day) -> Day:
    """The ledger has written what waits; creates that waited for it go to the runtime."""
    ledger = dict(day.ledger)
    for key, record in day.queue:
        ledger.pop(key, None)
        if record is not None:
            ledger[key] = record
    day = replace(day, ledger=ledger, queue=())
    for uid, call in day.calls.items():
        container = day.state.containers.get(f"t-{uid}")
        if call.stage != "recording" or container is None:
            continue
        day, effects = day.after(CreateResumed(container))
        if isinstance(effects[-1], Forward) and not call.gone:
            ids = frozenset(i for _, some in container.placement.devices for i in some)
            day = day.with_call(uid, Call("runtime", ids))
        else:
            day = day.does(CreateFailed(container.id)).with_call(uid, None)
    return day


def stopped(day: Day, uid: str) -> Day:
    """The runtime stops a sandbox, and what is in it; its calls fail."""
    live = {key: ids for key, ids in day.live.items() if key != uid}
    call = day.calls.get(uid)
    day = replace(day, live=live, there=day.there - {uid})
    if call is not None and call.stage in ("runtime", "made"):
        day = day.with_call(uid, None)
        day = day if call.gone else day.does(CreateFailed(f"t-{uid}"))
    return day


def crashed(day: Day) -> Day:
    """A new daemon starts on what the ledger has; the runtime goes on with what it was sent."""
    pods = tuple(pod(uid) for uid in "abc" if f"p/s-{uid}" in day.ledger)
    held = ((key.removeprefix(PODS), record) for key, record in day.ledger.items() if key.startswith(PODS))
    records = {key: load_record(record) for key, record in held}  # type: ignore[arg-type]
    calls = {u: replace(c, gone=True) for u, c in day.calls.items() if c.stage == "runtime"}
    fresh = replace(
        day, state=NodeState.empty(NODE), queue=(), calls=calls, crashes=day.crashes - 1, reported=2
    )
    return fresh.does(LedgerRead(pods, (), {}, (), 0.0, records, (R,)))


def compared(day: Day) -> Day:
    """The runtime is asked what it has."""
    for sandbox_id in [p.sandbox_id for p in day.state.pods.values() if p.uid not in day.there]:
        day = day.does(SandboxRemoved(sandbox_id))
    return day.does(RuntimeListed([f"s-{uid}" for uid in day.there], [], 0))


def nexts(day: Day) -> Iterator[tuple[str, Day]]:
    """Yield what may happen next."""
    for uid in "abc":
        yield from _of_pod(day, uid)
    if day.queue or any(call.stage == "recording" for call in day.calls.values()):
        yield "written", written(day)
    if {p.uid for p in day.state.pods.values()} | day.state.devices.held.keys() != day.there:
        yield "compared", compared(day)
    if day.reported:
        yield "reported", replace(day.does(DevicesChanged(R, devices(day.names))), reported=0)
    if day.crashes:
        yield "crashed", crashed(day)
    if day.faults:
        less = replace(day, faults=day.faults - 1)
        for number, listed in enumerate(({**devices(day.names), "x": ILL}, {}), 1):
            yield f"list {number}", replace(less.does(DevicesChanged(R, listed)), reported=number)


def _of_pod(day: Day, uid: str) -> Iterator[tuple[str, Day]]:
    call, known = day.calls.get(uid), f"s-{uid}" in day.state.pods
    if call is not None:
        yield from _of_call(day, uid, call)
    elif known and uid in day.there and uid not in day.live and day.tried.count(uid) < day.tries:
        yield f"create {uid}", decided(replace(day, tried=(*day.tried, uid)), uid, None)
    if known and uid in day.there:
        yield f"stop {uid}", stopped(day, uid)
    if known and uid not in day.there:
        yield f"stopped {uid}", day.does(SandboxStopped(f"s-{uid}"))


def _of_call(day: Day, uid: str, call: Call) -> Iterator[tuple[str, Day]]:
    token, less = f"t-{uid}", replace(day, faults=day.faults - 1)
    if call.stage == "asked":
        yield f"prefers {uid}", decided(day, uid, ("y", "x"))
    elif call.stage == "allocating":
        wanted = {R: tuple(sorted(call.ids))}
        done = day.does(DevicesAllocated(uid, "c", {R: AllocateAnswer()}, wanted))
        yield f"allocated {uid}", done.with_call(uid, replace(call, stage="recording"))
        if day.faults:
            container = day.state.containers[token]
            failed = less.does(AllocateFailed(uid, "c", wanted), CreateWithoutDevices(container, "it hangs"))
            yield f"fails {uid}", failed.with_call(uid, None)
            yield f"client of {uid} goes", less.with_call(uid, replace(call, gone=True))
    elif call.stage == "runtime":
        made = replace(day, live={**day.live, uid: call.ids})
        yield f"made {uid}", made.with_call(uid, None if call.gone else replace(call, stage="made"))
        if call.gone:
            yield f"never made {uid}", day.with_call(uid, None)
        elif day.faults:
            yield f"error {uid}", less.does(CreateFailed(token)).with_call(uid, None)
    elif call.stage == "made":
        yield f"answer {uid}", day.does(ContainerCreated(token, f"id-{uid}")).with_call(uid, None)


# -- what must hold -----------------------------------------------------------------------------------------


def check(day: Day) -> None:
    """Check what must hold in every node."""
    assert violations(day.state) == []
    sent = {uid: call.ids for uid, call in day.calls.items() if call.stage == "runtime"}
    using = {uid: ids for uid, ids in {**day.live, **sent}.items() if uid in day.there}
    for uid, ids in using.items():
        for other, others in using.items():
            assert uid == other or ids.isdisjoint(others), f"{ids & others} is given to {uid} and {other}"
        held = day.state.devices.of_container(uid, "c", R)
        assert ids <= held, f"{uid} uses {set(ids)}, and holds {set(held)}"


def check_end(day: Day) -> None:
    """Check a node on which nothing is left: no device is lost."""
    assert day.state.devices.held == {}
    assert day.state.devices.answers == {}
    assert not [key for key, _ in day.ledger.items() if key.startswith(PODS)]


def search(first: Day) -> tuple[int, int]:
    """Follow every action from every node; returns how many nodes and how many ends there are."""
    seen, todo, ends = {first.key()}, [(first, ("",))], 0
    while todo:
        day, way = todo.pop()
        found = list(nexts(day))
        try:
            check(day)
            if not day.there and not found:
                ends += 1
                check_end(day)
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter {', '.join(way)}") from error
        for name, after in found:
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append((after, (*way, name)))
        assert len(seen) < LIMIT
    return len(seen), ends


def begin(pods: str, names: str = "x", *, tries: int = 2, faults: int = 1, crashes: int = 1) -> Day:
    state = NodeState.empty(NODE)
    day = Day(state, there=frozenset(pods), names=names, tries=tries, faults=faults, crashes=crashes)
    day = day.does(
        DevicesChanged(R, devices(names)), *(PodLearned(pod(uid), "sandbox running") for uid in pods)
    )
    return written(day)


def test_no_device_is_given_twice_and_none_is_lost_in_any_order() -> None:
    nodes, ends = search(begin("ab", tries=2, faults=0, crashes=0))
    assert nodes > 500
    assert ends


@pytest.mark.parametrize(("faults", "crashes"), [(1, 0), (0, 1), (1, 1)])
def test_not_with_faults_and_a_crash_after_every_effect(faults: int, crashes: int) -> None:
    nodes, ends = search(begin("ab", tries=1, faults=faults, crashes=crashes))
    assert nodes > 500
    assert ends


def _forgotten(devices: DeviceState, *_: object) -> DeviceState:
    return devices.register(R, ())


def _unreserved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(create, "granted", lambda state, container: state)
    patch.setattr(call_answers, "holds_all", lambda *_: True)


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nothing is reserved": _unreserved,
    "a restart forgets": lambda patch: patch.setattr(engine, "restored", _forgotten),
    "a pod that goes keeps its devices": lambda patch: patch.setattr(
        sandboxes, "_without_devices", lambda state, pod, effects: state
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_search_finds_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[fault](monkeypatch)
    with pytest.raises(AssertionError, match="after "):
        search(begin("ab"))
