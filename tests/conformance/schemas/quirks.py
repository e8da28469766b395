"""Intended differences from kubelet: the distributing allocator's two faults.

``upstream`` is what kubelet 1.36 answers (null: it never does); ``expected`` is the answer with choices kept
as values and rounds that end. Our answer must equal ``expected``, and so differ from ``upstream``.
"""

from __future__ import annotations

from proxy.allocation.distributed import take_distributed
from tests.conformance.cases import Case, Outcome, Topologies

_KINDS = ("endless_loop", "slice_aliasing")


def check(case: Case, topologies: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    expected = str(case.cpus("expected"))
    upstream = case.optional("upstream", str)
    group, n = case.optional("cpu_group_size", int, 1), case.value("num_cpus", int)
    got = str(take_distributed(topologies.of(case), case.cpus("available"), n, group=group))
    if got == upstream != expected:
        return Outcome(f"not kubelet's {upstream}", got)
    return Outcome(expected, got)
