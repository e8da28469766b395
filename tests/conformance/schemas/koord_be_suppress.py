"""BE suppression: budgets, picks, sets, quotas, and the order in which groups are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proxy.model.idset import CpuSet
from proxy.model.koordinator import SuppressMode
from proxy.model.workload import CFS_PERIOD_US, KubeQos, QosClass
from proxy.pools.be_cpu_choice import pick
from proxy.pools.be_suppression import Usage, be_cpus, budget, choose_cpus, is_be, quota_for
from proxy.pools.claims import UNLIMITED
from proxy.pools.cpu_location import CpuLocation
from proxy.pools.facts import qos_class
from proxy.pools.go_json import amount
from proxy.pools.node_keys import reservation, system_qos
from proxy.pools.published_pools import AnnotatedCpus, Withheld
from proxy.pools.write_order import CONTAINER, POD, ROOT, BeGroup, ordered_writes
from tests.conformance import noderules
from tests.conformance.cases import Case, Outcome, Topologies
from tests.oracles.koordinator_levels import wanted_cpus
from tests.oracles.koordinator_suppress import ModeStatus, ModeStatuses, suppression_round

_STATUS = {"policyUsing": ModeStatus.USING, "policyRecovered": ModeStatus.RECOVERED}
_BESTEFFORT = "kubepods/besteffort"


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    return _KINDS[kind](case)


def _budget(case: Case) -> Outcome:
    kept, _ = reservation(case.optional("node_annotations", dict, {}))
    pods = noderules.pods(case)
    # The budget counts a host application like a pod; it is BE only inside the group that is limited.
    apps, used = noderules.pods(case, "host_apps"), case.optional("host_app_used", dict, {})
    be_apps = {
        app["name"]
        for app in apps
        if qos_class(app.get("qos") or "") is QosClass.BE and app.get("cgroup_base") == "KubeBesteffort"
    }
    named = {app["name"] for app in apps}
    usage = Usage(
        case.value("capacity_milli", int),
        case.value("allocatable_milli", int),
        case.value("node_used", (int, float)),
        1000 * len(kept.cpus) if kept.text else amount(kept.resources, "cpu", milli=True),
        case.optional("pod_used", dict, {}) | {name: each for name, each in used.items() if name in named},
        frozenset(be_apps).union(
            pod["uid"]
            for pod in pods
            if is_be(qos_class(pod.get("qos_label") or ""), KubeQos(pod["kube_qos"]))
        ),
    )
    least = case.optional("min_percent", int)
    return Outcome(
        case.expected("expected_milli"), budget(usage, case.value("threshold_percent", int), least)
    )


def _locations(case: Case) -> list[CpuLocation]:
    return [CpuLocation(*row) for row in case.optional("processors", list, [])]


def _pick(case: Case) -> Outcome:
    got = pick(case.value("num_cpus", int), _locations(case))
    return Outcome(case.expected(), list(got) or None)


def _node(case: Case) -> tuple[list[AnnotatedCpus], Withheld]:
    annotations = case.optional("nrt_annotations", dict, {})
    hooked_pods = [noderules.hooked_pod(pod) for pod in noderules.pods(case)]
    held = [AnnotatedCpus(hooked_pod.qos, hooked_pod.status.cpus) for hooked_pod in hooked_pods]
    system, _ = system_qos(annotations)
    return held, Withheld(reserved=reservation(annotations)[0].cpus, system=system.exclusive_cpus)


def _tree(old: CpuSet, pods: Iterable[str], containers: Iterable[str] = ()) -> list[BeGroup]:
    """Create the groups: pods below the root, and every container below each pod."""
    names = list(pods)
    return [
        BeGroup(_BESTEFFORT, ROOT, old),
        *(BeGroup(f"{_BESTEFFORT}/{pod}", POD, old) for pod in names),
        *(BeGroup(f"{_BESTEFFORT}/{pod}/{each}", CONTAINER, old) for pod in names for each in containers),
    ]


def _written(
    groups: list[BeGroup], target: CpuSet, every: CpuSet, old: str, *, static: bool
) -> dict[int, set[str]]:
    """Carry out the steps; give the texts of the files by depth."""
    files = {group.path: old for group in groups}
    for step in ordered_writes(groups, wanted_cpus(groups, target, every, static=static)):
        files[step.path] = str(step.cpus)
    found: dict[int, set[str]] = {}
    for group in groups:
        found.setdefault(group.depth, set()).add(files[group.path])
    return found


def _adjust_cpuset(case: Case) -> Outcome:
    old, locations = case.value("old_file", str), _locations(case)
    held, withheld = _node(case)
    now = CpuSet.parse(old)
    target = choose_cpus(locations, held, withheld, case.value("budget_milli", int), now)
    every = be_cpus(CpuSet(location.cpu for location in locations), held, withheld)
    static = case.optional("kubelet_policy", str) == "static"
    files = _written(_tree(now, ("a", "b", "c")), target, every, old, static=static)
    return Outcome({ROOT: {case.expected("expected_file")}, POD: {case.expected("expected_file")}}, files)


def _adjust_quota(case: Case) -> Outcome:
    old, cpus = case.value("old_quota", int), case.value("capacity_cpus", int)
    assert case.value("period", int) == CFS_PERIOD_US
    got = quota_for(case.value("budget_milli", int), cpus, old)
    return Outcome(case.expected("expected_quota"), old if got is None else got)


def _recover_cpuset(case: Case) -> Outcome:
    old, locations = case.value("old_file", str), _locations(case)
    held, withheld = _node(case)
    now = suppression_round(SuppressMode.OFF, ModeStatuses(cpuset=_status(case)))
    every = be_cpus(CpuSet(location.cpu for location in locations), held, withheld)
    files = _written(_tree(CpuSet.parse(old), ("a",)), every, every, old, static=False)
    got = files[ROOT] if now.give_back_cpus else {old}
    return Outcome(({case.expected("expected_file")}, _expected(case)), (got, now.after.cpuset))


def _recover_quota(case: Case) -> Outcome:
    now = suppression_round(SuppressMode.OFF, ModeStatuses(quota=_status(case)))
    got = UNLIMITED if now.give_back_quota else case.value("old_quota", int)
    return Outcome((case.expected("expected_quota"), _expected(case)), (got, now.after.quota))


def _status(case: Case) -> ModeStatus | None:
    reported = case.optional("status_before", str)
    return None if reported is None else _STATUS[reported]


def _expected(case: Case) -> ModeStatus | None:
    reported = case.expected("expected_status")
    return None if reported is None else _STATUS[reported]


def _apply(case: Case) -> Outcome:
    old, locations = case.value("old_file", str), _locations(case)
    held, withheld = _node(case)
    every = be_cpus(CpuSet(location.cpu for location in locations), held, withheld)
    pods, containers = case.optional("pod_dirs", list, []), case.optional("container_dirs", list, [])
    # Directories of containers are given as paths, or as names below each pod.
    groups = _tree(CpuSet.parse(old), pods, [] if any("/" in each for each in containers) else containers)
    groups += [
        BeGroup(f"{_BESTEFFORT}/{each}", CONTAINER, CpuSet.parse(old)) for each in containers if "/" in each
    ]
    static = case.value("kubelet_policy", str) == "static"
    files = _written(groups, CpuSet(case.value("target", list)), every, old, static=static)
    expected = {
        depth: {case.expected(name)}
        for depth, name in ((ROOT, "expected_root"), (POD, "expected_pod"), (CONTAINER, "expected_container"))
        if case.expected(name) is not None
    }
    return Outcome(expected, files)


_KINDS: dict[str, Callable[[Case], Outcome]] = {
    "budget": _budget,
    "pick": _pick,
    "adjust_cpuset": _adjust_cpuset,
    "adjust_quota": _adjust_quota,
    "recover_cpuset": _recover_cpuset,
    "recover_quota": _recover_quota,
    "apply": _apply,
}
