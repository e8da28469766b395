"""Repaired cpusets and write conflicts, as log lines, problems and counters, and as ``status`` shows them."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.engine.likely_writer import ADVICE, WriterKind
from proxy.engine.write_conflicts import (
    QUIET_S,
    ReportDrift,
    WriteConflict,
    WriteConflicts,
    is_urgent,
)
from proxy.executor.context import NodeContext
from proxy.model.workload import LIVE
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

WRITE_CONFLICT = "another program keeps writing the cpuset of a container"
MANY_CONFLICTS = "another program keeps writing the cpusets of many containers"
MAX_NAMED = 5
"""How many of a kind are named one by one; the others are only counted."""


def report_repairs(context: NodeContext, report: ReportDrift) -> None:
    """Count repairs by their writer, and log those that do not belong to a conflict."""
    state, telemetry = context.state, context.telemetry
    for repairs, writer in report.repairs.values():
        telemetry.count(metrics.DRIFT_REPAIRED, repairs.times, author=writer)
    repaired = [i for i in report.repairs if i in state.containers and i not in report.contested]
    for container_id in repaired[:MAX_NAMED]:
        container, (repairs, writer) = state.containers[container_id], report.repairs[container_id]
        telemetry.warning(
            "drift: another program wrote a cpuset: put back",
            **subject(container),
            cpus=state.desired_cpus(container),
            found=None if repairs.kernel_cpus is None else str(repairs.kernel_cpus) or "none",
            probably=None if writer is WriterKind.UNKNOWN else writer,
        )
    if len(repaired) > MAX_NAMED:
        telemetry.warning(
            "drift: another program wrote more cpusets: put back", count=len(repaired) - MAX_NAMED
        )


def report_conflicts(context: NodeContext, began: Mapping[str, WriteConflict]) -> None:
    """Report conflicts that have begun."""
    state, telemetry = context.state, context.telemetry
    telemetry.count(metrics.WRITE_CONFLICTS, len(began))
    conflicting = [(state.containers[i], conflict) for i, conflict in began.items() if i in state.containers]
    for container, conflict in conflicting[:MAX_NAMED]:
        writer = conflict.writer or WriterKind.UNKNOWN
        urgent = is_urgent(state, container.id, conflict.kernel_cpus)
        telemetry.problem(
            WRITE_CONFLICT,
            **subject(container),
            cpus=state.desired_cpus(container),
            found=str(conflict.kernel_cpus) or None,
            probably=None if writer is WriterKind.UNKNOWN else writer,
            times=conflict.times,
            seconds=round(max(conflict.repaired - conflict.began, 0.1), 1),
            putBack="each second, as exclusive CPUs are at stake" if urgent else "less and less often",
            advice=ADVICE[writer],
        )
    if len(conflicting) > MAX_NAMED:
        telemetry.problem(MANY_CONFLICTS)


def report_end(context: NodeContext, container_id: str, conflict: WriteConflict) -> None:
    """Report that a conflict is over; if the container has ended, only the problem is resolved."""
    container = context.state.containers.get(container_id)
    context.telemetry.resolved(WRITE_CONFLICT, containerID=container_id)
    if not context.state.facts.drift.conflicts:
        context.telemetry.resolved(MANY_CONFLICTS)
    if container is not None and container.phase in LIVE:
        context.telemetry.event(
            "drift: no other program writes the cpuset any more",
            **subject(container),
            times=conflict.times,
            seconds=round(conflict.repaired - conflict.began),
            quiet=QUIET_S,
        )


def conflicts_page(context: NodeContext, known: WriteConflicts) -> list[dict[str, object]]:
    """Return the conflicts as ``topoproxy status`` shows them."""
    state, now = context.state, context.clock()
    containers = state.containers
    return [
        {
            "container": containers[i].ref,
            "id": i,
            "by": str(conflict.writer or WriterKind.UNKNOWN),
            "cpus": str(state.desired_cpus(containers[i])),
            "found": str(conflict.kernel_cpus),
            "times": conflict.times,
            "seconds": round(now - conflict.began, 1),
            "next_s": round(
                max(0.0, conflict.due(urgent=is_urgent(state, i, conflict.kernel_cpus)) - now), 1
            ),
        }
        for i, conflict in sorted(known.conflicts.items())
        if i in containers
    ]
