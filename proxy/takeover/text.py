"""A takeover as a page for people.

The daemon's answer may come from another version, so what is missing in it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from proxy.admin.page import table


def plan_text(answer: object) -> str:
    """Write what ``topoproxy takeover plan`` shows."""
    data = _map(answer)
    lines = [*_head(data), *_rows(data), *_list("Against it", data.get("conflicts"))]
    for step in (_map(step) for step in _items(data.get("steps"))):
        lines += _list(f"topoproxy takeover {_text(step.get('step'))}", step.get("does"))
    for target, said in _map(data.get("kubelet_settings")).items():
        lines += _list(f"kubelet's settings, to go on under {_text(target)}", said)
    lines += [*_list("Good to know", data.get("notes")), *_list("Next", data.get("next"), ordered=True)]
    return "\n".join(lines) + "\n"


def status_text(answer: object) -> str:
    """Write what ``topoproxy takeover status`` shows."""
    data = _map(answer)
    lines = list(_head(data))
    remaining, old = _items(data.get("left")), data.get("old")
    if data.get("stage") != "none" and isinstance(old, int):
        lines += ["", f"Old allocations: {len(remaining)} of {old} are left"]
        rows = [("CPUS", "CONTAINER")]
        rows += [(_text(row.get("cpus")), _text(row.get("container"))) for row in map(_map, remaining)]
        lines += table(rows) if remaining else []
    nothing = ["", "Nothing remains to be done."] if data.get("stage") == "finished" else []
    steps = list(_list("What remains to be done", data.get("next"), ordered=True)) or nothing
    return "\n".join([*lines, *_list("Good to know", data.get("notes")), *steps]) + "\n"


def done_text(answer: object) -> str:
    """Write what a step came to."""
    data = _map(answer)
    told = [f"{_text(words)}" for words in _items(data.get("told"))]
    return "\n".join([*told, *_list("What remains to be done", data.get("next"), ordered=True)]) + "\n"


def _head(data: Mapping[str, object]) -> Iterable[str]:
    kubelet, ours = _map(data.get("kubelet")), _map(data.get("ours"))
    since = data.get("since")
    when = f", since {_when(since)}" if isinstance(since, int | float) and since else ""
    target = f" (kubelet's policy: {_text(data.get('target'))})" if data.get("target") else ""
    yield f"takeover: {_text(data.get('stage')) or '?'}{target}{when}"
    runs = _items(kubelet.get("running"))
    yield f"kubelet:  {f'runs ({_text(runs[0])})' if runs else 'does not run'}"
    options = ", ".join(f"{name}={value}" for name, value in _map(kubelet.get("options")).items())
    words = [f"policy {_text(kubelet.get('policy')) or '?'}", options]
    words.append(f"keeps back CPUs {_text(kubelet.get('reserved'))}" if kubelet.get("reserved") else "")
    yield f"          CPU manager: {', '.join(word for word in words if word)}"
    problem = _text(kubelet.get("file_problem"))
    state = problem or f"for policy {_text(kubelet.get('file_policy'))}, checksum good"
    yield f"          {_text(kubelet.get('file'))}: {state}"
    configured = _text(ours.get("configured"))
    now = _text(ours.get("cpuManagerPolicy"))
    more = f" (configured: {configured})" if configured != now else ""
    yield f"ours:     cpuManagerPolicy {now}{more}"


def _rows(data: Mapping[str, object]) -> Iterable[str]:
    rows = [("CPUS", "IN FORCE", "STATE", "CONTAINER")]
    for row in map(_map, _items(data.get("allocations"))):
        static = " (static pod)" if row.get("from_file") else ""
        cells = (_text(row.get("cpus")), _text(row.get("in_force")) or "-", _text(row.get("state")))
        rows.append((*cells, f"{_text(row.get('container'))}{static}"))
    yield ""
    if len(rows) == 1:
        yield "kubelet's file gives CPUs to nobody."
        return
    yield f"What kubelet has given ({len(rows) - 1})"
    yield from table(rows)


def _list(title: str, value: object, *, ordered: bool = False) -> Iterable[str]:
    items = [_text(item) for item in _items(value)]
    if items:
        yield ""
        yield title
        for number, item in enumerate(items, 1):
            yield f"  {f'{number}.' if ordered else '-'} {item}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _map(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else []


def _text(value: object) -> str:
    """One line without control characters: what is shown came from pods."""
    return "" if value is None else "".join(c if c.isprintable() else " " for c in str(value))
