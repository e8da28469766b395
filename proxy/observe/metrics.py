"""Answers ``/metrics`` in Prometheus' text format (version 0.0.4).

Counters and histograms come from the registry of telemetry, which begins with the process. Gauges are taken
from the page that ``topoproxy status`` shows, so both always agree. The figures of each hook, which the hook
engine keeps, are taken from it too. Figures that the page does not have are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import CFS_PERIOD_US, Phase, Pool
from proxy.observe.json_access import as_list, as_map
from proxy.telemetry import metrics as named
from proxy.telemetry.exposition import Sample, family
from proxy.telemetry.registry import Gauge, Registry


def metrics(status: Mapping[str, object], registry: Registry | None = None) -> str:
    """Write all metrics.

    Args:
        status: The answer to ``/status``.
        registry: The values of counters and histograms; None if nothing is counted.
    """
    parts = (_process, _config, _enforcement, _workers, _node, _rules, _suppression, _memory, hook_metrics)
    gauges = "".join(text for part in parts for text in part(status))
    return gauges if registry is None else f"{gauges}{registry.text()}"


def _process(status: Mapping[str, object]) -> Iterator[str]:
    labels = {"version": status.get("version", ""), "mode": status.get("mode", "")}
    yield family(named.INFO, [(labels, 1)])
    runtime = as_map(status.get("runtime"))
    attached = as_map(status.get("attach"))
    systemd = as_map(as_map(status.get("cgroups")).get("systemd")).get("connected")
    yield from _plain(
        (
            (named.UPTIME_SECONDS, status.get("uptime_s")),
            (named.READY, status.get("ready")),
            (named.RUNTIME_CONNECTED, runtime.get("connected")),
            (named.SYSTEMD_CONNECTED, systemd),
            (named.RUNTIME_EVENTS, _is_connected(runtime.get("events"))),
            (named.CLIENTS, status.get("clients")),
            (named.KUBELET_ENDPOINT_RESET, bool(attached.get("reset")) if attached else None),
        )
    )


def _enforcement(status: Mapping[str, object]) -> Iterator[str]:
    enforcement = as_map(status.get("enforcement"))
    if not enforcement:
        return
    pods = as_map(enforcement.get("pods"))
    yield family(
        named.ENFORCEMENT_PODS, [({"state": state}, n) for state, n in pods.items() if isinstance(n, int)]
    )
    yield from _plain(((named.ENFORCEMENT_PAUSED, int(enforcement.get("paused") is True)),))


def _config(status: Mapping[str, object]) -> Iterator[str]:
    config = as_map(status.get("config"))
    if not config:
        return
    refused = as_map(config.get("reload")).get("result") == "refused"
    yield from _plain(
        (
            (named.CONFIG_LAST_RELOAD_SUCCESSFUL, int(not refused)),
            (named.CONFIG_LAST_RELOAD_SUCCESS_TIMESTAMP, config.get("since")),
            (named.CONFIG_RESTART_KEYS, len(as_list(config.get("restart")))),
        )
    )


def _workers(status: Mapping[str, object]) -> Iterator[str]:
    workers = {name: as_map(worker) for name, worker in as_map(status.get("workers")).items()}
    if not workers:
        return
    for metric, key in ((named.WORKER_STUCK_SECONDS, "stuck_s"), (named.WORKER_JOBS_WAITING, "waiting")):
        yield family(
            metric, [({"worker": w}, _number(worker.get(key))) for w, worker in sorted(workers.items())]
        )


def _number(value: object) -> int | float:
    return value if isinstance(value, int | float) else 0


def _is_connected(events: object) -> object:
    return events if events is None else int(events == "connected")


def _plain(values: Iterable[tuple[Gauge, object]]) -> Iterator[str]:
    for metric, value in values:
        if isinstance(value, int | float):
            yield family(metric, [({}, value)])


def _node(status: Mapping[str, object]) -> Iterator[str]:
    pools, applied = as_map(status.get("pools")), _is_applied(status)
    if not pools:
        return
    names = [name for name in ("shared", "be", "system") if name in pools]
    cpus, node_cpus = (
        (named.POOL_CPUS, named.POOL_NODE_CPUS)
        if applied
        else (named.PLANNED_POOL_CPUS, named.PLANNED_POOL_NODE_CPUS)
    )
    yield family(cpus, [({"pool": n}, _count(pools[n])) for n in names])
    parts = [
        ({"pool": name, "node": part.get("node")}, _count(part.get(name)))
        for part in map(as_map, as_list(pools.get("nodes")))
        for name in names
        if name in part
    ]
    yield family(node_cpus, parts)
    owners = [as_map(owner) for owner in as_list(status.get("exclusive"))]
    existing = [as_map(container) for container in as_list(status.get("containers"))]
    live = [container for container in existing if container.get("phase") != Phase.EXITED.value]
    yield from _held(owners, live, (named.OWNERS, named.OWNED_CPUS, named.CONTAINERS), applied=True)
    planned = (named.PLANNED_OWNERS, named.PLANNED_OWNED_CPUS, named.PLANNED_CONTAINERS)
    yield from _held(owners, live, planned, applied=False)


def _held(
    owners: Iterable[Mapping[str, object]],
    live: Iterable[Mapping[str, object]],
    gauges: tuple[Gauge, Gauge, Gauge],
    *,
    applied: bool,
) -> Iterator[str]:
    """Write the gauges of owners, their CPUs and containers, either with the plan applied or without."""
    count, owned, containers = gauges
    matching = [owner for owner in owners if owner.get("applied", True) is applied]
    yield family(count, [({}, len(matching))])
    yield family(
        owned,
        [
            (
                {"be_may_use": may},
                sum(_count(_planned(owner)) for owner in matching if owner.get("hard") is hard),
            )
            for may, hard in (("true", False), ("false", True))
        ],
    )
    pools = [owner.get("pool") for owner in live if owner.get("applied", True) is applied]
    yield family(containers, [({"pool": pool.value}, pools.count(pool.value)) for pool in Pool])


def _is_applied(status: Mapping[str, object]) -> bool:
    """Return whether the plan is applied to any pod; if not, the figures show what would be."""
    if as_map(status.get("release")).get("stage"):
        return False
    rows = map(as_map, as_list(status.get("containers")))
    mode = status.get("mode", NodeMode.ENFORCE)
    return mode == NodeMode.ENFORCE or any(row.get("applied") is True for row in rows)


def _rules(status: Mapping[str, object]) -> Iterator[str]:
    reservations = named.POD_RESERVATIONS if _is_applied(status) else named.PLANNED_POD_RESERVATIONS
    values: list[tuple[Gauge, object]] = [
        (metric, len(as_list(status[key])))
        for metric, key in (
            (reservations, "reservations"),
            (named.PROBLEMS, "problems"),
            (named.VIOLATIONS, "violations"),
        )
        if key in status
    ]
    if "shortfalls" in status:
        short = [as_map(entry) for entry in as_list(status["shortfalls"])]
        away = sum(n for entry in short if isinstance(n := entry.get("missing"), int))
        values += [(named.CONTAINERS_BELOW_PROMISE, len(short)), (named.CPUS_BELOW_PROMISE, away)]
    policy = as_map(status.get("nodePolicy"))
    if policy:
        defective = sum(bool(as_map(value).get("problem")) for value in as_list(policy.get("values")))
        values.append((named.NODE_POLICY_PROBLEMS, defective))
        if policy.get("nodeObject"):
            is_read = int(bool(policy.get("read")) and not policy.get("problem"))
            values.append((named.NODE_OBJECT_READABLE, is_read))
    if drift := as_map(status.get("drift")):
        values.append((named.WRITE_CONFLICTS_ACTIVE, len(as_list(drift.get("writeConflicts")))))
        values.append((named.CPUSETS_WATCHED, drift.get("watched")))
    values.append((named.DECISIONS_REMEMBERED, status.get("remembered")))
    yield from _plain(values)


def _suppression(status: Mapping[str, object]) -> Iterator[str]:
    data = as_map(status.get("beSuppress"))
    if not data:
        return
    budget, quota, usage = data.get("budget_milli"), data.get("quota_us"), as_map(data.get("usage"))
    if isinstance(budget, int):
        yield family(named.BE_BUDGET_CPUS, [({}, budget / 1000)])
    used = [({"by": by}, n) for by in ("be", "others", "system") if isinstance(n := usage.get(by), float)]
    if used:
        yield family(named.BE_SUPPRESS_USED_CPUS, used)
    yield family(named.BE_CPUS, [({}, _count(data.get("cpus")))])
    if isinstance(quota, int) and quota > 0:
        yield family(named.BE_QUOTA_CPUS, [({}, quota / CFS_PERIOD_US)])


def _memory(status: Mapping[str, object]) -> Iterator[str]:
    samples = [
        ({"node": node.get("node"), "resource": resource, "state": state}, amount)
        for node in map(as_map, as_list(status.get("memory")))
        for resource, amounts in as_map(node.get("resources")).items()
        for state in ("allocatable", "given", "free")
        if isinstance(amount := as_map(amounts).get(state), int)
    ]
    if samples:
        yield family(named.MEMORY_BYTES if _is_applied(status) else named.PLANNED_MEMORY_BYTES, samples)


def _planned(owner: Mapping[str, object]) -> object:
    """Return the CPUs that an owner should have: those in effect are only read for the status page."""
    return owner.get("desired_cpus") or owner.get("cpus")


def _count(cpus: object) -> int:
    return len(CpuSet.parse(cpus)) if isinstance(cpus, str) else 0


_COUNTERS = {
    "calls": named.HOOK_CALLS,
    "conflicts": named.HOOK_CONFLICTS,
    "vetoes": named.HOOK_VETOES,
    "skipped": named.HOOK_SKIPPED,
    "lost": named.HOOK_LOST,
}


def hook_metrics(status: Mapping[str, object]) -> Iterator[str]:
    """Write the metrics of hooks; none if there are no hooks."""
    entries = [as_map(entry) for entry in as_list(as_map(status.get("hooks")).get("hooks"))]
    if not entries:
        return
    states = Counter(str(entry.get("state")) for entry in entries)
    yield family(named.HOOKS, [({"state": state}, n) for state, n in sorted(states.items())])
    # A masked file has the name of the one that is used, and only that one has values of its own.
    entries = [entry for entry in entries if entry.get("state") != "masked"]
    for metric, key in ((named.HOOK_BROKEN, "broken"), (named.HOOK_BREAKER_OPEN, "breaker_open")):
        samples = [(_hook(e), int(value)) for e in entries if isinstance(value := e.get(key), bool)]
        if samples:
            yield family(metric, samples)
    called = [entry for entry in entries if isinstance(entry.get("calls"), int)]
    if called:
        yield from _called(called)


def _called(entries: list[Mapping[str, object]]) -> Iterator[str]:
    for key, metric in _COUNTERS.items():
        yield family(metric, _numbers(entries, key))
    failures = [
        (_hook(entry) | {"kind": kind}, n)
        for entry in entries
        for kind, n in as_map(entry.get("failures")).items()
        if isinstance(n, int)
    ]
    yield family(named.HOOK_FAILURES, failures)
    yield family(named.HOOK_HUNG_CALLS, _numbers(entries, "hung"))
    lengths = [
        (_hook(entry) | {"of": of}, value)
        for entry in entries
        for of, key in (("median", "p50_s"), ("longest", "max_s"))
        if isinstance(value := entry.get(key), int | float)
    ]
    yield family(named.HOOK_CALL_SECONDS, lengths)


def _numbers(entries: list[Mapping[str, object]], key: str) -> list[Sample]:
    return [(_hook(e), value) for e in entries if isinstance(value := e.get(key), int | float)]


def _hook(entry: Mapping[str, object]) -> dict[str, object]:
    return {"hook": entry.get("name", "")}
