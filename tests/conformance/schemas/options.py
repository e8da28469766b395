"""Policy options: texts in, values under kubelet's names or a refusal out."""

from __future__ import annotations

from proxy.model.errors import ConfigError
from proxy.model.options import parse_cpu_options, parse_topology_options
from tests.conformance.cases import Case, Outcome, Topologies

_PARSERS = {"cpu_static": parse_cpu_options, "topology_manager": parse_topology_options}


def check(case: Case, topologies: Topologies) -> Outcome:
    component = case.value("component", str)
    if component not in _PARSERS:
        return Outcome(skipped=f"options of {component!r} are not built yet")
    expected = "refused" if case.value("error", bool) else case.value("expected", dict)
    try:
        got: object = _PARSERS[component](case.value("options", (dict, type(None)))).as_kubelet()
    except ConfigError:
        got = "refused"
    if component == "cpu_static" and isinstance(got, dict) and isinstance(expected, dict):
        got = {name: on for name, on in got.items() if on or name in expected}  # what is off is left out
    return Outcome(expected, got)
