"""A takeover as text for the terminal.

The daemon's answer may come from another version, so what is missing in it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from proxy.observe.json_access import as_list, as_map, one_line, table


def plan_text(answer: object) -> str:
    """Write what ``topoproxy takeover plan`` shows."""
    data = as_map(answer)
    lines = [*_head(data), *_rows(data), *_list("Blockers", data.get("conflicts"))]
    for step in (as_map(step) for step in as_list(data.get("steps"))):
        lines += _list(f"topoproxy takeover {one_line(step.get('step'))}", step.get("does"))
    for target, settings in as_map(data.get("kubelet_settings")).items():
        lines += _list(f"kubelet's settings, to continue under {one_line(target)}", settings)
    lines += [*_list("Notes", data.get("notes")), *_list("Next", data.get("next"), ordered=True)]
    return "\n".join(lines) + "\n"


def status_text(answer: object) -> str:
    """Write what ``topoproxy takeover status`` shows."""
    data = as_map(answer)
    lines = list(_head(data))
    remaining, old = as_list(data.get("left")), data.get("old")
    if data.get("stage") != "none" and isinstance(old, int):
        lines += ["", f"Old allocations: {len(remaining)} of {old} are left"]
        rows = [("CPUS", "CONTAINER")]
        rows += [
            (one_line(row.get("cpus")), one_line(row.get("container"))) for row in map(as_map, remaining)
        ]
        lines += table(rows) if remaining else []
    lines += _list("Blockers", data.get("conflicts"))
    nothing = ["", "Nothing remains to be done."] if data.get("stage") == "finished" else []
    title = "To take the node over" if data.get("stage") == "none" else "What remains to be done"
    steps = list(_list(title, data.get("next"), ordered=True)) or nothing
    return "\n".join([*lines, *_list("Notes", data.get("notes")), *steps]) + "\n"


def done_text(answer: object) -> str:
    """Write the result of a step."""
    data = as_map(answer)
    reported = [f"{one_line(words)}" for words in as_list(data.get("messages"))]
    return "\n".join([*reported, *_list("What remains to be done", data.get("next"), ordered=True)]) + "\n"


def _head(data: Mapping[str, object]) -> Iterable[str]:
    kubelet, ours = as_map(data.get("kubelet")), as_map(data.get("ours"))
    since = data.get("since")
    when = f", since {_when(since)}" if isinstance(since, int | float) and since else ""
    target = f" (kubelet's policy: {one_line(data.get('target'))})" if data.get("target") else ""
    yield f"takeover:  {one_line(data.get('stage')) or '?'}{target}{when}"
    runs = as_list(kubelet.get("running"))
    yield f"kubelet:   {f'runs ({one_line(runs[0])})' if runs else 'does not run'}"
    options = ", ".join(f"{name}={value}" for name, value in as_map(kubelet.get("options")).items())
    words = [f"policy {one_line(kubelet.get('policy')) or 'unknown'}", options]
    words.append(f"keeps back CPUs {one_line(kubelet.get('reserved'))}" if kubelet.get("reserved") else "")
    yield f"           CPU manager: {', '.join(word for word in words if word)}"
    problem = one_line(kubelet.get("file_problem"))
    state = problem or f"for policy {one_line(kubelet.get('file_policy'))}, checksum good"
    yield f"           {one_line(kubelet.get('file'))}: {state}"
    configured = one_line(ours.get("configured"))
    now = one_line(ours.get("cpuManagerPolicy"))
    more = f" (configured: {configured})" if configured != now else ""
    yield f"topoproxy: cpuManagerPolicy {now}{more}"


def _rows(data: Mapping[str, object]) -> Iterable[str]:
    rows = [("CPUS", "IN EFFECT", "STATE", "CONTAINER")]
    for row in map(as_map, as_list(data.get("allocations"))):
        static = " (static pod)" if row.get("from_file") else ""
        cells = (one_line(row.get("cpus")), one_line(row.get("in_force")) or "-", one_line(row.get("state")))
        rows.append((*cells, f"{one_line(row.get('container'))}{static}"))
    yield ""
    if len(rows) == 1:
        yield "kubelet's file assigns no CPUs."
        return
    yield f"Allocations of kubelet's CPU manager ({len(rows) - 1})"
    yield from table(rows)


def _list(title: str, value: object, *, ordered: bool = False) -> Iterable[str]:
    items = [one_line(item) for item in as_list(value)]
    if items:
        yield ""
        yield title
        for number, item in enumerate(items, 1):
            yield f"  {f'{number}.' if ordered else '-'} {item}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
