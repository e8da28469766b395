"""``topoproxy release``: restores the settings that each container would have without topoproxy."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.admin_query import STATUS_HINT, config_for, query_daemon
from proxy.cli.settings import FiniteRange, read_config, refuse_settings, setting_options
from proxy.model import schema_ids
from proxy.model.errors import TopoproxyError

if TYPE_CHECKING:
    from proxy.config import Config

TIMEOUT_S = 30.0
POLL_S = 0.5
RELEASED = "released"
RELEASING = "releasing"


@click.command()
@setting_options
@click.option("--undo", is_flag=True, help="Enter the configured mode again, as at a start.")
@click.option("--offline", is_flag=True, help="Without a daemon: from its ledger and the runtime.")
@click.option("--json", "as_json", is_flag=True, help="Print the final state as JSON.")
@click.option(
    "--timeout", type=FiniteRange(1, 86_400), default=300.0, show_default=True, help="Seconds to wait."
)
def release(
    file: Path | None, undo: bool, offline: bool, as_json: bool, timeout: float, **options: str | None
) -> None:
    """Give every container back the cpuset that it would have had without topoproxy.

    The cpuset is the one that kubelet's CPU manager assigned under its policy static; otherwise the one that
    the container's request names; otherwise that of the cgroup above the container. CFS quotas that were
    removed are restored, and so are the CPUs that BE suppression took. The kernel's cpusets grow at once;
    then the runtime is updated, so that they last.

    From then on the daemon only relays: no call is held and no container is moved, even after a restart,
    until topoproxy release --undo. The setting releaseAtStop does the same at each stop, and the next start
    places containers again. docs/release.md says more.

    Without --offline, only --config, --listen and --admin are accepted: they name the daemon, which has
    settings of its own. --listen has no effect with --admin.

    Ends with 0 on success, even if there is nothing to release; 1 when --timeout passes first (the
    daemon continues), 65 when there is nothing to undo, 69 when the daemon does not answer, 75 when --offline
    meets a daemon, 77 without permission.
    """
    admin = options.pop("admin")
    if offline:
        refuse_settings({"admin": admin}, "release", "with --offline: no daemon is queried")
        config = read_config(file, options, trusted=True)
        answer = _undo_offline(config) if undo else _offline(config, timeout)
    else:
        listen = options.pop("listen")  # without --admin, the daemon's socket is next to it
        refuse_settings(options, "release", "without --offline: the running daemon has settings of its own")
        if admin is None:
            config = read_config(file, {"listen": listen})
        else:
            refuse_settings({"listen": listen}, "release", "with --admin, which names the daemon's socket")
            config = config_for(file, admin)
        answer = _act(config, "undo", timeout) if undo else _online(config, timeout)
    if as_json:
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
    elif undo:
        if answer.get("nothing"):
            click.echo("the release is undone; in observe mode no container is moved")
        else:
            click.echo("containers are placed again" + (" when the daemon starts" if offline else ""))
    if undo or answer.get("nothing"):
        if not as_json and not undo:
            click.echo(answer["nothing"])
        return
    if answer.get("stage") not in (RELEASED, RELEASING):
        raise TopoproxyError("cannot release everything: the release was undone meanwhile")
    if answer.get("stage") == RELEASING:
        left = answer.get("left")
        cause = "; ".join(map(str, left)) if isinstance(left, list) and left else "it takes longer"
        more = "run it again" if offline else "the daemon continues; topoproxy status shows when it is done"
        raise TopoproxyError(f"cannot release everything in {timeout:g} s: {cause} ({more})")
    if not as_json:
        click.echo(result_text(answer))


def result_text(answer: Mapping[str, object]) -> str:
    """Write the result of a complete release."""
    containers, updated = answer.get("containers"), answer.get("updated")
    have = "container has what it" if containers == 1 else "containers have what they"
    return (
        f"released: {containers} {have} would have without topoproxy"
        f" ({updated} {'was' if updated == 1 else 'were'} updated at the runtime)\n"
        "calls are only relayed from now on, also after a restart: topoproxy release --undo takes over again"
    )


def _online(config: Config, timeout: float) -> Mapping[str, object]:
    end = time.monotonic() + timeout
    answer = _act(config, "start", timeout)
    shown = ""
    while answer.get("stage") == RELEASING and time.monotonic() < end:
        shown = _progress(answer, shown)
        time.sleep(POLL_S)
        answer = _query(config, "/release", max(POLL_S, end - time.monotonic()))
    return answer


def _progress(answer: Mapping[str, object], shown: str) -> str:
    """Print the progress on standard error if it has changed, and return it."""
    message = f"releasing: {answer.get('updated')} of {answer.get('containers')} containers updated"
    if isinstance(left := answer.get("left"), list) and left:
        message = f"{message}; {left[0]}"
    elif shown.startswith(message):
        return shown  # the printed cause is still valid, or nothing has changed
    if message != shown:
        click.echo(message, err=True)
    return message


def _act(config: Config, step: str, timeout: float) -> Mapping[str, object]:
    return _query(config, f"/release/{step}", timeout, act=True)


def _query(config: Config, route: str, timeout: float, *, act: bool = False) -> Mapping[str, object]:
    hint = f"{STATUS_HINT}; without it: topoproxy release --offline"
    answer = query_daemon(config, route, min(TIMEOUT_S, timeout), act=act, hint=hint)
    return answer if isinstance(answer, dict) else {}


def _offline(config: Config, timeout: float) -> Mapping[str, object]:
    from proxy import logs
    from proxy.release.offline import release as release_offline

    logs.setup("warning", "text")
    shown = ""

    def report(page: Mapping[str, object]) -> None:
        nonlocal shown
        shown = _progress(page, shown)

    return {"schema": schema_ids.RELEASE, **release_offline(config, timeout, report)}


def _undo_offline(config: Config) -> Mapping[str, object]:
    from proxy.release.offline import undo

    return {"schema": schema_ids.RELEASE, **undo(config)}
