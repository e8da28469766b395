"""``topoproxy report``: the node's picture for schedulers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from proxy.admin.client import ask
from proxy.cli.settings import config_option, read_config
from proxy.config import Config, override
from proxy.model.errors import UnavailableError

FORMATS = ("koordinator",)


@click.command()
@config_option
@click.option(
    "--admin", metavar="unix://SOCKET", help="The daemon's admin socket, if the configuration does not tell."
)
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
    help="What the Node object is called; by default as it says itself, else as the host.",
)
@click.option(
    "--timeout", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, help="Seconds to wait."
)
def report(file: Path | None, admin: str | None, form: str, node: str | None, timeout: float) -> None:
    """Print the node's picture for schedulers: CPUs, NUMA nodes, pools, and who owns CPUs.

    It is ready to be published; nothing is sent anywhere:

    \b
      topoproxy report | kubectl apply -f -

    Ends with 69 when nobody answers.
    """  # noqa: D301 - click wants the real backspace
    config = (
        read_config(file, {}) if admin is None else override(Config(), {"adminSocket": ("--admin", admin)})
    )
    asked = {"format": form} | ({"node": node} if node else {})
    try:
        answer = ask(config.admin_path, "/report", timeout, asked)
    except UnavailableError as error:
        hint = "systemctl status topoproxy tells whether it runs, --admin names another socket"
        raise UnavailableError(f"{error} ({hint})") from error
    click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
