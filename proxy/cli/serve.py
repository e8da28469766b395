"""``topoproxy serve``: reads the configuration; ``proxy.__main__`` then runs the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.settings import read_config, setting_options

if TYPE_CHECKING:
    from proxy.config.schema import Config


@click.command()
@setting_options
def serve(file: Path | None, **options: str | None) -> Config:
    """Run the proxy between kubelet and the container runtime, in the foreground.

    It ends on SIGTERM or SIGINT: calls in flight may finish first (drainTimeout), and containers are left
    as they are. Under systemd it reports when it is ready, pings the watchdog, and uses the socket that
    topoproxy.socket has opened.

    \b
    Try it next to a real node, changing nothing:
      topoproxy serve --mode observe --listen unix:///tmp/try.sock --state-dir /tmp/try
      crictl -r unix:///tmp/try.sock ps
      topoproxy status --admin unix:///tmp/admin.sock

    \b
    Exit codes
      0 stopped by a signal   73 the socket or the state cannot be made    75 another proxy uses either
      2 wrong usage           77 no permission                             78 the configuration is refused
      65 the machine cannot be read      1 any other error: its cgroups cannot be read, or an internal error
    """  # noqa: D301 - click wants the real backspace
    return read_config(file, options, trusted=True)
