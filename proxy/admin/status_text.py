"""The status of a daemon as text for the terminal.

The daemon may be of an older or a newer version, so every part of its answer may be missing or have an
unexpected type; such a part is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from proxy.admin.status_sections import (
    device_plugins,
    drift,
    hooks,
    kubelet,
    partitions,
    prescribed,
    quotas,
    release,
    release_remaining,
    shortfalls,
    suppression,
)
from proxy.admin.status_tables import containers, cpus_or_dash, exclusive, is_released, problems
from proxy.model.freshness import STALE_S
from proxy.model.phrases import counted
from proxy.observe.json_access import as_list, as_map, one_line, table
from proxy.observe.value_text import duration_text

_EVENTS = {
    "connected": "the runtime sends exit events",
    "not offered": "the runtime sends no exit events: freed CPUs return within {period}",
    "waiting": "not connected to the runtime's events: freed CPUs return within {period}",
    "off": "the runtime's events are not used: freed CPUs return within {period}",
}


def render(status: object, width: int = 100) -> str:
    """Write the page.

    Args:
        status: The answer to ``/status``.
        width: Columns of the terminal; long texts are cut at it.
    """
    data = as_map(status)
    lines = [_title(data), *table(_head(data)), *release_remaining(as_map(data.get("release")))]
    if not is_released(data):
        lines += _pools(data)
    lines += suppression(as_map(data.get("beSuppress")), width)
    lines += _stuck(as_map(data.get("workers")))
    lines += [*prescribed(as_map(data.get("nodePolicy"))), *kubelet(as_map(data.get("kubelet")))]
    lines += [*_memory(data), *exclusive(data), *_reserved(data)]
    lines += quotas([as_map(entry) for entry in as_list(data.get("quotas"))])
    lines += partitions(as_map(data.get("partitions")))
    lines += shortfalls([as_map(entry) for entry in as_list(data.get("shortfalls"))])
    lines += device_plugins(as_map(data.get("devicePlugins")), width)
    lines += hooks(as_map(data.get("hooks")), width)
    lines += [*containers(data, width), *drift(as_map(data.get("drift")), width), *problems(data)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _title(data: Mapping[str, object]) -> str:
    uptime, ready = data.get("uptime_s"), data.get("ready")
    title = f"topoproxy {one_line(data.get('version'))}".strip()
    parts = [f"mode {one_line(data.get('mode'))}" if "mode" in data else ""]
    parts.append(f"pid {one_line(data.get('pid'))}" if "pid" in data else "")
    parts.append(f"up {duration_text(uptime)}" if isinstance(uptime, int | float) else "")
    parts.append({True: "ready", False: "NOT READY"}.get(ready, "") if isinstance(ready, bool) else "")
    return ", ".join([title, *(w for w in parts if w)])


def _head(data: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the rows of the head: the daemon's connections, and the rules by which it works."""
    rows = [
        ("listens on", one_line(data.get("listen"))),
        ("clients", _clients(data)),
        ("kubelet", _attached(as_map(data.get("attach")))),
        *_runtime(as_map(data.get("runtime"))),
        *_cgroups(as_map(data.get("cgroups"))),
        ("cpusets", _reading(as_map(data.get("kernel")))),
        ("applied to", _applied_to(data)),
        ("release", release(as_map(data.get("release")))),
        ("config", _config(as_map(data.get("config")))),
        ("cluster", _cluster([as_map(entry) for entry in as_list(data.get("cluster"))])),
        ("rules", "; ".join(_rules(data))),
    ]
    return [row for row in rows if row[1]] or [("", "")]


def _clients(data: Mapping[str, object]) -> str:
    count, calls = data.get("clients"), as_map(data.get("calls"))
    if not isinstance(count, int):
        return ""
    parts = [f"{count} connected" if count else "none connected"]
    if "last_s" in calls:
        last = calls["last_s"]
        parts.append(
            f"last call {duration_text(last)} ago" if isinstance(last, int | float) else "no call yet"
        )
    methods = [
        f"{one_line(name)} {duration_text(s)} ago"
        for name, s in as_map(calls.get("methods")).items()
        if isinstance(s, int | float)
    ]
    return ", ".join(parts) + (f" ({', '.join(methods)})" if methods else "")


def _attached(attach: Mapping[str, object]) -> str:
    if reset := one_line(attach.get("reset")):
        return f"ENDPOINT RESET: {reset} (topoproxy attach sets it again)"
    return "attached" if attach else ""


def _runtime(runtime: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    where = " at ".join(t for t in (one_line(runtime.get("version")), one_line(runtime.get("endpoint"))) if t)
    state = {True: "connected", False: "NOT CONNECTED"}.get(runtime.get("connected") is True, "")
    if not isinstance(runtime.get("connected"), bool):
        state = ""
    elif reason := one_line(runtime.get("reason")):
        state = f"{state}: {reason}"
    yield "runtime", ", ".join(part for part in (where, state) if part)
    period = runtime.get("reconcile_s")
    within = duration_text(period) if isinstance(period, int | float) else "reconcilePeriod"
    events = one_line(runtime.get("events"))
    if events == "waiting" and runtime.get("connected") is False:
        within += " after the runtime answers again"
    yield "events", _EVENTS.get(events, events).format(period=within)


def _cgroups(groups: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    parts = [f"v{one_line(groups['version'])}" if "version" in groups else ""]
    parts.append(f"{one_line(groups['driver'])} driver" if groups.get("driver") else "")
    yield "cgroups", ", ".join(part for part in parts if part)
    connected = as_map(groups.get("systemd")).get("connected")
    if isinstance(connected, bool):
        yield "systemd", "connected" if connected else "NOT CONNECTED"


def _config(config: Mapping[str, object]) -> str:
    """Name the file, and the parts of it that are not in effect."""
    reload, restart = as_map(config.get("reload")), [as_map(row) for row in as_list(config.get("restart"))]
    parts = [one_line(config.get("source"))] if config.get("source") else []
    if reload.get("result") == "refused":
        at = reload.get("at")
        ago = f" {duration_text(max(0.0, time.time() - at))} ago" if isinstance(at, int | float) else ""
        parts.append(f"RELOAD REFUSED{ago}: the previous configuration stays in effect")
    if restart:
        keys = ", ".join(one_line(row.get("key")) for row in restart)
        parts.append(f"takes effect at the next restart: {keys}")
    return "; ".join(parts)


def _cluster(files: list[Mapping[str, object]]) -> str:
    """Return what the cluster agent has read, and the age of each file."""
    parts = []
    for entry in files:
        name, age = one_line(entry.get("name")), entry.get("confirmed_s")
        known = f"as of {duration_text(age)} ago" if isinstance(age, int | float) else "not read"
        count = f"{one_line(entry.get('items'))} " if name != "node" and entry.get("items") else ""
        parts.append(f"{count}{name} {known}")
    return ", ".join(parts)


def _applied_to(data: Mapping[str, object]) -> str:
    """Return to how many pods the plan is applied, if not to all."""
    page, users = as_map(data.get("enforcement")), data.get("observedOnExclusive")
    pods = {name: n for name, n in as_map(page.get("pods")).items() if isinstance(n, int) and n > 0}
    if data.get("mode") == "observe" and "enforced" not in pods:
        return "no pod: mode observe"
    others = [name for name in ("observed", "toEnforce", "toGiveBack") if name in pods]
    if data.get("mode") not in ("observe", "enforce") or not (others or page.get("paused")):
        return ""
    parts = [f"{counted(pods.get('enforced', 0), 'pod')}, {pods.get('observed', 0)} observed"]
    parts += [f"{pods['toEnforce']} to be enforced"] if "toEnforce" in pods else []
    parts += [f"{pods['toGiveBack']} to be given back"] if "toGiveBack" in pods else []
    parts += ["paused"] if page.get("paused") else []
    if isinstance(users, int) and users:
        parts.append(f"{counted(users, 'observed container')} can use exclusive CPUs")
    return "; ".join(parts)


def _reading(kernel: Mapping[str, object]) -> str:
    """Return a note if the cpusets shown are not current."""
    age, missing = kernel.get("age_s"), kernel.get("not_read")
    parts = []
    if isinstance(age, int | float) and age > STALE_S:
        parts.append(f"as they were {duration_text(age)} ago: the kernel does not answer")
    if isinstance(missing, int) and missing:
        parts.append(f"those of {counted(missing, 'container')} are not shown: reading takes too long")
    return "; ".join(parts)


def _stuck(workers: Mapping[str, object]) -> Iterable[str]:
    """One line for each worker that is stuck."""
    for name, worker in workers.items():
        seconds = as_map(worker).get("stuck_s")
        if isinstance(seconds, int | float) and seconds:
            waiting = one_line(as_map(worker).get("waiting"))
            yield f"STUCK: the {one_line(name)} worker, at one job for {seconds:.0f} s ({waiting} jobs wait)"


def _rules(data: Mapping[str, object]) -> list[str]:
    """Describe those rules for the placement of containers that differ from the defaults."""
    settings = as_map(data.get("settings"))
    policy = one_line(settings.get("topologyManagerPolicy"))
    parts = []
    if one_line(settings.get("cpuManagerPolicy")) == "static":
        options = ", ".join(one_line(option) for option in as_list(settings.get("cpuManagerPolicyOptions")))
        parts.append(f"CPUs static{f' ({options})' if options else ''}")
    if policy and policy != "none":
        parts.append(f"topology {policy}, scope {one_line(settings.get('topologyManagerScope'))}")
    if one_line(settings.get("memoryManagerPolicy")) == "Static":
        parts.append("memory Static")
    if reserved := one_line(settings.get("reservedSystemCPUs")):
        parts.append(f"reserved CPUs {reserved}")
    parts += _admission(as_map(settings.get("admission")))
    if stage := one_line(data.get("takeover")):
        parts.append(f"takeover from kubelet {stage}")
    return parts


def _admission(rules: Mapping[str, object]) -> Iterable[str]:
    """Return which CPUs no owner may take, and the other limits of owners."""
    floor = rules.get("sharedFloor")
    each = sorted(
        {n for n in as_map(rules.get("sharedFloorPerNUMANode")).values() if isinstance(n, int) and n > 0}
    )
    if isinstance(floor, int) and floor > 0:
        yield f"shared pool keeps {counted(floor, 'CPU')}" + (
            f" ({_span(each)} of each NUMA node)" if each else ""
        )
    elif each:
        yield f"shared pool keeps {_span(each)} CPU{'' if each == [1] else 's'} of each NUMA node"
    for key, owner in (
        ("maxCPUsPerPod", "pod"),
        ("maxCPUsPerNamespace", "namespace"),
        ("maxCPUsPerNode", "node"),
    ):
        if isinstance(most := rules.get(key), int):
            cpus = counted(most, "CPU")
            yield f"at most {cpus} owned" if owner == "node" else f"at most {cpus} owned by a {owner}"


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _memory(data: Mapping[str, object]) -> Iterable[str]:
    """One row for each resource of a NUMA node, if memory is counted."""
    rows: list[tuple[str, ...]] = [("NODE", "RESOURCE", "ALLOCATABLE", "GIVEN", "FREE", "IN GROUP")]
    for entry in (as_map(entry) for entry in as_list(data.get("memory"))):
        node, group = one_line(entry.get("node")), one_line(entry.get("group"))
        for resource, amounts in as_map(entry.get("resources")).items():
            sizes = [_bytes(as_map(amounts).get(key)) for key in ("allocatable", "given", "free")]
            rows.append((node, one_line(resource), *sizes, "-" if group == node else group))
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _reserved(data: Mapping[str, object]) -> Iterable[str]:
    """Name pods for which more is reserved than their containers own so far."""
    pods = [as_map(entry) for entry in as_list(data.get("reservations"))]
    if pods:
        yield ""
        yield "Reserved for pods"
        rows = [("CPUS", "POD", "NUMA NODES")]
        rows += [
            (cpus_or_dash(e.get("cpus")), one_line(e.get("pod")), one_line(e.get("nodes")) or "any")
            for e in pods
        ]
        yield from table(rows)


def _bytes(value: object) -> str:
    if not isinstance(value, int):
        return one_line(value) or "-"
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


def _pools(data: Mapping[str, object]) -> Iterable[str]:
    """One row for each pool; on a machine with several NUMA nodes also its part on each node."""
    pools = as_map(data.get("pools"))
    nodes = [as_map(entry) for entry in as_list(pools.get("nodes"))]
    nodes = nodes if len(nodes) > 1 else []
    held = as_map(pools.get("containers"))
    observed = data.get("mode") == "observe"
    title = "POOL (would be)" if observed else "POOL"
    rows = [(title, "CPUS", *(f"NODE {one_line(node.get('node'))}" for node in nodes), "CONTAINERS")]
    for key, name in (("shared", "shared"), ("be", "BE"), ("system", "SYSTEM")):
        if key in pools:
            parts = (cpus_or_dash(node.get(key)) for node in nodes)
            rows.append(
                (name, cpus_or_dash(pools[key]), *parts, _held(as_map(held.get(key)), observed=observed))
            )
    if not held:
        rows = [row[:-1] for row in rows]
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _held(pool: Mapping[str, object], *, observed: bool) -> str:
    """Return how many containers of a pool have its CPUs according to the kernel, if not all do."""
    count, good = pool.get("count"), pool.get("in_effect")
    return one_line(count) if observed or count == good else f"{one_line(good)} of {one_line(count)}"
