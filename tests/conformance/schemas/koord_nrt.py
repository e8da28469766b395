"""The node's annotations: pools, what kubelet has, what is kept back, and zones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from proxy.backends.kubelet.checkpoints import Checkpoint, CheckpointError, read_cpu_checkpoint
from proxy.engine.node_policy import node_reservation
from proxy.model.quantity import parse_quantity
from proxy.observe.koordinator import (
    CPU_TOPOLOGY,
    POD_ALLOCS,
    NodeFacts,
    Zone,
    equal_share,
    kubelet_reserve,
    subtract_share,
    topology_annotations,
)
from proxy.observe.koordinator_kubelet import (
    KubeletFacts,
    PodRow,
    kubelet_allocs,
    topology_of,
    topology_policy,
)
from proxy.pools.cpu_location import CpuLocation
from proxy.pools.node_keys import RESERVATION, SYSTEM_QOS, SystemQos
from proxy.pools.topology_keys import MANAGER_POLICY, SHARED_POOLS
from tests.conformance import noderules
from tests.conformance.cases import Case, Outcome, Topologies
from tests.oracles.koordinator_pools import without_cpus

Raw = Mapping[str, Any]


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    return _KINDS[kind](case)


def _policy(case: Case) -> Outcome:
    return Outcome(case.expected(), topology_policy(case.value("policy", str), case.value("scope", str)))


def _rows(case: Case) -> tuple[PodRow, ...]:
    found = []
    for pod in noderules.pods(case):
        hooked_pod = noderules.hooked_pod(pod)
        found.append(PodRow(pod["namespace"], pod["name"], pod["uid"], hooked_pod.qos, hooked_pod.status))
    return tuple(found)


def _file(case: Case) -> Checkpoint | None:
    """Read the checkpoint of a case; None if the file is missing or empty."""
    content = case.optional("state_file", str, "")
    return read_cpu_checkpoint(content) if content else None


def _allocs(case: Case) -> Outcome:
    return _held(case, _file)


def _state(case: Case) -> Outcome:
    return _held(case, lambda case: read_cpu_checkpoint(case.value("state_text", str)))


def _held(case: Case, read: Callable[[Case], Checkpoint | None]) -> Outcome:
    expected: object = "refused" if case.optional("error", bool) else case.expected()
    try:
        got: object = [alloc.data() for alloc in kubelet_allocs(read(case), _rows(case))] or None
    except CheckpointError:
        got = "refused"
    return Outcome(expected, got)


def _reserved(case: Case) -> Outcome:
    topology = topology_of(CpuLocation(*row) for row in case.value("cpus", list))
    found, _ = node_reservation(case.optional("node_annotations", dict, {}), topology)
    return Outcome(case.expected(), found.data())


def _system(case: Case) -> Outcome:
    raw = case.optional("system_qos", dict, {})
    system = SystemQos(raw.get("cpuset") or "", raw.get("cpusetExclusive"))
    pools = noderules.pools(case.optional("pools", list, []))
    return Outcome(case.expected() or [], noderules.shown_pools(without_cpus(pools, system.exclusive_cpus)))


def _divide(case: Case) -> Outcome:
    milli = parse_quantity(case.value("quantity", str), milli=True)
    return Outcome(case.expected("expected_milli"), equal_share(milli, case.value("count", int)))


def _numa(case: Case) -> Outcome:
    names = list(case.optional("zones", dict, {}))
    zones = [_zone(i, case.fields["zones"][name]) for i, name in enumerate(names)]
    count = case.optional("numa_count", int, 0)
    share = {
        name: equal_share(milli, count) for name, milli in _milli(case.optional("reserved", dict)).items()
    }
    got = {name: _shown(zone) for name, zone in zip(names, subtract_share(zones, share), strict=True)}
    return Outcome({name: _shown(_zone(0, raw)) for name, raw in case.expected().items()}, got)


def _zone(number: int, raw: Raw) -> Zone:
    return Zone(number, _milli(raw.get("capacity")), _milli(raw.get("allocatable")))


def _milli(raw: Mapping[str, float] | None) -> dict[str, int]:
    return {name: round(amount * 1000) for name, amount in (raw or {}).items()}


def _shown(zone: Zone) -> list[Mapping[str, int]]:
    return [zone.capacity, zone.allocatable]


def _kubelet_reserved(case: Case) -> Outcome:
    node = case.optional("node", dict, {})
    got = kubelet_reserve(_milli(node.get("capacity")), _milli(node.get("allocatable")))
    return Outcome(_milli(case.expected()), got)


def _pools(case: Case) -> Outcome:
    reserve = case.optional("kube_reserved", dict, {}).get("cpu", "0")
    kubelet = KubeletFacts(
        case.optional("kubelet_policy", str),
        reserved_milli=parse_quantity(reserve, milli=True),
        checkpoint=_file(case),
    )
    annotations = case.optional("node_annotations", dict, {})
    facts = NodeFacts(annotations=annotations, kubelet=kubelet, pods=_rows(case))
    reported = topology_annotations([CpuLocation(*row) for row in case.value("processors", list)], facts)
    got = {
        "expected_ls_pools": json.loads(reported[SHARED_POOLS]),
        "expected_allocs": json.loads(reported[POD_ALLOCS]),
        "expected_reserved_cpus": json.loads(reported[MANAGER_POLICY]).get("reservedCPUs", ""),
        "expected_cpu_topology": json.loads(reported[CPU_TOPOLOGY]),
        "expected_reservation": json.loads(reported[RESERVATION]),
        "expected_system_qos": json.loads(reported[SYSTEM_QOS]),
    }
    return Outcome({name: case.expected(name) for name in got}, got)


_KINDS: dict[str, Callable[[Case], Outcome]] = {
    "topology_policy": _policy,
    "kubelet_allocs": _allocs,
    "parse_state": _state,
    "node_reserved": _reserved,
    "remove_system_qos": _system,
    "divide": _divide,
    "numa_reservation": _numa,
    "kubelet_reserved": _kubelet_reserved,
    "shared_pools": _pools,
}
