"""The memory manager: starting with a state, hints, allocating, releasing."""

from __future__ import annotations

from collections.abc import Callable

from proxy.allocation.memory.allocate import allocate
from proxy.allocation.memory.hints import container_memory_hints, pod_memory_hints
from proxy.allocation.memory.state import MemoryRejectedError, MemoryState
from proxy.model.requests import ContainerKind
from tests.conformance import hints, memory
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.pods import first_app, pod
from tests.oracles.memory_manager import release
from tests.oracles.memory_manager_state import validated


def check(case: Case, _: Topologies) -> Outcome:
    test = case.value("test", str)
    if test in ("container_hints", "pod_hints"):
        return _hints(case, test)
    if test not in _STEPS:
        return Outcome(skipped=f"test {test!r} is not built yet")
    error = case.optional("error", str)
    try:
        got = _STEPS[test](case)
    except MemoryRejectedError as refused:
        return Outcome(f"error: {error}" if error else "no error", f"error: {refused}")
    return Outcome(
        f"error: {error}" if error else memory.shown(memory.state(case, "expected_")), memory.shown(got)
    )


def _hints(case: Case, test: str) -> Outcome:
    requests, state = pod(case), memory.state(case)
    got = (
        pod_memory_hints(state, requests)
        if test == "pod_hints"
        else container_memory_hints(state, requests, first_app(requests))
    )
    expected = hints.answer(case.value("expected_hints", (dict, type(None))))
    return Outcome(hints.shown(expected), hints.shown(got))


def _allocate(case: Case, *kinds: ContainerKind, most: int | None = None) -> MemoryState:
    state, requests = memory.state(case), pod(case)
    for container in requests.of_kinds(*kinds)[:most]:
        state = allocate(state, requests, container.name, hints.hint(case.optional("hint", dict))).state
    return state


_STEPS: dict[str, Callable[[Case], MemoryState]] = {
    "start": lambda case: validated(memory.state(case), memory.machine(case), memory.reserved(case)),
    "allocate_first_container": lambda case: _allocate(case, ContainerKind.APP, most=1),
    "allocate_all": lambda case: _allocate(case, *ContainerKind),
    "remove_pod1_container1": lambda case: release(memory.state(case), "pod1", "container1"),
}
