"""``topoproxy attach``: makes kubelet use topoproxy; a failure restores the previous state."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from proxy.cli.admin_query import query_daemon
from proxy.cli.settings import PATH, FiniteRange, config_option, read_config
from proxy.model.errors import UsageError

if TYPE_CHECKING:
    from proxy.attach.node import AttachNode

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_S = 10.0


def attach_options(command: F) -> F:
    """Add the options that ``attach`` and ``detach`` have in common."""
    for option in (
        click.option("--root", type=PATH, default=Path("/"), hidden=True),
        click.option(
            "--timeout",
            type=FiniteRange(1, 3600),
            default=120.0,
            show_default=True,
            help="Seconds until it is done, or undone.",
        ),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option("--dry-run", is_flag=True, help="Print the changes as a diff, and change nothing."),
        config_option,
    ):
        command = option(command)
    return command


def node_for(file: Path | None, root: Path) -> AttachNode:
    """Return the node that the configuration describes."""
    from proxy.attach.node import AttachNode

    config = read_config(file, {}, trusted=True)

    def query(route: str, act: bool) -> Mapping[str, object]:
        answer = query_daemon(config, route, TIMEOUT_S, act=act)
        return answer if isinstance(answer, dict) else {}

    directory = config.kubelet.state_dir
    listen = config.listen
    return AttachNode(
        root,
        config.state_dir,
        directory,
        config.procfs_root,
        listen,
        query,
        _report,
    )


def _report(message: str) -> None:
    with suppress(OSError):  # the terminal may be closed, and the command must still undo its changes
        click.echo(message, err=True)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, so that it can undo its changes."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        raise SystemExit(128 + number)

    ending = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in ending:  # nohup has made the process ignore SIGHUP
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in ending:
            signal.signal(each, signal.SIG_DFL)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before a change.

    Raises:
        UsageError: There is no terminal for the question.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("cannot ask for confirmation: standard input is not a terminal (--yes)")
    click.confirm(question, abort=True)


@click.command("attach")
@attach_options
def attach(file: Path | None, dry_run: bool, yes: bool, timeout: float, root: Path) -> None:
    """Point kubelet at topoproxy, and undo that if its calls do not arrive.

    The command finds the endpoint that kubelet uses (its flag, drop-ins of --config-dir, its configuration
    file), writes a journal of the change, and starts topoproxy. Then it changes the file that is in effect,
    restarts kubelet and waits until its calls arrive. If they do not arrive in time, every file and unit is
    restored, and the message says why. The same happens if the command is interrupted (Ctrl-C, SIGTERM,
    SIGHUP). If an upgrade of kubeadm has reset the endpoint, attach sets it again.

    topoproxy detach undoes an attach; without Python, the script rescue-detach in the state directory does.
    docs/attach.md says more.

    Ends with 0 when kubelet is attached, 1 when it cannot be (nothing has changed then), 65 when the journal
    of an earlier attach cannot be read, 73 when a file cannot be written, 77 without permission.
    """
    from proxy.attach import service

    node = node_for(file, root)
    changes = service.planned_changes(node)
    for change in changes:
        click.echo(change.diff(), nl=False)
    if dry_run:
        click.echo("nothing is changed" if changes else "there is nothing to change")
        return
    if changes:
        confirm("Make this change and restart kubelet?", yes=yes)
    with signals_as_exceptions():
        message = service.attach(node, timeout)
    click.echo(message)
