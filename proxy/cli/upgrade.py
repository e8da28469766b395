"""``topoproxy upgrade``: shows what another version would change here, and replaces the running one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from proxy.cli.admin_query import config_for, config_or_defaults, query_options
from proxy.cli.settings import PATH, read_config, refuse_settings
from proxy.model import schema_ids
from proxy.model.errors import InputError, PermissionDeniedError, UsageError

CHECK_FAILED = 1
REPLACE_S = 600.0
"""Seconds that replacing the daemon may take, with the calls that it waits for."""


@click.command("upgrade")
@click.option("--check", "compare", is_flag=True, help="Compare the running version with this one.")
@click.option("--now", is_flag=True, help="Compare, then replace the running daemon by this version.")
@click.option("--describe", is_flag=True, help="Print the interfaces of this version as JSON, for --from.")
@click.option(
    "--from",
    "described",
    type=PATH,
    metavar="FILE",
    help="Compare with what upgrade --describe of another version printed; the daemon is not queried.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@query_options()
def upgrade(
    compare: bool,
    now: bool,
    describe: bool,
    described: Path | None,
    as_json: bool,
    file: Path | None,
    admin: str | None,
    timeout: float,
) -> None:
    """Show what would change if this version ran in place of the running one, or replace it.

    upgrade --check: run the new version's program before it is installed over the old one, or before the
    service is restarted. It changes nothing. It compares the keys of the configuration and their values, the
    format of the ledger both ways, units, JSON answers and metrics. It loads each hook file in a child
    process, and calls no hook.

    upgrade --now: the running daemon starts the program that is installed now, hands the socket and the
    state of the node over to it, and finishes its own calls in flight. No call fails. While a create, start
    or update hangs at the runtime, new calls wait for it for 5 seconds at most. If the new process
    cannot start, the running one continues. If it runs but is not ready after 30 seconds, for example because
    the runtime is down, the reason is printed. If a check of --check fails, nothing is changed.

    Ends with 0 when no check fails (warnings do not count) and, with --now, the daemon is replaced; with 1
    when a check fails, or the new process did not start; with 69 when the daemon does not answer; with 77
    without permission for its socket or the ledger. --describe ends with 78 when the configuration is refused
    and with 77 when it may not be read, and prints nothing then.
    """
    from proxy.cli.doctor import finding_lines
    from proxy.doctor.checks import CheckResult
    from proxy.public_interfaces import interface
    from proxy.upgrade.checks import examine
    from proxy.upgrade.gather import gather

    if compare + describe + now != 1:
        which = "only one of " if compare + describe + now else ""
        raise UsageError(f"cannot upgrade: specify {which}--check, --now or --describe")
    if describe:
        refuse_settings({"admin": admin}, "describe this version", "with --describe: no daemon is queried")
        if described is not None:
            raise UsageError("cannot describe this version: --from has no effect with --describe")
        click.echo(json.dumps(interface(read_config(file, {})), indent=1, ensure_ascii=False))
        return
    if described is not None and not now:
        refuse_settings({"admin": admin}, "compare", "with --from: the daemon is not queried")
    config, refused = config_or_defaults(file, None)
    socket = config.admin_path if admin is None else config_for(file, admin).admin_path
    findings = examine(
        gather(config, refused, socket, timeout, None if described is None else _read(described))
    )
    failed = sum(finding.result is CheckResult.FAIL for finding in findings)
    if as_json:
        rows = [finding.data() for finding in findings]
        page = {"schema": schema_ids.UPGRADE, "ok": not failed, "checks": rows}
        click.echo(json.dumps(page, indent=1, ensure_ascii=False))
    elif not now or failed:
        click.echo("\n".join(finding_lines(findings, failed)))
    if now and not failed:
        from proxy.upgrade.replacement import replace_daemon

        new = replace_daemon(socket, REPLACE_S, after=config.admin_path, answer_s=timeout)
        message = f"process {new.pid} has replaced the daemon"
        click.echo(f"{message}; calls that were in flight finish in the former process", err=as_json)
        if new.reason:
            click.echo(f"note: it is not ready yet: {new.reason} (topoproxy status)", err=True)
    if failed:
        click.get_current_context().exit(CHECK_FAILED)


def _read(path: Path) -> dict[str, object]:
    from proxy.model.strict_json import StrictJsonError, read_json
    from proxy.open_file import open_file
    from proxy.upgrade.description import description_fault

    try:
        with open_file(path) as stream:
            description = read_json(stream.read().decode())
    except OSError as error:
        kind = PermissionDeniedError if isinstance(error, PermissionError) else InputError
        raise kind(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: byte {error.start} is not UTF-8") from error
    except RecursionError:
        raise InputError(f"cannot read {path}: it is nested too deeply") from None
    except StrictJsonError as error:
        raise InputError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise InputError(f"cannot read {path}: not JSON: {error}") from error
    if not isinstance(description, dict) or description.get("schema") != schema_ids.INTERFACE:
        raise InputError(f"cannot use {path}: it is not what topoproxy upgrade --describe prints")
    if not isinstance(description.get("version"), str):
        raise InputError(f"cannot use {path}: it has no version, which topoproxy upgrade --describe prints")
    if fault := description_fault(description):
        raise InputError(f"cannot use {path}: it is not what topoproxy upgrade --describe prints: {fault}")
    return description
