"""The fair alternative: a CRI proxy on grpc.aio, written with the means of the library and tuned.

    python bench/plain_proxy.py --listen /tmp/x/plain.sock --runtime /tmp/x/runtime.sock

It ends each call and makes another. Bodies pass as bytes. Metadata, deadline, cancel, status details and
trailers are passed on by hand. CreateContainer and UpdateContainerResources are decoded and get a fixed
cpuset. It decides nothing, keeps no state and moves no container, so it does less than topoproxy. Runs until
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # it costs, and nothing here forks
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import grpc.aio

from proxy.api.cri import api_pb2 as pb

CPUS, MEMS = "2-3", "0"
STREAMS = frozenset({"GetContainerEvents", "StreamContainers", "StreamPodSandboxes", "StreamContainerStats"})
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 1 << 20),
    ("grpc.max_concurrent_streams", 1 << 20),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


def rewrite(method: str, body: bytes) -> bytes:
    """Write the cpuset into the calls that carry one."""
    if method == "CreateContainer":
        create = pb.CreateContainerRequest.FromString(body)
        wanted = create.config.linux.resources
        wanted.cpuset_cpus, wanted.cpuset_mems = CPUS, MEMS
        return create.SerializeToString()
    if method == "UpdateContainerResources":
        update = pb.UpdateContainerResourcesRequest.FromString(body)
        update.linux.cpuset_cpus, update.linux.cpuset_mems = CPUS, MEMS
        return update.SerializeToString()
    return body


def _metadata(context: grpc.aio.ServicerContext[Any, Any]) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in context.invocation_metadata() or () if key != "user-agent"]


class PlainProxy(grpc.GenericRpcHandler):
    """Passes every method of every service to the given channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Find the handler of a method; it is made at the first call."""
        path = handler_call_details.method
        handler = self.handlers.get(path)
        if handler is None:
            method = path.rpartition("/")[2]
            handler = self._stream(path) if method in STREAMS else self._unary(path, method)
            self.handlers[path] = handler
        return handler

    def _unary(self, path: str, method: str) -> Any:
        upstream: Any = self.channel.unary_unary(path)

        async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            call = upstream(
                rewrite(method, request), metadata=_metadata(context), timeout=context.time_remaining()
            )
            try:
                if head := await call.initial_metadata():
                    await context.send_initial_metadata(head)
                body: bytes = await call
            except grpc.aio.AioRpcError as error:
                await context.abort(
                    error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
                )
            except asyncio.CancelledError:
                call.cancel()
                raise
            if tail := await call.trailing_metadata():
                context.set_trailing_metadata(tail)
            return body

        return grpc.unary_unary_rpc_method_handler(answer)

    def _stream(self, path: str) -> Any:
        upstream: Any = self.channel.unary_stream(path)

        async def answers(
            request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            call = upstream(request, metadata=_metadata(context), timeout=context.time_remaining())
            try:
                async for message in call:
                    yield message
            except grpc.aio.AioRpcError as error:
                await context.abort(
                    error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
                )
            finally:
                call.cancel()

        return grpc.unary_stream_rpc_method_handler(answers)


async def serve(listen: str, runtime: str) -> None:
    """Serve until SIGTERM."""
    channel = grpc.aio.insecure_channel(
        f"unix:{runtime}", options=(*_OPTIONS, ("grpc.default_authority", "localhost"))
    )
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((PlainProxy(channel),))
    with contextlib.suppress(FileNotFoundError):
        Path(listen).unlink()
    server.add_insecure_port(f"unix:{listen}")
    await server.start()
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    await done.wait()
    await server.stop(0)
    await channel.close()


def main() -> None:
    options = argparse.ArgumentParser(description="A plain grpc.aio CRI proxy, for comparison.")
    options.add_argument("--listen", required=True, metavar="SOCKET")
    options.add_argument("--runtime", required=True, metavar="SOCKET")
    chosen = options.parse_args()
    asyncio.run(serve(chosen.listen, chosen.runtime))


if __name__ == "__main__":
    main()
