"""``topoproxy version``: prints the version."""

from __future__ import annotations

import json
import platform

import click

from proxy import __version__
from proxy.model import schema_ids


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the versions of Python and Linux.")
def version(as_json: bool) -> None:
    """Print the version."""
    if not as_json:
        click.echo(f"topoproxy {__version__}")
        return
    facts = {
        "schema": schema_ids.VERSION,
        "name": "topoproxy",
        "version": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    click.echo(json.dumps(facts))
