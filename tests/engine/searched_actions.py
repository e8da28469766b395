"""The possible next actions on a searched node, as a list."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace

from proxy.engine.owner_moves import why_not_movable
from proxy.engine.reservation_state import Reservation, ReservationKind
from proxy.model.idset import CpuSet
from tests.engine.searched_clients import (
    answer_arrives,
    at_runtime,
    client_disconnects,
    finish_abandoned_call,
    may_run,
    next_call,
    outcome,
    run_at_runtime,
    save_cpuset,
)
from tests.engine.searched_comparison import RECONCILES, RuntimeListing, compare_lists
from tests.engine.searched_node import (
    SearchedNode,
)

Action = tuple[str, ...]


def actions(node: SearchedNode) -> Iterator[Action]:
    """Yield the actions that are possible now."""
    may_fail = node.faults > 0
    for pod, remaining_calls in node.remaining_calls.items():
        call = node.calls.get(pod)
        if call is None:
            if remaining_calls and (pod in node.ids or remaining_calls[0] == "Create"):
                yield ("client", pod)
            continue
        if call.stage == "answer":
            yield ("answer", pod)
            if may_fail and outcome(node, call) is not None:
                yield ("twice", pod)
        elif at_runtime(call):
            if may_run(node, call):
                yield ("do", pod)
            if may_fail:
                yield ("fail", pod)
                yield ("lie", pod)
        if may_fail:
            yield ("lose", pod)
    if node.may_move:
        yield ("move",)
    if (
        node.abandoned_calls
        and may_run(node, node.abandoned_calls[0])
        and not (node.hangs and not node.reconciled)
    ):
        yield ("late",)
    yield from daemon_actions(node, may_fail=may_fail)


def daemon_actions(node: SearchedNode, *, may_fail: bool) -> Iterator[Action]:
    """Yield the actions that affect the daemon."""
    if node.jobs:
        yield ("kernel",)
        if may_fail and node.jobs[0].kind in ("sharers", "owners", "write", "report", "all"):
            yield from (("kernel", str(number)) for number in (errno.EACCES, errno.EBUSY))
    if node.queue:
        yield ("ledger",)
        if may_fail and any(task.waits_for == "ledger" for task in node.tasks.values()):
            yield ("full",)
    for at, request in enumerate(node.requests):
        yield ("request" if request.answered_cpus is None else "response", str(at))
        if may_fail:
            yield ("refuse", str(at))
            if request.inflight_call is not None:
                yield ("deadline", str(at))
    yield from (("time", task.name) for task in node.waiting_tasks())
    if node.listing is not None:
        yield ("compare",)
    elif node.lists_left or (
        node.reconciles_left
        and not (node.jobs or node.queue or node.tasks)
        and (node.reconciles_left == RECONCILES or not node.abandoned_calls)
    ):
        yield ("list",)


FAULTS = ("twice", "fail", "lie", "lose", "full", "refuse", "deadline")


def node_after(before: SearchedNode, action: Action) -> SearchedNode:
    """Return the node after an action."""
    node = before.copied()
    what, *which = action
    node.faults -= what in FAULTS or (what == "kernel" and bool(which))
    ACTIONS[what](node, *which)
    node.continue_tasks()
    return node


def _run_call(node: SearchedNode, pod: str) -> None:
    node.calls = {**node.calls, pod: run_at_runtime(node, node.calls[pod])}


def _fail_call(node: SearchedNode, pod: str) -> None:
    call = node.calls[pod]
    if call.stage in ("made", "set"):
        node.groups = {i: cpus for i, cpus in node.groups.items() if i != call.target}
    node.calls = {**node.calls, pod: replace(call, stage="answer", failed=True)}


def _fail_executed_call(node: SearchedNode, pod: str) -> None:
    call = node.calls[pod]
    while call.stage != "answer":
        while call.stage == "set" and node.jobs:
            node.do_kernel_job()
            node.continue_tasks()
        call = run_at_runtime(node, call)
    node.calls = {**node.calls, pod: replace(call, failed=True)}


def _answer_twice(node: SearchedNode, pod: str) -> None:
    event = outcome(node, node.calls[pod])
    assert event is not None
    answer_arrives(node, pod)
    node.abandoned_calls = (*node.abandoned_calls, event)


def _kernel(node: SearchedNode, denied: str = "0") -> None:
    node.do_kernel_job(int(denied))


def _request(node: SearchedNode, at: str) -> None:
    request = node.requests[int(at)]
    if request.inflight_call is not None:
        save_cpuset(node, request.target, request.inflight_call.carries)
    done = replace(request, answered_cpus=node.saved_cpusets[request.target])
    node.requests = (*node.requests[: int(at)], done, *node.requests[int(at) + 1 :])


def _list(node: SearchedNode) -> None:
    if node.reconciles_left:
        node.clock += 3.0 if node.reconciles_left < RECONCILES else 0.0
        node.reconciles_left -= 1
    else:
        node.lists_left -= 1
    changes, known = node.state.runtime.changes, frozenset(node.state.containers)
    node.listing = RuntimeListing(tuple(sorted(node.phases.items())), changes.number, node.clock, known)


def _move(node: SearchedNode) -> None:
    node.may_move = False
    owner = node.state.containers["b-1"]
    target = CpuSet(list(node.state.pools.shared)[-1:])
    if why_not_movable(node.state, owner.owner, target):
        return
    own = owner.placement.exclusive
    reservation = Reservation(ReservationKind.MOVE, (owner.id,), target, ref="b", previous=own)
    node.reserve("move b", owner.id, reservation, "m-1")


ACTIONS: dict[str, Callable[..., None]] = {
    "client": next_call,
    "do": _run_call,
    "fail": _fail_call,
    "lie": _fail_executed_call,
    "answer": answer_arrives,
    "twice": _answer_twice,
    "lose": client_disconnects,
    "late": finish_abandoned_call,
    "move": _move,
    "kernel": _kernel,
    "ledger": SearchedNode.write_ledger,
    "full": SearchedNode.ledger_is_full,
    "request": _request,
    "response": lambda node, at: node.request_answered(int(at), ok=True),
    "refuse": lambda node, at: node.request_answered(int(at), ok=False),
    "deadline": lambda node, at: node.abandon_request(int(at)),
    "time": lambda node, name: node.pass_time(node.tasks[name]),
    "list": _list,
    "compare": compare_lists,
}
