"""``topoproxy takeover``: takes a node over from kubelet's static CPU manager, step by step.

The daemon may be of another version, so the text leaves out the parts that its answer lacks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.model.errors import TopoproxyError
from proxy.observe.json_access import as_list, as_map, one_line, table

ACTION_S = 60.0
ANSWER_S = 10.0


def plan_text(answer: object) -> str:
    """Write the output of ``topoproxy takeover plan``."""
    data = as_map(answer)
    lines = [*_head(data), *_rows(data), *_list("Obstacles", data.get("conflicts"))]
    for step in (as_map(step) for step in as_list(data.get("steps"))):
        lines += _list(f"topoproxy takeover {one_line(step.get('step'))}", step.get("does"))
    for target, settings in as_map(data.get("kubelet_settings")).items():
        lines += _list(f"kubelet's settings, to continue under {one_line(target)}", settings)
    lines += [*_list("Notes", data.get("notes")), *_list("Next", data.get("next"), ordered=True)]
    return "\n".join(lines) + "\n"


def status_text(answer: object) -> str:
    """Write the output of ``topoproxy takeover status``."""
    data = as_map(answer)
    lines = list(_head(data))
    remaining, old = as_list(data.get("left")), data.get("old")
    if data.get("stage") != "none" and isinstance(old, int):
        lines += ["", f"Old allocations: {len(remaining)} of {old} are left"]
        rows = [("CPUS", "CONTAINER")]
        rows += [
            (one_line(row.get("cpus")), one_line(row.get("container"))) for row in map(as_map, remaining)
        ]
        lines += table(rows) if remaining else []
    lines += _list("Obstacles", data.get("conflicts"))
    nothing = ["", "Nothing remains to be done."] if data.get("stage") == "finished" else []
    title = "To take the node over" if data.get("stage") == "none" else "What remains to be done"
    steps = list(_list(title, data.get("next"), ordered=True)) or nothing
    return "\n".join([*lines, *_list("Notes", data.get("notes")), *steps]) + "\n"


def done_text(answer: object) -> str:
    """Write the result of a step."""
    data = as_map(answer)
    messages = [f"{one_line(text)}" for text in as_list(data.get("messages"))]
    return "\n".join([*messages, *_list("What remains to be done", data.get("next"), ordered=True)]) + "\n"


def _head(data: Mapping[str, object]) -> Iterable[str]:
    kubelet, own = as_map(data.get("kubelet")), as_map(data.get("ours"))
    since = data.get("since")
    when = f", since {_when(since)}" if isinstance(since, int | float) and since else ""
    target = f" (kubelet's policy: {one_line(data.get('target'))})" if data.get("target") else ""
    yield f"takeover:  {one_line(data.get('stage')) or '?'}{target}{when}"
    runs = as_list(kubelet.get("running"))
    yield f"kubelet:   {f'runs ({one_line(runs[0])})' if runs else 'does not run'}"
    options = ", ".join(f"{name}={value}" for name, value in as_map(kubelet.get("options")).items())
    parts = [f"policy {one_line(kubelet.get('policy')) or 'unknown'}", options]
    parts.append(f"reserves CPUs {one_line(kubelet.get('reserved'))}" if kubelet.get("reserved") else "")
    yield f"           CPU manager: {', '.join(part for part in parts if part)}"
    problem = one_line(kubelet.get("file_problem"))
    state = problem or f"for policy {one_line(kubelet.get('file_policy'))}, checksum valid"
    yield f"           {one_line(kubelet.get('file'))}: {state}"
    configured = one_line(own.get("configured"))
    now = one_line(own.get("cpuManagerPolicy"))
    more = f" (configured: {configured})" if configured != now else ""
    yield f"topoproxy: cpuManagerPolicy {now}{more}"


def _rows(data: Mapping[str, object]) -> Iterable[str]:
    rows = [("CPUS", "IN EFFECT", "STATE", "CONTAINER")]
    for row in map(as_map, as_list(data.get("allocations"))):
        static = " (static pod)" if row.get("from_file") else ""
        in_effect = row.get("in_effect", row.get("in_force"))  # the former name, which an older daemon uses
        cells = (one_line(row.get("cpus")), one_line(in_effect) or "-", one_line(row.get("state")))
        rows.append((*cells, f"{one_line(row.get('container'))}{static}"))
    yield ""
    if len(rows) == 1:
        yield "kubelet's file assigns no CPUs."
        return
    yield f"Allocations of kubelet's CPU manager ({len(rows) - 1})"
    yield from table(rows)


def _list(title: str, value: object, *, ordered: bool = False) -> Iterable[str]:
    items = [one_line(item) for item in as_list(value)]
    if items:
        yield ""
        yield title
        for number, item in enumerate(items, 1):
            yield f"  {f'{number}.' if ordered else '-'} {item}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@click.group()
def takeover() -> None:
    """Take a node over from kubelet's static CPU manager, without a drain.

    The steps, on a node whose kubelet has cpuManagerPolicy: static and reaches the runtime through topoproxy:

    \b
      topoproxy takeover plan        shows allocations of kubelet, and obstacles; changes nothing
      topoproxy takeover start       new pods get CPUs from topoproxy; running pods keep kubelet's
      topoproxy takeover status      how many of kubelet's allocations are left
      systemctl stop kubelet         containers keep running
      topoproxy takeover finish      rewrites kubelet's state file for policy none
      (kubelet's configuration)      cpuManagerPolicy: none, without cpuManagerPolicyOptions
      systemctl start kubelet
      topoproxy takeover revert      at any time: back to kubelet's CPU manager

    No container moves or restarts in any of these steps. Each can be repeated, and a daemon that dies in the
    middle of one completes or undoes it when it starts again. docs/takeover.md walks through it.

    All of them end with 0 when the step is done, 1 when it cannot be done now (the message says what to do),
    65 when the daemon refuses the request, 69 when it does not answer, 77 without permission.
    """  # noqa: D301 - click wants the real backspace


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all steps have."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")
    return as_json(query_options(ACTION_S + ANSWER_S)(command))


@takeover.command(short_help="Show the allocations of kubelet's CPU manager; change nothing.")
@_options
def plan(file: Path | None, admin: str | None, as_json: bool, timeout: float) -> None:
    """Show the allocations of kubelet's CPU manager, and what each step would do. Changes nothing.

    IN EFFECT are the CPUs that the container has. STATE: runs (the container is here and owns CPUs), waits
    (its pod is here), gone (kubelet will remove the allocation).

    Ends with 1 when the takeover cannot start: the obstacles are listed.
    """
    answer = _query(file, admin, timeout, "/takeover", {"view": "plan"})
    _show(answer, plan_text, as_json=as_json)
    if isinstance(answer, dict) and (conflicts := answer.get("conflicts")):
        raise TopoproxyError(f"cannot start the takeover: {'; '.join(map(str, conflicts))}")


@takeover.command()
@_options
def status(file: Path | None, admin: str | None, as_json: bool, timeout: float) -> None:
    """Show the progress of the takeover, and the remaining steps."""
    _show(_query(file, admin, timeout, "/takeover", {"view": "status"}), status_text, as_json=as_json)


@takeover.command()
@_options
def start(file: Path | None, admin: str | None, as_json: bool, timeout: float) -> None:
    """Choose the CPUs of new pods from now on.

    Containers keep the CPUs that kubelet's CPU manager assigned to them until their pods end. kubelet may
    continue to run with the policy static: the CPUs that it names for new pods are not in effect, and its
    updates are answered with the CPUs that the container has. None of kubelet's files is written.

    cpuManagerPolicy is static from now on, whatever the configuration says (status shows the difference).
    CPUs that kubelet reserves are never assigned exclusively.
    """
    _act(file, admin, timeout, "start", {}, as_json=as_json)


@takeover.command(short_help="Rewrite kubelet's state file for its next start.")
@click.option(
    "--kubelet-policy",
    type=click.Choice(["none", "static"]),
    default="none",
    show_default=True,
    help="The policy with which kubelet is started next.",
)
@click.option("--with-running", is_flag=True, help="Finish although old allocations are still in use.")
@click.option("--force", is_flag=True, help="Write although kubelet seems to run.")
@_options
def finish(
    kubelet_policy: str,
    with_running: bool,
    force: bool,
    file: Path | None,
    admin: str | None,
    as_json: bool,
    timeout: float,
) -> None:
    """Rewrite kubelet's state file, so that kubelet starts again and nothing is lost.

    kubelet does not start if its cpu_manager_state was written under another policy than the configured one,
    and deleting the file loses the assignment of CPUs. For policy none, the new file names no CPUs:
    topoproxy's ledger has them. For policy static, it names the CPUs in effect.

    Stop kubelet first (systemctl stop kubelet; containers keep running), because it writes the file from
    memory. Change its configuration as the answer says, and start it again. A copy of the old file is kept in
    the directory takeover below stateDir.
    """
    params = {"kubelet-policy": kubelet_policy, "with-running": _word(with_running), "force": _word(force)}
    _act(file, admin, timeout, "finish", params, as_json=as_json)


@takeover.command()
@click.option("--force", is_flag=True, help="Write although kubelet seems to run.")
@_options
def revert(force: bool, file: Path | None, admin: str | None, as_json: bool, timeout: float) -> None:
    """Return to kubelet's CPU manager, which decides again.

    kubelet's state file becomes that of policy static, with all containers that own CPUs and the CPUs that
    they have now. If the file has that content already, kubelet may run; otherwise stop it first, as for
    finish.
    """
    _act(file, admin, timeout, "revert", {"force": _word(force)}, as_json=as_json)


def _word(flag: bool) -> str:
    return "true" if flag else "false"


def _act(
    file: Path | None,
    admin: str | None,
    timeout: float,
    step: str,
    params: Mapping[str, str],
    *,
    as_json: bool,
) -> None:
    answer = _query(file, admin, timeout, f"/takeover/{step}", params, act=True)
    done = isinstance(answer, dict) and answer.get("done") is True
    if as_json or done:
        _show(answer, done_text, as_json=as_json)
    if done:
        return
    data: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
    hints = [f"\n  - {hint}" for hint in data.get("hints", [])]
    raise TopoproxyError(f"{data.get('why', f'cannot {step} the takeover')}{''.join(hints)}")


def _show(answer: object, text: Callable[[object], str], *, as_json: bool) -> None:
    click.echo(json.dumps(answer, indent=1, ensure_ascii=False) if as_json else text(answer), nl=as_json)


def _query(
    file: Path | None,
    admin: str | None,
    timeout: float,
    route: str,
    params: Mapping[str, str],
    *,
    act: bool = False,
) -> object:
    return query_daemon(config_for(file, admin), route, timeout, params, act=act)
