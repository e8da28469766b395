"""Policy options: texts in, values under kubelet's names or a refusal out."""

from __future__ import annotations

from proxy.model.errors import ConfigError
from proxy.model.options import parse_cpu_options, parse_topology_options
from tests.conformance.cases import Case, Outcome, Topologies

_PARSERS = {"cpu_static": parse_cpu_options, "topology_manager": parse_topology_options}


def check(case: Case, _: Topologies) -> Outcome:
    component = case.value("component", str)
    if component not in _PARSERS:
        return Outcome(skipped=f"options of {component!r} are not built yet")
    fails = case.optional("error", bool, default=False)
    expected: object = "refused" if fails else case.value("expected", (dict, type(None))) or {}
    try:
        got: object = _PARSERS[component](case.optional("options", dict)).as_kubelet()
    except ConfigError:
        got = "refused"
    if component == "cpu_static" and isinstance(got, dict) and isinstance(expected, dict):
        got = {name: on for name, on in got.items() if on or name in expected}  # disabled ones are left out
    return Outcome(expected, got)
