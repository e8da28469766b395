"""The daemon as a process: its signals, its log, and the exit code that it ends with."""

from __future__ import annotations

import asyncio
import signal
import sys

from proxy.config.schema import Config
from proxy.daemon import Daemon
from proxy.model.errors import TopoproxyError


def _pass_over(number: signal.Signals) -> None:
    from proxy.logs import log

    log.warning(f"{number.name} does nothing: the configuration is read at the start (restart to apply it)")


def _say_once(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    from proxy.logs import log

    what, error = str(context.get("message")), repr(context.get("exception"))
    log.say_once(("loop", what), "error", "fault in the event loop", what=what, err=error)


async def _serve(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, _pass_over, number)
    loop.set_exception_handler(_say_once)
    await daemon.start()
    await done.wait()
    await daemon.stop()


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit code.

    Raises:
        TopoproxyError: The daemon cannot start.
    """
    from proxy import logs

    logs.setup(config.log.level, config.log.format, logs.apart(sys.stderr))
    asyncio.run(_serve(Daemon(config)))
    return 0


def run_to_end(config: Config) -> int:
    """Serve, and turn every end into words and an exit code.

    Returns:
        The exit code.
    """
    try:
        return run(config)
    except TopoproxyError as error:
        print(f"topoproxy: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001  the log is where a daemon's last words belong
        from proxy.logs import log

        log.exception("cannot go on: a fault of our own")
        return 1
