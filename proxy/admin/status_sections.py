"""The sections of the status page, each written from its part of the answer to ``/status``.

A part that is missing or has an unexpected type is left out. Long lines are cut at the terminal's width.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from proxy.observe.json_access import as_list, as_map, cut, one_line, table


def shortfalls(entries: Sequence[Mapping[str, object]]) -> Iterable[str]:
    """Write the section; nothing if every container has what it was promised.

    Args:
        entries: The part of the status under ``shortfalls``.
    """
    if entries:
        yield ""
        yield f"NOT AS PROMISED ({len(entries)})"
        for entry in entries:
            yield f"  {one_line(entry.get('container')) or '?'}: {one_line(entry.get('what')) or '?'}"


def drift(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the section; nothing if no other program has written.

    Args:
        data: The part ``drift`` of the answer to ``/status``.
        width: Columns of the terminal; long lines are cut at it.
    """
    by = {one_line(writer): n for writer, n in as_map(data.get("by")).items() if isinstance(n, int) and n > 0}
    conflicts = [as_map(entry) for entry in as_list(data.get("writeConflicts"))]
    if not by and not conflicts:
        return
    count = ", ".join(
        f"{writer} {n}" for writer, n in sorted(by.items(), key=lambda item: (-item[1], item[0]))
    )
    yield ""
    yield cut(f"Cpusets changed by others, repaired (by probable writer): {count or '-'}", width)
    if reason := one_line(data.get("not_watched")):
        yield cut(f"  Some writes are detected late: {reason}", width)
    if conflicts:
        rows = [("CHANGED AGAIN AND AGAIN", "BY", "FOUND", "DESIRED", "TIMES", "FOR", "NEXT REPAIR IN")]
        rows += [
            (
                one_line(conflict.get("container")) or one_line(conflict.get("id"))[:13],
                one_line(conflict.get("by")),
                one_line(conflict.get("found")) or "-",
                one_line(conflict.get("cpus")) or "-",
                one_line(conflict.get("times")),
                _drift_seconds(conflict.get("seconds")),
                _drift_seconds(conflict.get("next_s")),
            )
            for conflict in conflicts
        ]
        yield from (cut(f"  {line}", width) for line in table(rows))


def _drift_seconds(value: object) -> str:
    if not isinstance(value, int | float):
        return ""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"  # half a second must not be shown as 0


def device_plugins(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the section; nothing if no device plugin has registered.

    Args:
        data: The part of the status under ``devicePlugins``.
        width: Columns of the terminal; long lines are cut at it.
    """
    plugins = [as_map(entry) for entry in as_list(data.get("resources"))]
    if not plugins:
        return
    keys = ("resource", "state", "devices", "healthy", "socket")
    rows: list[tuple[str, ...]] = [("DEVICE PLUGIN OF", "STATE", "DEVICES", "HEALTHY", "SOCKET")]
    rows += [tuple(one_line(plugin.get(key)) or "-" for key in keys) for plugin in plugins]
    yield ""
    yield from (cut(line, width) for line in table(rows))


_STATES_WITHOUT_PROBLEM = frozenset({"running", "masked", "disabled", ""})
_NOT_CALLED_TEXTS = {
    "failing": "fails",
    "open": "not called for now",
    "probing": "tried again now",
    "hangs": "not called, as its calls hang",
}


def hooks(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the section; nothing if there are no hooks.

    Args:
        data: The part of the status under ``hooks``.
        width: Columns of the terminal; long lines are cut at it.
    """
    entries = [as_map(entry) for entry in as_list(data.get("hooks"))]
    served = as_map(data.get("serving"))
    if not entries and not served:
        return
    requested = [one_line(entry.get("name")) for entry in entries if as_list(entry.get("points"))]
    yield ""
    yield cut(": ".join(text for text in (f"Hooks ({len(requested)})", ", ".join(requested)) if text), width)
    for entry in entries:
        if text := hook_problem(entry):
            yield cut(f"  {one_line(entry.get('name')) or '?'}: {text}", width)
    if served:
        yield cut(f"  {_hooks_served(served)}", width)


def hook_problem(entry: Mapping[str, object]) -> str:
    """Return what is wrong with a hook; empty if nothing is."""
    state, requested = one_line(entry.get("state")), one_line(entry.get("asked"))
    parts = []
    error = one_line(entry.get("error"))
    if state not in _STATES_WITHOUT_PROBLEM and (state != "being read" or error):
        parts.append(_because(state, error))
    if requested in _NOT_CALLED_TEXTS:
        parts.append(_because(_NOT_CALLED_TEXTS[requested], last_error(entry)))
    return "; ".join(parts)


def last_error(entry: Mapping[str, object], now: float | None = None) -> str:
    """Describe a hook's last failure, with its time; nothing if there was none.

    Args:
        entry: The hook's entry.
        now: Seconds since the epoch.
    """
    message, when = one_line(entry.get("last_error")), entry.get("last_error_at")
    if not message or not isinstance(when, int | float):
        return message
    ago = max(0.0, (time.time() if now is None else now) - when)
    return f"{message} ({rounded_duration(ago)} ago)"


def rounded_duration(seconds: float) -> str:
    """Format a duration in one unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _because(what: str, why: str) -> str:
    return f"{what}: {why}" if why else what


def _hooks_served(served: Mapping[str, object]) -> str:
    message = f"served to Koordinator's runtime proxy at {one_line(served.get('socket')) or '?'}"
    calls = served.get("calls")
    return f"{message}: {calls} calls" if isinstance(calls, int) else message


_KUBELET_SETTINGS = (
    ("policy", "cpuManagerPolicy"),
    ("options", "cpuManagerPolicyOptions"),
    ("reserved", "reservedSystemCPUs"),
    ("topology_policy", "topologyManagerPolicy"),
    ("topology_scope", "topologyManagerScope"),
    ("default", "default"),
)
_KUBELET_NAMES = {"default": "CPUs of all other containers"}


def kubelet(data: Mapping[str, object]) -> Iterable[str]:
    """Write the section: kubelet's settings, the source of each, and the CPUs that it assigned.

    Args:
        data: The part ``kubelet`` of the answer to ``/status``; nothing is written if nothing is known.
    """
    sources = as_map(data.get("sources"))
    rows = [
        (_KUBELET_NAMES.get(key, key), value, one_line(sources.get(name)))
        for name, key in _KUBELET_SETTINGS
        if (value := _kubelet_value(data.get(key)))
    ]
    entries = [entry for entry in as_list(data.get("held")) if isinstance(entry, Mapping)]
    if not rows and not entries:
        return
    yield ""
    yield "Kubelet's CPU manager"
    yield from _indented([("SETTING", "VALUE", "FROM"), *rows])
    if entries:
        yield from _indented(
            [("CPUS", "ASSIGNED BY KUBELET TO"), *((one_line(e.get("cpus")), _holder(e)) for e in entries)]
        )


def _holder(entry: Mapping[str, object]) -> str:
    return f"{one_line(entry.get('pod')) or one_line(entry.get('uid'))}/{one_line(entry.get('container'))}"


def _kubelet_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{one_line(name)}={one_line(value[name])}" for name in sorted(value, key=str))
    return one_line(value)


def _indented(rows: list[tuple[str, ...]]) -> Iterable[str]:
    return (f"  {row}" for row in table(rows))


def partitions(data: Mapping[str, object]) -> Iterable[str]:
    """Write the section; nothing if no partitions are requested.

    Args:
        data: The part of the status under ``partitions``.
    """
    entries = [as_map(entry) for entry in as_list(data.get("containers"))]
    requested, reason = one_line(data.get("asked")), one_line(data.get("lack"))
    if not requested and not any(entry.get("state") not in (None, "member") for entry in entries):
        return
    yield ""
    yield f"Partitions of owned CPUs ({requested or 'none'}){f': there are none, {reason}' if reason else ''}"
    rows = [[one_line(entry.get(key)) for key in ("ref", "cpus", "state", "reason")] for entry in entries]
    if rows and not reason:
        yield from table(rows)
    isolated = one_line(data.get("isolated"))
    if isolated:
        yield f"  The kernel isolates CPUs {isolated}."


_DEFAULT = "default"


def prescribed(data: Mapping[str, object]) -> Iterable[str]:
    """Write the section; nothing if nothing is prescribed and nothing is wrong.

    Args:
        data: The part ``prescribed`` of the answer to ``/status``.
    """
    values = [row for row in as_list(data.get("values")) if isinstance(row, Mapping)]
    shown_values = [row for row in values if row.get("source") != _DEFAULT or row.get("problem")]
    where, trouble = one_line(data.get("nodeObject")), one_line(data.get("problem"))
    if not shown_values and not trouble:
        return
    yield ""
    yield f"Settings of the node{f' (Node object: {where})' if where else ''}"
    rows = [("VALUE", "IN EFFECT", "FROM")]
    rows += [
        (one_line(e.get("name")), _prescribed_value(e.get("value")), one_line(e.get("source")))
        for e in shown_values
    ]
    yield from table(rows) if shown_values else ()
    if trouble:
        yield f"  The Node object cannot be used: {trouble}"
    for row in shown_values:
        if text := one_line(row.get("problem")):
            yield f"  Ignored node label or annotation: {text}"


def _prescribed_value(value: object) -> str:
    text = one_line(value)
    return {"true": "yes", "false": "no", "True": "yes", "False": "no"}.get(text, text) or "-"


def quotas(entries: Sequence[Mapping[str, object]]) -> Iterable[str]:
    """Write the section; nothing if no quota was taken off.

    Args:
        entries: The part of the status under ``quotas``.
    """
    rows = []
    for entry in entries:
        pod, container, was = (entry.get(key) for key in ("pod", "container", "was"))
        group = f"{pod or 'a pod that is gone'}/{container}" if container else str(pod or entry.get("group"))
        rows.append((one_line(group), f"{was} us" if isinstance(was, int) else "?", _quota_now(entry)))
    if rows:
        yield ""
        yield "CFS quota removed (previous value)"
        yield from table(sorted(rows))


def _quota_now(entry: Mapping[str, object]) -> str:
    """Return the quota that the kernel has now; empty if it has none."""
    now = entry.get("now")
    return f"now {now} us" if isinstance(now, int) and now >= 0 else ""


def release(data: Mapping[str, object]) -> str:
    """Return how far a release is; empty if the node is not released.

    Args:
        data: The part ``release`` of ``/status``.
    """
    if data.get("stage") == "released":
        return "calls are only relayed, containers are not moved (topoproxy release --undo resumes)"
    if data.get("stage") != "releasing":
        return ""
    done, all_of_them = one_line(data.get("updated")), one_line(data.get("containers"))
    return f"{done} of {all_of_them} containers updated, calls are only relayed"


def release_remaining(data: Mapping[str, object]) -> Iterable[str]:
    """Write what remains to be done in a release.

    Args:
        data: The part ``release`` of ``/status``.
    """
    if data.get("stage") == "releasing":
        yield from (f"  still: {one_line(text)}" for text in as_list(data.get("left")))


_PERIOD_US = 100_000


def suppression(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the section: the usage, what is left for BE (best effort) pods, what they have, and since when.

    Args:
        data: The part ``beSuppress`` of the answer to ``/status``; empty if nothing is suppressed.
        width: Columns of the terminal; long lines are cut at it.
    """
    mode = one_line(data.get("mode"))
    if not mode:
        return
    yield ""
    yield f"BE suppression ({mode}, up to {one_line(data.get('threshold'))} % of the node)"
    yield from (cut(line, width) for line in _suppression_lines(data))


def _suppression_lines(data: Mapping[str, object]) -> Iterable[str]:
    usage, budget = data.get("usage"), data.get("budget_milli")
    if isinstance(usage, Mapping) and isinstance(budget, int):
        used = [
            f"{name} {value:.1f}"
            for name, key in (("other pods", "others"), ("BE pods", "be"), ("system", "system"))
            if isinstance(value := usage.get(key), int | float)
        ]
        yield f"  CPUs in use: {', '.join(used)}; for BE pods: {budget / 1000:.1f}"
    elif _is_suppressed(data):
        yield "  usage is not known"
    quota = data.get("quota_us")
    if isinstance(quota, int) and quota > 0:
        group = one_line(data.get("group"))
        yield f"  quota: {quota / _PERIOD_US:.2f} CPUs{f' for /{group}' if group else ''}"
    elif data.get("mode") == "cpuset":
        now, pool = one_line(data.get("cpus")), one_line(data.get("pool"))
        yield f"  BE pods run on {now or '-'}" + ("" if now == pool else f" of {pool}")
    change = data.get("last_change")
    if isinstance(change, Mapping):
        when = change.get("when")
        ago = f" {max(0.0, time.time() - when):.0f} s ago" if isinstance(when, int | float) else ""
        yield f"  changed{ago} to {one_line(change.get('after'))} from {one_line(change.get('before'))}"
        yield f"    {one_line(change.get('why'))}"


def _is_suppressed(data: Mapping[str, object]) -> bool:
    """Return whether suppression applies to anything."""
    return data.get("mode") in ("cpuset", "cfs-quota")
