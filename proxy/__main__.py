"""The program ``topoproxy``: runs the command line; for ``serve`` it opens the socket and starts the daemon.

Command line and daemon are separate, so that the daemon's process can forget the command line: see
``proxy.memory_trim``.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from proxy import memory_trim


def main() -> NoReturn:
    """Run a command and end the process with its exit code."""
    if sys.argv[1:2] == ["serve"]:
        # SIGHUP would end the process; after the daemon has started, it reloads the configuration.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if os.environ.get("TOPOPROXY_SUCCEEDS") and os.fork():  # see proxy.succession.successor
            os._exit(0)
    if not {"agent", "scheduler-extender"} & set(sys.argv[1:2]):  # these two connect to the API server
        memory_trim.block_tls_imports()
    from proxy.cli.main import run_command_line

    end = run_command_line()
    if isinstance(end, int):
        sys.exit(end)
    del run_command_line
    from proxy.early_socket import block_signals, open_socket
    from proxy.model.errors import TopoproxyError
    from proxy.standard_streams import report

    block_signals()
    try:
        early = open_socket(end)
    except TopoproxyError as error:
        report(f"topoproxy: {error}")
        sys.exit(error.exit_code)
    import proxy.relay.huffman  # noqa: F401  it reads tables of a module that is dropped below

    memory_trim.drop_start_only_modules()
    memory_trim.use_one_arena()
    memory_trim.block_python_protobuf()
    from proxy.process import run_and_report

    sys.exit(run_and_report(end, early))


if __name__ == "__main__":
    main()
