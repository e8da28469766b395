"""``topoproxy doctor``: checks the node, and shows what prevents it from working properly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.admin_query import config_or_defaults, query_options
from proxy.model import schema_ids
from proxy.model.errors import UsageError
from proxy.model.phrases import counted

if TYPE_CHECKING:
    from proxy.doctor.checks import Finding

BROKEN = 1


@click.command("doctor")
@query_options()
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="CHECK",
    help="Skip a check, by its id; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(
    file: Path | None, admin: str | None, timeout: float, ignored: tuple[str, ...], as_json: bool
) -> None:
    """Check this node: one line per check, and what to do if one fails.

    Checks the configuration, the machine, cgroups, the runtime, kubelet's endpoint, the daemon, the ledger,
    hook files and sockets. It changes nothing, and works without the daemon too. Run it as root: another user
    cannot read everything.

    Ends with 0 when no check fails (warnings do not count), and with 1 when one does.
    """
    from proxy.doctor.checks import CHECKS, CheckResult, examine
    from proxy.doctor.gather import gather

    if unknown := [name for name in ignored if name not in CHECKS]:
        raise UsageError(
            f"cannot ignore {', '.join(unknown)}: there is no such check (there are: {', '.join(CHECKS)})"
        )
    config, refused = config_or_defaults(file, admin)
    findings = examine(gather(config, refused, timeout), ignored)
    failed = sum(finding.result is CheckResult.FAIL for finding in findings)
    if as_json:
        click.echo(json.dumps(_page(findings, failed), indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(finding_lines(findings, failed)))
    if failed:
        click.get_current_context().exit(BROKEN)


def _page(findings: Sequence[Finding], failed: int) -> dict[str, object]:
    return {"schema": schema_ids.DOCTOR, "ok": not failed, "checks": [finding.data() for finding in findings]}


def finding_lines(findings: Sequence[Finding], failed: int) -> Iterable[str]:
    """Write findings: a line for each, its advice below it, and their number."""
    from proxy.doctor.checks import CheckResult
    from proxy.observe.json_access import one_line

    shown = {CheckResult.WARN: "WARN", CheckResult.FAIL: "FAIL"}
    width = max(len(finding.id) for finding in findings)
    for finding in findings:
        result = shown.get(finding.result, finding.result.value)
        yield f"{result:4}  {finding.id:{width}}  {one_line(finding.text)}"
        if finding.advice:
            yield f"{'':{width + 8}}advice: {finding.advice}"
    warned = sum(finding.result is CheckResult.WARN for finding in findings)
    yield ""
    yield (
        f"{counted(len(findings), 'check')}: {failed} failed, {warned} with a warning"
        if failed or warned
        else f"{counted(len(findings), 'check')}: none failed"
    )
