"""Channels of our own calls: opened once, closed permanently; options of a caller take precedence."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from proxy.wire.grpc_channel import GrpcChannel, details_of

ANSWER = b"x" * 2000


class Handler(grpc.GenericRpcHandler):
    """Answers every method with the same bytes."""

    def service(self, handler_call_details: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: ANSWER)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    socket = tmp_path / "a b"
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(f"unix:{str(socket).replace(' ', '%20')}")
    server.start()
    yield socket
    server.stop(0).wait()


def call(channel: GrpcChannel) -> bytes:
    answer: bytes = channel.open(1.0).unary_unary("/a/b")(b"", timeout=10)
    return answer


def test_a_channel_is_opened_once_with_or_without_the_scheme(path: Path) -> None:
    channel = GrpcChannel(f"unix://{path}", -1)
    assert call(channel) == ANSWER
    assert channel.open() is channel.open()
    channel.close()


def test_the_size_limit_applies_and_an_option_of_the_caller_takes_precedence(path: Path) -> None:
    small = GrpcChannel(path, 100)
    with pytest.raises(grpc.RpcError) as refused:
        call(small)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "\n" not in details_of(refused.value)
    small.close()
    large = GrpcChannel(path, 100, ("grpc.max_receive_message_length", 10_000))
    assert call(large) == ANSWER
    large.close()


def test_a_closed_channel_is_not_opened_again(path: Path) -> None:
    channel = GrpcChannel(path, -1)
    channel.close()
    with pytest.raises(ValueError, match="the channel is closed"):
        channel.open()
    channel.close()
