"""Clients and the runtime of a searched node: their actions, and how their calls end."""

from __future__ import annotations

from dataclasses import replace

from proxy.engine import reservation as reservations
from proxy.engine import reservation_events as seen
from proxy.engine.call_events import (
    CallOrphaned,
    StartEnded,
    StartRefused,
    StartRequested,
    UpdateEnded,
    UpdateRequested,
)
from proxy.engine.container_events import (
    ContainerCreated,
    CreateFailed,
    CreateLost,
    CreateRequested,
    PhaseChanged,
)
from proxy.engine.node_effects import PlanDecided
from proxy.engine.node_events import NodeEvent
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos, Phase, Pod, QosClass, Request
from tests.engine.searched_node import (
    ALL,
    ClientCall,
    RuntimeRequest,
    SearchedNode,
)

ONE_CPU = Request(1024, 100_000, 100_000)
PODS = {
    "a": Pod("s-a", "a", "ns", "a", qos=QosClass.LS, kube_qos=KubeQos.BURSTABLE),
    "chosen": Pod("s-b", "b", "ns", "b", kube_qos=KubeQos.GUARANTEED),
    "named": Pod(
        "s-b", "b", "ns", "b", qos=QosClass.LSE, kube_qos=KubeQos.GUARANTEED, cpuset=CpuSet.parse("1")
    ),
}


def pod_b(node: SearchedNode) -> Pod:
    return node.state.pods["s-b"]


def pod_of(node: SearchedNode, container_id: str) -> Pod:
    return PODS["a"] if container_id.startswith("a") else pod_b(node)


def next_call(node: SearchedNode, pod: str) -> None:
    """A client makes its next call."""
    method, *left = node.remaining_calls[pod]
    node.remaining_calls = {**node.remaining_calls, pod: tuple(left)}
    if method == "Create":
        node.last_number += 1
        token, of = f"t-{node.last_number}", PODS["a"] if pod == "a" else pod_b(node)
        request = Request() if pod == "a" else ONE_CPU
        *_, decided = node.handle(CreateRequested(of, "c", 0, request, token))
        assert type(decided) is PlanDecided
        node.follow_answer(ClientCall(pod, method, "daemon", token), decided.answer)
        return
    call = ClientCall(pod, method, "daemon", node.ids[pod])
    node.calls = {**node.calls, pod: call}
    if method == "Start":
        node.follow_answer(call, node.handle(StartRequested(call.target))[-1])
    elif method == "Update":
        node.follow_answer(call, node.handle(UpdateRequested(call.target, "", "", 0))[-1])
    else:
        node.calls = {**node.calls, pod: replace(call, stage="runtime")}


def at_runtime(call: ClientCall) -> bool:
    return call.stage in ("runtime", "made", "set")


def run_at_runtime(node: SearchedNode, call: ClientCall) -> ClientCall:
    """The runtime completes a call; a start that hangs makes one step."""
    there = node.ids.get(call.pod, "")
    if node.hangs and call.pod == "a" and call.method == "Start" and call.stage != "set":
        node.groups = {**node.groups, there: node.saved_cpusets[there]}
        node.kernel_reports(there)
        return replace(call, stage="set" if call.stage == "made" else "made")
    if call.method == "Create":
        there = f"{call.pod}-1"
        node.ids = {**node.ids, call.pod: there}
        node.saved_cpusets = {**node.saved_cpusets, there: call.cpus or ALL}
        node.phases = {**node.phases, there: Phase.CREATED}
    elif call.method == "Start":
        if call.stage != "set":
            node.groups = {**node.groups, there: node.saved_cpusets[there]}
        node.phases = {**node.phases, there: Phase.RUNNING}
        node.has_sharer_begun |= call.pod == "a"
        node.owner_cpus = node.groups[there] if call.pod == "b" else node.owner_cpus
    elif call.method == "Stop":
        node.groups = {i: cpus for i, cpus in node.groups.items() if i != there}
        node.phases = {**node.phases, there: Phase.EXITED}
        node.owner_cpus = CpuSet() if call.pod == "b" else node.owner_cpus
    else:
        save_cpuset(node, there, call.cpus or ALL)
    return replace(call, stage="answer")


def save_cpuset(node: SearchedNode, target: str, cpus: CpuSet) -> None:
    """The runtime saves a cpuset, and writes it if the container has a cgroup."""
    node.saved_cpusets = {**node.saved_cpusets, target: cpus}
    if target in node.groups:
        node.groups = {**node.groups, target: cpus}


def outcome(node: SearchedNode, call: ClientCall) -> NodeEvent | None:
    """Return the event for the answer to a call."""
    ok, inflight_call = not call.failed, call.inflight_call
    if call.method == "Create":
        return ContainerCreated(call.target, f"{call.pod}-1", call.cpus) if ok else CreateFailed(call.target)
    if inflight_call is None:
        stopped = call.method == "Stop" and ok
        return PhaseChanged(call.target, Phase.EXITED) if stopped else None
    if call.method == "Update":
        return UpdateEnded(inflight_call, inflight_call.carries if ok else None)
    if ok:
        return StartEnded(inflight_call, Phase.RUNNING)
    container = node.state.containers.get(call.target)
    if container is None or container.phase is not Phase.STARTING:
        return StartEnded(inflight_call, None)
    return StartRefused(inflight_call, node.clock)


def answer_arrives(node: SearchedNode, pod: str) -> None:
    """The answer to a call arrives."""
    call = node.calls[pod]
    node.end_call(call)
    if call.failed:
        node.remaining_calls = {**node.remaining_calls, pod: ()}
    if (event := outcome(node, call)) is not None:
        node.handle(event)


def client_disconnects(node: SearchedNode, pod: str) -> None:
    """A client disconnects; the runtime is not notified, and may still execute the call."""
    call = node.calls[pod]
    node.end_call(call)
    node.remaining_calls = {**node.remaining_calls, pod: ()}
    if call.method == "Create":
        node.handle(CreateLost(call.target, node.clock))
        task = node.tasks.get(f"create {pod}")
        if task is not None and task.reservation is not None:
            node.put_task(
                replace(task, reservation=reservations.step(task.reservation, seen.ClientDisconnected())[0])
            )
    elif call.inflight_call is not None:
        node.handle(CallOrphaned(call.inflight_call, node.clock))
    if at_runtime(call):
        node.abandoned_calls = (*node.abandoned_calls, replace(call, gone=True))


def finish_abandoned_call(node: SearchedNode) -> None:
    """Finish calls that no client waits for any more."""
    first, node.abandoned_calls = node.abandoned_calls[0], node.abandoned_calls[1:]
    if isinstance(first, ClientCall):
        after = run_at_runtime(node, first)
        if after.stage != "answer":
            node.abandoned_calls = (after, *node.abandoned_calls)
    elif isinstance(first, RuntimeRequest):
        assert first.inflight_call is not None
        save_cpuset(node, first.target, first.inflight_call.carries)
    else:
        node.handle(first)


def may_run(node: SearchedNode, call: object) -> bool:
    """Return whether the runtime may continue: a program waits for the daemon's answers to reports."""
    return not (isinstance(call, ClientCall) and call.stage == "set") or (not node.jobs and node.reconciled)
