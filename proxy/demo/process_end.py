"""Ends the processes that the demonstration has started."""

from __future__ import annotations

import signal
import subprocess

_WAIT_S = 10.0


def end_process(process: subprocess.Popen[bytes], with_signal: signal.Signals) -> None:
    """End a process with a signal, or with SIGKILL if it still runs ten seconds later."""
    process.send_signal(with_signal)
    try:
        process.wait(_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
