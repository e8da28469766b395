"""Runs the daemon as a process: handles signals, sets up the log, and returns the exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from proxy import logs
from proxy.config.schema import Config
from proxy.daemon import Daemon
from proxy.early_socket import EarlySocket, deliver_signals
from proxy.executor.background import JOBS
from proxy.frontends.cri.relay_loop import RelayLoop
from proxy.model.errors import TopoproxyError
from proxy.replaced_files import guard_imports
from proxy.standard_streams import report

FORCED_EXIT_S, LAST_LOG_S = 4.6, 0.3
"""Seconds after ``drainTimeout`` at which the process ends, whatever hangs, and seconds for its last log
message: five together."""
OVERDUE_EXIT_CODE = 1
"""The exit code in that case."""


def _force_exit_after(seconds: float) -> None:
    """End the process in this many seconds, even if a thread or the end of the interpreter hangs."""

    def end() -> None:
        time.sleep(seconds)
        # The log itself may hang.
        last = threading.Thread(target=_log_overdue, args=(seconds,), daemon=True)
        last.start()
        last.join(LAST_LOG_S)
        os._exit(OVERDUE_EXIT_CODE)

    threading.Thread(target=end, name="end", daemon=True).start()


def _log_overdue(seconds: float) -> None:
    logs.log.error("cannot stop in time: the process ends without waiting any longer", seconds=seconds)


def _ignore_signal(number: signal.Signals) -> None:
    logs.log.warning("a signal was ignored", signal=number.name)


def _log_once(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    what, error = str(context.get("message")), repr(context.get("exception"))
    logs.log.say_once(("loop", what), "error", "fault in the event loop", what=what, err=error)


async def _serve(
    daemon: Daemon, ending: Callable[[], None] = lambda: None, started: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT, or until another process has replaced this one.

    Args:
        daemon: The daemon that serves.
        ending: Called when a signal has arrived.
        started: Called when calls are answered.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def end() -> None:
        if not done.is_set():
            done.set()
            ending()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, daemon.reload_soon)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, _ignore_signal, number)
    deliver_signals()
    loop.set_exception_handler(_log_once)
    await daemon.start()
    started()
    stopped = asyncio.ensure_future(done.wait())
    is_replaced = False
    while not is_replaced:
        prepared = asyncio.ensure_future(daemon.replacement.prepared.wait())
        await asyncio.wait([stopped, prepared], return_when=asyncio.FIRST_COMPLETED)
        if done.is_set():
            prepared.cancel()
            await daemon.stop()
            return
        is_replaced = await daemon.hand_over(done.is_set)
    if done.is_set():  # the signal arrived during the hand-over: the successor is the daemon that has to stop
        daemon.replacement.stop_successor()
        await daemon.finish_calls(daemon.config.drain_timeout)
        return
    remaining = asyncio.ensure_future(daemon.finish_calls())
    await asyncio.wait([remaining, stopped], return_when=asyncio.FIRST_COMPLETED)


async def _serve_config(config: Config, early: EarlySocket | None) -> None:
    daemon = Daemon(config, early=early)
    predecessor = None if early is None else early.predecessor
    await _serve(
        daemon,
        lambda: _force_exit_after(daemon.config.drain_timeout + FORCED_EXIT_S),
        predecessor.report_serving if predecessor is not None else lambda: None,
    )


def run(config: Config, early: EarlySocket | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: The configuration.
        early: The socket, if it is already open.

    Returns:
        The exit code.

    Raises:
        TopoproxyError: The daemon cannot start.
    """
    guard_imports()
    logs.setup(config.log.level, config.log.format, logs.with_own_descriptor(sys.stderr))
    if early is not None and early.predecessor is not None:
        import proxy.assembly  # noqa: F401  import it now, while calls are still answered

        early.predecessor.wait_for_turn()
    loop = partial(RelayLoop, config.busy_poll, JOBS.none_unfinished)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_serve_config(config, early))
    return 0


def run_and_report(config: Config, early: EarlySocket | None = None) -> int:
    """Serve; report the error that ends the daemon, and return an exit code.

    Args:
        config: The configuration.
        early: The socket, if it is already open.

    Returns:
        The exit code.
    """
    try:
        return run(config, early)
    except TopoproxyError as error:
        report(f"topoproxy: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001  the log is where a daemon's last words belong
        logs.log.exception("cannot continue: internal error")
        return 1
