"""Names of cgroups: made from Kubernetes' terms, and read."""

from __future__ import annotations

from collections.abc import Callable

from proxy.backends.cgroup.group_names import CgroupDriver, pod_uid
from proxy.model.errors import CgroupError
from proxy.model.workload import KubeQos
from proxy.pools.facts import kube_qos
from tests.conformance.cases import BadCaseError, Case, Outcome, Topologies
from tests.oracles.kubepods import container_id, container_name, container_path, driver_of, pod_path


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    expected: object = "refused" if case.optional("error", bool) else case.expected()
    try:
        got = _KINDS[kind](case)
    except CgroupError:
        got = "refused"
    if kind == "container_dir":
        expected = (case.expected("expected_runtime"), expected)
        got = ("unknown", got) if got == "refused" else got
    return Outcome(expected, got)


def _driver(case: Case) -> CgroupDriver:
    driver = driver_of(case.value("driver", str))
    if driver is None:
        raise BadCaseError(f"it has an unusable 'driver': {case.fields['driver']!r}")
    return driver


_KINDS: dict[str, Callable[[Case], object]] = {
    "driver_valid": lambda case: driver_of(case.value("driver", str)) is not None,
    "parse_pod_id": lambda case: pod_uid(_driver(case), case.value("basename", str)),
    "parse_container_id": lambda case: container_id(_driver(case), case.value("basename", str)),
    "container_dir": lambda case: container_name(_driver(case), case.value("container_id", str)),
    "pod_path": lambda case: pod_path(
        _driver(case), KubeQos(case.value("kube_qos", str)), case.value("uid", str)
    ),
    "kube_qos_of_path": lambda case: kube_qos(case.value("path", str)),
    "container_path": lambda case: container_path(
        _driver(case), case.value("pod_dir", str), case.value("container_id", str)
    ),
}
