"""The tables of containers and owners, and the list of problems, on the status page.

Columns CPUS and MEMS show what the kernel has. Columns after them show the values that differ: DESIRED, if
topoproxy will apply them, or WOULD BE, if it only observes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from proxy.admin.status_sections import hook_problem
from proxy.observe.json_access import as_list, as_map, cut, one_line, table
from proxy.observe.value_text import duration_text

SHOWN = 2
"""How many of the containers that use an owner's CPUs are named in a row."""
_RELEASED = "released"
_IN_RELEASE = ("releasing", _RELEASED)


def is_released(data: Mapping[str, object]) -> bool:
    """Return whether nothing of the plan is in effect: the page then shows only what the kernel has."""
    return data.get("mode") == _RELEASED


def exclusive(data: Mapping[str, object]) -> Iterable[str]:
    """Write the owners of CPUs; nothing if there are none."""
    owners = [as_map(entry) for entry in as_list(data.get("exclusive"))]
    if not owners:
        return
    rows = []
    for entry in owners:
        name = "/".join(t for t in (one_line(entry.get("pod")), one_line(entry.get("container"))) if t)
        borrow = {True: "no", False: "yes"}.get(bool(entry.get("hard")), "") if "hard" in entry else ""
        others = _users(entry)
        desired, would = _differing(data, entry, ("",))
        rows.append(
            (
                cpus_or_dash(entry.get("cpus")),
                desired,
                would,
                name or one_line(entry.get("owner")),
                borrow,
                others,
            )
        )
    rows.sort(key=lambda row: row[3])
    yield ""
    yield "Exclusive CPUs"
    yield from table(_filled(("CPUS", "DESIRED", "WOULD BE", "OWNER", "BE CAN BORROW", "ALSO USED BY"), rows))


def _users(entry: Mapping[str, object]) -> str:
    """Name the others that can use an owner's CPUs."""
    refs, count = as_list(entry.get("also_used_by")), entry.get("also_used")
    more = count - len(refs[:SHOWN]) if isinstance(count, int) else 0
    return ", ".join(map(one_line, refs[:SHOWN])) + (f" and {more} more" if more > 0 else "")


def containers(data: Mapping[str, object], width: int) -> Iterable[str]:
    """Write the table of containers."""
    known = [as_map(entry) for entry in as_list(data.get("containers"))]
    yield ""
    if data.get("mode") == "passthrough":
        yield "Containers and pools are not known in mode passthrough."
        return
    yield f"Containers ({len(known)})" if known else "No containers."
    if not known:
        return
    known.sort(key=lambda entry: one_line(entry.get("ref")))
    columns = ("CONTAINER", "QOS", "POOL", "CPUS", "DESIRED", "WOULD BE", "MEMS", "PHASE", "ID")
    header, *lines = table(_filled(columns, [_row(data, entry) for entry in known]))
    yield header
    for entry, line in zip(known, lines, strict=True):
        yield line
        reason = one_line(entry.get("reason"))
        if reason:
            yield cut(f"    {'' if _is_applied(data, entry) else 'if enforced: '}{reason}", width)


def _row(data: Mapping[str, object], entry: Mapping[str, object]) -> tuple[str, ...]:
    pool = one_line(entry.get("pool"))
    desired, would = _differing(data, entry, (pool,))
    return (
        one_line(entry.get("ref")),
        one_line(entry.get("qos")),
        pool if _is_applied(data, entry) else "-",
        cpus_or_dash(entry.get("cpus")),
        desired,
        would,
        cpus_or_dash(entry.get("mems")),
        one_line(entry.get("phase")),
        one_line(entry.get("id"))[:13],
    )


def _is_applied(data: Mapping[str, object], entry: Mapping[str, object]) -> bool:
    """Return whether a row's plan is applied; an older daemon does not report this for each row."""
    applied = entry.get("applied")
    return applied if isinstance(applied, bool) else data.get("mode") not in ("observe", *_IN_RELEASE)


def _differing(
    data: Mapping[str, object], entry: Mapping[str, object], pool: Sequence[str]
) -> tuple[str, str]:
    """Return the text for DESIRED, if it differs from what the kernel has, and the text for WOULD BE."""
    planned, mems = one_line(entry.get("desired_cpus")), one_line(entry.get("desired_mems"))
    if not planned:
        return "", ""
    other_mems = f"mems {mems}" if mems and mems != one_line(entry.get("mems")) else ""
    if not _is_applied(data, entry):
        return "", " ".join(text for text in (*pool, planned, other_mems) if text)
    cpus_differ = planned != one_line(entry.get("cpus"))
    return " ".join(text for text in (planned if cpus_differ else "", other_mems) if text), ""


def _filled(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Return a table without those of the columns DESIRED, WOULD BE and ALSO USED BY that are empty."""
    optional = ("DESIRED", "WOULD BE", "ALSO USED BY")
    kept = [i for i, name in enumerate(columns) if name not in optional or any(row[i] for row in rows)]
    return [[row[i] for i in kept] for row in (columns, *rows)]


def problems(data: Mapping[str, object]) -> Iterable[str]:
    """Write failed checks, broken rules, and problems that were reported."""
    lines = [
        *_failed(data),
        *(f"RULE BROKEN: {one_line(entry)}" for entry in as_list(data.get("violations"))),
    ]
    hooks = [as_map(entry) for entry in as_list(as_map(data.get("hooks")).get("hooks"))]
    lines += [
        f"hook {one_line(entry.get('name')) or '?'}: {text}"
        for entry in hooks
        if (text := hook_problem(entry))
    ]
    for entry in map(as_map, as_list(as_map(data.get("enforcement")).get("problems"))):
        lines.append(f"cannot change pod {one_line(entry.get('pod'))}: {one_line(entry.get('reason'))}")
    for entry in map(as_map, as_list(data.get("problems"))):
        times = entry.get("count")
        notes = [f"{times} times" if isinstance(times, int) and times > 1 else "", _when(entry.get("last"))]
        more = ", ".join(note for note in notes if note)
        lines.append(f"{one_line(entry.get('what')) or '?'}{f' ({more})' if more else ''}")
    yield ""
    nothing = "No problems."
    if data.get("mode") == "passthrough":
        nothing = "No problems: in mode passthrough only the runtime's socket is checked."
    yield f"Problems ({len(lines)})" if lines else nothing
    yield from (f"  {line}" for line in lines)


def _failed(data: Mapping[str, object]) -> Iterable[str]:
    """Name the checks that fail, including those that an older daemon reports without reasons."""
    checks = [as_map(check) for check in as_list(data.get("checks"))]
    for check in checks:
        if check.get("ok") is False:
            message = one_line(check.get("reason")) or one_line(check.get("name")) or "?"
            yield f"NOT READY: {message}" if check.get("required") is True else message
    if not checks:
        if data.get("ready") is False:
            yield "NOT READY (the daemon gives no reason)"
        if as_map(data.get("runtime")).get("connected") is False:
            yield "NOT CONNECTED with the runtime (the daemon gives no reason)"


def cpus_or_dash(value: object) -> str:
    """Write a set; a dash if it is empty or not known."""
    return one_line(value) or "-"


def _when(value: object) -> str:
    """Format when a problem was last seen: a Unix time as an age, any other text unchanged."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"last {duration_text(max(0.0, time.time() - value))} ago"
    return f"last {one_line(value)}" if value else ""


MIB = 1 << 20
MEMORY_HEADER = ("CONTAINER", "DECIDED", "IN EFFECT", "NODE", "ANON", "CACHE", "HUGE", "")
MEMORY_KINDS = ("anon", "file", "huge")


def memory_rows(answer: object) -> list[tuple[str, ...]]:
    """Return the rows of a table, one for each container and NUMA node, after the header row.

    Args:
        answer: The answer to ``/memory``; missing parts are left out.
    """
    rows: list[tuple[str, ...]] = [MEMORY_HEADER]
    for entry in as_list(as_map(answer).get("containers")):
        if isinstance(entry, Mapping):
            rows += _rows(entry)
    return rows


def _rows(entry: Mapping[str, object]) -> list[tuple[str, ...]]:
    first = (one_line(entry.get("ref")), one_line(entry.get("decided")) or "-", one_line(entry.get("nodes")))
    if problem := one_line(entry.get("problem")):
        return [(*first, "-", "-", "-", "-", problem)]
    kinds = [_sizes(entry.get(kind)) for kind in MEMORY_KINDS]
    numbers = sorted({node for sizes in kinds for node in sizes}, key=lambda node: (len(node), node))
    rows: list[tuple[str, ...]] = []
    for node in numbers or ["-"]:
        cells = [_size(sizes.get(node, 0)) for sizes in kinds]
        rows.append(
            (*(first if not rows else ("", "", "")), node, *cells, "" if rows else memory_remark(entry))
        )
    return rows


def memory_remark(entry: Mapping[str, object]) -> str:
    """Describe as text whether the memory is where it should be."""
    firm, cache = entry.get("outside"), entry.get("outsideFile")
    if not isinstance(firm, int) or not isinstance(cache, int):
        return ""
    if not firm and not cache:
        return "all there"
    parts = [f"{_size(firm)} elsewhere"] if firm else []
    parts += [f"{_size(cache)} of page cache elsewhere, where it was read first"] if cache else []
    if firm and entry.get("migrates") is False:
        parts.append("the kernel does not move it (memory_migrate is 0)")
    return "; ".join(parts)


def _sizes(value: object) -> dict[str, int]:
    return {str(node): size for node, size in as_map(value).items() if isinstance(size, int)}


def _size(size: int) -> str:
    return "0" if not size else f"{size / MIB:.1f} MiB" if size >= MIB / 10 else f"{size} B"
