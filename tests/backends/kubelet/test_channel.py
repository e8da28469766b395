"""The channel to a socket of kubelet if the other side is slow."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.backends.kubelet.channel import UnixChannel
from proxy.backends.kubelet.settings import KubeletError
from proxy.model.grpc_status import GrpcStatus

METHOD = "/v1.PodResourcesLister/List"
LONG_TIMEOUT_S = 60.0
"""Seconds: more than any machine needs."""


def test_the_channel_waits_for_a_server_that_starts_slowly(
    tmp_path: Path, serve: Any, slow_socket: Any
) -> None:
    """The first query to kubelet comes while the node is busy starting its pods."""
    server_path, path = tmp_path / "server", tmp_path / "slow.sock"
    serve(
        server_path,
        "v1.PodResourcesLister",
        List=lambda *_: pb.ListPodResourcesResponse().SerializeToString(),
    )
    slow_socket(path, server_path, 0.5)
    channel = UnixChannel(str(path), LONG_TIMEOUT_S)
    answer = channel.call("list", METHOD, pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)
    assert not answer.pod_resources
    channel.close()


def test_a_server_that_never_starts_costs_the_timeout_of_one_call(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "slow.sock"))
        listener.listen()
        channel = UnixChannel(str(tmp_path / "slow.sock"), 0.3)
        begin = time.monotonic()
        with pytest.raises(KubeletError) as caught:
            channel.call("list", METHOD, pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)
        assert time.monotonic() - begin < LONG_TIMEOUT_S
        assert caught.value.code in (GrpcStatus.DEADLINE_EXCEEDED, GrpcStatus.UNAVAILABLE)
        channel.close()
