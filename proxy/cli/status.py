"""``topoproxy status``: ask the running daemon."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from proxy.admin.status_text import render
from proxy.cli.admin_query import ask_daemon, asking_options, config_for
from proxy.config import Config
from proxy.model.errors import UsageError
from proxy.observe.json_access import table


@click.command()
@asking_options()
@click.option("--cgroups", is_flag=True, help="Show what the kernel's cpusets say, group by group, too.")
@click.option("--memory", is_flag=True, help="Show on which NUMA nodes the memory of containers is, instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")
@click.option("--metrics", is_flag=True, help="Print its numbers as Prometheus reads them, and nothing else.")
def status(
    file: Path | None,
    admin: str | None,
    cgroups: bool,
    memory: bool,
    as_json: bool,
    metrics: bool,
    timeout: float,
) -> None:
    """Show what the running proxy does: pools, owners of exclusive CPUs, containers, problems.

    With --memory: where the memory of each container is, by the kernel's account, and how much of it is not
    on the nodes that were decided (ANON with locked memory, CACHE of files, HUGE pages).

    Ends with 69 when the daemon does not answer.
    """
    route = _route(memory=memory, metrics=metrics, cgroups=cgroups, as_json=as_json)
    config = config_for(file, admin)
    answer = ask_daemon(config, route, timeout)
    if metrics:
        click.echo(answer, nl=False)
        return
    if memory:
        from proxy.admin.memory import memory_rows

        if not as_json:
            click.echo("\n".join(table(memory_rows(answer))))
            return
    groups = _groups(config) if cgroups else []
    if as_json:
        if cgroups and isinstance(answer, dict):
            answer["cpusets"] = groups
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
    else:
        click.echo(render(answer, shutil.get_terminal_size((120, 24)).columns), nl=False)
        if cgroups:
            rows = [("CGROUP", "CPUS", "MEMS"), *((g["cgroup"], g["cpus"], g["mems"]) for g in groups)]
            click.echo("\n".join(["", *table(rows)]))


def _route(*, memory: bool, metrics: bool, cgroups: bool, as_json: bool) -> str:
    """Choose what is asked for.

    Raises:
        UsageError: Options were given of which one would be ignored.
    """
    others = [f"--{name}" for name, on in (("memory", memory), ("cgroups", cgroups), ("json", as_json)) if on]
    if metrics and others:
        raise UsageError(
            f"cannot show {' and '.join(others)} in numbers for Prometheus: leave --metrics or the rest away"
        )
    if memory and cgroups:
        raise UsageError("cannot show cpusets beside memory: leave --memory or --cgroups away")
    return "/metrics" if metrics else "/memory" if memory else "/status"


def _groups(config: Config) -> list[dict[str, str]]:
    """Read all groups below the root: what they may use in effect."""
    from proxy.backends.cgroup.cpuset import open_cgroups
    from proxy.backends.cgroup.survey import survey

    return [
        {"cgroup": path, "cpus": str(value.effective_cpus), "mems": str(value.effective_mems)}
        for path, value in survey(open_cgroups(config.cgroup_root)).items()
    ]
