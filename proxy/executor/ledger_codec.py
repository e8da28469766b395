"""Pods and containers as plain data for the ledger, and back.

Sets are stored in the list format of Linux, so that the file is readable. A record that cannot be decoded (a
field of a later version, a manual edit) is read as None, and the caller rebuilds it from the runtime.

A record may come from a version that stored the CPUs and nodes of annotations unchecked. A pod is read
without sets that are not on the machine, and with a defect that says so; a placement is read with the part of
its sets that is on the machine. Long sentences are truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from msgspec import structs

from proxy.model.defects import DefectKind, InputDefect
from proxy.model.grants import Block, Blocks, Share
from proxy.model.idset import CpuSet, IdSet, Mask
from proxy.model.machine import ANY_MACHINE, Bounds
from proxy.model.phrases import listed
from proxy.model.pod_selection import selectable_labels
from proxy.model.quoting import MESSAGE, SENTENCE, printable
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import (
    Container,
    ContainerPart,
    KubeQos,
    Phase,
    Placement,
    Pod,
    Pool,
    QosClass,
    Request,
    SetAside,
)

S = TypeVar("S", CpuSet, Mask)
_FORMER_NAMES = {
    "numa_exclusive": "apart",
    "volcano_policy": "wish_policy",
    "volcano_nodes": "wish_nodes",
    "cpuset_chosen_locally": "chosen",
    "cgroup_changed_by_hook": "reparented",
}
"""Fields of ``Pod`` whose keys in the ledger are older than their names."""
_NAMED = frozenset(
    (
        "sandbox_id", "uid", "namespace", "name", "attempt", "qos", "kube_qos", "cgroup_parent", "cpuset",
        "nodes", "source",
    )
)  # fmt: skip
"""Simple fields of ``Pod`` that the functions below name.

``requests`` and ``source`` are recorded with a container only: what it keeps after its end depends on them.
After a start of the daemon, kubelet is queried again for the next container of a pod.
"""
_SIMPLE = (bool, int, str, CpuSet, Mask)
"""A field of one of these types, or of a subclass, is recorded as it is; a set is recorded as a list."""
MOST_FAULTS = 20
"""How many defects of a pod are read; its annotations cannot have more."""
MOST_REASONS = 100
"""How many reasons of a placement are read."""
TOTAL_FIELDS = ("cpu_shares", "cpu_quota", "cpu_period")
REQUEST_FIELDS = ("cpu_shares", "cpu_quota", "cpu_period", "memory_limit", "cpuset_cpus", "cpuset_mems")


def dump(value: Pod | Container) -> dict[str, object]:
    """Return a record as plain data."""
    if isinstance(value, Pod):
        return {**_dump_pod(value), **({"labels": dict(value.labels)} if value.labels else {})}
    return _dump_container(value)


def _dump_pod(pod: Pod) -> dict[str, object]:
    return {
        "sandbox_id": pod.sandbox_id,
        "uid": pod.uid,
        "namespace": pod.namespace,
        "name": pod.name,
        "attempt": pod.attempt,
        "qos": pod.qos.value,
        "kube_qos": pod.kube_qos.value,
        "cgroup_parent": pod.cgroup_parent,
        "cpuset": None if pod.cpuset is None else str(pod.cpuset),
        "problem": pod.problem,
        **({} if pod.nodes is None else {"nodes": str(pod.nodes)}),
        **_dump_simple(pod),
        **({} if pod.total is None else {"total": {name: getattr(pod.total, name) for name in TOTAL_FIELDS}}),
        **({} if pod.reserved_for_pod is None else {"aside": _dump_aside(pod.reserved_for_pod)}),
        **({"faults": [[each.kind.value, str(each)] for each in pod.defects]} if pod.defects else {}),
    }


def _dump_requests(pod: Pod) -> dict[str, object]:
    """Return kubelet's report about a pod, under its key in the ledger; empty if there is none."""
    requests = pod.requests
    if requests is None:
        return {}
    recorded = {
        "uid": requests.uid,
        "source": pod.source,
        "guaranteed": requests.guaranteed,
        "containers": [
            [each.name, each.kind.value, dict(each.requests), dict(each.limits)]
            for each in requests.containers
        ],
        **(
            {}
            if requests.pod_level_requests is None
            else {
                "own": dict(requests.pod_level_requests),
                "managed": requests.are_pod_level_requests_managed,
            }
        ),
        **({"ownLimits": dict(requests.pod_level_limits)} if requests.pod_level_limits else {}),
    }
    return {"requests": recorded}


@cache
def _simple_fields() -> Mapping[str, tuple[type, str, object]]:
    """Return the fields of ``Pod`` that need no code of their own here: type, key in the ledger, default.

    These are all fields of a simple type which the functions below do not name, so a new field is recorded
    without further code.
    """
    types = get_type_hints(Pod)
    simple: dict[str, tuple[type, str, object]] = {}
    for each in structs.fields(Pod):
        declared = types[each.name]
        kinds = set(get_args(declared) if isinstance(declared, UnionType) else (declared,)) - {NoneType}
        kind = kinds.pop()
        if each.name not in _NAMED and not kinds and isinstance(kind, type) and issubclass(kind, _SIMPLE):
            simple[each.name] = kind, _FORMER_NAMES.get(each.name, each.name), each.default
    return simple


def _dump_simple(pod: Pod) -> dict[str, object]:
    """Return the simple fields of a pod that differ from their defaults."""
    dumped: dict[str, object] = {}
    for name, (kind, key, default) in _simple_fields().items():
        value = getattr(pod, name)
        if value != default:
            dumped[key] = str(value) if issubclass(kind, IdSet | str) else value
    return dumped


def _load_simple(data: Mapping[str, Any], bounds: Bounds, defects: list[InputDefect]) -> dict[str, object]:
    """Read the simple fields of a pod.

    Args:
        data: The record.
        bounds: The CPUs and NUMA nodes of the machine; a set with others is left out.
        defects: Takes a defect for each set that is left out.
    """
    loaded: dict[str, object] = {}
    for name, (kind, key, _) in _simple_fields().items():
        if key not in data:
            continue
        if issubclass(kind, IdSet):
            ids, existing = kind.parse(_text(data[key])), bounds.cpus if kind is CpuSet else bounds.nodes
            if ids <= existing:
                loaded[name] = ids
            else:
                defects.append(_not_here(ids - existing, decisive=False))
        elif kind is bool:
            loaded[name] = data[key] is True
        elif issubclass(kind, int):
            loaded[name] = _number(data[key])
        else:
            parse = cast("Callable[[str], str]", kind)  # a text, or an enumeration of texts
            loaded[name] = parse(_text(data[key]))
    return loaded


def _dump_aside(aside: SetAside) -> dict[str, object]:
    return {
        "affinity": None if aside.affinity is None else str(aside.affinity),
        "preferred": aside.preferred,
        "cpus": str(aside.cpus),
        "blocks": _dump_blocks(aside.blocks),
        "parts": [
            {
                "name": part.name,
                "cpus": str(part.cpus),
                "blocks": _dump_blocks(part.blocks),
                **_dump_shares(part.shares),
            }
            for part in aside.parts
        ],
        **_dump_shares(aside.shares),
    }


def _dump_blocks(blocks: Blocks) -> list[object]:
    return [[str(block.affinity), block.resource, block.size] for block in blocks]


def _dump_shares(shares: tuple[Share, ...]) -> dict[str, object]:
    """Return shares under their key; empty if there are none."""
    if not shares:
        return {}
    return {
        "shares": [
            [share.provider, share.resource, share.amount, None if share.nodes is None else str(share.nodes)]
            for share in shares
        ]
    }


def _dump_container(container: Container) -> dict[str, object]:
    request, placement = container.request, container.placement
    return {
        "id": container.id,
        "name": container.name,
        "pod": {**_dump_pod(container.pod), **_dump_requests(container.pod)},
        "request": {
            **{name: getattr(request, name) for name in REQUEST_FIELDS},
            **({"huge_pages": dict(request.huge_pages)} if request.huge_pages else {}),
        },
        "placement": {
            "pool": placement.pool.value,
            "own": str(placement.exclusive),
            "mems": str(placement.mems),
            "reasons": list(placement.reasons),
            "hard": placement.excludes_be,
            **({"blocks": _dump_blocks(placement.blocks)} if placement.blocks else {}),
            **({} if placement.pool_cpus_limit is None else {"within": str(placement.pool_cpus_limit)}),
            **({} if placement.pool_numa_limit is None else {"nodes": str(placement.pool_numa_limit)}),
            **({"unlimited": True} if placement.cfs_quota_off else {}),
            **({"instead": str(placement.replacement)} if placement.replacement else {}),
            **({} if placement.hook_cpus is None else {"narrowed": str(placement.hook_cpus)}),
            **({"beyond": str(placement.hook_extra_cpus)} if placement.hook_extra_cpus else {}),
            **({"quota": placement.hook_quota} if placement.hook_quota else {}),
            **_dump_shares(placement.shares),
            **({"devices": {r: list(ids) for r, ids in placement.devices}} if placement.devices else {}),
        },
        "phase": container.phase.value,
        "attempt": container.attempt,
        "owner": container.owner,
        "cgroup": container.cgroup,
    }


def load_container(data: Mapping[str, Any], bounds: Bounds = ANY_MACHINE) -> Container | None:
    """Read a container; None if the data is not one, or names CPUs that the machine does not have."""
    cpus = bounds.cpus
    try:
        placement = data["placement"]
        reasons = placement["reasons"]
        return Container(
            _text(data["id"]),
            _text(data["name"]),
            _pod(data["pod"], bounds),
            _request(data["request"]),
            Placement(
                Pool(placement["pool"]),
                CpuSet.parse(_text(placement["own"]), cpus),
                Mask.parse(_text(placement["mems"])),
                tuple(_sentence(reason, MESSAGE) for reason in reasons[:MOST_REASONS]),
                placement["hard"] is True,
                _blocks(placement.get("blocks", [])),
                _devices(placement.get("devices", {})),
                pool_cpus_limit=_on_machine(placement, "within", cpus),
                pool_numa_limit=_on_machine(placement, "nodes", bounds.nodes),
                cfs_quota_off=placement.get("unlimited") is True,
                replacement=CpuSet.parse(_text(placement.get("instead", "")), cpus),
                hook_cpus=CpuSet.parse(_text(placement["narrowed"])) & cpus
                if "narrowed" in placement
                else None,
                hook_extra_cpus=CpuSet.parse(_text(placement.get("beyond", "")), cpus),
                hook_quota=_number(placement.get("quota", 0)),
                shares=_shares(placement.get("shares", [])),
            ),
            Phase(data["phase"]),
            _number(data["attempt"]),
            _text(data["owner"]),
            _text(data["cgroup"]),
        )
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _on_machine(data: Mapping[str, Any], name: str, existing: S) -> S | None:
    """Read the part of a set that is on the machine; None if the record has no such set."""
    return type(existing).parse(_text(data[name])) & existing if name in data else None


def load_pod(data: Mapping[str, Any], bounds: Bounds = ANY_MACHINE) -> Pod | None:
    """Read a pod; None if the data is not one."""
    try:
        return _pod(data, bounds)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _pod(data: Mapping[str, Any], bounds: Bounds) -> Pod:
    defects = _defects(data)
    undecided = not any(defect.decisive for defect in defects)
    cpuset = None if data["cpuset"] is None else CpuSet.parse(_text(data["cpuset"]))
    nodes = Mask.parse(_text(data["nodes"])) if "nodes" in data else None
    if cpuset is not None and not cpuset <= bounds.cpus:
        defects.append(_not_here(cpuset - bounds.cpus, decisive=undecided))
        cpuset, undecided = None, False
    if nodes is not None and not nodes <= bounds.nodes:
        defects.append(_not_here(nodes - bounds.nodes, decisive=undecided))
        nodes = None
    simple = _load_simple(data, bounds, defects)
    pod = Pod(
        _text(data["sandbox_id"]),
        _text(data["uid"]),
        _text(data["namespace"]),
        _text(data["name"]),
        _number(data["attempt"]),
        QosClass(data["qos"]),
        KubeQos(data["kube_qos"]),
        _text(data["cgroup_parent"]),
        cpuset,
        tuple(defects),
        nodes=nodes,
        reserved_for_pod=_aside(data["aside"], bounds) if "aside" in data else None,
        total=_total(data["total"]) if "total" in data else None,
        requests=_requests(data["requests"]) if "requests" in data else None,
        source=_sentence(data["requests"]["source"]) if "requests" in data else "",
        labels=selectable_labels({_text(key): _text(text) for key, text in data.get("labels", {}).items()}),
    )
    return structs.replace(pod, **simple) if simple else pod


def _defects(data: Mapping[str, Any]) -> list[InputDefect]:
    """Read a pod's defects: ``faults`` has them all, ``problem`` repeats the decisive one."""
    problem = _sentence(data["problem"])
    found = [
        InputDefect(_sentence(text), DefectKind(kind)) for kind, text in data.get("faults", [])[:MOST_FAULTS]
    ]
    if problem and problem not in found:
        found.insert(0, InputDefect(problem))
    decisive = next((each for each in found if each == problem), None) if problem else None
    return [each.as_decisive() if each is decisive else each for each in found]


def _not_here(ids: IdSet, *, decisive: bool) -> InputDefect:
    """Return the defect of ids named by a scheduler that are not on the machine."""
    message = f"a scheduler named {listed(ids)} ({ids.NOUN}), not on this machine"
    return InputDefect(message, DefectKind.CPU_LIST, decisive=decisive)


def _total(data: Mapping[str, Any]) -> Request:
    return Request(_number(data["cpu_shares"]), _number(data["cpu_quota"]), _number(data["cpu_period"]))


def _requests(data: Mapping[str, Any]) -> PodRequests:
    own = data.get("own")
    return PodRequests(
        _text(data["uid"]),
        tuple(
            ContainerResources(_text(name), ContainerKind(kind), _amounts(requests), _amounts(limits))
            for name, kind, requests, limits in data["containers"]
        ),
        data["guaranteed"] is True,
        None if own is None else _amounts(own),
        data.get("managed") is True,
        _amounts(data.get("ownLimits", {})),
    )


def _amounts(data: Mapping[str, Any]) -> dict[str, int]:
    return {_text(resource): _number(amount) for resource, amount in data.items()}


def _aside(data: Mapping[str, Any], bounds: Bounds) -> SetAside:
    return SetAside(
        None if data["affinity"] is None else Mask.parse(_text(data["affinity"])),
        data["preferred"] is True,
        CpuSet.parse(_text(data["cpus"]), bounds.cpus),
        _blocks(data["blocks"]),
        tuple(
            ContainerPart(
                _text(part["name"]),
                CpuSet.parse(_text(part["cpus"]), bounds.cpus),
                _blocks(part["blocks"]),
                _shares(part.get("shares", [])),
            )
            for part in data["parts"]
        ),
        _shares(data.get("shares", [])),
    )


def _devices(data: dict[str, Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((_text(resource), tuple(_text(each) for each in ids)) for resource, ids in data.items())


def _blocks(data: list[Any]) -> Blocks:
    blocks = tuple(Block(Mask.parse(_text(mask)), _text(name), _number(size)) for mask, name, size in data)
    if any(block.size < 0 for block in blocks):
        raise ValueError("the size of a memory block is negative")
    return blocks


def _shares(data: list[Any]) -> tuple[Share, ...]:
    return tuple(
        Share(
            _text(provider), _text(name), _number(amount), None if nodes is None else Mask.parse(_text(nodes))
        )
        for provider, name, amount, nodes in data
    )


def _request(data: Mapping[str, Any]) -> Request:
    return Request(
        _number(data["cpu_shares"]),
        _number(data["cpu_quota"]),
        _number(data["cpu_period"]),
        _number(data["memory_limit"]),
        _text(data["cpuset_cpus"]),
        _text(data["cpuset_mems"]),
        tuple((_text(name), _number(size)) for name, size in data.get("huge_pages", {}).items()),
    )


def _sentence(value: object, limit: int = SENTENCE) -> str:
    """Read a sentence; it is truncated if it is too long, and escaped if it cannot be encoded."""
    text = _text(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return printable(text, limit)
    return text if len(text) <= limit else printable(text, limit)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    return value
