"""``topoproxy hooks registration``: the file that registers us with Koordinator's runtime proxy."""

from __future__ import annotations

from pathlib import Path

import click

from proxy.cli.settings import config_option, read_config


@click.command(short_help="Print the file by which koord-runtime-proxy asks us.")
@config_option
def registration(file: Path | None) -> None:
    """Print the file by which a koord-runtime-proxy asks topoproxy, as a hook server.

    For nodes where that proxy stays between kubelet and the runtime, and topoproxy decides on CPUs. Set
    hooks.serve in the configuration to the path of a socket, start topoproxy, and then:

    \b
      topoproxy hooks registration > /etc/runtime/hookserver.d/topoproxy.json

    Ends with 78 where hooks.serve is not set.
    """  # noqa: D301 - click wants the real backspace
    from proxy.hooks.serving.registration import registration as text

    click.echo(text(read_config(file, {})), nl=False)
