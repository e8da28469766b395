"""Every interleaving of a few calls for pods that need devices, with faults and crashes in between.

The search works on plain values, as ``test_every_interleaving`` does for CPUs. The engine takes every step;
around it are the inputs that the executor waits for (a plugin's preference, its response to Allocate, the
ledger), the runtime, and the content of the ledger. On each path some faults may happen: a plugin fails, the
runtime fails, a client disconnects while its plugin is queried, a device becomes unhealthy, or all devices
vanish. In every node the daemon may crash, which is a crash after every effect: the runtime executes the
calls that it has received later or never.

In every node: no device is in two pods at the runtime, and the devices of a container there are held by its
pod. In the end no device is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.allocate import QueryPreference
from proxy.allocation.devices.state import DeviceState, RegisteredDevice
from proxy.engine import call_answers, container_create, sandboxes
from proxy.engine import handle as engine
from proxy.engine.call_answers import AllocateFirst, Forward, Refuse
from proxy.engine.container_events import (
    AllocateFailed,
    ContainerCreated,
    CreateFailed,
    CreateRequested,
    CreateResumed,
    CreateWithoutDevices,
    DevicesAllocated,
)
from proxy.engine.handle import handle
from proxy.engine.held_devices import POD_DEVICES_RECORD, load_record
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.node_effects import NodeEffects, PlanDecided, PutRecord
from proxy.engine.node_events import DevicesChanged, LedgerRead, NodeEvent, RuntimeListed
from proxy.engine.pod_events import PodLearned, SandboxRemoved, SandboxStopped
from proxy.engine.state import NodeState
from proxy.model.devices import AllocateAnswer
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Pod, Request
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(1, 1, 2, 1)
NODE = Node(MACHINE, CpuTopology.of(MACHINE))
RESOURCE = "example.com/nic"
UNHEALTHY = RegisteredDevice("x", healthy=False)
LIMIT = 400_000
"""More nodes than there are."""
Ids = frozenset[str]


def devices(names: str) -> dict[str, RegisteredDevice]:
    return {name: RegisteredDevice(name) for name in names}


def pod(uid: str) -> Pod:
    requests = PodRequests(uid, (ContainerResources("c", limits={RESOURCE: 1}),))
    return Pod(f"s-{uid}", uid, "ns", uid, kube_qos=KubeQos.BURSTABLE, requests=requests)


@dataclass(frozen=True)
class CreateInProgress:
    """A create in progress.

    Attributes:
        stage: ``queried``: its plugin is queried for devices; ``allocating``; ``recording``; ``runtime``;
            ``made``: the runtime has it, and the daemon has not received the response.
        ids: The devices that its plugin is requested, and then those in its request.
        gone: Whether its client has disconnected, or the daemon that sent it has crashed.
    """

    stage: str
    ids: Ids = frozenset()
    gone: bool = False


@dataclass(frozen=True)
class SearchedDeviceNode:
    """The node, its daemon, the runtime, the ledger.

    Attributes:
        queue: Records that the ledger has not written yet.
        ledger: Its records.
        live: The containers of the runtime, with their devices.
        pods_with_sandbox: Pods whose sandboxes run.
        creates_sent: A pod for each create that was sent.
        names: The devices.
        creates_per_pod: Creates of one pod.
        reported: The last list of the plugin: 0 all devices, 1 one is unhealthy, 2 none.
        faults, crashes: How many more may happen.
    """

    state: NodeState
    queue: tuple[tuple[str, object], ...] = ()
    ledger: Mapping[str, object] = field(default_factory=dict)
    calls: Mapping[str, CreateInProgress] = field(default_factory=dict)
    live: Mapping[str, Ids] = field(default_factory=dict)
    pods_with_sandbox: Ids = frozenset("abc")
    creates_sent: tuple[str, ...] = ()
    names: str = "x"
    creates_per_pod: int = 2
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
            self.pods_with_sandbox,
            tuple(sorted(self.creates_sent)),
            (
                self.reported,
                RESOURCE in devices.registered and len(devices.registered[RESOURCE]),
                self.faults,
                self.crashes,
            ),
        )

    def after(self, event: NodeEvent) -> tuple[SearchedDeviceNode, NodeEffects]:
        state, effects = handle(self.state, event)
        records = tuple((e.key, e.record) for e in effects if type(e) is PutRecord and e.key[0] in "dp")
        return replace(self, state=state, queue=(*self.queue, *records)), effects

    def handle(self, *events: NodeEvent) -> SearchedDeviceNode:
        node = self
        for event in events:
            node, _ = node.after(event)
        return node

    def with_call(self, uid: str, call: CreateInProgress | None) -> SearchedDeviceNode:
        calls = {key: other for key, other in self.calls.items() if key != uid}
        return replace(self, calls=calls if call is None else {**calls, uid: call})


# -- possible next actions ----------------------------------------------------------------------------------


def decided(node: SearchedDeviceNode, uid: str, preferred: tuple[str, ...] | None) -> SearchedDeviceNode:
    """A create is decided, or its plugin has to be queried first."""
    event = CreateRequested(pod(uid), "c", 0, Request(), f"t-{uid}", {("c", RESOURCE): preferred})
    node, effects = node.after(event)
    last = effects[-1]
    answer = last.answer if type(last) is PlanDecided else last
    if isinstance(answer, QueryPreference):
        return node.with_call(uid, CreateInProgress("queried"))
    if isinstance(answer, AllocateFirst):
        return node.with_call(
            uid, CreateInProgress("allocating", node.state.devices.of_container(uid, "c", RESOURCE))
        )
    assert isinstance(answer, Refuse), answer
    return node.with_call(uid, None)


def written(node: SearchedDeviceNode) -> SearchedDeviceNode:
    """The ledger has written its queue; creates that waited for it are sent to the runtime."""
    ledger = dict(node.ledger)
    for key, record in node.queue:
        ledger.pop(key, None)
        if record is not None:
            ledger[key] = record
    node = replace(node, ledger=ledger, queue=())
    for uid, call in node.calls.items():
        container = node.state.containers.get(f"t-{uid}")
        if call.stage != "recording" or container is None:
            continue
        node, effects = node.after(CreateResumed(container))
        if isinstance(effects[-1], Forward) and not call.gone:
            ids = frozenset(i for _, some in container.placement.devices for i in some)
            node = node.with_call(uid, CreateInProgress("runtime", ids))
        else:
            node = node.handle(CreateFailed(container.id)).with_call(uid, None)
    return node


def stopped(node: SearchedDeviceNode, uid: str) -> SearchedDeviceNode:
    """The runtime stops a sandbox and its containers; its calls fail."""
    live = {key: ids for key, ids in node.live.items() if key != uid}
    call = node.calls.get(uid)
    node = replace(node, live=live, pods_with_sandbox=node.pods_with_sandbox - {uid})
    if call is not None and call.stage in ("runtime", "made"):
        node = node.with_call(uid, None)
        node = node if call.gone else node.handle(CreateFailed(f"t-{uid}"))
    return node


def crashed(node: SearchedDeviceNode) -> SearchedDeviceNode:
    """A new daemon starts with the records of the ledger; the runtime continues with its received calls."""
    pods = tuple(pod(uid) for uid in "abc" if f"p/s-{uid}" in node.ledger)
    held = (
        (key.removeprefix(POD_DEVICES_RECORD), record)
        for key, record in node.ledger.items()
        if key.startswith(POD_DEVICES_RECORD)
    )
    records = {key: load_record(record) for key, record in held}  # type: ignore[arg-type]
    calls = {u: replace(c, gone=True) for u, c in node.calls.items() if c.stage == "runtime"}
    fresh = replace(
        node, state=NodeState.empty(NODE), queue=(), calls=calls, crashes=node.crashes - 1, reported=2
    )
    return fresh.handle(LedgerRead(pods, (), {}, (), 0.0, records, (RESOURCE,)))


def compared(node: SearchedDeviceNode) -> SearchedDeviceNode:
    """The daemon lists the containers of the runtime."""
    for sandbox_id in [p.sandbox_id for p in node.state.pods.values() if p.uid not in node.pods_with_sandbox]:
        node = node.handle(SandboxRemoved(sandbox_id))
    return node.handle(RuntimeListed([f"s-{uid}" for uid in node.pods_with_sandbox], [], 0))


def next_nodes(node: SearchedDeviceNode) -> Iterator[tuple[str, SearchedDeviceNode]]:
    """Yield the possible next nodes."""
    for uid in "abc":
        yield from _of_pod(node, uid)
    if node.queue or any(call.stage == "recording" for call in node.calls.values()):
        yield "written", written(node)
    if {p.uid for p in node.state.pods.values()} | node.state.devices.held.keys() != node.pods_with_sandbox:
        yield "compared", compared(node)
    if node.reported:
        yield "reported", replace(node.handle(DevicesChanged(RESOURCE, devices(node.names))), reported=0)
    if node.crashes:
        yield "crashed", crashed(node)
    if node.faults:
        less = replace(node, faults=node.faults - 1)
        for number, listed in enumerate(({**devices(node.names), "x": UNHEALTHY}, {}), 1):
            yield f"list {number}", replace(less.handle(DevicesChanged(RESOURCE, listed)), reported=number)


def _of_pod(node: SearchedDeviceNode, uid: str) -> Iterator[tuple[str, SearchedDeviceNode]]:
    call, known = node.calls.get(uid), f"s-{uid}" in node.state.pods
    if call is not None:
        yield from _of_call(node, uid, call)
    elif (
        known
        and uid in node.pods_with_sandbox
        and uid not in node.live
        and node.creates_sent.count(uid) < node.creates_per_pod
    ):
        yield f"create {uid}", decided(replace(node, creates_sent=(*node.creates_sent, uid)), uid, None)
    if known and uid in node.pods_with_sandbox:
        yield f"stop {uid}", stopped(node, uid)
    if known and uid not in node.pods_with_sandbox:
        yield f"stopped {uid}", node.handle(SandboxStopped(f"s-{uid}"))


def _of_call(
    node: SearchedDeviceNode, uid: str, call: CreateInProgress
) -> Iterator[tuple[str, SearchedDeviceNode]]:
    token, less = f"t-{uid}", replace(node, faults=node.faults - 1)
    if call.stage == "queried":
        yield f"prefers {uid}", decided(node, uid, ("y", "x"))
    elif call.stage == "allocating":
        wanted = {RESOURCE: tuple(sorted(call.ids))}
        done = node.handle(DevicesAllocated(uid, "c", {RESOURCE: AllocateAnswer()}, wanted))
        yield f"allocated {uid}", done.with_call(uid, replace(call, stage="recording"))
        if node.faults:
            container = node.state.containers[token]
            failed = less.handle(
                AllocateFailed(uid, "c", wanted), CreateWithoutDevices(container, "it hangs")
            )
            yield f"fails {uid}", failed.with_call(uid, None)
            yield f"client of {uid} goes", less.with_call(uid, replace(call, gone=True))
    elif call.stage == "runtime":
        made = replace(node, live={**node.live, uid: call.ids})
        yield f"made {uid}", made.with_call(uid, None if call.gone else replace(call, stage="made"))
        if call.gone:
            yield f"never made {uid}", node.with_call(uid, None)
        elif node.faults:
            yield f"error {uid}", less.handle(CreateFailed(token)).with_call(uid, None)
    elif call.stage == "made":
        yield f"answer {uid}", node.handle(ContainerCreated(token, f"id-{uid}")).with_call(uid, None)


# -- invariants ---------------------------------------------------------------------------------------------


def check(node: SearchedDeviceNode) -> None:
    """Check the invariants of every node."""
    assert violations(node.state) == []
    sent = {uid: call.ids for uid, call in node.calls.items() if call.stage == "runtime"}
    using = {uid: ids for uid, ids in {**node.live, **sent}.items() if uid in node.pods_with_sandbox}
    for uid, ids in using.items():
        for other, others in using.items():
            assert uid == other or ids.isdisjoint(others), f"{ids & others} is assigned to {uid} and {other}"
        held = node.state.devices.of_container(uid, "c", RESOURCE)
        assert ids <= held, f"{uid} uses {set(ids)}, and holds {set(held)}"


def check_end(node: SearchedDeviceNode) -> None:
    """Check a node without pending work: no device is lost."""
    assert node.state.devices.held == {}
    assert node.state.devices.answers == {}
    assert not [key for key, _ in node.ledger.items() if key.startswith(POD_DEVICES_RECORD)]


def search(first: SearchedDeviceNode) -> tuple[int, int]:
    """Follow every action from every node; return the number of nodes and of final nodes."""
    seen, todo, ends = {first.key()}, [(first, ("",))], 0
    while todo:
        node, way = todo.pop()
        found = list(next_nodes(node))
        try:
            check(node)
            if not node.pods_with_sandbox and not found:
                ends += 1
                check_end(node)
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter {', '.join(way)}") from error
        for name, after in found:
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append((after, (*way, name)))
        assert len(seen) < LIMIT
    return len(seen), ends


def begin(
    pods: str, names: str = "x", *, creates_per_pod: int = 2, faults: int = 1, crashes: int = 1
) -> SearchedDeviceNode:
    state = NodeState.empty(NODE)
    node = SearchedDeviceNode(
        state,
        pods_with_sandbox=frozenset(pods),
        names=names,
        creates_per_pod=creates_per_pod,
        faults=faults,
        crashes=crashes,
    )
    node = node.handle(DevicesChanged(RESOURCE, devices(names)), *(PodLearned(pod(uid)) for uid in pods))
    return written(node)


def test_no_device_is_assigned_twice_or_lost_in_any_order() -> None:
    nodes, ends = search(begin("ab", creates_per_pod=2, faults=0, crashes=0))
    assert nodes > 500
    assert ends


@pytest.mark.parametrize(("faults", "crashes"), [(1, 0), (0, 1), (1, 1)])
def test_no_device_is_assigned_twice_or_lost_with_faults_and_crashes(faults: int, crashes: int) -> None:
    nodes, ends = search(begin("ab", creates_per_pod=1, faults=faults, crashes=crashes))
    assert nodes > 500
    assert ends


def _forgotten(devices: DeviceState, *_: object) -> DeviceState:
    return devices.register(RESOURCE, ())


def _unreserved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(container_create, "granted", lambda state, container: state)
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
