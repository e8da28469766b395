"""Renders the answer to ``/observe/report`` as text for the terminal.

The answer may come from an older or a newer daemon, so any part may be missing or have another type; such a
part is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proxy.model.freshness import STALE_S
from proxy.model.phrases import counted
from proxy.observe.json_access import as_list, as_map, one_line, table
from proxy.observe.sentences import wrap
from proxy.observe.value_text import clean, duration_text

_TITLE = ("WOULD", "CONTAINER", "POOL", "CPUS NOW", "CPUS THEN", "QUOTA REMOVED")
_CHANGES = (
    ("pins", "pin", "container", " to exclusive CPUs"),
    ("moves", "move", "container", " to other CPUs"),
    ("cfs_quotas", "remove", "CFS quota", ""),
    ("memory_nodes", "bind", "container", " to other memory nodes, once created again"),
    ("rejections", "refuse", "create", " like those below"),
)
"""For each line: the key of its number, the verb, the noun that is counted, and the rest of the sentence."""
_ENFORCE = "enforce"
_IN_RELEASE = ("releasing", "released")


def render_plan_report(answer: object, width: int = 100, *, everything: bool = False) -> str:
    """Return the report as text.

    Args:
        answer: The answer to ``/observe/report``.
        width: Columns of the terminal.
        everything: Whether to list containers that would not change.
    """
    data = as_map(answer)
    sums = {key: n for key, n in as_map(data.get("sums")).items() if isinstance(n, int)}
    unread = list(_unread(as_map(data.get("kernel"))))
    if data.get("compared") is False:
        unread.insert(0, "The state has not been compared with the runtime yet: containers may be missing.")
    lines = [*_summary(one_line(data.get("mode")), sums, is_known=not unread), *unread]
    lines += _containers(data, everything=everything)
    lines += _memory(data)
    lines += _rejections(data, width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _summary(mode: str, sums: Mapping[str, int], *, is_known: bool) -> Iterable[str]:
    """Yield the changes that would be made; "nothing" only if all cpusets are known."""
    total, applied = sums.get("containers", 0), sums.get("applied", 0)
    yield f"Mode {mode}: the plan is applied to {applied} of {counted(total, 'running container')}."
    if drift := sums.get("drift", 0):
        yield f"{counted(drift, 'container')} of these without the planned CPUs in the kernel (drift)."
    would = [
        f"  {verb:<7} {counted(n, thing)}{more}"
        for key, verb, thing, more in _CHANGES
        if (n := sums.get(key))
    ]
    step = (
        "topoproxy release --undo"
        if mode in _IN_RELEASE
        else "Enforcing all pods"
        if applied
        else "Enforcing"
    )
    if would:
        yield f"{step} would:"
        yield from would
        same = sums.get("unchanged", 0)
        yield f"{counted(same, 'container')} would stay as {'it is' if same == 1 else 'they are'}."
    elif not is_known:
        yield "No changes detected so far."
    elif applied < total or mode != _ENFORCE:
        yield f"{step} would change nothing."
    elif not drift:
        yield "Nothing would change: all containers have the planned CPUs in the kernel."


def _unread(kernel: Mapping[str, object]) -> Iterable[str]:
    """Yield notes on cpusets that may differ from those that the kernel has now."""
    age, number = kernel.get("age_s", 0.0), kernel.get("not_read")
    if age is None:
        yield "The kernel has not answered: no cpuset was read."
    elif isinstance(age, int | float) and age > STALE_S:
        yield f"The cpusets are those of {duration_text(age)} ago: the kernel does not answer."
    if age is not None and isinstance(number, int) and number:
        yield f"The cpusets of {counted(number, 'container')} could not be read."


def _rows(data: Mapping[str, object]) -> Iterable[tuple[str, Mapping[str, object], Mapping[str, object]]]:
    for pod in map(as_map, as_list(data.get("pods"))):
        for container in map(as_map, as_list(pod.get("containers"))):
            yield f"{one_line(pod.get('pod'))}/{one_line(container.get('container'))}", pod, container


def _containers(data: Mapping[str, object], *, everything: bool) -> Iterable[str]:
    rows: list[Sequence[str]] = [_TITLE]
    for name, pod, container in _rows(data):
        change, quota = one_line(container.get("change")), _quota(pod, container)
        if not (everything or change or quota):
            continue
        same = "" if change else "as now"
        rows.append(
            (
                change or "-",
                name,
                one_line(container.get("pool")),
                one_line(container.get("cpus")) or "?",
                same or one_line(container.get("desired_cpus")),
                quota or "-",
            )
        )
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _quota(pod: Mapping[str, object], container: Mapping[str, object]) -> str:
    own = f"{one_line(container.get('cfs_quota_us'))} us" if container.get("removes_cfs_quota") else ""
    of_pod = f"pod {one_line(pod.get('cfs_quota_us'))} us" if pod.get("removes_cfs_quota") else ""
    return ", ".join(text for text in (own, of_pod) if text) if container.get("pool") == "own" else ""


def _memory(data: Mapping[str, object]) -> Iterable[str]:
    rows: list[Sequence[str]] = [("CONTAINER", "MEMORY NODES NOW", "ONCE CREATED AGAIN")]
    rows += [
        (name, one_line(entry.get("mems")), one_line(entry.get("desired_mems")))
        for name, _, entry in _rows(data)
        if entry.get("rebinds_memory")
    ]
    if len(rows) > 1:
        yield ""
        yield from table(rows)


def _rejections(data: Mapping[str, object], width: int) -> Iterable[str]:
    entries = [as_map(entry) for entry in as_list(data.get("rejections"))]
    if not entries:
        return
    yield ""
    yield "Would be rejected"
    for entry in entries:
        names = (one_line(entry.get("pod")), one_line(entry.get("container")))
        outcome = "it runs" if entry.get("exists") else "gone"
        why = one_line(entry.get("message")) or one_line(entry.get("reason"))
        yield from wrap(clean(f"{'/'.join(name for name in names if name)} ({outcome}): {why}"), width, "  ")
