"""``topoproxy status``: shows the status of the running daemon."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.admin.client import query_admin
from proxy.admin.status_text import render
from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.model.errors import UnavailableError, UsageError
from proxy.observe.json_access import as_list, as_map, one_line, table

if TYPE_CHECKING:
    from proxy.config import Config

NOT_READY = 1
"""The exit status if the daemon is not ready."""
POLL_S = 0.2


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Read a duration such as ``30s``."""
    try:
        from proxy.config.kinds import parse_duration

        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


@click.command()
@query_options()
@click.option(
    "--wait-ready",
    callback=_seconds,
    is_flag=False,
    flag_value="30s",
    metavar="[=DURATION]",
    help="Wait until the daemon answers and is ready, for at most 30s or the duration.",
)
@click.option("--cgroups", is_flag=True, help="Also show the cpuset that each cgroup has in the kernel.")
@click.option("--memory", is_flag=True, help="Show on which NUMA nodes the memory of containers is, instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")
@click.option(
    "--metrics", is_flag=True, help="Print the metrics in the text format of Prometheus, and nothing else."
)
def status(
    file: Path | None,
    admin: str | None,
    wait_ready: float | None,
    cgroups: bool,
    memory: bool,
    as_json: bool,
    metrics: bool,
    timeout: float,
) -> None:
    """Show what the running proxy does: pools, owners of exclusive CPUs, containers, problems.

    CPUS and MEMS are the values that the kernel has. If the plan's values differ, further columns show them:
    DESIRED, or WOULD BE if topoproxy only observes.

    With --memory, the page shows on which NUMA nodes the kernel counts the memory of each container, and how
    much of it is not on the assigned nodes (ANON with locked memory, CACHE of files, HUGE pages).

    Ends with 0 when the daemon is ready, 1 when it is not (the reasons are under Problems), 69 when it does
    not answer. With --memory and --metrics it ends with 0 whenever there is an answer.
    """
    route = _route(memory=memory, metrics=metrics, cgroups=cgroups, as_json=as_json)
    config = config_for(file, admin)
    if wait_ready is not None:
        _wait(config, wait_ready)
    answer = query_daemon(config, route, timeout)
    if metrics:
        click.echo(answer, nl=False)
        return
    if memory:
        from proxy.admin.status_tables import memory_rows

        rows = "\n".join(table(memory_rows(answer)))
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False) if as_json else rows)
        return
    _show(answer, _groups(config, answer) if cgroups else None, as_json=as_json)
    if isinstance(answer, dict) and answer.get("ready") is False:
        click.get_current_context().exit(NOT_READY)


def _wait(config: Config, seconds: float) -> None:
    """Wait until the daemon answers that it is ready, or the time has passed."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(UnavailableError):
            query_admin(config.admin_path, "/readyz", max(POLL_S, end - time.monotonic()))
            return
        if time.monotonic() + POLL_S > end:
            return
        time.sleep(POLL_S)


def _show(answer: object, groups: list[dict[str, str]] | None, *, as_json: bool) -> None:
    if as_json:
        if groups is not None and isinstance(answer, dict):
            answer["cpusets"] = groups
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
        return
    click.echo(render(answer, shutil.get_terminal_size((120, 24)).columns), nl=False)
    if groups is not None:
        columns = ("cgroup", "cpus", "mems", "pod", "container")
        rows = [tuple(map(str.upper, columns)), *(tuple(group[name] for name in columns) for group in groups)]
        click.echo("\n".join(["", *table(rows)]))


def _route(*, memory: bool, metrics: bool, cgroups: bool, as_json: bool) -> str:
    """Return the route to request.

    Raises:
        UsageError: One of the options would be ignored.
    """
    others = [f"--{name}" for name, on in (("memory", memory), ("cgroups", cgroups), ("json", as_json)) if on]
    if metrics and others:
        raise UsageError(f"cannot show {' and '.join(others)} with --metrics: use one of them")
    if memory and cgroups:
        raise UsageError("cannot show cpusets and memory together: use --memory or --cgroups")
    return "/metrics" if metrics else "/memory" if memory else "/status"


def _groups(config: Config, answer: object) -> list[dict[str, str]]:
    """Read all cgroups below the root: the CPUs and memory nodes in effect, and the container of each."""
    from proxy.backends.cgroup.cgroup_listing import PodAndContainerNames, list_cpusets
    from proxy.backends.cgroup.cpuset import open_cgroups

    containers: dict[str, str] = {}
    pods: dict[str, str] = {}
    for row in map(as_map, as_list(as_map(answer).get("containers"))):
        pod, _, name = one_line(row.get("ref")).rpartition("/")
        containers[one_line(row.get("sandbox"))] = "(sandbox)"
        containers[one_line(row.get("id"))] = name
        pods[one_line(row.get("pod_uid"))] = pod
    containers.pop("", None)
    pods.pop("", None)
    names = PodAndContainerNames(containers, pods)
    rows = []
    for path, value in list_cpusets(open_cgroups(config.cgroup_root)).items():
        pod, name = names.of_group(path)
        cpus, mems = str(value.effective_cpus), str(value.effective_mems)
        rows.append({"cgroup": path, "cpus": cpus, "mems": mems, "pod": pod, "container": name})
    return rows
