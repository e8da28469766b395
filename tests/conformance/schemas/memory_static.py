"""The memory manager: starting with a state, hints, allocating, releasing."""

from __future__ import annotations

from collections.abc import Callable

from proxy.model.asks import Kind
from proxy.place.memory.allocate import allocate, release
from proxy.place.memory.hints import container_hints, pod_hints
from proxy.place.memory.state import MemoryRefused, MemoryState
from proxy.place.memory.validate import validated
from tests.conformance import memory
from tests.conformance.cases import Case, Outcome, Topologies


def check(case: Case, _: Topologies) -> Outcome:
    test = case.value("test", str)
    if test in ("container_hints", "pod_hints"):
        return _hints(case, test)
    if test not in _STEPS:
        return Outcome(skipped=f"test {test!r} is not built yet")
    error = case.value("error", (str, type(None)))
    try:
        got = _STEPS[test](case)
    except MemoryRefused as refused:
        return Outcome(f"error: {error}" if error else "no error", f"error: {refused}")
    return Outcome(
        f"error: {error}" if error else memory.shown(memory.expected_state(case)), memory.shown(got)
    )


def _hints(case: Case, test: str) -> Outcome:
    pod, state = memory.pod(case), memory.state(case)
    if test == "pod_hints":
        got = pod_hints(state, pod)
    else:
        got = container_hints(state, pod, pod.of(Kind.APP)[0].name)
    expected = memory.hints(case.value("expected_hints", (dict, type(None))))
    return Outcome(memory.hints_shown(expected), memory.hints_shown(got))


def _allocate(case: Case, *kinds: Kind, most: int | None = None) -> MemoryState:
    state, pod = memory.state(case), memory.pod(case)
    for ask in pod.of(*kinds)[:most]:
        state = allocate(state, pod, ask.name, memory.hint(case.value("hint", dict))).state
    return state


_STEPS: dict[str, Callable[[Case], MemoryState]] = {
    "start": lambda case: validated(memory.state(case), memory.machine(case), memory.reserved(case)),
    "allocate_first_container": lambda case: _allocate(case, Kind.APP, most=1),
    "allocate_all": lambda case: _allocate(case, *Kind),
    "remove_pod1_container1": lambda case: release(memory.state(case), "pod1", "container1"),
}
