"""CPU topology hints, for a container and for a pod."""

from __future__ import annotations

from proxy.allocation.cpu_static import container_cpu_hints, pod_cpu_hints
from proxy.model.hint import Hints
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.hints import answer, shown
from tests.conformance.pods import first_app, pod
from tests.conformance.static import policy, state


def check(case: Case, topologies: Topologies) -> Outcome:
    known, now, requests = policy(case, topologies), state(case), pod(case)
    want = _cpu(answer({"cpu": case.value("expected", (list, type(None)))}))
    expected = dict.fromkeys(case.value("scopes", list), want)
    got: dict[str, object] = {}
    for scope in expected:
        if scope == "pod":
            got[scope] = _cpu(pod_cpu_hints(known, now, requests))
        else:
            name = case.optional("container", str) or first_app(requests)
            got[scope] = _cpu(container_cpu_hints(known, now, requests, name))
    return Outcome(expected, got)


def _cpu(found: Hints) -> object:
    """Return the hints for CPUs; upstream does not distinguish null from an empty list."""
    return shown(found).get("cpu") or []
