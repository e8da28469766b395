"""``topoproxy enforce``: shows how far the plan is applied to the pods of the node; pauses and resumes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.model.phrases import counted
from proxy.observe.json_access import as_list, as_map, one_line

json_option = click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")


@click.group()
def enforce() -> None:
    """Show and pause how the plan is applied to running pods.

    The settings mode and enforce determine to which pods the plan is applied. If they change on a running
    node, the running pods are changed in steps. To reverse the changes, lower enforce.percent or set mode to
    observe, and run topoproxy reload: the pods get back the settings that they would have without topoproxy.
    """


@enforce.command(short_help="Show to which pods the plan is applied, and how many remain.")
@query_options()
@json_option
def status(file: Path | None, admin: str | None, timeout: float, as_json: bool) -> None:
    """Show to which pods the plan is applied, and how many are still to be changed.

    Ends with 0; 69 when the daemon does not answer, 77 without permission.
    """
    _show(file, admin, timeout, "/enforce", as_json=as_json, act=False)


@enforce.command(short_help="Change no further running pods.")
@query_options()
@json_option
def pause(file: Path | None, admin: str | None, timeout: float, as_json: bool) -> None:
    """Change no further running pods. The current step is finished, and the pause survives restarts.

    Ends with 0; 65 when the node is released, 69 when the daemon does not answer, 77 without permission.
    """
    _show(file, admin, timeout, "/enforce/pause", as_json=as_json)


@enforce.command()
@query_options()
@json_option
def resume(file: Path | None, admin: str | None, timeout: float, as_json: bool) -> None:
    """Continue to change running pods.

    Ends with 0; 65 when the node is released, 69 when the daemon does not answer, 77 without permission.
    """
    _show(file, admin, timeout, "/enforce/resume", as_json=as_json)


def _show(
    file: Path | None, admin: str | None, timeout: float, route: str, *, as_json: bool, act: bool = True
) -> None:
    page = as_map(query_daemon(config_for(file, admin), route, timeout, act=act))
    click.echo(json.dumps(page, indent=1, ensure_ascii=False) if as_json else "\n".join(_lines(page)))


def _lines(page: Mapping[str, object]) -> Iterator[str]:
    pods, selection = as_map(page.get("pods")), as_map(page.get("selection"))
    mode, enforces = one_line(page.get("mode")), page.get("mode") == "enforce"
    yield f"mode {mode}{', paused' if page.get('paused') is True else ''}"
    yield f"selected: {', '.join(_selected(selection)) if enforces else f'none in mode {mode}'}"
    yield f"enforced: {_pods(pods.get('enforced'))}"
    observed = _containers(
        page.get("observedContainers"), ", which may use the CPUs of owners" if enforces else ""
    )
    yield f"observed: {_pods(pods.get('observed'))}{observed}"
    for key, what in (
        ("toEnforce", "still to be enforced"),
        ("toGiveBack", "still to be given back"),
        ("inStep", "being changed now"),
    ):
        if pods.get(key):
            yield f"{what}: {_pods(pods.get(key))}"
    for row in map(as_map, as_list(page.get("problems"))):
        yield f"problem: {one_line(row.get('pod'))}: {one_line(row.get('reason'))}"


def _pods(count: object) -> str:
    return counted(count, "pod") if isinstance(count, int) else one_line(count)


def _containers(count: object, remark: str) -> str:
    if not isinstance(count, int) or not count:
        return ""
    return f" with {counted(count, 'container')}{remark}"


def _selected(selection: Mapping[str, object]) -> Iterator[str]:
    names = ", ".join(one_line(name) for name in as_list(selection.get("namespaces")))
    yield "all namespaces" if names == "*" else f"namespaces {names or 'none'}"
    labels = [f"{key}={one_line(value)}" for key, value in as_map(selection.get("matchLabels")).items()]
    for expression in map(as_map, as_list(selection.get("matchExpressions"))):
        values = ", ".join(one_line(value) for value in as_list(expression.get("values")))
        key, operator = one_line(expression.get("key")), one_line(expression.get("operator"))
        labels.append(f"{key} {operator} {values}".rstrip())
    if labels:
        yield f"labels {' and '.join(labels)}"
    yield f"{one_line(selection.get('percent'))} %"
