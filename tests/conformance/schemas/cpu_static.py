"""kubelet's static policy as a whole: stored states, allocation under a hint, release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.allocation.cpu_policy import (
    CpuPolicy,
    CpuRejectedError,
    CpuState,
    CpuStateError,
    SmtAlignmentError,
)
from proxy.allocation.cpu_static import allocate, remove, take_under
from proxy.allocation.packed import NotEnoughCpus
from proxy.model.idset import CpuSet
from tests.conformance.cases import BadCaseError, Case, Outcome, Topologies
from tests.conformance.hints import hint
from tests.conformance.pods import pod
from tests.conformance.static import policy, state, written
from tests.oracles.cpu_manager_state import start
from tests.oracles.pod_level_cpu import allocate_pod

_REFUSALS = (NotEnoughCpus, CpuRejectedError, CpuStateError)


def check(case: Case, topologies: Topologies) -> Outcome:
    test = case.value("test", str)
    if test not in _TESTS:
        return Outcome(skipped=f"test {test!r} is not built yet")
    refused = _told(case, "new_error")
    try:
        known = policy(case, topologies)
    except CpuStateError as error:
        return Outcome(refused or "no error", _error(error))
    if refused:
        return Outcome(refused, "no error")
    return _TESTS[test](case, known, state(case))


def _told(case: Case, name: str) -> dict[str, str] | None:
    """Return a refusal that is expected; the files write it as kind and message."""
    raw = case.optional(name, (str, dict))
    if isinstance(raw, str):
        return {"type": "error", "message": raw}
    return raw and {"type": raw.get("type") or "error", "message": raw.get("message")}


def _error(refused: Exception | None) -> dict[str, str] | None:
    if refused is None:
        return None
    kind = "SMTAlignmentError" if isinstance(refused, SmtAlignmentError) else "error"
    return {"type": kind, "message": str(refused)}


def _start(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    error = _told(case, "error")
    expected: list[Any] = [error, None if error else case.expected("expected_default")]
    try:
        got: list[Any] = [None, str(start(known, now).default)]
    except CpuStateError as refused:
        got = [_error(refused), None]
    return Outcome(expected, got)


def _allocate(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    requests, affinity = pod(case), hint(case.optional("hint", dict)).affinity
    refused: Exception | None = None
    names = case.value("allocate", list)
    try:
        for name in names:
            now = allocate(known, now, requests, name, affinity)
    except _REFUSALS as error:
        refused = error
    owned = {name: now.owned_by(requests.uid, name) for name in names}
    got: dict[str, Any] = {"error": _error(refused)}
    want: dict[str, Any] = {"error": _told(case, "error")}
    if reported := case.optional("expected", dict):
        want["expected"] = reported
        got["expected"] = {name: None if owned.get(name) is None else str(owned[name]) for name in reported}
    if (caches := case.optional("expected_uncore_caches", list)) is not None:
        cpus = CpuSet(cpu for part in owned.values() for cpu in part or ())
        want["expected_uncore_caches"] = sorted(caches)
        uncores = known.topo.uncores.items()
        got["expected_uncore_caches"] = sorted(uncore for uncore, bits in uncores if bits & cpus.bits)
    if (default := case.optional("expected_default", str)) is not None:
        want["expected_default"], got["expected_default"] = default, str(now.default)
    if (leaves := case.optional("then_remove", str)) is not None:
        want["after"] = case.expected("expected_default_after_remove")
        got["after"] = str(remove(now, requests.uid, leaves).default)
    if len(want) == 1 and not want["error"]:
        raise BadCaseError("it expects nothing")
    return Outcome(want, got)


def _allocate_pod(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    fails = False
    try:
        now = allocate_pod(known, now, pod(case), hint(case.optional("hint", dict)).affinity)
    except _REFUSALS:
        fails = True
    want = {
        "fails": case.optional("fails", bool, default=False),
        "assignments": {uid: c for uid, c in (case.expected("expected_assignments") or {}).items() if c},
        "default": case.expected("expected_default"),
    }
    return Outcome(want, {"fails": fails, "assignments": written(now.assigned), "default": str(now.default)})


def _allocate_cpus(case: Case, known: CpuPolicy, now: CpuState) -> Outcome:
    affinity = hint(case.optional("hint", dict)).affinity
    error = _told(case, "error")
    expected: object = error or case.expected("expected_cpus")
    try:
        got: object = str(take_under(known, now, case.value("num_cpus", int), affinity, CpuSet()))
    except _REFUSALS as refused:
        got = _error(refused)
    return Outcome(expected, got)


def _remove(case: Case, _: CpuPolicy, now: CpuState) -> Outcome:
    left = remove(now, case.value("pod_uid", str), case.value("container", str))
    return Outcome(case.expected("expected_default"), str(left.default))


_TESTS: dict[str, Callable[[Case, CpuPolicy, CpuState], Outcome]] = {
    "start": _start,
    "allocate": _allocate,
    "allocate_pod": _allocate_pod,
    "allocate_cpus": _allocate_cpus,
    "remove": _remove,
}
