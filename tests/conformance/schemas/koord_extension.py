"""Annotations of a node: read, and written."""

from __future__ import annotations

from proxy.pools.node_keys import (
    SystemQos,
    amplification_ratios,
    raw_allocatable,
    reservation,
    system_qos,
    with_ratios,
)
from tests.conformance.cases import Case, Outcome, Topologies
from tests.oracles.koordinator_annotations import with_ratio, with_raw_allocatable


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    return _KINDS[kind](case)


def _annotations(case: Case) -> dict[str, str]:
    found: dict[str, str] = case.optional("annotations", dict, {})
    return found


def _fails(case: Case) -> bool:
    return bool(case.optional("error", bool))


def _reserved(case: Case) -> Outcome:
    found, _ = reservation(_annotations(case))
    expected = (case.expected("expected_cpus"), case.expected("expected_count"))
    return Outcome(expected, (found.text, found.count))


def _system(case: Case) -> Outcome:
    found, problem = system_qos(_annotations(case))
    # An invalid CPU list is reported too, but the annotation itself was readable.
    fails = bool(problem) and not found.text
    reported = None if fails or case.fields.get("annotations") is None else found.data()
    return Outcome((_fails(case), case.expected()), (fails, reported))


def _exclusive(case: Case) -> Outcome:
    raw = case.optional("system_qos", dict, {})
    found = SystemQos(raw.get("cpuset") or "", raw.get("cpusetExclusive"))
    return Outcome(case.expected(), found.exclusive)


def _ratios(case: Case) -> Outcome:
    found, problem = amplification_ratios(_annotations(case))
    return Outcome((_fails(case), case.expected()), (bool(problem), found))


def _ratio(case: Case) -> Outcome:
    found, problem = amplification_ratios(_annotations(case))
    got = (found or {}).get(case.value("resource", str), -1)
    return Outcome((_fails(case), case.expected()), (bool(problem), got))


def _set_ratios(case: Case) -> Outcome:
    got = with_ratios(_annotations(case), case.value("ratios", dict))
    return Outcome(case.expected("expected_annotations"), got)


def _set_ratio(case: Case) -> Outcome:
    resource, ratio = case.value("resource", str), case.value("ratio", (int, float))
    annotations, changed, problem = with_ratio(_annotations(case), resource, ratio)
    expected = (
        _fails(case),
        case.expected("expected_changed"),
        case.expected("expected_annotations") or {},
    )
    return Outcome(expected, (bool(problem), changed, annotations))


def _raw(case: Case) -> Outcome:
    found, problem = raw_allocatable(_annotations(case))
    return Outcome((_fails(case), case.expected()), (bool(problem), found))


def _set_raw(case: Case) -> Outcome:
    got = with_raw_allocatable(_annotations(case), case.value("allocatable", dict))
    return Outcome(case.expected("expected_annotations"), got)


_KINDS = {
    "reserved_cpus": _reserved,
    "system_qos": _system,
    "system_qos_exclusive": _exclusive,
    "amplification_ratios": _ratios,
    "amplification_ratio": _ratio,
    "set_amplification_ratios": _set_ratios,
    "set_amplification_ratio": _set_ratio,
    "raw_allocatable": _raw,
    "set_raw_allocatable": _set_raw,
}
