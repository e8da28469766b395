"""The status of a daemon as text for the terminal.

The daemon's answer may come from an older or a newer version, so every part
may be missing or be something else than expected; then it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from proxy.admin.status_sections import (
    drift,
    hooks,
    kubelet,
    partitions,
    prescribed,
    quotas,
    release,
    short,
    suppression,
)
from proxy.model.phrases import counted
from proxy.observe.json_access import as_list, as_map, cut, one_line, table

_COLUMNS = ("CONTAINER", "QOS", "POOL", "CPUS", "MEMS", "PHASE", "ID")


def render(status: object, width: int = 100) -> str:
    """Write the page.

    Args:
        status: What ``/status`` answered.
        width: Columns of the terminal; long texts are cut at it.
    """
    data = as_map(status)
    lines = [
        *_head(data),
        *release(as_map(data.get("release"))),
        *_rules(data),
        *_pools(data),
        *suppression(as_map(data.get("beSuppress")), width),
    ]
    lines += _stuck(as_map(data.get("workers")))
    lines += [*prescribed(as_map(data.get("nodePolicy"))), *kubelet(as_map(data.get("kubelet")))]
    lines += [*_memory(data), *_exclusive(data), *_aside(data)]
    lines += quotas([as_map(entry) for entry in as_list(data.get("quotas"))])
    lines += partitions(as_map(data.get("partitions")))
    lines += short([as_map(entry) for entry in as_list(data.get("shortfalls"))])
    lines += hooks(as_map(data.get("hooks")), width)
    lines += [*_containers(data, width), *drift(as_map(data.get("drift")), width), *_problems(data)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _head(data: Mapping[str, object]) -> Iterable[str]:
    uptime, ready = data.get("uptime_s"), data.get("ready")
    title = f"topoproxy {one_line(data.get('version'))}".strip()
    words = [f"mode {one_line(data.get('mode'))}" if "mode" in data else ""]
    words.append(f"pid {one_line(data.get('pid'))}" if "pid" in data else "")
    words.append(f"up {_length(uptime)}" if isinstance(uptime, int | float) else "")
    words.append({True: "ready", False: "NOT READY"}.get(ready, "") if isinstance(ready, bool) else "")
    yield ", ".join([title, *(w for w in words if w)])
    runtime = as_map(data.get("runtime"))
    if "listen" in data or runtime:
        state = {True: "connected", False: "NOT CONNECTED"}.get(bool(runtime.get("connected")), "")
        shown = [
            one_line(runtime.get("version")),
            state if isinstance(runtime.get("connected"), bool) else "",
        ]
        shown.append(f"events {one_line(runtime['events'])}" if "events" in runtime else "")
        groups = as_map(data.get("cgroups"))
        shown.append(f"cgroup v{one_line(groups['version'])}" if "version" in groups else "")
        shown.append(f"{one_line(groups['driver'])} driver" if groups.get("driver") else "")
        shown.append(
            "systemd NOT CONNECTED" if as_map(groups.get("systemd")).get("connected") is False else ""
        )
        more = f" ({', '.join(s for s in shown if s)})" if any(shown) else ""
        yield f"{one_line(data.get('listen')) or '?'} -> {one_line(runtime.get('endpoint')) or '?'}{more}"


def _stuck(workers: Mapping[str, object]) -> Iterable[str]:
    """One line for each worker that is stuck."""
    for name, each in workers.items():
        seconds = as_map(each).get("stuck_s")
        if isinstance(seconds, int | float) and seconds:
            waiting = one_line(as_map(each).get("waiting"))
            yield f"STUCK: the {one_line(name)} worker, at one job for {seconds:.0f} s ({waiting} jobs wait)"


def _rules(data: Mapping[str, object]) -> Iterable[str]:
    """Describe the rules by which containers are placed, as far as they differ from the defaults."""
    settings = as_map(data.get("settings"))
    policy = one_line(settings.get("topologyManagerPolicy"))
    words = []
    if one_line(settings.get("cpuManagerPolicy")) == "static":
        options = ", ".join(one_line(option) for option in as_list(settings.get("cpuManagerPolicyOptions")))
        words.append(f"CPUs static{f' ({options})' if options else ''}")
    if policy and policy != "none":
        words.append(f"topology {policy}, scope {one_line(settings.get('topologyManagerScope'))}")
    if one_line(settings.get("memoryManagerPolicy")) == "Static":
        words.append("memory Static")
    if reserved := one_line(settings.get("reservedSystemCPUs")):
        words.append(f"reserved CPUs {reserved}")
    words += _admission(as_map(settings.get("admission")))
    if stage := one_line(data.get("takeover")):
        words.append(f"takeover from kubelet {stage}")
    if words:
        yield f"rules: {'; '.join(words)}"


def _admission(rules: Mapping[str, object]) -> Iterable[str]:
    """Say which CPUs no owner may take, and what else limits owners."""
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
    """One row a resource of a NUMA node, where memory is counted."""
    rows: list[tuple[str, ...]] = [("NODE", "RESOURCE", "ALLOCATABLE", "GIVEN", "FREE", "IN GROUP")]
    for entry in (as_map(entry) for entry in as_list(data.get("memory"))):
        node, group = one_line(entry.get("node")), one_line(entry.get("group"))
        for resource, amounts in as_map(entry.get("resources")).items():
            sizes = [_bytes(as_map(amounts).get(key)) for key in ("allocatable", "given", "free")]
            rows.append((node, one_line(resource), *sizes, "-" if group == node else group))
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _aside(data: Mapping[str, object]) -> Iterable[str]:
    """Name pods for which more is set aside than their containers own so far."""
    pods = [as_map(entry) for entry in as_list(data.get("reservations"))]
    if pods:
        yield ""
        yield "Set aside for pods"
        rows = [("CPUS", "POD", "NUMA NODES")]
        rows += [
            (_cpus(e.get("cpus")), one_line(e.get("pod")), one_line(e.get("nodes")) or "any") for e in pods
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
    """One row a pool; on a machine with several NUMA nodes also what of it lies on each."""
    pools = as_map(data.get("pools"))
    nodes = [as_map(entry) for entry in as_list(pools.get("nodes"))]
    nodes = nodes if len(nodes) > 1 else []
    rows = [("POOL", "CPUS", *(f"NODE {one_line(node.get('node'))}" for node in nodes))]
    for key, name in (("shared", "shared"), ("be", "BE"), ("system", "SYSTEM")):
        if key in pools:
            rows.append((name, _cpus(pools[key]), *(_cpus(node.get(key)) for node in nodes)))
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _exclusive(data: Mapping[str, object]) -> Iterable[str]:
    owners = [as_map(entry) for entry in as_list(data.get("exclusive"))]
    if not owners:
        return
    yield ""
    yield "Exclusive CPUs"
    rows = [("CPUS", "OWNER", "BE MAY USE THEM")]
    for entry in owners:
        name = "/".join(t for t in (one_line(entry.get("pod")), one_line(entry.get("container"))) if t)
        yes = {True: "no", False: "yes"}.get(bool(entry.get("hard")), "") if "hard" in entry else ""
        rows.append((_cpus(entry.get("cpus")), name or one_line(entry.get("owner")), yes))
    yield from table(rows)


def _containers(data: Mapping[str, object], width: int) -> Iterable[str]:
    known = [as_map(entry) for entry in as_list(data.get("containers"))]
    yield ""
    yield f"Containers ({len(known)})" if known else "No containers."
    if not known:
        return
    known.sort(key=lambda entry: one_line(entry.get("ref")))
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for entry in known:
        cells = [one_line(entry.get(key)) for key in ("ref", "qos", "pool")]
        cells += [_cpus(entry.get("cpus")), _cpus(entry.get("mems"))]
        rows.append((*cells, one_line(entry.get("phase")), one_line(entry.get("id"))[:13]))
    header, *lines = table(rows)
    yield header
    for entry, line in zip(known, lines, strict=True):
        yield line
        reason = one_line(entry.get("reason"))
        if reason:
            yield cut(f"    {reason}", width)


def _problems(data: Mapping[str, object]) -> Iterable[str]:
    broken = [one_line(entry) for entry in as_list(data.get("violations"))]
    problems = [as_map(entry) for entry in as_list(data.get("problems"))]
    count = len(broken) + len(problems)
    yield ""
    yield f"Problems ({count})" if count else "No problems."
    for text in broken:
        yield f"  RULE BROKEN: {text}"
    for entry in problems:
        times = entry.get("count")
        notes = [f"{times} times" if isinstance(times, int) and times > 1 else "", _when(entry.get("last"))]
        more = ", ".join(n for n in notes if n)
        yield f"  {one_line(entry.get('what')) or '?'}{f' ({more})' if more else ''}"


def _cpus(value: object) -> str:
    return one_line(value) or "-"


def _length(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    shown = [f"{n}{unit}" for n, unit in parts if n][:2]
    return " ".join(shown) or "0s"


def _when(value: object) -> str:
    """Say when a problem was last seen: an age for a Unix time, else the text as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"last {_length(max(0.0, time.time() - value))} ago"
    return f"last {one_line(value)}" if value else ""
