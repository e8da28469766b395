"""Formats the results of ``topoproxy hooks run`` as lines and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from proxy.cli.hooks.dry_run import DryRunResult, EventResult, fields_of
from proxy.hooks.engine.errors import subject
from proxy.hooks.engine.stats import HookReport
from proxy.hooks.serialize import event_to, outcome_to
from proxy.hooks.status_data import hooks_page
from proxy.model import schema_ids
from proxy.observe.json_access import one_line, table


def run_data(done: DryRunResult) -> dict[str, Any]:
    """Return what hooks wanted as plain data."""
    requested = [{"event": event_to(one.event), "outcome": outcome_to(one.outcome)} for one in done.asked]
    return {"schema": schema_ids.HOOKS_RUN, "asked": requested, "hooks": hooks_page((), done.reports)}


def run_lines(done: DryRunResult) -> Iterator[str]:
    """Yield what hooks wanted, for people."""
    for one in done.asked:
        yield from _of_event(one)
        for report in one.failed:
            yield from _failure(report)
    # what failed at configure or shutdown was no event's
    shown = {report.name for one in done.asked for report in one.failed}
    for report in done.failed:
        if report.name not in shown:
            yield from _failure(report)


def _of_event(one: EventResult) -> Iterator[str]:
    about = one_line(subject(one.event))
    title = f"{one.event.NAME}, {about}" if about.strip("/") else one.event.NAME
    fields = list(fields_of(one.outcome.adjustment))
    if one.outcome.refusal:
        yield f"{title}: refused"
        yield f"  {one_line(one.outcome.refusal)}"
    elif not one.handled:
        yield f"{title}: no hook handles it"
    elif not fields:
        yield f"{title}: nothing to change"
    else:
        yield f"{title}:"
        rows = [(one_line(name), one_line(value), one.outcome.owners.get(name, "")) for name, value in fields]
        yield from (f"  {line}" for line in table([("FIELD", "VALUE", "HOOK"), *rows]))


def _failure(report: HookReport) -> Iterator[str]:
    yield f"FAILED {report.name} (policy {report.policy}): {one_line(report.last_error)}"
    yield from (f"  {one_line(line)}" for line in report.last_trace.splitlines())
