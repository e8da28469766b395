"""The decision table: a rule and a pod in, a CPU list out; reading rules, and what a new one changes."""

from __future__ import annotations

from tests.conformance import noderules
from tests.conformance.cases import Case, Outcome, Topologies
from tests.oracles.koordinator_hook import changes, decide, decide_host_app
from tests.oracles.koordinator_rule import NodeRule, updated

_BESTEFFORT = "kubepods.slice/kubepods-besteffort.slice"
"""The parent of pods without a cgroup parent: the pods of the files request nothing."""


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    return _KINDS[kind](case)


def _container(case: Case) -> Outcome:
    expected = (case.optional("error", bool, default=False), case.expected())
    rule = noderules.rule(case)
    answer = decide(
        rule,
        noderules.hooked_pod(case.fields),
        be_manager=case.optional("be_cpu_manager", bool, default=False),
    )
    return Outcome(expected, (answer.row == 0, answer.upstream))


def _host_app(case: Case) -> Outcome:
    expected = (case.optional("error", bool, default=False), case.expected())
    request = case.optional("request", dict)
    if request is None:  # there is no host application
        return Outcome(expected, (False, None))
    answer = decide_host_app(noderules.rule(case), request["name"], request["qos"])
    return Outcome(expected, (answer.row == 0, answer.upstream))


def _parse(case: Case) -> Outcome:
    expected = (
        case.optional("error", bool, default=False),
        case.value("expected_updated", bool),
        case.expected("expected_rule"),
    )
    rule, new, problem = updated(noderules.rule(case), case.optional("nrt_annotations", dict, {}))
    return Outcome(expected, (bool(problem), new, noderules.shown_rule(rule)))


def _update_pods(case: Case) -> Outcome:
    rule = noderules.rule(case) or NodeRule()
    reported, hooked_pods = noderules.pods(case), []
    for pod in reported:
        hooked_pod = noderules.hooked_pod(pod, _BESTEFFORT)
        hooked_pods.append((pod["uid"], hooked_pod))
        hooked_pods += [(name, hooked_pod) for part in ("init", "containers") for name in pod.get(part) or ()]
    written = {key: "" for key, _ in hooked_pods}
    written |= {change.key: change.answer.text for change in changes(None, rule, hooked_pods)}
    containers = [name for pod in reported for part in ("init", "containers") for name in pod.get(part) or ()]
    got = (
        {name: written[name] for name in containers},
        {pod["uid"]: written[pod["uid"]] for pod in reported},
    )
    return Outcome((case.expected("expected_containers"), case.expected("expected_sandboxes")), got)


def _update_host_app(case: Case) -> Outcome:
    request = case.value("request", dict)
    answer = decide_host_app(noderules.rule(case), request["name"], request["qos"])
    return Outcome(case.expected("expected_file"), answer.upstream or "")


_KINDS = {
    "container": _container,
    "host_app": _host_app,
    "parse_rule": _parse,
    "rule_update_pods": _update_pods,
    "rule_update_host_app": _update_host_app,
}
