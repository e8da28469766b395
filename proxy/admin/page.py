"""The status of a daemon as a page for people.

The daemon's answer may come from an older or a newer version, so every part
may be missing or be something else than expected; then it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from proxy.admin.kubelet import kubelet
from proxy.admin.prescribed import prescribed
from proxy.admin.quotas import quotas
from proxy.admin.release import release
from proxy.admin.suppression import suppression

_COLUMNS = ("CONTAINER", "QOS", "POOL", "CPUS", "MEMS", "PHASE", "ID")


def render(status: object, width: int = 100) -> str:
    """Write the page.

    Args:
        status: What ``/status`` answered.
        width: Columns of the terminal; long texts are cut at it.
    """
    data = _map(status)
    lines = [
        *_head(data),
        *release(_map(data.get("release"))),
        *_rules(data),
        *_pools(data),
        *suppression(_map(data.get("beSuppress")), width),
    ]
    lines += [*prescribed(_map(data.get("prescribed"))), *kubelet(_map(data.get("kubelet")))]
    lines += [*_memory(data), *_exclusive(data), *_aside(data)]
    lines += quotas([_map(entry) for entry in _list(data.get("quotas"))])
    lines += [*_containers(data, width), *_problems(data)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns, two blanks apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _head(data: Mapping[str, object]) -> Iterable[str]:
    uptime, ready = data.get("uptime_s"), data.get("ready")
    title = f"topoproxy {_text(data.get('version'))}".strip()
    words = [f"mode {_text(data.get('mode'))}" if "mode" in data else ""]
    words.append(f"pid {_text(data.get('pid'))}" if "pid" in data else "")
    words.append(f"up {_length(uptime)}" if isinstance(uptime, int | float) else "")
    words.append({True: "ready", False: "NOT READY"}.get(ready, "") if isinstance(ready, bool) else "")
    yield ", ".join([title, *(w for w in words if w)])
    runtime = _map(data.get("runtime"))
    if "listen" in data or runtime:
        state = {True: "connected", False: "NOT CONNECTED"}.get(bool(runtime.get("connected")), "")
        shown = [_text(runtime.get("version")), state if isinstance(runtime.get("connected"), bool) else ""]
        shown.append(f"events {_text(runtime['events'])}" if "events" in runtime else "")
        groups = _map(data.get("cgroups"))
        shown.append(f"cgroup v{_text(groups['version'])}" if "version" in groups else "")
        shown.append(f"{_text(groups['driver'])} driver" if groups.get("driver") else "")
        more = f" ({', '.join(s for s in shown if s)})" if any(shown) else ""
        yield f"{_text(data.get('listen')) or '?'} -> {_text(runtime.get('endpoint')) or '?'}{more}"


def _rules(data: Mapping[str, object]) -> Iterable[str]:
    """Say by which rules containers are placed, as far as they are not those that one expects of nobody."""
    settings = _map(data.get("settings"))
    policy = _text(settings.get("topologyManagerPolicy"))
    words = []
    if _text(settings.get("cpuManagerPolicy")) == "static":
        options = ", ".join(_text(option) for option in _list(settings.get("cpuManagerPolicyOptions")))
        words.append(f"CPUs static{f' ({options})' if options else ''}")
    if policy and policy != "none":
        words.append(f"topology {policy}, scope {_text(settings.get('topologyManagerScope'))}")
    if _text(settings.get("memoryManagerPolicy")) == "Static":
        words.append("memory Static")
    if reserved := _text(settings.get("reservedSystemCPUs")):
        words.append(f"reserved CPUs {reserved}")
    if stage := _text(data.get("takeover")):
        words.append(f"takeover from kubelet {stage}")
    if words:
        yield f"rules: {'; '.join(words)}"


def _memory(data: Mapping[str, object]) -> Iterable[str]:
    """One row a resource of a NUMA node, where memory is counted."""
    rows: list[tuple[str, ...]] = [("NODE", "RESOURCE", "ALLOCATABLE", "GIVEN", "FREE", "IN GROUP")]
    for entry in (_map(entry) for entry in _list(data.get("memory"))):
        node, group = _text(entry.get("node")), _text(entry.get("group"))
        for resource, amounts in _map(entry.get("resources")).items():
            sizes = [_bytes(_map(amounts).get(key)) for key in ("allocatable", "given", "free")]
            rows.append((node, _text(resource), *sizes, "-" if group == node else group))
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _aside(data: Mapping[str, object]) -> Iterable[str]:
    """Name pods for which more is set aside than their containers own so far."""
    pods = [_map(entry) for entry in _list(data.get("aside"))]
    if pods:
        yield ""
        yield "Set aside for pods"
        rows = [("CPUS", "POD", "NUMA NODES")]
        rows += [(_cpus(e.get("cpus")), _text(e.get("pod")), _text(e.get("nodes")) or "any") for e in pods]
        yield from table(rows)


def _bytes(value: object) -> str:
    if not isinstance(value, int):
        return _text(value) or "-"
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


def _pools(data: Mapping[str, object]) -> Iterable[str]:
    """One row a pool; on a machine with several NUMA nodes also what of it lies on each."""
    pools = _map(data.get("pools"))
    nodes = [_map(entry) for entry in _list(pools.get("nodes"))]
    nodes = nodes if len(nodes) > 1 else []
    rows = [("POOL", "CPUS", *(f"NODE {_text(node.get('node'))}" for node in nodes))]
    for key, name in (("shared", "shared"), ("be", "BE"), ("system", "SYSTEM")):
        if key in pools:
            rows.append((name, _cpus(pools[key]), *(_cpus(node.get(key)) for node in nodes)))
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _exclusive(data: Mapping[str, object]) -> Iterable[str]:
    owners = [_map(entry) for entry in _list(data.get("exclusive"))]
    if not owners:
        return
    yield ""
    yield "Exclusive CPUs"
    rows = [("CPUS", "OWNER", "BE MAY USE THEM")]
    for entry in owners:
        name = "/".join(t for t in (_text(entry.get("pod")), _text(entry.get("container"))) if t)
        yes = {True: "no", False: "yes"}.get(bool(entry.get("hard")), "") if "hard" in entry else ""
        rows.append((_cpus(entry.get("cpus")), name or _text(entry.get("owner")), yes))
    yield from table(rows)


def _containers(data: Mapping[str, object], width: int) -> Iterable[str]:
    known = [_map(entry) for entry in _list(data.get("containers"))]
    yield ""
    yield f"Containers ({len(known)})" if known else "No containers."
    if not known:
        return
    known.sort(key=lambda entry: _text(entry.get("ref")))
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for entry in known:
        cells = [_text(entry.get(key)) for key in ("ref", "qos", "pool")]
        cells += [_cpus(entry.get("cpus")), _cpus(entry.get("mems"))]
        rows.append((*cells, _text(entry.get("phase")), _text(entry.get("id"))[:13]))
    header, *lines = table(rows)
    yield header
    for entry, line in zip(known, lines, strict=True):
        yield line
        reason = _text(entry.get("reason"))
        if reason:
            yield _cut(f"    {reason}", width)


def _problems(data: Mapping[str, object]) -> Iterable[str]:
    broken = [_text(entry) for entry in _list(data.get("violations"))]
    problems = [_map(entry) for entry in _list(data.get("problems"))]
    count = len(broken) + len(problems)
    yield ""
    yield f"Problems ({count})" if count else "No problems."
    for text in broken:
        yield f"  RULE BROKEN: {text}"
    for entry in problems:
        times = entry.get("count")
        notes = [f"{times} times" if isinstance(times, int) and times > 1 else "", _when(entry.get("last"))]
        more = ", ".join(n for n in notes if n)
        yield f"  {_text(entry.get('what')) or '?'}{f' ({more})' if more else ''}"


def _map(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else []


def _text(value: object) -> str:
    """One line without control characters: what is shown came from pods."""
    if value is None:
        return ""
    return "".join(c if c.isprintable() else " " for c in str(value))


def _cpus(value: object) -> str:
    return _text(value) or "-"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


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
    return f"last {_text(value)}" if value else ""
