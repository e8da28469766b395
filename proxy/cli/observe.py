"""``topoproxy observe``: shows what enforcing would change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.cli.exit_codes import epilog


@click.group()
def observe() -> None:
    """Show what enforcing would change on the node; nothing is changed."""


@observe.command(epilog=epilog("observe report"))
@query_options(timeout=10.0)
@click.option("--all", "everything", is_flag=True, help="List containers that would not change, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON (docs/json.md).")
def report(file: Path | None, admin: str | None, everything: bool, as_json: bool, timeout: float) -> None:
    """Compare the plan with the cpusets that the kernel has now.

    The report shows what applying the plan to all pods would do: which containers it would pin to exclusive
    CPUs or move to other CPUs, which CFS quotas it would remove, and which creates it would refuse. If the
    plan is applied already, a difference is drift, which is repaired.

    Ends with 69 when the daemon does not answer.
    """
    from proxy.observe.plan_report_text import render_plan_report

    answer = query_daemon(config_for(file, admin), "/observe/report", timeout)
    if as_json:
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    click.echo(render_plan_report(answer, width, everything=everything), nl=False)
