"""The checks of a node: whether topoproxy is ready for calls, and what else needs an operator.

A check that is *required* decides about readiness: ``topoproxy status`` exits with 1 while one fails, and
``/readyz`` answers 503. The others are listed among the problems of the status. Each check passes or has a
reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from proxy.executor.context import NodeContext
from proxy.executor.reconciler import Reconciler
from proxy.model.phrases import counted

OLD_S = 120.0
"""Seconds after which facts of the cluster that the agent has not confirmed are reported as old."""


class Check(Struct, frozen=True):
    """The result of a check.

    Attributes:
        name: A stable name.
        reason: Why the check fails; empty if it passes.
        required: Whether the node is ready only if it passes.
    """

    name: str
    reason: str = ""
    required: bool = False

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows."""
        return {"name": self.name, "ok": not self.reason, "reason": self.reason, "required": self.required}


def required_checks(context: NodeContext, reconciler: Reconciler) -> list[Check]:
    """Return the checks that decide whether the node is ready. They do no input or output."""
    stuck = context.health.stuck()
    state = "" if context.reconciled.is_set() else "the state has not been compared with the runtime yet"
    if state and reconciler.connected and reconciler.failure:
        state = f"{state}: {reconciler.failure}"
    runtime = "" if reconciler.connected else reconciler.failure or "the runtime has not answered yet"
    workers = "; ".join(f"the {name} worker has been at one job for {s:.0f} s" for name, s in stuck.items())
    return [Check("runtime", runtime, True), Check("state", state, True), Check("workers", workers, True)]


def other_checks(page: Mapping[str, object]) -> Iterator[Check]:
    """Yield the checks that do not decide about readiness.

    Args:
        page: The status of the node as plain data (``status_data``).
    """
    rows = _rows(page.get("containers"))
    off = [str(row["ref"]) for row in rows if row["differs"]]
    yield Check(
        "cpusets", f"{counted(len(off), 'container')} without the desired cpuset: {_few(off)}" if off else ""
    )
    groups = page.get("cgroups")
    systemd = groups.get("systemd") if isinstance(groups, Mapping) else None
    away = isinstance(systemd, Mapping) and systemd.get("connected") is False
    yield Check("systemd", "systemd does not answer on D-Bus: unit properties are not set" if away else "")
    short = [str(row["container"]) for row in _rows(page.get("shortfalls"))]
    yield Check(
        "shortfalls",
        f"{counted(len(short), 'container')} with less than promised: {_few(short)}" if short else "",
    )
    yield Check("cluster", "; ".join(_cluster_problems(page)))


def _cluster_problems(page: Mapping[str, object]) -> Iterator[str]:
    """Yield which files of the cluster agent cannot be used, and which may be outdated."""
    old: dict[str, float] = {}
    for row in _rows(page.get("cluster")):
        age = row["confirmed_s"]
        if row["problem"]:
            yield str(row["problem"])
        elif isinstance(age, int | float) and age > OLD_S:
            old[str(row["name"])] = age
    if old:
        yield f"the cluster agent has not confirmed its {', '.join(old)} for {max(old.values()):.0f} s"


def _rows(value: object) -> list[Mapping[str, object]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list | tuple) else []


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
