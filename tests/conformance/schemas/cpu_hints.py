"""CPU topology hints, for a container and for a pod."""

from __future__ import annotations

from typing import Any

from proxy.model.hint import Hints
from proxy.place.cpu_static import container_hints, pod_hints
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.hints import hints, plain
from tests.conformance.pods import pod
from tests.conformance.static import policy, state


def check(case: Case, topologies: Topologies) -> Outcome:
    known, now, asked = policy(case, topologies), state(case), pod(case)
    expected = {
        scope: _sorted({"cpu": hints(case.fields["expected"] or ())}) for scope in case.value("scopes", list)
    }
    got: dict[str, Any] = {}
    for scope in expected:
        if scope == "pod":
            got[scope] = _sorted(pod_hints(known, now, asked))
        else:
            got[scope] = _sorted(container_hints(known, now, asked, case.value("container", str)))
    return Outcome(expected, got)


def _sorted(answer: Hints) -> list[dict[str, Any]]:
    """Write hints in an order of their own; upstream does not tell nothing from nothing."""
    return sorted(map(plain, (answer or {}).get("cpu") or ()), key=repr)
