"""The whole CPUs that a pod requests."""

from __future__ import annotations

from proxy.allocation.cpu_request import pod_cpus
from tests.conformance.cases import Case, Outcome, Topologies
from tests.conformance.pods import pod


def check(case: Case, _: Topologies) -> Outcome:
    return Outcome(case.value("expected", int), pod_cpus(pod(case)))
