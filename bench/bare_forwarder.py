"""The least that a relay in Python does: it forwards bytes both ways, and does not parse them.

    python bench/bare_forwarder.py --listen /tmp/x/bare.sock --runtime /tmp/x/runtime.sock

It runs on the daemon's own event loop, which polls as the daemon's does by default. A client that does not
read stops the process, so this is only for measurements. Runs until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import select
import signal
import socket
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxy.config.schema import Config
from proxy.frontends.cri.relay_loop import RelayLoop

_READ_BYTES = 256 << 10
_SEND_BUFFER = 1 << 20


def forward(source: socket.socket, sink: socket.socket) -> None:
    """Forward bytes from one socket to another one, until the end of the stream."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, RelayLoop)

    def send(data: bytes | memoryview) -> int:
        try:
            return sink.send(data)
        except BlockingIOError:
            return 0

    def readable() -> None:
        try:
            data = source.recv(_READ_BYTES)
            if data:
                left = memoryview(data)[send(data) :]
                while left:
                    select.select((), (sink,), ())
                    left = left[send(left) :]
                return
        except BlockingIOError:
            return
        except OSError:  # one of the sockets is gone
            pass
        loop.watch(source.fileno(), None, None)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    loop.watch(source.fileno(), readable, None)


async def serve(listen: str, runtime: str) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    ends: list[socket.socket] = []
    with contextlib.suppress(FileNotFoundError):
        Path(listen).unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(listen)
        listener.listen(64)
        listener.setblocking(False)

        def accept() -> None:
            client, server = listener.accept()[0], socket.socket(socket.AF_UNIX)
            server.connect(runtime)
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
                ends.append(end)
            forward(client, server)
            forward(server, client)

        loop.add_reader(listener, accept)
        done = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, done.set)
        await done.wait()
        loop.remove_reader(listener)
    for end in ends:
        end.close()


def main() -> None:
    options = argparse.ArgumentParser(description="Forward bytes, for comparison.")
    options.add_argument("--listen", required=True, metavar="SOCKET")
    options.add_argument("--runtime", required=True, metavar="SOCKET")
    chosen = options.parse_args()
    with asyncio.Runner(loop_factory=partial(RelayLoop, Config().busy_poll)) as runner:
        runner.run(serve(chosen.listen, chosen.runtime))


if __name__ == "__main__":
    main()
