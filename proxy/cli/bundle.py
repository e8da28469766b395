"""``topoproxy bundle``: collects what a bug report needs, redacted, in one file."""

from __future__ import annotations

import time
from pathlib import Path

import click

from proxy.cli.admin_query import config_or_defaults, query_options
from proxy.cli.settings import PATH
from proxy.model.errors import UsageError
from proxy.model.phrases import counted


@click.command("bundle")
@click.argument("output", type=PATH, required=False, metavar="[FILE]")
@click.option(
    "--log",
    type=PATH,
    metavar="FILE",
    help="Read the log from a file, not from the journal.",
)
@query_options()
def bundle(
    output: Path | None, log: Path | None, file: Path | None, admin: str | None, timeout: float
) -> None:
    """Collect what a bug report needs: one file, without secrets.

    FILE is a compressed tar archive, topoproxy-bundle-TIME.tar.gz in the current directory by default, which
    only its owner can read. It holds the machine's topology, the configuration in effect, the ledger, recent
    decisions, versions, the log and what doctor finds. It works without the daemon, too: manifest.json lists
    the missing parts, with reasons.

    Only harmless content is kept: words of topoproxy's source, numbers, and names of pods and containers.
    Everything else is replaced by <redacted:N>: values of annotations, labels, environments and settings of
    hooks, and messages of other programs. Read the file before you send it. The output of the command itself
    is not redacted.
    """
    from proxy.bundle.sources import BundleSettings, collect, pack, write_bundle

    if output is not None and output.name in ("", "-"):
        shown = "standard output" if output.name else "a file without a name"
        raise UsageError(f"cannot write the bundle to {shown}: give the name of a file")
    now = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    path = output or Path(f"topoproxy-bundle-{stamp}.tar.gz")
    config, refused = config_or_defaults(file, admin)
    if refused:
        click.echo(f"the defaults are described, because the configuration is refused: {refused}")
    found = collect(BundleSettings(config, refused, timeout, log, now))
    data = pack(f"topoproxy-bundle-{stamp}", found.members, now)
    write_bundle(path, data)
    count = counted(len(found.members), "file")
    click.echo(f"{path}: {count}, {len(data)} bytes, {found.redacted} strings redacted")
    for name, why in found.absent.items():
        click.echo(f"without {name}: {why}")
