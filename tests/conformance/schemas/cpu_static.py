"""kubelet's static policy as a whole: stored states, allocation under a hint, release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.model.idset import CpuSet
from proxy.place.cpu_pod import allocate_pod
from proxy.place.cpu_policy import (
    CpuPolicy,
    CpuRefusedError,
    CpuState,
    CpuStateError,
    SmtAlignmentError,
    start,
)
from proxy.place.cpu_static import allocate, remove, take_under
from proxy.place.packed import NotEnoughCpus
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.hints import hint
from tests.conformance.pods import pod
from tests.conformance.static import policy, state, written

_REFUSALS = (NotEnoughCpus, CpuRefusedError, CpuStateError)


def check(case: Case, topologies: Topologies) -> Outcome:
    test = case.value("test", str)
    if test not in _TESTS:
        return Outcome(skipped=f"test {test!r} is not built yet")
    try:
        known = policy(case, topologies)
    except CpuStateError as refused:
        return Outcome(case.fields.get("new_error"), _error(refused))
    if case.fields.get("new_error"):
        return Outcome(case.fields["new_error"], None)
    return _TESTS[test](case, known, state(case))


def _error(refused: Exception | None) -> dict[str, str] | None:
    if refused is None:
        return None
    kind = "SMTAlignmentError" if isinstance(refused, SmtAlignmentError) else "error"
    return {"type": kind, "message": str(refused)}


def _start(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    expected: list[Any] = [case.fields["error"], case.fields["expected_default"]]
    try:
        got: list[Any] = [None, str(start(known, now).default)]
    except CpuStateError as refused:
        got = [_error(refused), None]
    return Outcome(expected, got)


def _allocate(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    asked, affinity = pod(case), hint(case.value("hint", dict)).affinity
    refused: Exception | None = None
    names = case.value("allocate", list)
    try:
        for name in names:
            now = allocate(known, now, asked, name, affinity)
    except _REFUSALS as error:
        refused = error
    owned = {name: now.of(asked.uid, name) for name in names}
    got: dict[str, Any] = {"error": _error(refused)}
    if "expected" in case.fields:
        got["expected"] = {name: None if cpus is None else str(cpus) for name, cpus in owned.items()}
    if "expected_uncore_caches" in case.fields:
        cpus = CpuSet(cpu for part in owned.values() for cpu in part or ())
        uncores = known.topo.uncores.items()
        got["expected_uncore_caches"] = [uncore for uncore, bits in uncores if bits & cpus.bits]
    if "expected_default" in case.fields:
        got["expected_default"] = str(now.default)
    if "then_remove" in case.fields:
        now = remove(now, asked.uid, case.fields["then_remove"])
        got["expected_default_after_remove"] = str(now.default)
    return Outcome({name: case.fields[name] for name in got}, got)


def _allocate_pod(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    fails = False
    try:
        now = allocate_pod(known, now, pod(case), hint(case.value("hint", dict)).affinity)
    except _REFUSALS:
        fails = True
    got = {
        "fails": fails,
        "expected_assignments": written(now.assigned),
        "expected_default": str(now.default),
    }
    return Outcome({name: case.fields[name] for name in got}, got)


def _allocate_cpus(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    affinity = hint(case.value("hint", dict)).affinity
    got = take_under(known, now, case.value("num_cpus", int), affinity, CpuSet())
    return Outcome(case.fields["expected_cpus"], str(got))


def _remove(case: Case, _: CpuPolicy, now: CpuState) -> Outcome:
    left = remove(now, case.value("pod_uid", str), case.value("container", str))
    return Outcome(case.fields["expected_default"], str(left.default))


_TESTS: dict[str, Callable[[Case, CpuPolicy, CpuState], Outcome]] = {
    "start": _start,
    "allocate": _allocate,
    "allocate_pod": _allocate_pod,
    "allocate_cpus": _allocate_cpus,
    "remove": _remove,
}
