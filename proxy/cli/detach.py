"""``topoproxy detach``: restores the files that the attach changed, so kubelet uses the runtime."""

from __future__ import annotations

from pathlib import Path

import click

from proxy.cli.attach import attach_options, confirm, node_for, signals_as_exceptions


@click.command("detach")
@attach_options
@click.option(
    "--force", is_flag=True, help="If another program changed a file since, change only the endpoint."
)
@click.option("--no-release", is_flag=True, help="Leave containers on the CPUs that they have.")
def detach(
    file: Path | None, dry_run: bool, yes: bool, timeout: float, root: Path, force: bool, no_release: bool
) -> None:
    """Undo topoproxy attach: every file gets its bytes, mode, owner and time back.

    Containers are released first (topoproxy release): they get the settings that they would have without
    topoproxy. Then the files are restored from the journal, kubelet is restarted, units that the attach
    enabled are disabled, and those that it started are stopped.

    Ends with 0 when kubelet is detached, or was not attached; 1 when it cannot be detached, 65 when the
    journal cannot be read, 73 when a file cannot be written.
    """
    from proxy.attach import detach as detaching
    from proxy.attach import journal as journals
    from proxy.attach.changes import FileChange

    node = node_for(file, root)
    journal = journals.load(node.state)
    if journal is not None:
        for change, target in journals.files_to_restore(journal, node.root):
            path = node.root / change.path.relative_to("/")
            now = path.read_bytes() if path.is_file() else None
            removed = "" if target is not None else f"{change.path} is removed\n"
            click.echo(removed or FileChange(change.path, now, target or b"").diff(), nl=False)
        for change in detaching.copied_endpoints_of(node, journal):
            click.echo(change.diff(), nl=False)
        if not dry_run:
            detaching.refuse_changed_files(node, journal, force=force)
            confirm("Restore this and restart kubelet?", yes=yes)
    if dry_run:
        click.echo("nothing is changed" if journal is not None else "kubelet is not attached")
        return
    with signals_as_exceptions():
        try:
            message = detaching.detach(node, timeout, force=force, release=not no_release)
        except (KeyboardInterrupt, SystemExit):
            node.report_progress("detach was interrupted: repeat topoproxy detach, which does the rest")
            raise
    click.echo(message)
