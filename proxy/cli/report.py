"""``topoproxy report``: prints the node's description for schedulers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.model.errors import UsageError

FORMATS = ("koordinator",)


@click.command()
@query_options()
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="koordinator: a NodeResourceTopology with the annotations that Koordinator's scheduler reads.",
)
@click.option(
    "--node",
    metavar="NAME",
    help="The name of the Node object; by default the name in the object that was read, or the host name.",
)
def report(file: Path | None, admin: str | None, form: str, node: str | None, timeout: float) -> None:
    """Print the node's description for schedulers: CPUs, NUMA nodes, pools, and the owners of CPUs.

    It only prints the object; nothing is sent. To publish it once, with a kubectl that may write
    NodeResourceTopology objects, in a cluster that has their CRD:

    \b
      topoproxy report | kubectl apply -f -

    Ends with 69 when the daemon does not answer.
    """  # noqa: D301 - click wants the real backspace
    from proxy.config import Config, override

    requested = {"format": form}
    if node is not None:
        requested["node"] = override(Config(), {"cluster.node": ("--node", node)}).cluster.node
    if not requested.get("node", form):
        raise UsageError("cannot use --node: the name is empty")
    answer = query_daemon(config_for(file, admin), "/report", timeout, requested)
    click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
