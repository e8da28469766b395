"""The hook: what is set in a request, CPU list and quota."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.model.koordinator import KeepQuota
from proxy.pools.claims import quota_of_owner
from tests.conformance import noderules
from tests.conformance.cases import Case, Outcome, Topologies
from tests.oracles.koordinator_hook import decide, decide_host_app
from tests.oracles.koordinator_rule import NodeRule

Request = dict[str, Any]


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    request = case.optional("request", dict)
    expected = (case.optional("error", bool, default=False), case.expected())
    # A call without a request has nothing that could be decided; the hook refuses it.
    got = (True, None) if request is None else _KINDS[kind](case, request)
    return Outcome(expected, got)


def _cpuset(case: Case, request: Request) -> tuple[bool, object]:
    answer = decide(noderules.rule(case), noderules.hooked_pod(request))
    return answer.row == 0, answer.upstream


def _quota(case: Case, request: Request) -> tuple[bool, object]:
    hooked_pod = noderules.hooked_pod(request)
    keep = KeepQuota.ALWAYS if case.optional("disable_unset_cpu_quota", bool) else KeepQuota.NEVER
    return bool(hooked_pod.problem), quota_of_owner(
        containers=1, keep=keep
    ) if hooked_pod.status.cpus else None


def _host_app(case: Case, request: Request) -> tuple[bool, object]:
    rule: NodeRule | None = noderules.rule(case)
    answer = decide_host_app(rule, request["name"], request["qos"])
    return answer.row == 0, answer.upstream


_KINDS: dict[str, Callable[[Case, Request], tuple[bool, object]]] = {
    "set_container_cpuset": _cpuset,
    "unset_pod_quota": _quota,
    "unset_container_quota": _quota,
    "set_host_app_cpuset": _host_app,
}
