"""``topoproxy serve``: the daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from proxy.cli.settings import read_config, setting_options
from proxy.model.errors import TopoproxyError


@click.command()
@setting_options
def serve(file: Path | None, **words: str | None) -> None:
    """Run the proxy between kubelet and the container runtime, in the foreground.

    It ends on SIGTERM or SIGINT: calls in flight may finish first (drainTimeout), containers stay as is.
    Under systemd it says when it is ready, keeps the watchdog quiet, and takes over a socket that
    topoproxy.socket has opened.

    \b
    Try it beside a real node, changing nothing:
      topoproxy serve --mode observe --listen unix:///tmp/try.sock --state-dir /tmp/try
      crictl -r unix:///tmp/try.sock ps

    \b
    Exit codes
      0 ended when told to    73 the socket or the state cannot be made    75 another proxy has the socket
      2 wrong usage           77 no permission                             78 the configuration is refused
    """  # noqa: D301 - click wants the real backspace
    config = read_config(file, words)
    from proxy.daemon import run

    try:
        code = run(config)
    except TopoproxyError:
        raise
    except Exception:  # noqa: BLE001 - the log is where a daemon's last words belong
        from proxy.logs import log

        log.exception("cannot go on: a fault of our own")
        code = 1
    sys.exit(code)
